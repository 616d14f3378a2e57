"""The engine in a process of its own: everybody gets a reply, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloister.engine import EngineClient, ProcessTransport, Supervision, adapters
from cloister.engine.child_process import ProcessHandle
from cloister.engine.client import UNSTARTABLE
from cloister.engine.engine_process import NICENESS
from cloister.engine.spawning import spawn_program
from cloister.engine.supervision import Restarts
from cloister.engine.transports import Spawn
from cloister.trust.attestation.unchanged_files import FilesChangedError
from cloister.types.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    MemoryBudgetError,
    QueueFullError,
)
from cloister.types.events import Ended
from cloister.types.request import FinishReason, Request, SequenceOutput
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import TRIGGER, VOCAB_SIZE, make_config, make_request
from tests.engine.soak import soak
from tests.history_program import greedy_continuation

DEADLINE_S = 600.0


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a test that must end in time."""
    asyncio.run(asyncio.wait_for(main, DEADLINE_S))


@contextlib.asynccontextmanager
async def serving(
    path: Path, entry: str = "build", supervision: Supervision | None = None, spawn: Spawn = spawn_forked, **changes: object
) -> AsyncIterator[EngineClient]:
    transport = ProcessTransport(f"tests.engine.replica:{entry}", supervision=supervision, spawn=spawn)
    engine = EngineClient(transport, make_config(path, **changes))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.drain(0.0)
        assert engine.pid is None


def test_threads_that_compute_yield_to_the_front_and_the_one_that_listens_to_it_does_not(model_path):
    async def main() -> None:
        async with serving(model_path) as engine:
            assert engine.pid is not None
            tasks = Path(f"/proc/{engine.pid}/task")
            own = os.getpriority(os.PRIO_PROCESS, 0)
            niceness = {
                int(each.name): os.getpriority(os.PRIO_PROCESS, int(each.name)) - own
                for each in await asyncio.to_thread(list, tasks.iterdir())
            }
            assert niceness.pop(engine.pid) == min(NICENESS, 19 - own)
            assert 0 in niceness.values(), "the thread that listens"

    run(main())


async def answer(engine: EngineClient, request: Request) -> list[SequenceOutput]:
    return [output async for output in engine.generate(request)]


def reasons(outputs: list[SequenceOutput]) -> list[FinishReason]:
    return [o.finish_reason for o in outputs if o.finish_reason is not None]


async def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, "it did not come to pass"
        await asyncio.sleep(0.01)


def test_it_answers_as_an_engine_in_this_process_would(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, spawn=spawn_program) as engine:
            assert engine.model.vocab_size == VOCAB_SIZE
            assert engine.memory
            assert engine.health().good
            request = make_request("tell me", max_tokens=20)
            outputs = await answer(engine, request)
            assert [i for o in outputs for i in o.token_ids] == greedy_continuation(request.token_ids, 20, VOCAB_SIZE)
            assert reasons(outputs) == [FinishReason.LENGTH]

    run(main())


def test_every_request_ends_once_though_clients_leave_and_the_engine_is_killed(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, max_waiting=1000) as engine:
            outcome = await soak(engine, num_clients=200, num_kills=1, seed=5)
            outcome.check()
            assert set(outcome.reasons) == {FinishReason.LENGTH}
            assert None in outcome.ends.values()
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]

    run(main())


def test_a_killed_engine_is_reported_and_replaced_and_its_answers_go_on(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow") as engine:
            first = engine.pid
            request = make_request("xylophone", max_tokens=40)
            stream = engine.generate(request)
            begun = await anext(stream)
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until(lambda: not engine.health().good)
            with pytest.raises(EngineError, match="restarted"):
                await answer(engine, make_request())
            await until(lambda: engine.health().good)
            assert engine.pid != first
            outputs = [begun, *[output async for output in stream]]
            assert reasons(outputs) == [FinishReason.LENGTH]
            said = [token_id for output in outputs for token_id in output.token_ids]
            assert said == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
            assert reasons(await answer(engine, make_request(max_tokens=2))) == [FinishReason.LENGTH]

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert "status -9" in caplog.text
    assert "xylophone" not in caplog.text


def test_a_hung_engine_is_replaced(model_path: Path) -> None:
    supervision = Supervision(first_step_timeout_s=4.0, look_every_s=0.1)

    async def main() -> None:
        async with serving(model_path, "build_hanging", supervision, stall_timeout_s=1.5) as engine:
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            first, fine = engine.pid, asyncio.create_task(answer(engine, make_request(max_tokens=200)))
            await asyncio.sleep(0.01)
            hung = await answer(engine, make_request([TRIGGER, 1]))
            assert reasons(hung) == [FinishReason.ERROR]
            assert len(reasons(await fine)) == 1
            await until(lambda: engine.health().good)
            assert engine.pid != first
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]

    run(main())


def test_an_engine_whose_closing_is_cancelled_leaves_no_zombie(model_path: Path) -> None:
    async def main() -> None:
        transport = ProcessTransport("tests.engine.replica:build")
        await transport.open(make_config(model_path))
        process = transport._process
        assert process is not None
        closing = asyncio.create_task(transport.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        assert process.returncode == -signal.SIGKILL

    run(main())


def test_a_stopped_engine_is_unhealthy_before_it_is_replaced(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, supervision=Supervision(look_every_s=0.05), stall_timeout_s=1.5) as engine:
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            first = engine.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            assert engine.health().good  # nothing waits
            waiting = asyncio.create_task(answer(engine, make_request()))
            await until(lambda: not engine.health().good)
            assert "no step for" in engine.health().detail
            assert engine.pid == first
            assert reasons(await waiting) == [FinishReason.LENGTH]
            assert engine.health().good
            assert engine.pid != first

    run(main())


def test_an_engine_that_loads_an_adapter_for_long_is_not_replaced(model_path: Path) -> None:
    async def main() -> None:
        supervision = Supervision(look_every_s=0.05)
        async with serving(model_path, "build_loading", supervision, stall_timeout_s=1.5) as engine:
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            first = engine.pid
            loading = asyncio.create_task(engine.adapters.load("ann", "somewhere"))
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(answer(engine, make_request()))
            while not loading.done():
                assert engine.health().good
                await asyncio.sleep(0.05)
            assert (await loading).name == "ann"
            assert reasons(await waiting) == [FinishReason.LENGTH]
            assert engine.pid == first

    run(main())


def test_an_engine_that_loads_an_adapter_for_a_call_that_was_cancelled_is_not_replaced(model_path: Path) -> None:
    async def main() -> None:
        supervision = Supervision(look_every_s=0.05)
        async with serving(model_path, "build_loading", supervision, stall_timeout_s=1.5) as engine:
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            first = engine.pid
            loading = asyncio.create_task(engine.adapters.load("ann", "somewhere"))
            await asyncio.sleep(0.1)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            waiting = asyncio.create_task(answer(engine, make_request()))
            while not waiting.done():
                assert engine.health().good
                await asyncio.sleep(0.05)
            assert reasons(await waiting) == [FinishReason.LENGTH]
            assert engine.pid == first

    run(main())


def test_an_engine_that_goes_on_loading_an_adapter_is_kept_though_the_call_was_late(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CALL_TIMEOUT_S", 0.3)

    async def main() -> None:
        supervision = Supervision(look_every_s=0.05)
        async with serving(model_path, "build_loading_steadily", supervision, stall_timeout_s=1.0) as engine:
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            first = engine.pid
            loading = asyncio.create_task(engine.adapters.load("ann", "somewhere"))
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(answer(engine, make_request()))
            with pytest.raises(DeadlineError):
                await loading
            assert reasons(await waiting) == [FinishReason.LENGTH]
            assert engine.pid == first

    run(main())


@contextlib.asynccontextmanager
async def replacing_a_stopped_engine(
    model_path: Path,
) -> AsyncIterator[tuple[EngineClient, asyncio.Task[list[SequenceOutput]]]]:
    """An engine that stands still, and a request that waits for it; the next engine has answered it at the end."""
    supervision = Supervision(look_every_s=0.05)
    async with serving(model_path, "build_adapting", supervision, stall_timeout_s=1.5) as engine:
        assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        waiting = asyncio.create_task(answer(engine, make_request()))
        yield engine, waiting
        assert reasons(await waiting) == [FinishReason.LENGTH]
        assert engine.pid != first


def test_an_engine_that_answers_no_call_is_replaced_though_loads_are_cancelled_again_and_again(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CALL_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with replacing_a_stopped_engine(model_path) as (engine, waiting):
            first = engine.pid
            for number in itertools.count():
                if waiting.done():
                    break
                loading = asyncio.create_task(engine.adapters.load(f"ann{number}", "somewhere"))
                await asyncio.sleep(0.1)
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                if engine.pid != first:
                    break  # the next engine would load, and not answer the request

    run(main())


def test_an_engine_that_answers_no_call_is_replaced_though_adapters_are_asked_for_again_and_again(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CALL_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with replacing_a_stopped_engine(model_path) as (engine, waiting):
            while not waiting.done():
                with contextlib.suppress(DeadlineError, EngineError, InvalidRequestError):  # the next engine has it
                    await engine.adapters.load("ann", "somewhere")
                await asyncio.sleep(0)  # a call that is refused at once does not wait

    run(main())


def test_more_sequences_than_run_at_once_are_refused_before_anything_is_made_for_them(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as engine:
            with pytest.raises(InvalidRequestError, match="from 1 to 16"):
                await answer(engine, make_request(n=10**9))
            assert reasons(await answer(engine, make_request(n=16, max_tokens=1))) == [FinishReason.LENGTH] * 16

    run(main())


@pytest.mark.parametrize("fails", ["spawn", "boot"])
def test_an_engine_that_does_not_start_leaves_no_socket_open(model_path: Path, fails: str) -> None:
    def spawn(far: socket.socket) -> ProcessHandle:
        if fails == "spawn":
            raise OSError("no more processes")
        return spawn_program(far)

    async def main() -> None:
        kept: list[socket.socket] = []
        transport = ProcessTransport("tests.engine.replica:build_broken", spawn=spawn, keep_listener=kept.append)
        engine = EngineClient(transport, make_config(model_path))
        gc.collect()
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises((OSError, EngineError)):
            await engine.start()
        assert set(os.listdir("/proc/self/fd")) == before
        assert not kept

    run(main())


def test_an_engine_whose_listener_is_refused_ends_and_leaves_no_socket_open(model_path: Path) -> None:
    started: list[ProcessHandle] = []

    def spawn(far: socket.socket) -> ProcessHandle:
        started.append(spawn_program(far))
        return started[-1]

    def refuse(_: socket.socket) -> None:
        raise EngineError("its files were changed")

    async def main() -> None:
        transport = ProcessTransport("tests.engine.replica:build", spawn=spawn, keep_listener=refuse)
        engine = EngineClient(transport, make_config(model_path))
        gc.collect()
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(EngineError, match="its files were changed"):
            await engine.start()
        assert set(os.listdir("/proc/self/fd")) == before
        assert started[0].poll() is not None

    run(main())


def test_an_engine_whose_files_changed_is_given_up_before_it_is_started_again(model_path: Path) -> None:
    started: list[ProcessHandle] = []
    guarded: list[None] = []

    def spawn(far: socket.socket) -> ProcessHandle:
        started.append(spawn_program(far))
        return started[-1]

    @contextlib.asynccontextmanager
    async def guard() -> AsyncIterator[None]:
        guarded.append(None)
        if len(guarded) > 1:
            raise FilesChangedError("its files were changed")
        yield

    async def main() -> None:
        transport = ProcessTransport("tests.engine.replica:build", spawn=spawn, guard_load=guard)
        engine = EngineClient(transport, make_config(model_path))
        await engine.start()
        started[0].kill()
        async with asyncio.timeout(300):
            while engine.fault() is None:
                await asyncio.sleep(0.01)
        assert engine.fault() == UNSTARTABLE
        assert (len(started), len(guarded)) == (1, 2), "neither five restarts nor a load"
        await engine.drain(0.0)

    run(main())


def test_an_idle_engine_is_healthy_for_as_long_as_it_likes(model_path: Path) -> None:
    supervision = Supervision(first_step_timeout_s=0.2, look_every_s=0.05)

    async def main() -> None:
        async with serving(model_path, supervision=supervision, stall_timeout_s=0.2) as engine:
            first = engine.pid
            await asyncio.sleep(1.0)
            assert engine.health().good
            assert engine.pid == first

    run(main())


def test_too_many_deaths_are_the_end_and_health_says_so(model_path: Path) -> None:
    supervision = Supervision(restarts=Restarts(max_restarts=2, window_s=60.0, backoff_s=0.01))

    async def main() -> None:
        async with serving(model_path, "build_failing", supervision) as engine:
            assert engine.fault() is None
            await until_broken(engine)
            assert not engine.health().good
            assert "too often" in (engine.fault() or "")
            assert engine.state == "lost"
            with pytest.raises(EngineError, match="log says"):
                await answer(engine, make_request())
            await engine.drain(0.0)
            assert "too often" in (engine.fault() or "")  # a server that ends for it still knows why

    async def until_broken(engine: EngineClient) -> None:
        while "too often" not in engine.health().detail:
            with contextlib.suppress(EngineError):
                assert reasons(await answer(engine, make_request())) == [FinishReason.ERROR]
            await asyncio.sleep(0.02)

    run(main())


def test_a_restart_that_fails_counts_as_one(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())
    supervision = Supervision(restarts=Restarts(max_restarts=2, window_s=60.0, backoff_s=0.01))

    async def main() -> None:
        async with serving(path, "build_once", supervision) as engine:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: "too often" in engine.health().detail)

    run(main())


def test_an_engine_with_other_weights_does_not_go_on_with_answers(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())
    supervision = Supervision(restarts=Restarts(max_restarts=2, window_s=60.0, backoff_s=0.01))

    async def main() -> None:
        async with serving(path, "build_changed", supervision) as engine:
            before = engine.model
            answering = asyncio.create_task(answer(engine, make_request(max_tokens=2000)))
            await until(lambda: engine.num_requests == 1 and engine.last_step is not None)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            assert reasons(await answering) == [FinishReason.ERROR]
            assert engine.model == before
            assert "too often" in engine.health().detail

    run(main())
    assert "started again with other weights" in caplog.text


def test_the_log_of_an_engine_names_its_replica(model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        for replica in (3, None):
            transport = ProcessTransport("tests.engine.replica:build_broken", replica=replica, spawn=spawn_forked)
            with pytest.raises(EngineError):
                await EngineClient(transport, make_config(model_path)).start()

    run(main())
    named, other = [line for line in capfd.readouterr().err.splitlines() if "could not be built" in line]
    assert "replica=3" in named
    assert "replica=" not in other


@pytest.mark.parametrize(
    ("entry", "kind", "text"),
    [
        ("build_refusing", MemoryBudgetError, "--max-model-len 7"),
        ("build_broken", EngineError, "RuntimeError"),
        ("build_killed", EngineError, r"killed by signal 9 \(SIGKILL\) while it started; memory may have run out"),
        ("build_exiting", EngineError, "ended with exit status 3 while it started; the log may say why"),
        ("no_such_function", ConfigError, "no_such_function"),
    ],
)
def test_an_engine_that_cannot_start_says_why(model_path: Path, entry: str, kind: type[Exception], text: str) -> None:
    async def main() -> None:
        engine = EngineClient(ProcessTransport(f"tests.engine.replica:{entry}", spawn=spawn_forked), make_config(model_path))
        with pytest.raises(kind, match=text):
            await engine.start()
        assert engine.pid is None

    run(main())


def test_a_client_that_leaves_frees_its_place(model_path: Path) -> None:
    ended: list[Ended] = []

    async def main() -> None:
        async with serving(model_path, "build_slow") as engine:
            engine.subscribe(lambda event: ended.append(event) if isinstance(event, Ended) else None)
            stream = engine.generate(make_request(max_tokens=200))
            await anext(stream)
            await stream.aclose()
            await until(lambda: len(ended) == 1)
            assert ended[0].reason is FinishReason.ABORT
            assert ended[0].num_output_tokens < 100

    run(main())


def test_a_full_queue_refuses_before_anything_is_sent(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, "build_slow", max_waiting=3, max_num_seqs=1) as engine:
            taken = [asyncio.create_task(answer(engine, make_request(max_tokens=5))) for _ in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError) as refusal:
                await answer(engine, make_request())
            assert refusal.value.retry_after_s >= 1.0
            assert [reasons(outputs) for outputs in await asyncio.gather(*taken)] == [[FinishReason.LENGTH]] * 4

    run(main())


class TestDrain:
    """The way out of SIGTERM."""

    def test_running_requests_end_and_new_ones_are_refused(self, model_path: Path) -> None:
        async def main() -> None:
            async with serving(model_path, "build_slow") as engine:
                running = asyncio.create_task(answer(engine, make_request(max_tokens=15)))
                await asyncio.sleep(0.1)
                draining = asyncio.create_task(engine.drain(120.0))
                await asyncio.sleep(0)
                with pytest.raises(EngineError, match="shutting down"):
                    await answer(engine, make_request())
                assert not engine.health().good
                assert reasons(await running) == [FinishReason.LENGTH]
                await asyncio.wait_for(draining, 300.0)
                assert engine.pid is None

        run(main())

    def test_what_takes_too_long_is_ended_with_a_reply(self, model_path: Path) -> None:
        async def main() -> None:
            async with serving(model_path, "build_slow") as engine:
                running = asyncio.create_task(answer(engine, make_request(max_tokens=200)))
                await asyncio.sleep(0.1)
                await asyncio.wait_for(engine.drain(0.5), 300.0)
                outputs = await running
                assert reasons(outputs) == [FinishReason.ABORT]
                assert "shutting down" in (outputs[-1].error or "")

        run(main())

    def test_a_hung_engine_does_not_hold_it_up_for_ever(self, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cloister.engine.client.STOP_GRACE_S", 0.5)

        async def main() -> None:
            async with serving(model_path, "build_hanging") as engine:
                hung = asyncio.create_task(answer(engine, make_request([TRIGGER])))
                await asyncio.sleep(0.2)
                await asyncio.wait_for(engine.drain(0.1), 300.0)
                assert len(reasons(await hung)) == 1

        run(main())

    def test_the_engine_itself_ignores_the_signals_of_a_terminal(self, model_path: Path) -> None:
        async def main() -> None:
            async with serving(model_path, "build_slow") as engine:
                running = asyncio.create_task(answer(engine, make_request(max_tokens=10)))
                await asyncio.sleep(0.1)
                for number in (signal.SIGINT, signal.SIGTERM):
                    assert engine.pid is not None
                    os.kill(engine.pid, number)
                assert reasons(await running) == [FinishReason.LENGTH]

        run(main())


PARENT = """
import asyncio, sys
from pathlib import Path
from cloister.engine import EngineClient, ProcessTransport
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import make_config

async def main():
    engine = EngineClient(ProcessTransport("tests.engine.replica:build"), make_config(Path(sys.argv[1])))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_an_engine_whose_front_is_killed_ends_too(model_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    give_up_s = time.monotonic() + 300
    while is_alive(child):
        assert time.monotonic() < give_up_s, "the engine outlives its front"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """True if the process runs; a zombie that nobody collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
