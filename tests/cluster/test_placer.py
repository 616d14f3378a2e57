"""Replicas that something else places: they are there when it is, come back when it does, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cluster import ROUTERS
from cloister.cluster.backend import placer, ray_folder
from cloister.cluster.backend.node_resources import choose_num_cpus, share_memory
from cloister.cluster.backend.placed_replicas import PlacedReplicas
from cloister.cluster.backend.placer import RayPlacer, driver_variables
from cloister.cluster.backend.ray_messages import RaySettings
from cloister.cluster.remote.transport import RemoteTransport
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.rolling_update import EngineRelease
from cloister.cluster.routers import RouterContext
from cloister.engine import EngineClient, Supervision
from cloister.engine.identity import Identity
from cloister.engine.replica_snapshot import UpdateProgress
from cloister.engine.supervision import Restarts
from cloister.kv import PrefixKeys
from cloister.types.errors import EngineError
from cloister.types.request import Request, SequenceOutput
from tests.cluster.test_remote import run
from tests.cluster.test_rolling_update import load, update
from tests.engine.replica import BLOCK_SIZE, VOCAB_SIZE, make_config, make_request
from tests.history_program import greedy_continuation
from tests.serving import descendants

ROOT = Path(__file__).parents[2]


def make_placer(identity: Identity, address: str | None = None) -> RayPlacer:
    settings = RaySettings(2, address, "", 1, 0, identity.certificate)
    return RayPlacer(settings, "tests.cluster.local_driver")


def make_replicas(
    path: Path, entries: Sequence[str], address: str | None = None, new: str = "build_slow", max_restarts: int = 5
) -> PlacedReplicas:
    """Replicas of these entries of `tests.engine.replica`, whose new engines are of the entry `new`."""
    identity = Identity.make()
    placer = make_placer(identity, address)

    def make(entry: str, index: int) -> EngineClient:
        transport = RemoteTransport(
            placer.placement(index),
            identity,
            f"tests.engine.replica:{entry}",
            import_path=[p for p in sys.path if p],
            supervision=Supervision(restarts=Restarts(max_restarts, backoff_s=0.01)),
        )
        return EngineClient(transport, make_config(path))

    context = RouterContext(PrefixKeys("history", BLOCK_SIZE), random.Random(0))
    replicas = PlacedReplicas(
        [make(entry, index) for index, entry in enumerate(entries)],
        lambda model: ROUTERS.get("round_robin")(context),
        ClusterConfig(),
        BLOCK_SIZE,
        avoids_slow=False,
        verify_replay=1.0,
        release=EngineRelease("old", lambda index, lora: make(entries[0], index)),
        make_release=lambda model: EngineRelease(model, lambda index, lora: make(new, index)),
    )
    replicas.placer = placer
    return replicas


@asynccontextmanager
async def serving(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entries: Sequence[str] = ("build_slow", "build_slow"),
    address: str | None = None,
    **options: Any,
) -> AsyncIterator[PlacedReplicas]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = set(descendants(os.getpid()))
    replicas = make_replicas(path, entries, address, **options)
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.drain(0.0)
        assert set(descendants(os.getpid())) <= before
        assert replicas.placer._folder is None


async def answer(replicas: PlacedReplicas, request: Request) -> list[SequenceOutput]:
    return [output async for output in replicas.generate(request)]


def pids(part: bytes) -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            found += [pid] if part in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


async def until(condition: Callable[[], object]) -> None:
    give_up_s = asyncio.get_running_loop().time() + 300
    while not condition():
        assert asyncio.get_running_loop().time() < give_up_s, "it did not come to pass"
        await asyncio.sleep(0.01)


def test_requests_survive_a_host(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(model_path, monkeypatch) as replicas:
            requests = [make_request(f"request {number}", max_tokens=20) for number in range(4)]
            answers = [asyncio.create_task(answer(replicas, request)) for request in requests]
            await asyncio.sleep(0.3)
            os.kill(pids(b"remote.host")[0], signal.SIGKILL)
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                expected = greedy_continuation(request.token_ids, 20, VOCAB_SIZE)
                assert [token_id for output in outputs for token_id in output.token_ids] == expected
            await until(lambda: sum(snapshot.num_restarts for snapshot in replicas.snapshots()))
            await until(lambda: all(snapshot.is_accepting for snapshot in replicas.snapshots()))
            await until(lambda: len(pids(b"engine_process")) == 2)

    run(main())


def test_replicas_wait_for_a_cluster_that_is_gone_and_their_requests_for_them(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placer, "_FIRST_RETRY_S", 0.01)
    gone = tmp_path / "gone"

    async def main() -> None:
        async with serving(model_path, monkeypatch, ["build_slow"], str(gone), max_restarts=1) as replicas:
            request = make_request("a request", max_tokens=30)
            answering = asyncio.create_task(answer(replicas, request))
            await asyncio.sleep(0.3)
            gone.touch()
            os.kill(pids(b"local_driver")[0], signal.SIGKILL)
            await until(lambda: len(gone.read_text().splitlines()) >= 3)  # more often than an engine may start again
            assert [snapshot.state for snapshot in replicas.snapshots()] == ["starting"]
            gone.unlink()
            said = [token_id for output in await answering for token_id in output.token_ids]
            assert said == greedy_continuation(request.token_ids, 30, VOCAB_SIZE)

    run(main())


def test_every_replica_gets_a_new_engine_in_a_host_of_its_own_and_no_request_is_lost(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(model_path, monkeypatch) as replicas:
            old = pids(b"remote.host") + pids(b"engine_process")
            answers = await load(replicas, lambda number: make_request(f"{number % 8}", max_tokens=30), update(replicas))
            assert replicas.update_progress == UpdateProgress(2, 2, is_running=False)
            assert len(answers) >= 8
            for number, said in answers.items():
                assert said == greedy_continuation(list(str(number % 8).encode()), 30, VOCAB_SIZE)
            await until(lambda: not set(old) & set(descendants(os.getpid())))
            assert (len(pids(b"remote.host")), len(pids(b"engine_process"))) == (2, 2)

    run(main())


@pytest.mark.slow  # the same update with another end
def test_a_new_engine_that_does_not_start_leaves_no_host_and_the_old_ones_go_on(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(model_path, monkeypatch, new="build_refusing") as replicas:
            old = set(pids(b"remote.host"))
            assert "--max-model-len 7" in (await update(replicas)).error
            await until(lambda: set(pids(b"remote.host")) == old)
            assert [snapshot.is_accepting for snapshot in replicas.snapshots()] == [True, True]

    run(main())


@pytest.mark.slow  # what `test_replay.py` shows of replicas in threads
def test_a_replica_elsewhere_that_computes_wrongly_is_found(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(model_path, monkeypatch, ["build", "build_wrong", "build"]) as replicas:
            while [snapshot.state for snapshot in replicas.snapshots()].count("suspicious") == 0:
                await answer(replicas, make_request("a request", max_tokens=10))
                await asyncio.sleep(0.02)
            assert [snapshot.state for snapshot in replicas.snapshots()] == ["running", "suspicious", "running"]

    run(main())


def writers(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended, as any process of this machine may
            found += [int(path.parts[2])] if bytes(folder) in path.read_bytes() else []
    return found


@pytest.mark.parametrize("num_replicas", [0, 2], ids=["it does not start", "it starts"])
def test_a_ray_of_its_own_leaves_neither_a_folder_nor_what_would_make_it_anew(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made: list[Path] = []

    def make_folder() -> str:
        made.append(Path(ray_folder.make_folder()))
        return str(made[-1])

    monkeypatch.setattr(placer, "make_folder", make_folder)
    ray = RayPlacer(RaySettings(num_replicas, None, "", 1, 0, ""), "tests.cluster.local_driver")

    async def main() -> None:
        if not num_replicas:
            with pytest.raises(EngineError, match="no such cluster"):
                await ray.connect()
            return
        await ray.connect()
        assert len(writers(made[0])) == 1
        assert (made[0] / "r" / "log").exists()
        await ray.close()

    run(main())
    assert len(made) == 1
    assert not writers(made[0])
    assert not made[0].exists()


def test_who_reads_a_log_in_the_folder_of_a_ray_is_not_ended(tmp_path: Path) -> None:
    log = tmp_path / "ray" / "log"
    log.parent.mkdir()
    log.write_text("a line")
    with (
        log.open() as file,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()]) as cat,
    ):
        ray_folder.remove_folder(str(log.parent))
        assert not log.parent.exists()
        assert cat.communicate(b"still here")[0] == b"still here"


def test_a_driver_whose_end_is_cancelled_is_ended_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = set(descendants(os.getpid()))
    ray = make_placer(Identity.make())

    async def main() -> None:
        await ray.connect()
        [driver] = pids(b"local_driver")
        os.kill(driver, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ray.close(), 0.1)
        os.kill(driver, signal.SIGCONT)
        await ray.close()

    run(main())
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize(("blocks_s", "status"), [(0.2, 0), (300.0, 1)])
def test_a_process_ends_when_its_event_loop_stands_still_for_too_long(blocks_s: float, status: int) -> None:
    program = f"""
import asyncio, time
from cloister.cluster.backend.loop_watchdog import LoopWatchdog

async def main():
    watch = LoopWatchdog(2.0)
    watch.start()
    beating = asyncio.create_task(watch.beat())
    for _ in range(4):
        await asyncio.sleep(0.0)
        await asyncio.to_thread(time.sleep, 0.7)
    time.sleep({blocks_s})

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == status, ended.stderr
    assert ("in main" in ended.stderr) == bool(status)


def test_a_cluster_that_cannot_be_joined_is_an_error_and_leaves_nothing(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def main() -> None:
        before = set(descendants(os.getpid()))
        with pytest.raises(EngineError, match="no such cluster"):
            await make_replicas(model_path, ["build"], "nowhere").start()
        assert set(descendants(os.getpid())) <= before

    run(main())


def test_an_address_where_nothing_listens_is_named_at_once_and_no_driver_is_started(model_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"

        async def main() -> None:
            before = set(descendants(os.getpid()))
            with pytest.raises(EngineError, match=f"no Ray cluster answers at {address} .Connection refused."):
                await make_replicas(model_path, ["build"], address).start()
            assert set(descendants(os.getpid())) <= before

        run(main())


def test_a_host_without_a_machine_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def main() -> None:
        ray = make_placer(Identity.make())
        try:
            with pytest.raises(EngineError, match="no machine is left"):
                await ray.placement(7).start()
        finally:
            await ray.close()

    run(main())


def test_no_driver_is_an_error_and_not_a_wait() -> None:
    async def main() -> None:
        ray = RayPlacer(RaySettings(1, None, "", 1, 0, ""), "tests.cluster.nothing_of_this_name")
        with pytest.raises(EngineError, match="Ray driver has ended"):
            await ray.connect()
        await ray.close()

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
