"""Tokens become text, and content ends answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.engine.core import Runner
from cloister.types.events import Submit
from cloister.types.request import FinishReason, Request, SequenceOutput
from cloister.types.step import StepPlan, StepResult
from tests.engine.replica import EOS, SpeakingRunner, ends, make_replica, make_request, texts


def say(path: Path, speech: str | list[int], request: Request, **settings: int) -> list[SequenceOutput]:
    """Returns the outputs of one request to an engine that says `speech`."""
    replica = make_replica(path, SpeakingRunner(speech), **settings)
    replica.core.input_queue.put(Submit(request))
    outputs, _ = replica.drive()
    return outputs


def test_text_arrives_token_by_token(model_path: Path) -> None:
    request = make_request(max_tokens=5)
    outputs = say(model_path, "hello world", request)
    assert [o.text for o in outputs] == list("hello")
    assert [o.num_output_tokens for o in outputs] == [1, 2, 3, 4, 5]
    assert ends(outputs, request) == [FinishReason.LENGTH]


def test_a_character_of_several_tokens_is_never_broken(model_path: Path) -> None:
    request = make_request(max_tokens=9)
    outputs = say(model_path, "é🙂日", request)
    assert [o.text for o in outputs if o.text] == ["é", "🙂", "日"]


def test_a_character_cut_short_by_length_is_left_out(model_path: Path) -> None:
    request = make_request(max_tokens=4)
    assert texts(say(model_path, "a🙂", request), request) == ["a"]


def test_bytes_that_are_no_character_show_as_replacement_though_the_answer_is_cut(model_path: Path) -> None:
    request = make_request(max_tokens=3)
    assert texts(say(model_path, [0xF0, ord("a"), 0xF0], request), request) == ["\ufffda"]


def test_a_character_that_the_model_leaves_open_when_it_ends_shows_as_replacement(model_path: Path) -> None:
    request = make_request(max_tokens=50, ignore_eos=False)
    assert texts(say(model_path, [ord("a"), 0xF0, 0x9F, EOS], request), request) == ["a\ufffd"]


def test_what_was_held_back_for_a_stop_string_survives_a_cut_inside_a_character(model_path: Path) -> None:
    request = make_request(max_tokens=6, stop=("END",))
    assert texts(say(model_path, "aEN🙂", request), request) == ["aEN"]


def test_a_stop_string_over_several_tokens_is_cut_and_never_shown(model_path: Path) -> None:
    request = make_request(max_tokens=50, stop=("END",))
    outputs = say(model_path, "EN EndENDmore", request)
    assert texts(outputs, request) == ["EN End"]
    assert outputs[-1].stop_reason == "END"
    assert outputs[-1].num_output_tokens == len("EN EndEND")
    assert ends(outputs, request) == [FinishReason.STOP]


def test_a_stop_string_is_shown_when_asked_for(model_path: Path) -> None:
    request = make_request(max_tokens=50, stop=("END",), include_stop=True)
    assert texts(say(model_path, "wordENDmore", request), request) == ["wordEND"]


def test_text_held_back_for_a_stop_string_is_given_out_at_the_end(model_path: Path) -> None:
    request = make_request(max_tokens=6, stop=("END",))
    outputs = say(model_path, "wordEN", request)
    assert texts(outputs, request) == ["wordEN"]
    assert ends(outputs, request) == [FinishReason.LENGTH]


def test_eos_ends_an_answer_without_text_and_without_reason(model_path: Path) -> None:
    request = make_request(max_tokens=50, ignore_eos=False)
    outputs = say(model_path, [*b"bye", EOS, *b"!"], request)
    assert texts(outputs, request) == ["bye"]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason is None
    assert outputs[-1].token_ids == [EOS]
    assert outputs[-1].num_output_tokens == 4


def test_ignored_eos_goes_on(model_path: Path) -> None:
    request = make_request(max_tokens=5, ignore_eos=True)
    assert texts(say(model_path, [*b"bye", EOS, *b"!"], request), request) == ["bye!"]


def test_a_stop_token_is_named_as_the_reason(model_path: Path) -> None:
    request = make_request(max_tokens=50, stop_token_ids=(ord("y"),))
    outputs = say(model_path, "bye", request)
    assert texts(outputs, request) == ["b"]
    assert outputs[-1].stop_reason == ord("y")


def test_stop_strings_do_not_count_before_min_tokens(model_path: Path) -> None:
    request = make_request(max_tokens=50, stop=("ab",), min_tokens=3)
    outputs = say(model_path, "abcab!", request)
    assert texts(outputs, request) == ["abc"]
    assert outputs[-1].num_output_tokens == 5


def test_a_stop_on_the_last_token_counts_as_stop(model_path: Path) -> None:
    request = make_request(max_tokens=5, stop=("lo",))
    assert ends(say(model_path, "hello", request), request) == [FinishReason.STOP]


def test_every_sequence_of_a_request_has_its_own_text(model_path: Path) -> None:
    request = make_request(max_tokens=4, n=3)
    outputs = say(model_path, "word", request)
    assert texts(outputs, request) == ["word"] * 3
    assert ends(outputs, request) == [FinishReason.LENGTH] * 3


def test_text_goes_on_where_it_was_after_preemption(model_path: Path) -> None:
    requests = [make_request(f"{i}" * 20, max_tokens=60) for i in range(4)]
    replica = make_replica(model_path, SpeakingRunner("abcdefghijklmnopqrstuvwxyz é🙂日"), num_blocks=24)
    for request in requests:
        replica.core.input_queue.put(Submit(request))
    outputs, events = replica.drive()
    assert any(type(event).__name__ == "Preempted" for event in events)
    expected = ("abcdefghijklmnopqrstuvwxyz é🙂日" * 2).encode()[:60].decode("utf-8", "replace")
    assert [texts(outputs, request) for request in requests] == [[expected]] * 4


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_prompt_logprobs_come_once_and_whole(model_path: Path, num_blocks: int) -> None:
    replica = make_replica(model_path, num_blocks=num_blocks)
    request = make_request("a prompt of some length", prompt_logprobs=2, logprobs=1, n=2, max_tokens=3)
    others = [make_request("x" * 30, max_tokens=20) for _ in range(3)]
    for one in (*others, request):
        replica.core.input_queue.put(Submit(one))
    outputs = [o for o in replica.drive()[0] if o.request_id == request.request_id]
    carrying = [o for o in outputs if o.prompt_logprobs is not None]
    assert [o.index for o in carrying] == [0]
    entries = carrying[0].prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert b"".join(e.text for e in entries[1:] if e is not None) == b" prompt of some length"
    assert all(len(e.top_texts) == 2 for e in entries[1:] if e is not None)
    assert all(o.logprobs is not None and [e.token_id for e in o.logprobs] == o.token_ids for o in outputs)


def test_an_answer_that_ends_before_its_prompt_is_computed_has_none_of_its_logprobs(model_path: Path) -> None:
    def fail(runner: Runner) -> Runner:
        def run(plan: StepPlan) -> StepResult:
            raise OSError("a step that was to fail")

        runner.run = run  # type: ignore[method-assign]
        return runner

    replica = make_replica(model_path, wrap=fail)
    replica.core.input_queue.put(Submit(make_request("a prompt", prompt_logprobs=1)))
    (output,) = replica.drive()[0]
    assert output.finish_reason is FinishReason.ERROR
    assert output.prompt_logprobs is None


def test_a_prompt_alone_can_be_scored(model_path: Path) -> None:
    replica = make_replica(model_path)
    request = make_request("score me", prompt_logprobs=0, max_tokens=0)
    replica.core.input_queue.put(Submit(request))
    outputs, _ = replica.drive()
    assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH]
    assert len(outputs[0].prompt_logprobs or []) == len("score me")


def test_an_empty_stop_string_harms_nobody(model_path: Path) -> None:
    request = make_request(max_tokens=4, stop=("",))
    assert texts(say(model_path, "word", request), request) == ["word"]
