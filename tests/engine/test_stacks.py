"""Where an engine hangs is known before it is killed, and those that hang at the same place are replaced together."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cloister.cluster import ReplicaSet
from cloister.engine import EngineClient, ProcessTransport, Supervision
from cloister.engine.stacks import StackClusters, find_same, read_step_stack
from cloister.types.request import Request
from tests.cluster.test_replica_set import make_router
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import TRIGGER, make_config, make_request

WRITTEN = """Thread 0x00007f869c0866c0 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 982 in recv
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f869cdeeb80 (most recent call first):
  Garbage-collecting
  File "/home/someone/cloister/backends/native/program.py", line 5 in step
  File "/home/someone/cloister/engine/core.py", line 190 in step
  File "/home/someone/cloister/engine/core.py", line 160 in run
  File "<frozen runpy>", line 88 in _run_code
"""
STACK = ("native/program.py:5 step", "engine/core.py:190 step", "engine/core.py:160 run", "<frozen runpy>:88 _run_code")


def test_the_thread_that_runs_steps_is_found_and_no_folder_is_named() -> None:
    assert read_step_stack(WRITTEN) == STACK
    assert read_step_stack("") == ()
    assert read_step_stack("something else\n\n  File x") == ()


def test_equal_stacks_are_counted_over_replicas_and_time() -> None:
    clusters = StackClusters()
    clusters.add(STACK, 1)
    clusters.add(STACK[1:], 0)
    line = clusters.add(STACK, 0)
    assert line.startswith("it hangs at native/program.py:5 step < engine/core.py:190 step")
    assert line.endswith("; 2 of 3 hangs were there, of replica 0, 1")
    assert clusters.add(("engine/core.py:1 run",), 0).endswith("; no engine has hung there before")
    assert clusters.add((), 0).startswith("it is unknown where it hangs: ")


def test_only_those_that_hang_at_the_same_place_are_the_same() -> None:
    assert find_same(STACK, {0: STACK, 1: STACK[1:], 3: STACK}) == [0, 3]
    assert find_same((), {0: ()}) == []


HESITANT = """
import os, signal, sys, time
fd, text, cut, asked = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3]), []

def write(*_):
    asked.append(1)
    os.write(fd, text[:cut])
    time.sleep(0.5 if len(asked) == 1 else 0)
    os.write(fd, text[cut:])

signal.signal(signal.SIGUSR2, write)
os.write(1, b"x")
while True:
    time.sleep(600)
"""


def test_a_stack_that_is_written_with_a_pause_is_whole() -> None:
    """As by an engine that others keep from the processor in the middle of it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    arguments = [str(writer), WRITTEN, str(WRITTEN.index("line 160"))]
    with subprocess.Popen([sys.executable, "-c", HESITANT, *arguments], stdout=subprocess.PIPE, pass_fds=[writer]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1)
            transport = ProcessTransport("tests.engine.replica:build")
            transport._process, transport._stacks_fd = process, reader
            assert read_step_stack(asyncio.run(transport.collect_stacks())) == STACK
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


@pytest.mark.parametrize(("entry", "is_replaced"), [("build_hanging", True), ("build_hanging_elsewhere", False)])
def test_a_replica_that_hangs_where_another_one_does_is_replaced_with_it(
    model_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, entry: str, is_replaced: bool
) -> None:
    monkeypatch.setattr("cloister.engine.client.STOP_GRACE_S", 0.5)  # what hangs does not end by itself
    monkeypatch.setattr("cloister.engine.transports._STACKS_TIMEOUT_S", 60.0)  # a busy machine may take longer than a second

    async def main() -> list[bool]:
        clients = [
            EngineClient(
                ProcessTransport(
                    f"tests.engine.replica:{name}", supervision=Supervision(look_every_s=60.0), spawn=spawn_forked
                ),
                make_config(model_path, stall_timeout_s=0.3),
            )
            for name in ("build_hanging", entry)
        ]
        replicas = ReplicaSet(clients, partial(make_router, "least_load"))
        await replicas.start()
        try:
            waiting = [asyncio.create_task(answer(client, make_request("warm up"))) for client in clients]
            await asyncio.gather(*waiting)
            for client in clients:
                client.submit(make_request([TRIGGER, *b"a secret"]), lambda output: None)
            pids = [client.pid for client in clients]
            for _ in range(4):  # the front looks by itself once a minute here
                await asyncio.sleep(0.2)
                for client in clients:
                    client._watchdog.look(client._clock.now(), is_waited_for=True)
            await clients[0]._report_hang()
            deadline_s = asyncio.get_running_loop().time() + 60.0
            while is_replaced and clients[1].pid == pids[1]:
                assert asyncio.get_running_loop().time() < deadline_s
                await asyncio.sleep(0.02)
            return [client.pid != pid for client, pid in zip(clients, pids, strict=True)]
        finally:
            await replicas.drain(0.0)

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(asyncio.wait_for(main(), 600.0)) == [False, is_replaced]
    assert "engine/replica.py" in caplog.text
    assert "< engine/core.py" in caplog.text
    assert "secret" not in caplog.text


async def answer(client: EngineClient, request: Request) -> None:
    async for _ in client.generate(request):
        pass
