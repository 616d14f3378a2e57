"""A virtual cluster takes the times that it is given, so that what it predicts follows from them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cloister.bench.drive import Timed, drive_client, make_request
from cloister.bench.recorder import RequestRecord
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop, run_virtually
from cloister.cluster.virtual.kv_links import KVSwitch, LinkCosts, VirtualKVLinks
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.prediction import ClusterShape, running_cluster
from cloister.cluster.virtual.processors import FrontCosts, Processors
from cloister.engine.kv_transfer import EntryContents, KVOffer
from cloister.kv import KVFormat, KVQuery
from cloister.scheduler.kv_exports import KVEntry
from cloister.text import Tokenizer
from cloister.types.events import Ended, Event
from cloister.types.request import FinishReason
from cloister.types.step import SequencePlan, StepPlan

ENGINE = EngineShape(
    num_blocks=2000, block_size=16, max_num_seqs=64, max_waiting=1000, max_model_len=2048, max_batched_tokens=1024,
    step_s=0.002, token_s=0.0001, sample_s=0.0003,
)  # fmt: skip
DELAY_S = 0.004
MIXED = ClusterShape(ENGINE, "least_load", delay_s=DELAY_S)
SPLIT = replace(MIXED, router="capacity_random", roles=("prefill", "decode"), moves_kv=True, part_entries=64)


def ask(number: int, num_input: int, num_output: int, at_s: float = 0.0, shared: int = 0) -> Timed:
    prompt = [*make_tokens((1,), shared, 256), *make_tokens((2, number), num_input - shared, 256)]
    return Timed(at_s, make_request(number, WorkItem(at_s, prompt, num_input, num_output)))


def run(shape: ClusterShape, requests: Sequence[Timed], tokenizer: Tokenizer) -> tuple[list[RequestRecord], list[int]]:
    """Returns what the senders saw, and how many requests each replica got."""

    async def drive() -> tuple[list[RequestRecord], list[int]]:
        async with running_cluster(shape, tokenizer, seed=1) as cluster:
            records = await drive_client(cluster, requests)
            return records, [replica.num_routed for replica in cluster.snapshots()]

    return run_virtually(drive())


def test_a_request_alone_takes_its_steps_and_two_messages(tokenizer: Tokenizer) -> None:
    [record], _ = run(MIXED, [ask(0, 500, 4)], tokenizer)
    assert record.ttft_s == pytest.approx(0.002 + 500 * 0.0001 + 0.0003 + 2 * DELAY_S)
    assert record.gaps_s == pytest.approx([0.002 + 0.0001 + 0.0003] * 3)


def test_keys_of_prompts_and_of_answers_take_times_of_their_own() -> None:
    shape = EngineShape(step_s=1.0, token_s=0.0, key_s=0.01, read_s=0.5)
    prompt = SequencePlan(seq_id=0, start=10, num_tokens=4, table_start=0, new_block_ids=[], num_samples=0)
    answer = SequencePlan(seq_id=1, start=7, num_tokens=1, table_start=0, new_block_ids=[], num_samples=1)
    assert shape.step_time_s(StepPlan(plan_id=0, sequences=[prompt, answer])) == 1.0 + 0.01 * (11 + 12 + 13 + 14) + 0.5 * 8


def test_a_request_that_its_sender_leaves_is_sent_before_that_is(tokenizer: Tokenizer) -> None:
    async def drive() -> list[Event]:
        events: list[Event] = []
        front = FrontCosts(request_s=0.05)
        async with running_cluster(replace(MIXED, num_cores=2, front=front), tokenizer, seed=1) as cluster:
            cluster.subscribe(events.append)
            asking = asyncio.create_task(cluster.follow(ask(0, 10, 1000).request, lambda _: None))
            await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.sleep(1.0)
            assert not any(replica.num_requests for replica in cluster.snapshots())
        return events

    [ended] = [event for event in run_virtually(drive()) if isinstance(event, Ended)]
    assert ended.reason == FinishReason.ABORT


def test_who_waits_for_a_timer_that_is_late_sends_late(tokenizer: Tokenizer) -> None:
    async def drive() -> RequestRecord:
        async with running_cluster(MIXED, tokenizer, seed=1) as cluster:
            [record] = await drive_client(cluster, [ask(0, 500, 4, at_s=0.5)], late_s=0.02)
            return record

    [in_time], _ = run(MIXED, [ask(0, 500, 4, at_s=0.5)], tokenizer)
    late = run_virtually(drive())
    assert late.due_s == in_time.due_s
    assert late.ttft_s == pytest.approx(in_time.ttft_s + 0.02)


def test_steps_take_what_a_curve_says() -> None:
    shape = EngineShape(step_s=0.0, token_s=0.0, curve=((0, 0.001), (1, 0.004), (8, 0.004), (16, 0.012)))

    def step_s(num_tokens: int) -> float:
        part = SequencePlan(seq_id=0, start=0, num_tokens=num_tokens, table_start=0, new_block_ids=[], num_samples=1)
        return shape.step_time_s(StepPlan(plan_id=0, sequences=[part] if num_tokens else []))

    assert [step_s(num_tokens) for num_tokens in (0, 1, 5, 8, 12, 16, 24)] == pytest.approx(
        [0.001, 0.004, 0.004, 0.004, 0.008, 0.012, 0.02]
    )


def test_a_sequence_that_comes_takes_time_once(tokenizer: Tokenizer) -> None:
    shape = replace(MIXED, engine=replace(ENGINE, arrival_s=0.005))
    [record], _ = run(shape, [ask(0, 500, 4)], tokenizer)
    [without], _ = run(MIXED, [ask(0, 500, 4)], tokenizer)
    assert record.ttft_s == pytest.approx(without.ttft_s + 0.005)
    assert record.gaps_s == pytest.approx(without.gaps_s)


def test_a_slow_answer_delays_the_sending_of_none(tokenizer: Tokenizer) -> None:
    records, _ = run(MIXED, [ask(0, 10, 200), ask(1, 10, 1, at_s=0.05)], tokenizer)
    assert records[0].end_s > 0.4
    assert records[1].due_s == 0.05
    assert records[1].end_s < 0.1


def test_steps_become_longer_where_more_runs_than_there_are_cores(tokenizer: Tokenizer) -> None:
    answers = [ask(0, 10, 20), ask(1, 10, 20)]
    step_s = 0.002 + 0.0001 + 0.0003
    for num_cores, expected_s in ((None, step_s), (2, step_s), (1, 2 * step_s)):
        records, num_routed = run(replace(MIXED, router="round_robin", num_cores=num_cores), answers, tokenizer)
        assert num_routed == [1, 1]
        for record in records:
            assert record.gaps_s == pytest.approx([expected_s] * 19, rel=0.01)


def test_the_front_and_its_clients_take_time_of_the_cores(tokenizer: Tokenizer) -> None:
    front = FrontCosts(request_s=0.001, message_s=0.0004, token_s=0.0001)
    [free], _ = run(replace(MIXED, num_cores=2), [ask(0, 500, 4)], tokenizer)
    [charged], _ = run(replace(MIXED, num_cores=2, front=front), [ask(0, 500, 4)], tokenizer)
    assert charged.ttft_s - free.ttft_s == pytest.approx(0.001 + 0.0004 + 0.0001)
    many = [ask(number, 10, 8) for number in range(8)]
    ends = [
        max(record.end_s for record in run(replace(MIXED, num_cores=num_cores, front=front), many, tokenizer)[0])
        for num_cores in (3, 1)
    ]
    assert ends[1] > 1.5 * ends[0]


def test_cores_are_shared_equally_and_each_thread_has_one_at_most() -> None:
    async def drive() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualEventLoop)
        processors = Processors(2, loop.clock)
        ends = [0.0, 0.0, 0.0, 0.0]

        async def work(number: int, at_s: float, work_s: float) -> None:
            await asyncio.sleep(at_s)
            await processors.run(work_s)
            ends[number] = loop.time()

        # two alone until 1, then four at half a core each until the short ones end at 3, then the first two again
        await asyncio.gather(work(0, 0.0, 3.0), work(1, 0.0, 4.0), work(2, 1.0, 1.0), work(3, 1.0, 1.0))
        return ends

    assert run_virtually(drive()) == pytest.approx([4.0, 5.0, 3.0, 3.0])


def test_cores_are_shared_by_niceness_and_what_one_leaves_is_for_others() -> None:
    async def drive(num_cores: int) -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualEventLoop)
        processors = Processors(num_cores, loop.clock)
        ends = [0.0, 0.0, 0.0]

        async def work(number: int, niceness: int, work_s: float) -> None:
            await processors.run(work_s, niceness)
            ends[number] = loop.time()

        await asyncio.gather(work(0, 0, 1.0), work(1, 5, 1.0), work(2, 5, 1.0))
        return ends

    # two cores: the first would get more than one, has one, and leaves one to both others
    assert run_virtually(drive(2)) == pytest.approx([1.0, 1.5, 1.5])
    # one core: shares of 1 and twice 1.25**-5 of what all weigh
    weight = 1.25**-5
    first_s = 1 + 2 * weight
    assert run_virtually(drive(1)) == pytest.approx([first_s, 3.0, 3.0])


def test_nice_threads_are_slower_in_company_and_only_there() -> None:
    async def drive(others: Sequence[int]) -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualEventLoop)
        processors = Processors(2, loop.clock, company=1.25)
        tasks = [asyncio.create_task(processors.run(1.0, niceness)) for niceness in others]
        await processors.run(1.0, 5)
        end_s = loop.time()
        await asyncio.gather(*tasks)
        return end_s

    assert run_virtually(drive([])) == pytest.approx(1.0)
    assert run_virtually(drive([5])) == pytest.approx(1.25)
    assert run_virtually(drive([0])) == pytest.approx(1.2)  # in company for a second, until the other one has ended


NUM_ENTRIES = 500 // 16


def gap_behind_prompt(entry_s: float, tokenizer: Tokenizer) -> float:
    """Returns the time between the first token, which one replica computes, and the second one."""
    [record], _ = run(replace(SPLIT, entry_s=entry_s, delay_s=0.0005), [ask(0, 500, 4)], tokenizer)
    assert record.gaps_s[1:] == pytest.approx([0.002 + 0.0001 + 0.0003] * 2)
    return record.gaps_s[0]


def test_kv_moves_while_its_prompt_is_computed(tokenizer: Tokenizer) -> None:
    slower_by_s = gap_behind_prompt(0.0002, tokenizer) - gap_behind_prompt(0.0001, tokenizer)
    assert slower_by_s < NUM_ENTRIES * 0.0001 / 3


def test_kv_that_moves_more_slowly_than_its_prompt_is_computed_takes_its_time(tokenizer: Tokenizer) -> None:
    slower_by_s = gap_behind_prompt(0.03, tokenizer) - gap_behind_prompt(0.01, tokenizer)
    assert slower_by_s == pytest.approx(NUM_ENTRIES * 0.02)


@pytest.mark.parametrize(
    "engine",
    [
        replace(ENGINE, load_s=0.001), replace(ENGINE, links=LinkCosts(export_s=0.001)),
        replace(ENGINE, links=LinkCosts(receive_s=0.001)), replace(ENGINE, links=LinkCosts(serve_s=0.031)),
        replace(ENGINE, links=LinkCosts(pull_s=0.031)),
    ],
    ids=["loads", "exports", "receives", "serves", "pulls"],
)  # fmt: skip
def test_kv_that_moves_takes_time_of_both_engines(engine: EngineShape, tokenizer: Tokenizer) -> None:
    requests = [ask(0, 500, 4), ask(1, 500, 4)]
    busy = replace(SPLIT, num_cores=1)  # whatever thread works, others wait
    free, _ = run(busy, requests, tokenizer)
    charged, _ = run(replace(busy, engine=engine), requests, tokenizer)
    later_s = max(record.end_s for record in charged) - max(record.end_s for record in free)
    assert NUM_ENTRIES * 0.001 / 2 < later_s < 3 * NUM_ENTRIES * 0.001  # a part of it while nothing else could run


def test_links_work_beside_steps_as_long_as_cores_are_free(tokenizer: Tokenizer) -> None:
    engine = replace(ENGINE, links=LinkCosts(serve_s=0.03, export_s=0.002, pull_s=0.03, receive_s=0.002))
    requests = [ask(number, 500, 3, at_s=0.04 * number) for number in range(4)]

    def last_ttft_s(shape: ClusterShape) -> float:
        return run(shape, requests, tokenizer)[0][-1].ttft_s

    split = replace(SPLIT, part_entries=8)
    assert last_ttft_s(replace(split, engine=engine)) == pytest.approx(last_ttft_s(split), rel=0.15)
    assert last_ttft_s(replace(split, engine=engine, num_cores=1)) > 1.5 * last_ttft_s(replace(split, num_cores=1))


def test_threads_of_an_engines_links_work_one_at_a_time(tokenizer: Tokenizer) -> None:
    requests = [ask(number, 100, 3) for number in range(6)]

    def last_end_s(links: LinkCosts) -> float:
        shape = replace(SPLIT, engine=replace(ENGINE, links=links), num_cores=64)
        return max(record.end_s for record in run(shape, requests, tokenizer)[0])

    free_s = last_end_s(LinkCosts())
    assert last_end_s(LinkCosts(serve_s=0.1)) > free_s + 0.5
    assert last_end_s(LinkCosts(pull_s=0.1)) > free_s + 0.5


class Links:
    """Links of two engines, whose threads are done when a test says so.

    Attributes:
        jobs: of threads that work.
    """

    def __init__(self) -> None:
        draw = random.Random(1)
        switch = KVSwitch(VirtualNetwork(draw, 0.001), draw)
        form = KVFormat("a model", 16, "one group", (4,))
        self.jobs: list[Callable[[], None]] = []
        costs = LinkCosts(serve_s=1.0, export_s=1.0, pull_s=1.0, receive_s=1.0)
        self.source, self.target = (
            VirtualKVLinks(index, switch, form, costs=costs, work=lambda _, job: self.jobs.append(job)) for index in range(2)
        )

    async def work(self) -> None:
        """Has every thread finish, and what it sends arrive."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()
        await asyncio.sleep(0.01)


def test_a_pull_ends_in_whatever_its_threads_do() -> None:
    query = KVQuery("request", b"root", [b"key"], 0)

    async def stages(num_stages: int) -> tuple[list[bool | None], list[bool | None], int, int]:
        """Returns what the source and the target hear if the pull is cancelled behind so many stages, how often KV is copied,
        and what stays open."""
        links, copied = Links(), list[Sequence[KVEntry]]()

        def copy(entries: Sequence[KVEntry]) -> list[EntryContents]:
            copied.append(entries)
            return [EntryContents(b"root", b"key", 0, (b"four",))]

        links.target.pull(query, links.source.endpoint, 1.0)
        demands, pulled = list[bool | None](), list[bool | None]()
        for stage in range(10):
            if stage == num_stages:
                links.target.cancel("request")
            await asyncio.sleep(0.01)
            await links.work()
            for demand in links.source.take_demands():
                demands.append(None if demand.query is None else True)
                if demand.query is not None:
                    links.source.offer(demand.peer, KVOffer([KVEntry(0, b"key", (0,))], copy, True))
            pulled += [each.is_complete for each in links.target.take_pulled()]
        return demands, pulled, len(copied), links.source.num_open + links.target.num_open

    assert run_virtually(stages(9)) == ([True, None], [None, True], 1, 0)
    heard = [run_virtually(stages(number)) for number in range(4)]
    assert heard == [([], [], 0, 0), ([None], [], 0, 0), ([True, None], [], 0, 0), ([True, None], [], 1, 0)]


def test_kv_of_two_requests_shares_the_way(tokenizer: Tokenizer) -> None:
    records, _ = run(replace(SPLIT, entry_s=0.01), [ask(0, 480, 3), ask(1, 480, 3)], tokenizer)
    assert max(record.end_s for record in records) > 2 * 30 * 0.01


def test_a_prediction_is_repeated_to_the_bit(tokenizer: Tokenizer) -> None:
    requests = [ask(number, 30 + 7 * number, 5, at_s=0.01 * number) for number in range(12)]
    assert run(SPLIT, requests, tokenizer) == run(SPLIT, requests, tokenizer)


def test_a_system_prompt_that_all_share_heats_no_replica_once_it_is_busy(tokenizer: Tokenizer) -> None:
    requests = [ask(number, 320, 20, at_s=0.006 * number, shared=256) for number in range(80)]
    shared, routed = run(replace(MIXED, router="prefix_aware"), requests, tokenizer)
    apart, _ = run(replace(MIXED, router="round_robin"), requests, tokenizer)
    assert min(routed) > 80 / 4
    assert max(record.e2e_s for record in shared) < 1.25 * max(record.e2e_s for record in apart)
    assert sum(record.num_cached_tokens for record in shared) >= sum(record.num_cached_tokens for record in apart)


def test_a_request_that_an_engine_refuses_is_a_failure_of_its_own(tokenizer: Tokenizer) -> None:
    records, _ = run(MIXED, [ask(0, 3000, 4), ask(1, 10, 2)], tokenizer)
    assert [record.failure is None for record in records] == [False, True]
