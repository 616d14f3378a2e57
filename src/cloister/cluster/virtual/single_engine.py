"""Answers of one engine alone, with which those of a cluster are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from cloister.cluster.virtual.checks import JobAnswer, RunRecord, check_answer, updates_of
from cloister.cluster.virtual.engine import make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.reference import match_program
from cloister.cluster.virtual.scenario import NUM_ADAPTERS
from cloister.engine.core import EngineCore
from cloister.text import Tokenizer
from cloister.types.clock import VirtualClock
from cloister.types.events import Submit


def check_answers(run: RunRecord, shape: EngineShape, tokenizer: Tokenizer) -> list[str]:
    """Compares each answer of a run with that of one engine alone, for all weights of the scenario.

    Args:
        shape: of the engines at the start.
    """
    weights = sorted({0, *(update.weights or 0 for update in updates_of(run.scenario))})
    plain = replace(shape, policy="fcfs", drafts="none", num_adapters=NUM_ADAPTERS)
    shapes = [replace(plain, weights=each) for each in weights]
    if match_program(run.answers, shapes[0]) or (
        len(shapes) > 1 and all(any(match_program([a], shape) for shape in shapes) for a in run.answers)
    ):
        return [wrong for answer in run.answers for wrong in check_answer(answer, answer.as_given(), run)]
    alone = [_answer_alone(run.answers, shape, tokenizer) for shape in shapes]
    found: list[str] = []
    for number, answer in enumerate(run.answers):
        each = [check_answer(answer, of_shape[number].as_given(), run) for of_shape in alone]
        found += next((wrong for wrong in each if not wrong), each[0])
        if not all(match_program([of_shape[number]], shape) for of_shape, shape in zip(alone, shapes, strict=True)):
            found.append(f"{answer.request.request_id}: one engine alone says something else than the program")
    return found


def _answer_alone(given: Sequence[JobAnswer], shape: EngineShape, tokenizer: Tokenizer) -> list[JobAnswer]:
    """Returns what one engine alone answers without faults."""
    return answer_all(make_engine(shape, tokenizer, VirtualClock()).core, given)


def answer_all(core: EngineCore, given: Sequence[JobAnswer]) -> list[JobAnswer]:
    """Returns what an engine answers to the same requests, without deadlines."""
    answers = [JobAnswer.to(answer.job, answer.request) for answer in given]
    by_id = {answer.request.request_id: answer for answer in answers}
    for answer in answers:
        core.input_queue.put(Submit(msgspec.structs.replace(answer.request, timeout_s=1e9)))
    while (outputs := core.step()) is not None:
        for output in outputs.outputs:
            by_id[output.request_id].take(output)
    return answers
