"""Replicas that something else places: they are there when it is, come back when it does, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cluster import ROUTERS
from cloister.cluster.backend.placer import (
    PlacedReplicas,
    RayPlacer,
    RaySettings,
    choose_num_cpus,
    driver_variables,
    share_memory,
)
from cloister.cluster.remote.transport import RemoteTransport
from cloister.cluster.replica_set import ClusterConfig
from cloister.cluster.routers import RouterContext
from cloister.cluster.virtual.engine import write_byte_tokenizer
from cloister.engine import EngineClient
from cloister.engine.identity import Identity
from cloister.kv import PrefixKeys
from cloister.types.errors import EngineError
from cloister.types.request import Request, SequenceOutput
from tests.cluster.test_remote import run
from tests.engine.replica import BLOCK_SIZE, VOCAB_SIZE, make_config, make_request
from tests.history_program import greedy_continuation
from tests.serving import descendants

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


def make_placer(identity: Identity, address: str | None = None) -> RayPlacer:
    settings = RaySettings(2, address, "", 1, 0, identity.certificate)
    return RayPlacer(settings, "tests.cluster.local_driver")


def make_replicas(path: Path, entry: str, address: str | None = None) -> PlacedReplicas:
    identity = Identity.make()
    placer = make_placer(identity, address)
    clients = [
        EngineClient(
            RemoteTransport(
                placer.placement(index), identity, f"tests.engine.replica:{entry}", import_path=[p for p in sys.path if p]
            ),
            make_config(path),
        )
        for index in range(2)
    ]
    context = RouterContext(PrefixKeys("history", BLOCK_SIZE), random.Random(0))
    return PlacedReplicas(
        clients, lambda model: ROUTERS.get("round_robin")(context), placer, ClusterConfig(), BLOCK_SIZE, avoids_slow=False
    )


@asynccontextmanager
async def serving(path: Path, monkeypatch: pytest.MonkeyPatch, entry: str = "build_slow") -> AsyncIterator[PlacedReplicas]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = set(descendants(os.getpid()))
    replicas = make_replicas(path, entry)
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.drain(0.0)
        assert set(descendants(os.getpid())) <= before
        assert replicas._placer._temp_dir is None


async def answer(replicas: PlacedReplicas, request: Request) -> list[SequenceOutput]:
    return [output async for output in replicas.generate(request)]


def pids(part: bytes) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if part in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("victim", [b"remote.host", b"local_driver"])
def test_requests_survive_a_host_and_even_what_placed_all_hosts(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, victim: bytes
) -> None:
    async def main() -> None:
        async with serving(model_path, monkeypatch) as replicas:
            requests = [make_request(f"request {number}", max_tokens=20) for number in range(4)]
            answers = [asyncio.create_task(answer(replicas, request)) for request in requests]
            await asyncio.sleep(0.3)
            os.kill(pids(victim)[0], signal.SIGKILL)
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                expected = greedy_continuation(request.token_ids, 20, VOCAB_SIZE)
                assert [token_id for output in outputs for token_id in output.token_ids] == expected
            while not all(snapshot.is_accepting for snapshot in replicas.snapshots()):
                await asyncio.sleep(0.01)
            assert len(pids(b"engine_process")) == 2

    run(main())


def test_a_cluster_that_cannot_be_joined_is_an_error_and_leaves_nothing(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def main() -> None:
        before = set(descendants(os.getpid()))
        with pytest.raises(EngineError, match="no such cluster"):
            await make_replicas(model_path, "build", "nowhere").start()
        assert set(descendants(os.getpid())) <= before

    run(main())


def test_an_address_where_nothing_listens_is_named_at_once_and_no_driver_is_started(model_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"

        async def main() -> None:
            before = set(descendants(os.getpid()))
            with pytest.raises(EngineError, match=f"no Ray cluster answers at {address} .Connection refused."):
                await make_replicas(model_path, "build", address).start()
            assert set(descendants(os.getpid())) <= before

        run(main())


def test_a_host_without_a_machine_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def main() -> None:
        placer = make_placer(Identity.make())
        try:
            with pytest.raises(EngineError, match="no machine is left"):
                await placer.placement(7).start()
        finally:
            await placer.close()

    run(main())


def test_no_driver_is_an_error_and_not_a_wait() -> None:
    async def main() -> None:
        placer = RayPlacer(RaySettings(1, None, "", 1, 0, ""), "tests.cluster.nothing_of_this_name")
        with pytest.raises(EngineError, match="driver of Ray has ended"):
            await placer.connect()
        await placer.close()

    run(main())


@given(node_cpus=st.lists(st.integers(0, 64), max_size=6), num_replicas=st.integers(1, 12))
def test_all_replicas_find_place_with_as_many_cpus_as_there_are(node_cpus: list[int], num_replicas: int) -> None:
    chosen = choose_num_cpus(node_cpus, num_replicas)
    if chosen is None:
        assert sum(node_cpus) < num_replicas
        return
    assert sum(cpus // chosen for cpus in node_cpus) >= num_replicas
    assert sum(cpus // (chosen + 1) for cpus in node_cpus) < num_replicas


def test_replicas_that_may_meet_on_a_machine_divide_its_memory() -> None:
    assert share_memory(8, 8, 4) == 1.0
    assert share_memory(8, 2, 4) == 0.25
    assert share_memory(64, 2, 4) == 0.25
    assert share_memory(1, 2, 4) == 1.0


def test_ray_reports_nothing_to_its_makers_and_its_own_one_listens_on_loopback_with_a_secret() -> None:
    own, joined = driver_variables(None), driver_variables("10.0.0.1:6379")
    assert own["RAY_USAGE_STATS_ENABLED"] == joined["RAY_USAGE_STATS_ENABLED"] == "0"
    assert own["RAY_AUTH_MODE"] == "token"
    assert len(own["RAY_AUTH_TOKEN"]) == 64
    assert own["RAY_AUTH_TOKEN"] != driver_variables(None)["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN" not in joined
