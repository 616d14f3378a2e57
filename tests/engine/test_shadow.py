"""A request that two engines compute: when the front may go over from one to the other, and what is then news."""

from __future__ import annotations

from cloister.engine.in_flight import InFlightRequests
from cloister.engine.shadow import Shadow, ShadowState
from cloister.types.clock import VirtualClock
from cloister.types.events import Arrived, Ended, Event, Outputs, Progressed
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput


def say(shadow: Shadow, token_ids: list[int], index: int = 0, end: FinishReason | None = None, *, last: bool = False) -> None:
    """The second engine makes a step."""
    shadow.note(Progressed("r", 70 + index, index, 1.0, len(token_ids), first=False))
    if end is not None:
        shadow.note(Ended("r", 70 + index, index, 1.0, end, 3, 0, 0, 0.0, None, last=last))
    shadow.take(SequenceOutput(request_id="r", index=index, token_ids=token_ids, finish_reason=end))


def news_of(shadow: Shadow, token_ids: list[list[int]], is_open: set[int]) -> list[object]:
    def name(item: Event | SequenceOutput) -> object:
        return item.token_ids if isinstance(item, SequenceOutput) else type(item).__name__

    return [name(item) for item in shadow.news(token_ids, is_open)]


def test_it_is_behind_until_it_has_said_what_the_client_has() -> None:
    shadow = Shadow([[1, 2]], {0})
    assert shadow.compare([[1, 2]], {0}) is ShadowState.BEHIND  # it has computed nothing yet
    say(shadow, [3])
    assert shadow.compare([[1, 2, 3, 4]], {0}) is ShadowState.BEHIND
    assert shadow.count_missing([[1, 2, 3, 4]]) == 1
    say(shadow, [4])
    assert shadow.compare([[1, 2, 3, 4]], {0}) is ShadowState.LEVEL
    assert news_of(shadow, [[1, 2, 3, 4]], {0}) == []
    say(shadow, [5])
    assert shadow.compare([[1, 2, 3, 4]], {0}) is ShadowState.AHEAD
    assert news_of(shadow, [[1, 2, 3, 4]], {0}) == ["Progressed", [5]]


def test_an_answer_that_differs_is_no_copy_even_if_it_is_longer() -> None:
    shadow = Shadow([[1]], {0})
    say(shadow, [2])
    say(shadow, [9])
    assert shadow.compare([[1, 2, 3]], {0}) is ShadowState.WRONG


def test_several_tokens_of_one_step_are_not_cut_in_two() -> None:
    shadow = Shadow([[1]], {0})
    say(shadow, [2, 3, 4])  # their text is one piece
    assert shadow.compare([[1, 2]], {0}) is ShadowState.BEHIND
    assert shadow.compare([[1, 2, 3, 4]], {0}) is ShadowState.LEVEL


def test_an_end_is_no_reason_to_leave_out_the_rest_of_a_step() -> None:
    shadow = Shadow([[1]], {0})
    say(shadow, [2, 3, 4])
    say(shadow, [5], end=FinishReason.LENGTH, last=True)
    assert shadow.compare([[1, 2]], {0}) is ShadowState.BEHIND  # 3 and 4 would be lost
    assert shadow.compare([[1, 2, 3, 4]], {0}) is ShadowState.AHEAD
    assert news_of(shadow, [[1, 2, 3, 4]], {0}) == ["Progressed", "Ended", [5]]


def test_an_end_that_the_client_has_not_seen_is_news_and_one_that_it_has_is_not() -> None:
    shadow = Shadow([[1], [1]], {0, 1})
    say(shadow, [2], index=0, end=FinishReason.STOP)
    assert shadow.compare([[1, 2], [1]], {1}) is ShadowState.BEHIND  # nothing of the other sequence yet
    say(shadow, [5], index=1, end=FinishReason.LENGTH, last=True)
    assert shadow.is_over
    assert shadow.compare([[1, 2], [1]], {1}) is ShadowState.AHEAD
    assert news_of(shadow, [[1, 2], [1]], {1}) == ["Progressed", "Ended", [5]]


def test_a_sequence_that_has_ended_must_have_ended_there_too() -> None:
    shadow = Shadow([[1], [1]], {0, 1})
    say(shadow, [2], index=0)
    say(shadow, [2], index=1)
    assert shadow.compare([[1, 2], [1]], {1}) is ShadowState.BEHIND


def test_an_engine_that_ends_it_by_an_error_or_sooner_than_the_other_is_not_gone_over_to() -> None:
    failed = Shadow([[1]], {0})
    say(failed, [2], end=FinishReason.TIMEOUT, last=True)
    assert failed.compare([[1]], {0}) is ShadowState.WRONG
    short = Shadow([[1]], {0})
    say(short, [2], end=FinishReason.STOP, last=True)
    assert short.compare([[1, 2]], {0}) is ShadowState.WRONG


def test_an_end_that_is_taken_over_has_times_of_the_front_and_not_of_the_engine_that_said_it() -> None:
    clock = VirtualClock(50.0)
    source, target = (InFlightRequests(clock, max_waiting=4, max_num_seqs=4) for _ in range(2))
    told: list[Event] = []
    target.subscribe(told.append)
    source.add(Request(request_id="r", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=2)), lambda output: None)
    first = [SequenceOutput(request_id="r", index=0, token_ids=[4])]
    source.deliver(Outputs(first, [Arrived("r", 50.0, 3), Progressed("r", 7, 0, 50.0, 1, first=True)]))
    found = source.find("r")
    assert found is not None
    assert target.add_shadow(found) is not None
    clock.advance(2.0)
    ended = Ended("r", 9, 0, 1052.0, FinishReason.LENGTH, 3, 2, 0, 1050.0, 1050.0, last=True)
    last = [SequenceOutput(request_id="r", index=0, token_ids=[5], finish_reason=FinishReason.LENGTH)]
    target.deliver(Outputs(last, [Progressed("r", 9, 0, 1052.0, 1, first=False), ended]))
    assert source.depart("r", is_running=True) is found
    target.take_over("r")
    (end,) = [event for event in told if isinstance(event, Ended)]
    assert (end.arrival_s, end.first_token_s, end.now_s) == (50.0, 50.0, 52.0)
