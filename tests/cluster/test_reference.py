"""Answers of the virtual cluster are compared with what its program says, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cloister.cluster.virtual import fuzz
from cloister.cluster.virtual.checks import JobAnswer
from cloister.cluster.virtual.engine import make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.job_requests import make_request
from cloister.cluster.virtual.reference import match_program
from cloister.cluster.virtual.scenario import NUM_ADAPTERS, Job
from cloister.text import Tokenizer
from cloister.types.clock import VirtualClock
from cloister.types.events import Submit
from cloister.types.request import FinishReason

SHAPE = EngineShape(num_adapters=NUM_ADAPTERS)
TOO_LONG = "x" * 300
JOBS = [{"max_tokens": 20}, {"max_tokens": 90, "num_stop_ids": 20}, {"max_tokens": 200, "stop": "a"}]


def answer(tokenizer: Tokenizer, *jobs: Job) -> list[JobAnswer]:
    """Has one engine answer jobs."""
    engine = make_engine(SHAPE, tokenizer, VirtualClock())
    answers = {f"r{number}": JobAnswer.to(job, make_request(job, f"r{number}")) for number, job in enumerate(jobs)}
    for found in answers.values():
        engine.core.input_queue.put(Submit(msgspec.structs.replace(found.request, timeout_s=1e9)))
    while (outputs := engine.core.step()) is not None:
        for output in outputs.outputs:
            answers[output.request_id].take(output)
    return list(answers.values())


def test_answers_of_an_engine_are_right(tokenizer: Tokenizer) -> None:
    jobs = [msgspec.structs.replace(job, kills_after=None) for seed in range(40) for job in fuzz.scenario_of(seed).jobs]
    answers = answer(tokenizer, *jobs, Job(at_s=0.0, prompt=TOO_LONG))
    assert {end for each in answers for ends in each.ends for end in ends} == {
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.REJECTED,
    }
    assert all(match_program([each], SHAPE) for each in answers)
    assert match_program(answers, SHAPE)


def change_a_token(found: JobAnswer) -> None:
    found.token_ids[1][0] ^= 1


def lose_a_token(found: JobAnswer) -> None:
    del found.token_ids[1][0]


def change_the_text(found: JobAnswer) -> None:
    found.texts[1] += "?"


def end_otherwise(found: JobAnswer) -> None:
    found.ends[1] = [FinishReason.LENGTH if found.ends[1] == [FinishReason.STOP] else FinishReason.STOP]


def refuse(found: JobAnswer) -> None:
    found.ends[1] = [FinishReason.REJECTED]


def swap_two_sequences(found: JobAnswer) -> None:
    found.token_ids.reverse()
    found.texts.reverse()
    found.ends.reverse()


@pytest.mark.parametrize(
    "job", [{"max_tokens": 20}, {"max_tokens": 60, "num_stop_ids": 20}, {"max_tokens": 60, "stop": "a"}], ids=str
)
@pytest.mark.parametrize("spoil", [change_a_token, lose_a_token, change_the_text, end_otherwise, refuse, swap_two_sequences])
def test_a_wrong_answer_is_none(job: dict[str, object], spoil: Callable[[JobAnswer], None], tokenizer: Tokenizer) -> None:
    (found,) = answer(tokenizer, Job(at_s=0.0, prompt="Once", n=2, temperature=1.0, seed=5, **job))
    assert match_program([found], SHAPE)
    spoil(found)
    assert not match_program([found], SHAPE)


def test_an_answer_that_was_cut_is_right_as_far_as_it_goes(tokenizer: Tokenizer) -> None:
    (found,) = answer(tokenizer, Job(at_s=0.0, prompt="Once", max_tokens=60, num_stop_ids=20, temperature=1.0, seed=7))
    (whole,) = found.token_ids
    assert found.ends == [[FinishReason.STOP]]
    found.token_ids, found.ends = [whole[:-2]], [[FinishReason.TIMEOUT]]
    assert match_program([found], SHAPE)
    found.token_ids = [[*whole, 97]]
    assert not match_program([found], SHAPE)


def test_a_request_that_no_engine_takes_has_no_answer(tokenizer: Tokenizer) -> None:
    (found,) = answer(tokenizer, Job(at_s=0.0, prompt=TOO_LONG))
    assert found.ends == [[FinishReason.REJECTED]]
    found.ends = [[FinishReason.LENGTH]]
    assert not match_program([found], SHAPE)
