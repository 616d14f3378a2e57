"""Engines as forks of a template: they answer as executed ones do, share its memory, and outlive it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloister.engine import EngineClient, EngineCore, ProcessTransport, Supervision
from cloister.engine.fork_server import MAX_CRASHES, ForkServer
from cloister.engine.supervision import Restarts
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError, EngineError, MemoryBudgetError
from cloister.types.request import FinishReason
from tests.engine import replica
from tests.engine.replica import VOCAB_SIZE, make_config, make_request
from tests.engine.test_process import answer, is_alive, reasons, run, until
from tests.history_program import greedy_continuation
from tests.trust.residue.test_planted_leaks import can_trace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")

BALLAST_BYTES = 64 << 20


def build_heavy(config: EngineConfig) -> EngineCore:
    """A replica with as much memory as some weights."""
    core = replica.build_once(config)
    core.ballast = b"\1" * BALLAST_BYTES  # type: ignore[attr-defined]
    return core


def build_threaded(config: EngineConfig) -> EngineCore:
    """A replica with a thread that a fork would lack."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return replica.build(config)


@pytest.fixture
def fresh_path(model_path: Path, tmp_path: Path) -> Path:
    """A model that `build_once` has not built."""
    (tmp_path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())
    return tmp_path


@contextlib.asynccontextmanager
async def forking(
    path: Path, entry: str = "tests.engine.replica:build", num_engines: int = 1, **settings: bool
) -> AsyncIterator[tuple[ForkServer, list[EngineClient]]]:
    """Engines that share a fork server, started one after the other."""
    server = ForkServer(**settings)
    supervision = Supervision(restarts=Restarts(max_restarts=10, backoff_s=0.01, max_backoff_s=0.01))
    engines = [
        EngineClient(ProcessTransport(entry, supervision=supervision, fork_server=server), make_config(path))
        for _ in range(num_engines)
    ]
    try:
        for engine in engines:
            await engine.start()
        yield server, engines
    finally:
        for engine in engines:
            await engine.drain(0.0)
        assert server.pid is None


def pid_of(process: EngineClient | ForkServer) -> int:
    assert process.pid is not None
    return process.pid


def status_of(pid: int, field: str) -> str:
    found = re.search(rf"^{field}:\s*(\S+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^Private_\w+:\s*(\d+) kB", text, re.MULTILINE))


async def kill(engine: EngineClient) -> None:
    """Kills an engine, and returns when another one runs."""
    lost = pid_of(engine)
    os.kill(lost, signal.SIGKILL)
    await until(lambda: engine.pid not in (None, lost) and engine.health().good)


def test_a_fork_answers_as_an_executed_engine_does(fresh_path: Path) -> None:
    async def main() -> None:
        async with forking(fresh_path, "tests.engine.replica:build_once", num_engines=2) as (_, engines):
            for engine in engines:  # the second one could not have been built
                request = make_request("tell me", max_tokens=20)
                outputs = await answer(engine, request)
                assert [i for o in outputs for i in o.token_ids] == greedy_continuation(request.token_ids, 20, VOCAB_SIZE)
                assert reasons(outputs) == [FinishReason.LENGTH]

    run(main())


def test_an_answer_goes_on_in_another_fork(fresh_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with forking(fresh_path, "tests.engine.replica:build_once") as (server, (engine,)):
            template, request = server.pid, make_request("xylophone", max_tokens=40)
            stream = engine.generate(request)
            outputs = [await anext(stream)]
            os.kill(pid_of(engine), signal.SIGKILL)
            outputs += [output async for output in stream]
            said = [token_id for output in outputs for token_id in output.token_ids]
            assert said == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
            assert server.pid == template
            assert [phase for phase, _ in engine.startup] == ["clone"]

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert "status -9" in caplog.text  # the front sees how its adopted child ended
    assert "xylophone" not in caplog.text


def test_a_template_has_one_thread_and_its_forks_are_the_fronts_children(model_path: Path) -> None:
    async def main() -> None:
        async with forking(model_path, num_engines=2) as (server, engines):
            assert status_of(pid_of(server), "Threads") == "1"
            assert status_of(pid_of(server), "Name") == "cl-template"
            for engine in engines:
                assert status_of(pid_of(engine), "Name") == "cl-engine"
                assert status_of(pid_of(engine), "PPid") == str(os.getpid())

    run(main())


def test_a_fork_says_where_its_step_is(model_path: Path) -> None:
    async def main() -> None:
        async with forking(model_path, num_engines=2) as (_, engines):
            for engine in engines:
                while not (stack := await engine.collect_stack()):
                    pass  # a busy machine may miss the second within which it has to react
                assert any("engine/template.py" in location for location in stack)

    run(main())


def readable_memory(pid: int) -> bytes:
    """What a process has in its own, writable memory."""
    pieces = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights = line.split()[:2]
            if rights == "rw-p":
                start, end = (int(address, 16) for address in span.split("-"))
                memory.seek(start)
                pieces.append(memory.read(end - start))
    return b"".join(pieces)


@pytest.mark.skipif(not can_trace(), reason="memory of other processes may not be read here")
def test_the_secret_of_engines_that_exchange_kv_is_in_forks_and_not_in_their_template(model_path: Path) -> None:
    async def main() -> None:
        secret = secrets.token_bytes(32)
        server = ForkServer()
        transport = ProcessTransport("tests.engine.replica:build", fork_server=server, kv_secret=secret)
        engine = EngineClient(transport, make_config(model_path))
        await engine.start()
        assert secret in readable_memory(pid_of(engine))
        assert secret not in readable_memory(pid_of(server))
        await engine.drain(0.0)

    run(main())


def test_a_front_adopts_its_engines_and_no_other_orphans(model_path: Path) -> None:
    async def main() -> None:
        async with forking(model_path, num_engines=2):
            said = subprocess.run(["sh", "-c", "sleep 60 >&- & echo $!"], stdout=subprocess.PIPE, text=True, check=True)
            orphan = int(said.stdout)
            try:
                assert status_of(orphan, "PPid") != str(os.getpid())
            finally:
                os.kill(orphan, signal.SIGKILL)

    run(main())


def test_a_fork_shares_what_the_template_has_loaded(fresh_path: Path) -> None:
    async def main() -> None:
        entry = "tests.engine.test_fork_server:build_heavy"
        async with forking(fresh_path, entry, num_engines=2) as (server, engines):
            for engine in engines:
                assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            for process in (server, *engines):
                assert private_bytes(pid_of(process)) < BALLAST_BYTES / 2

    run(main())


def test_a_template_that_is_killed_is_replaced_before_an_engine_needs_it(model_path: Path) -> None:
    async def main() -> None:
        async with forking(model_path) as (server, (engine,)):
            template, pid = pid_of(server), pid_of(engine)
            os.kill(template, signal.SIGKILL)
            await until(lambda: server.pid not in (None, template))
            replacement = pid_of(server)
            assert engine.pid == pid
            await kill(engine)
            assert server.pid == replacement

    run(main())


def test_engines_outlive_their_template_and_the_next_one_comes_from_a_new_template(model_path: Path) -> None:
    async def main() -> None:
        async with forking(model_path, num_engines=2) as (server, engines):
            template = pid_of(server)
            os.kill(template, signal.SIGKILL)
            await until(lambda: not is_alive(template))
            pids = [engine.pid for engine in engines]
            for engine in engines:
                assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            assert [engine.pid for engine in engines] == pids
            await kill(engines[0])
            assert is_alive(pid_of(server))
            assert server.pid != template
            assert engines[1].pid == pids[1]

    run(main())


def test_a_template_that_hangs_is_replaced(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.engine.fork_server.FORK_TIMEOUT_S", 2.0)

    async def main() -> None:
        async with forking(model_path) as (server, (engine,)):
            template = pid_of(server)
            os.kill(template, signal.SIGSTOP)
            await kill(engine)
            assert server.pid != template
            assert not is_alive(template)

    run(main())


def test_a_template_is_replaced_after_some_crashes(model_path: Path) -> None:
    async def main() -> None:
        async with forking(model_path) as (server, (engine,)):
            template = server.pid
            for _ in range(MAX_CRASHES - 1):
                await kill(engine)
            assert server.pid == template
            await kill(engine)
            assert server.pid != template
            template = server.pid
            await kill(engine)  # the new one begins to count anew
            assert server.pid == template

    run(main())


def test_other_settings_need_another_template(model_path: Path) -> None:
    async def main() -> None:
        server = ForkServer()
        engines = [
            EngineClient(
                ProcessTransport("tests.engine.replica:build", fork_server=server), make_config(model_path, max_num_seqs=number)
            )
            for number in (3, 4)
        ]
        templates = []
        for engine in engines:
            await engine.start()
            templates.append(server.pid)
        assert templates[0] != templates[1]
        for engine in engines:
            assert reasons(await answer(engine, make_request(n=3, max_tokens=1))) == [FinishReason.LENGTH] * 3
            await engine.drain(0.0)
        assert server.pid is None

    run(main())


def test_an_engine_with_threads_is_served_without_a_fork(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        entry = "tests.engine.test_fork_server:build_threaded"
        async with forking(model_path, entry, num_engines=2) as (server, engines):
            assert server.pid is None
            assert len({engine.pid for engine in engines}) == 2
            await kill(engines[0])
            for engine in engines:
                assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]

    run(main())
    assert caplog.text.count("it has 2 threads") == 1


@pytest.mark.parametrize(
    ("entry", "kind", "text"),
    [
        ("build_refusing", MemoryBudgetError, "--max-model-len 7"),
        ("build_without_memory", MemoryBudgetError, "the system refuses this process more memory"),
        ("build_broken", EngineError, "RuntimeError"),
        ("build_killed", EngineError, r"killed by signal 9 \(SIGKILL\) while it started; memory may have run out"),
        ("build_exiting", EngineError, "ended with exit status 3 while it started; the log may say why"),
        ("no_such_function", ConfigError, "no_such_function"),
    ],
)
def test_a_template_that_cannot_be_built_says_why_and_ends(
    model_path: Path, entry: str, kind: type[Exception], text: str
) -> None:
    async def main() -> None:
        server = ForkServer()
        transport = ProcessTransport(f"tests.engine.replica:{entry}", fork_server=server)
        with pytest.raises(kind, match=text):
            await EngineClient(transport, make_config(model_path)).start()
        assert server.pid is None

    run(main())


FRONT = """
import asyncio, sys
from pathlib import Path
from cloister.engine import EngineClient, ProcessTransport
from cloister.engine.fork_server import ForkServer
from tests.engine.replica import make_config

async def main():
    server = ForkServer()
    engine = EngineClient(ProcessTransport("tests.engine.replica:build", fork_server=server), make_config(Path(sys.argv[1])))
    await engine.start()
    print(engine.pid, server.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_template_and_its_forks_end_with_a_front_that_is_killed(model_path: Path) -> None:
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, str(model_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    with front:
        assert front.stdout is not None
        pids = [int(pid) for pid in front.stdout.readline().split()]
        assert all(map(is_alive, pids))
        front.kill()
    give_up_s = time.monotonic() + 300
    while any(map(is_alive, pids)):
        assert time.monotonic() < give_up_s, "something outlives the front"
        time.sleep(0.02)
