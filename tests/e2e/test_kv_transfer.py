"""Engines in processes of their own load KV from each other, and nothing is lost when one is killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloister.cluster import ReplicaSet
from cloister.cluster.shadow_moves import ShadowEnd, ShadowMoves
from cloister.engine import EngineClient
from cloister.engine.fork_server import ForkServer
from cloister.engine.in_flight import InFlightRequest
from cloister.engine.transports import ProcessTransport
from cloister.launch.processes import ENGINE_ENTRY, make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, Event, KVLoaded, KVSource, Outputs, Scheduled, Shutdown, Stepped, Submit
from cloister.types.request import Request, SamplingParams
from cloister.types.scope import LOCAL_SCOPE
from tests import slow_engine

SECRET = b"e" * 32
PROMPT = [(7 * i * i + 3 * i) % 2000 for i in range(1000)]
NUM_HIT = 999 // 16 * 16
WAIT_S = 300.0
NUM_ATTEMPTS = 5


@dataclass
class RunningEngine:
    """An engine process, and what it said."""

    transport: ProcessTransport
    events: list[Event] = field(default_factory=list)
    token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        assert self.transport.ready is not None
        assert self.transport.ready.kv_endpoint is not None
        return self.transport.ready.kv_endpoint

    def deliver(self, message: Outputs) -> None:
        self.events += message.events
        for output in message.outputs:
            self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)

    def find(self, kind: type[Any], name: str = "") -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and name in ("", getattr(event, "request_id", ""))]

    async def answer(
        self, name: str, token_ids: list[int] = PROMPT, source: str | None = None, hold_kv_s: float = 0.0
    ) -> list[int]:
        kv_source = None if source is None else KVSource(source)
        self.transport.send(Submit(make_request(name, token_ids), 0, kv_source=kv_source, hold_kv_s=hold_kv_s))
        await wait_until(lambda: bool(self.find(Ended, name)))
        return self.token_ids[name]


def make_request(name: str, token_ids: list[int] = PROMPT) -> Request:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, token_ids=token_ids, sampling=sampling)


async def wait_until(is_done: Callable[[], bool]) -> None:
    give_up_s = asyncio.get_running_loop().time() + WAIT_S
    while not is_done():
        assert asyncio.get_running_loop().time() < give_up_s, "it did not come to pass"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def engines(*settings: str, fork_server: ForkServer | None = None, **changes: Any) -> AsyncIterator[list[RunningEngine]]:
    """Starts an engine for each setting of `kv_transfer`."""
    found = []
    async with contextlib.AsyncExitStack() as stack:
        for setting in settings:
            transport = ProcessTransport(ENGINE_ENTRY, kv_secret=SECRET, fork_server=fork_server)
            stack.push_async_callback(transport.discard_template, is_final=True)
            config = EngineConfig(num_threads=1, kv_memory_mb=64.0, prefix_cache=True, kv_transfer=setting, **changes)
            await transport.open(config)
            stack.push_async_callback(transport.close)
            engine = RunningEngine(transport)
            found.append(engine)
            task = asyncio.create_task(transport.run(engine.deliver))
            stack.callback(task.cancel)
        yield found


async def move_prompt(source: RunningEngine, target: RunningEngine) -> int:
    """Checks that a prompt moves as a whole; returns how many loads were not complete before."""
    for attempt in range(NUM_ATTEMPTS):  # a busy machine may miss the deadline of a load, and computes then
        name = f"attempt {attempt}"
        prompt = [attempt, *PROMPT[1:]]
        expected = await source.answer(name, prompt, hold_kv_s=300.0)
        assert await target.answer(name, prompt, source.endpoint) == expected
        (loaded,) = target.find(KVLoaded, name)
        if loaded.complete:
            break
    assert (loaded.num_tokens, loaded.complete) == (NUM_HIT, True)
    assert target.find(Scheduled, name)[0].num_cached_tokens == NUM_HIT
    return attempt


@pytest.mark.parametrize("setting", ["shm", "unix", pytest.param("tls://127.0.0.1:0", marks=pytest.mark.slow)])
def test_a_prompt_of_a_thousand_tokens_moves_from_one_process_to_another(setting: str) -> None:
    async def run() -> None:
        async with engines(setting, setting) as (source, target):
            attempt = await move_prompt(source, target)
            source.transport.send(Submit(make_request("short", [1, 2, 3]), 0))  # its steps tell what is used
            await wait_until(lambda: bool(source.find(Ended, "short")))
            assert target.find(Stepped)[-1].num_used_blocks <= NUM_HIT // 16 + 2
            num_held = attempt * (NUM_HIT // 16 + 2)  # of loads that were not complete
            assert source.find(Stepped)[-1].num_used_blocks <= num_held + 1, "what was held is not held any more"

    asyncio.run(run())


def sockets_of(pid: int | None) -> set[str]:
    """The sockets that a process has, and this one has not."""
    found: list[set[str]] = []
    for number in (pid, os.getpid()):
        found.append(set())
        for link in Path(f"/proc/{number}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found[-1].add(os.readlink(link))
    return {name for name in found[0] - found[1] if name.startswith("socket:")}


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_forks_of_one_template_load_kv_from_each_other_through_sockets_of_their_own() -> None:
    async def run() -> None:
        server = ForkServer()
        async with engines("unix", "unix", fork_server=server) as (source, target):
            await move_prompt(source, target)
            assert source.endpoint != target.endpoint
            of_template, *of_engines = (sockets_of(pid) for pid in (server.pid, source.transport.pid, target.transport.pid))
            assert len(of_template) == 1  # for the front's requests
            assert not of_template & of_engines[0]
            assert not (of_template | of_engines[0]) & of_engines[1]
            assert min(map(len, of_engines)) >= 2  # its front and its listener

    asyncio.run(run())


def memories_of(pid: int | None) -> list[str]:
    """The memory without a name that a process has."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(link))
    return [name for name in links if "cloister-kv-pull" in name]


@pytest.mark.parametrize("setting", ["shm", pytest.param("unix", marks=pytest.mark.slow)])
def test_a_source_that_is_killed_in_the_middle_of_a_transfer_costs_a_prefill(setting: str) -> None:
    """It is stopped before it has copied anything, and killed while the target waits for the rest."""

    async def run() -> None:
        async with engines(setting, setting) as (source, target):
            expected = await source.answer("first")
            process: Any = source.transport._process
            process.send_signal(19)  # SIGSTOP: the kernel accepts its connections, and nothing answers
            target.transport.send(Submit(make_request("second"), 0, kv_source=KVSource(source.endpoint)))
            await asyncio.sleep(0.3)
            assert not target.find(Scheduled), "it waits for KV"
            process.kill()
            await wait_until(lambda: bool(target.find(Ended)))
            assert target.token_ids["second"] == expected
            (loaded,) = target.find(KVLoaded)
            assert not loaded.complete
            assert target.find(Scheduled)[0].num_cached_tokens < NUM_HIT
            await wait_until(lambda: not memories_of(target.transport.pid))
            target.transport.send(Shutdown(5.0))

    asyncio.run(run())


def test_a_target_that_was_late_begins_anew_when_the_source_has_just_filled_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little is left for it to compute, and the answer does not wait for it."""
    monkeypatch.setattr("cloister.launch.processes.ENGINE_ENTRY", slow_engine.ENTRY)
    rests: dict[str, list[int]] = {}

    def prefetch(client: EngineClient, found: InFlightRequest, source: str) -> None:
        num_with_kv = len(found.request.token_ids) + len(found.token_ids[0]) - 1
        rests.setdefault(found.request.request_id, []).append(num_with_kv % 16)
        ask(client, found, source)

    ask = EngineClient.prefetch
    monkeypatch.setattr(EngineClient, "prefetch", prefetch)

    ends = iter([ShadowEnd.LATE])
    run_moves = ShadowMoves.run

    async def be_late_once(moves: ShadowMoves, request_id: str, source: int, target: int) -> ShadowEnd:
        return next(ends, None) or await run_moves(moves, request_id, source, target)

    monkeypatch.setattr(ShadowMoves, "run", be_late_once)

    async def run() -> None:
        settings = resolve_settings({"replicas": 2, "num_threads": 1, "kv_memory_mb": 64, "kv_transfer": "unix"})
        cluster = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(cluster, ReplicaSet)
        await cluster.start()
        try:
            answers: dict[str, list[int]] = {}
            for name in ("stays", "moves"):
                sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
                request = Request(request_id=name, token_ids=PROMPT[:100], sampling=sampling)
                answer = asyncio.create_task(follow(cluster, request, answers.setdefault(name, [])))
                await wait_until(lambda name=name: len(answers[name]) > 10)
                if name == "moves":
                    assert await cluster.migrate(name, 1 - cluster._moves.places[name])
                await answer
        finally:
            await cluster.drain(0.0)
        assert answers["moves"] == answers["stays"]

    asyncio.run(run())
    assert len(rests["moves"]) > 1
    assert rests["moves"][1] <= 3  # a busy machine may take a step or two more


@contextlib.asynccontextmanager
async def split_cluster() -> AsyncIterator[ReplicaSet]:
    """One engine that computes prompts, in small steps, and one that goes on with answers."""
    settings = resolve_settings(
        {
            "replicas": 2, "prefill": 1, "decode": 1, "num_threads": 1, "kv_memory_mb": 64, "kv_transfer": "unix",
            "max_batched_tokens": 64, "router": "capacity_random",
        }
    )  # fmt: skip
    cluster = make_engine(settings.engine.config, settings.server.config)
    assert isinstance(cluster, ReplicaSet)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.drain(0.0)


def note_loads(cluster: ReplicaSet, index: int) -> list[KVLoaded]:
    loads: list[KVLoaded] = []
    cluster._replicas[index].subscribe(lambda event: loads.append(event) if isinstance(event, KVLoaded) else None)
    return loads


async def check_following(cluster: ReplicaSet) -> None:
    """Checks that an answer goes on with KV that was loaded while its prompt was computed, and is that of one engine."""
    expected: list[int] = []
    cluster._replicas[0].submit(make_request("alone"), lambda output: expected.extend(output.token_ids))
    loads = note_loads(cluster, 1)
    for attempt in range(NUM_ATTEMPTS):  # a busy machine may miss the deadline of a load, and computes then
        answer: list[int] = []
        await follow(cluster, make_request(f"attempt {attempt}"), answer)
        await wait_until(lambda: len(expected) == 12)
        assert answer == expected
        if loads and loads[-1].complete:
            break
    assert (loads[-1].num_tokens, loads[-1].complete) == (len(PROMPT) // 16 * 16, True)
    assert cluster.num_followed == 0


@pytest.mark.parametrize(
    "killed", [pytest.param(0, id="that computes it"), pytest.param(1, id="that follows it", marks=pytest.mark.slow)]
)
def test_a_prompt_is_followed_and_an_engine_that_is_killed_meanwhile_loses_no_token(
    killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9` of either side, when the load is under way and the prompt is not done."""
    monkeypatch.setattr("cloister.launch.processes.ENGINE_ENTRY", slow_engine.ENTRY)

    async def run() -> None:
        async with split_cluster() as cluster:
            await check_following(cluster)
            follower = cluster._replicas[1]
            assert follower.pid is not None
            os.kill(follower.pid, signal.SIGSTOP)  # so that the load is under way for as long as this takes
            answers: dict[str, list[int]] = {"cut": [], "again": []}
            prompt = [1, *PROMPT[1:]]
            task = asyncio.create_task(follow(cluster, make_request("cut", prompt), answers["cut"]))
            await wait_until(lambda: cluster.num_followed > 0)
            pid = cluster._replicas[killed].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            if killed == 0:
                os.kill(follower.pid, signal.SIGCONT)
            await asyncio.wait_for(task, WAIT_S)
            assert cluster.num_followed == 0
            await wait_until(lambda: all(replica.is_accepting for replica in cluster.snapshots()))
            await follow(cluster, make_request("again", prompt), answers["again"])
            assert answers["cut"] == answers["again"]
            assert len(answers["again"]) == 12
            await wait_until(lambda: all(replica.num_requests == 0 for replica in cluster.snapshots()))

    asyncio.run(run())


async def follow(cluster: ReplicaSet, request: Request, token_ids: list[int]) -> None:
    async for output in cluster.generate(request):
        token_ids += output.token_ids


async def check_copies(cluster: ReplicaSet) -> None:
    """Checks that a hot prompt is copied, is a hit where it was copied, and is gone with its owner's cache."""
    hot, loads = PROMPT[:200], [note_loads(cluster, 0), note_loads(cluster, 1)]
    alone: list[int] = []
    await follow(cluster, make_request("alone", hot), alone)
    owner = cluster._replicas[0] if cluster.snapshots()[0].num_routed else cluster._replicas[1]
    other = cluster._replicas[1] if owner is cluster._replicas[0] else cluster._replicas[0]
    answers: dict[str, list[int]] = {f"hot {number}": [] for number in range(7)}
    tasks = []
    for name, answer in answers.items():  # as many as the router leaves to the replica that has it
        sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)  # they run for as long as the test does
        request = Request(request_id=name, token_ids=hot, sampling=sampling)
        cluster._copies.note(request, cluster._replicas.index(owner))  # type: ignore[union-attr]
        owner.submit(request, lambda output, answer=answer: answer.extend(output.token_ids))
    await wait_until(lambda: sum(each.num_prefix_copies for each in cluster.snapshots()) == 1)
    assert [load.complete for of_replica in loads for load in of_replica] == [True]
    hits: list[Scheduled] = []
    other.subscribe(lambda event: hits.append(event) if isinstance(event, Scheduled) else None)
    copied: list[int] = []
    tasks.append(asyncio.create_task(follow(cluster, make_request("copied", hot), copied)))
    await asyncio.gather(*tasks)
    assert copied == alone
    assert [hit.num_cached_tokens for hit in hits] == [192]
    report = await cluster.inspect_cache(LOCAL_SCOPE, drop=True)
    assert not report.unanswered
    assert cluster.num_hot_prefixes == 0
    assert (await cluster.inspect_cache(LOCAL_SCOPE)).places[0].num_blocks == 0


def test_a_hot_prefix_is_copied_between_processes_and_dropped_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.launch.processes.ENGINE_ENTRY", slow_engine.ENTRY)

    async def run() -> None:
        settings = resolve_settings(
            {
                "replicas": 2, "num_threads": 1, "kv_memory_mb": 64, "kv_transfer": "unix", "router": "prefix_aware",
                "replicate_hot_prefixes": True,
            }
        )  # fmt: skip
        cluster = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(cluster, ReplicaSet)
        await cluster.start()
        try:
            await check_copies(cluster)
        finally:
            await cluster.drain(0.0)

    asyncio.run(run())
