"""Readers of outputs take turns on the event loop, so that no step's tokens hold it, and nothing of an answer is lost by it."""

from __future__ import annotations

import asyncio

import msgspec

from cloister.engine import EngineClient
from cloister.engine.mailbox import BATCH, WAKEUPS_A_TURN
from cloister.types.events import Outputs
from cloister.types.request import FinishReason, Request, SequenceOutput, TokenLogprobs
from tests.engine.fake_transport import FakeTransport, opened_client
from tests.engine.replica import make_request

NUM_STREAMS = 3 * WAKEUPS_A_TURN


def part(request: Request, text: str, index: int = 0, **more: object) -> SequenceOutput:
    return SequenceOutput(request_id=request.request_id, index=index, text=text, token_ids=[ord(text[-1])] * len(text), **more)  # type: ignore[arg-type]


def end(request: Request, **more: object) -> SequenceOutput:
    return SequenceOutput(request_id=request.request_id, index=0, finish_reason=FinishReason.LENGTH, **more)  # type: ignore[arg-type]


class Reader:
    """A task that reads an answer.

    Attributes:
        read: what it read, in order; also noted in `log`, with its name.
    """

    def __init__(self, client: EngineClient, log: list[str], name: str, n: int = 1, *, in_batches: bool = False) -> None:
        self.request = make_request(n=n)
        self.read: list[SequenceOutput] = []
        self._log, self._name = log, name
        self.task = asyncio.create_task(self._run(client, in_batches))

    async def _run(self, client: EngineClient, in_batches: bool) -> None:
        async for output in client.generate(self.request, in_batches=in_batches):
            self.read.append(output)
            self._log.append(self._name)


def make_client(**settings: object) -> EngineClient:
    return opened_client(FakeTransport(), max_num_seqs=256, max_waiting=256, **settings)


async def let_run() -> None:
    for _ in range(3 * NUM_STREAMS):
        await asyncio.sleep(0)


def test_few_streams_wake_in_a_turn_of_the_loop_and_all_in_the_end() -> None:
    client = make_client()

    async def main() -> None:
        log: list[str] = []
        readers = [Reader(client, log, str(number)) for number in range(NUM_STREAMS)]
        await let_run()
        client.receive(Outputs([part(reader.request, "a") for reader in readers], []))
        await let_run()
        assert len(log) == NUM_STREAMS
        client.receive(Outputs([part(reader.request, "b") for reader in readers], []))
        seen = len(log)
        most = 0
        while len(log) < 2 * NUM_STREAMS:
            await asyncio.sleep(0)
            most, seen = max(most, len(log) - seen), len(log)
        assert most == WAKEUPS_A_TURN
        assert log[NUM_STREAMS:] == [str(number) for number in range(NUM_STREAMS)]
        client.receive(Outputs([end(reader.request) for reader in readers], []))
        await asyncio.gather(*(reader.task for reader in readers))

    asyncio.run(asyncio.wait_for(main(), 300))


def test_a_first_output_overtakes_the_tokens_of_other_streams_and_of_other_engines() -> None:
    one, other = make_client(), make_client()

    async def main() -> None:
        log: list[str] = []
        readers = [Reader(one, log, "old") for _ in range(NUM_STREAMS)]
        await let_run()
        one.receive(Outputs([part(reader.request, "a") for reader in readers], []))
        await let_run()
        new = Reader(other, log, "new")
        await let_run()
        log.clear()
        one.receive(Outputs([part(reader.request, "b") for reader in readers], []))
        other.receive(Outputs([part(new.request, "c")], []))
        await let_run()
        assert log.index("new") < WAKEUPS_A_TURN
        assert log.count("old") == NUM_STREAMS
        for reader in (*readers, new):
            reader.task.cancel()

    asyncio.run(asyncio.wait_for(main(), 300))


def read_late(said: list[list[SequenceOutput]], request: Request, n: int = 1) -> list[SequenceOutput]:
    """Returns what a reader gets that comes to read only after all was said."""
    client = make_client()

    async def main() -> list[SequenceOutput]:
        reader = Reader(client, [], "late", n)
        await let_run()
        for outputs in said:
            mine = [msgspec.structs.replace(output, request_id=reader.request.request_id) for output in outputs]
            client.receive(Outputs(mine, []))
        await reader.task
        return reader.read

    return asyncio.run(asyncio.wait_for(main(), 300))


def test_what_a_task_has_not_read_yet_becomes_one_piece() -> None:
    request = make_request()
    said = [
        [part(request, "ab", num_output_tokens=2)],
        [part(request, "c", num_output_tokens=3)],
        [part(request, "de", num_output_tokens=5)],
        [end(request, num_output_tokens=5)],
    ]
    first, rest, last = read_late(said, request)
    assert (first.text, first.num_output_tokens) == ("ab", 2), "a first token waits for no other"
    assert (rest.text, rest.token_ids, rest.num_output_tokens) == ("cde", [ord("c"), ord("e"), ord("e")], 5)
    assert (last.text, last.finish_reason) == ("", FinishReason.LENGTH)


def test_pieces_of_two_answers_and_those_with_more_than_text_stay_apart() -> None:
    request = make_request(n=2)
    said = [
        [part(request, "a", 0), part(request, "x", 1)],
        [part(request, "b", 0), part(request, "y", 1, finish_reason=FinishReason.STOP)],
        [part(request, "c", 0, finish_reason=FinishReason.STOP)],
    ]
    read = read_late(said, request, n=2)
    assert ["".join(each.text for each in read if each.index == index) for index in (0, 1)] == ["abc", "xy"]
    assert sum(each.finish_reason is not None for each in read) == 2
    entry = TokenLogprobs(token_id=1, logprob=-1.0)
    read = read_late(
        [[part(request, "a", logprobs=[entry])], [part(request, "b", logprobs=[entry], finish_reason=FinishReason.STOP)]],
        request,
    )
    assert [each.text for each in read] == ["a", "b"]


def test_text_comes_before_the_error_that_breaks_it_off() -> None:
    request = make_request()
    broken = SequenceOutput(request_id=request.request_id, index=0, finish_reason=FinishReason.ERROR, error="the engine died")
    assert [(each.text, each.error) for each in read_late([[part(request, "a")], [broken]], request)] == [
        ("a", None),
        ("", "the engine died"),
    ]


def test_a_reader_of_a_whole_answer_is_woken_for_many_tokens_at_once_and_at_the_end() -> None:
    client = make_client()

    async def main() -> None:
        reader = Reader(client, [], "whole", in_batches=True)
        await let_run()
        texts = [chr(ord("a") + number % 26) for number in range(2 * BATCH + 3)]
        sizes = set()
        for text in texts:
            client.receive(Outputs([part(reader.request, text)], []))
            await let_run()
            sizes.add(len(reader.read))
        client.receive(Outputs([end(reader.request)], []))
        await reader.task
        assert sizes == {0, BATCH, 2 * BATCH}
        assert "".join(output.text for output in reader.read) == "".join(texts)
        assert reader.read[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(asyncio.wait_for(main(), 300))


def test_the_end_of_each_of_several_answers_wakes_a_reader_of_whole_ones() -> None:
    client = make_client()

    async def main() -> None:
        reader = Reader(client, [], "whole", n=2, in_batches=True)
        await let_run()
        client.receive(Outputs([part(reader.request, "a", 1), part(reader.request, "b", 0)], []))
        await let_run()
        assert reader.read == []
        client.receive(Outputs([end(reader.request)], []))
        await let_run()
        assert [output.index for output in reader.read] == [1, 0, 0]
        client.receive(Outputs([msgspec.structs.replace(end(reader.request), index=1)], []))
        await reader.task

    asyncio.run(asyncio.wait_for(main(), 300))
