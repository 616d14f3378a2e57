"""Replicas on a Ray of several raylets, one of which is killed under load. Runs where the extra `ray` is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.cluster_demo import START_S, VARIABLES, ask_all, local_ray, make_bodies, serving
from cloister.cluster.backend.ray_messages import RaySettings
from cloister.types.errors import EngineError
from tests.serving import ServeProcess, descendants

ROOT = Path(__file__).parents[2]
JOB_LOST_S = 180.0
pytestmark = [
    pytest.mark.slow,  # Ray takes some ten seconds to start, and longer to notice that a node is dead
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]


def listening_elsewhere() -> set[str]:
    """Addresses other than loopback on which processes below this one listen (proc(5), /proc/net/tcp)."""
    inodes = set()
    for pid in descendants(os.getpid()):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "0000000000000000FFFF00000100007F")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes and words[1].split(":")[0] != loopback:
                found.add(words[1])
    return found


def left_over() -> set[Path]:
    return set(Path("/tmp").glob("cl-ray-*"))


def test_every_answer_is_that_of_one_engine_alone_though_a_raylet_is_killed() -> None:
    before = left_over()
    demo = [sys.executable, "-m", "benchmarks.cluster_demo", "--requests", "32", "--max-tokens", "8"]
    ended = subprocess.run(demo, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"; [1-9]\d* answers went on in another one", ended.stdout), ended.stdout  # though the load is short
    assert re.search(r"(\d+) requests in \S+ s: \1 answered, \1 as one engine alone, 0 lost", ended.stdout), ended.stdout
    assert left_over() == before


def test_every_answer_of_replicas_with_roles_is_that_of_one_engine_alone_though_a_raylet_is_killed() -> None:
    before = left_over()
    faults = [sys.executable, "-m", "benchmarks.cluster_faults", "--on", "ray", "--layouts", "1 prefill, 1 decode",
              "--faults", "kill -9 raylet", "--requests", "64", "--max-tokens", "60"]  # fmt: skip
    ended = subprocess.run(faults, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "num_identical=64" in ended.stdout
    assert left_over() == before


def test_replicas_come_back_after_all_of_ray_was_started_again_at_its_address_and_no_request_is_lost() -> None:
    before = left_over()
    faults = [sys.executable, "-m", "benchmarks.cluster_faults", "--on", "ray", "--layouts", "2 mixed",
              "--faults", "replace head", "--requests", "32", "--max-tokens", "60", "--load-s", "40"]  # fmt: skip
    ended = subprocess.run(faults, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left_over() == before


@pytest.mark.parametrize("flags", [["--same", "--flags", "--verify-replay 0.2"], []], ids=["same weights", "other weights"])
def test_replicas_get_new_engines_while_they_answer(flags: list[str]) -> None:
    before = left_over()
    update = [
        sys.executable,
        "-m",
        "benchmarks.weight_updates",
        "--on",
        "ray",
        "--requests",
        "32",
        "--max-tokens",
        "40",
        *flags,
    ]
    ended = subprocess.run(update, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 lost" in ended.stdout
    assert "computed differently: 0" in ended.stdout
    assert left_over() == before


def test_a_cluster_that_refuses_the_token_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*VARIABLES, "RAY_TMPDIR"):
        monkeypatch.setenv(name, "")  # what a Ray sets in this process goes with the test
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    with local_ray(1) as ray:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
        monkeypatch.setenv("RAY_ADDRESS", ray.address)  # `auto` would find a Ray of somebody else as well
        refused = f"the Ray cluster at {ray.address} refuses the token of this process, or this process has none"
        for address in (ray.address, "auto"):
            began_s = time.monotonic()
            with pytest.raises(RuntimeError, match=refused):
                ServeProcess("--on", "ray", "--ray-address", address, "--num-threads", "1")
            print(f"{address}: refused after {time.monotonic() - began_s:.1f} s")
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        monkeypatch.setenv("HOME", str(tmp_path))  # where Ray looks for one
        with pytest.raises(RuntimeError, match=refused):
            ServeProcess("--on", "ray", "--ray-address", ray.address, "--num-threads", "1")


def test_without_a_ray_here_auto_names_the_command_that_joins_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*VARIABLES, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="ray start --address=HOST:PORT of its head --num-cpus=0"):
        ServeProcess("--on", "ray", "--ray-address", "auto", "--num-threads", "1")


def test_a_ray_that_does_not_start_in_time_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("cloister.cluster.backend.ray")

    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray's own

    monkeypatch.setattr(ray.ray, "init", init)
    driver = object.__new__(ray.Driver)
    driver._settings = RaySettings(1, None, "/tmp/none", None, 0, "")
    with pytest.raises(EngineError, match=r"Ray does not start on this machine .*timed out.* try again"):
        driver.connect()


def test_a_ray_of_this_machine_alone_listens_on_loopback_keeps_no_content_and_leaves_nothing() -> None:
    before = left_over()
    secret = "my doctor is called Okonkwo"

    async def main() -> None:
        async with serving("--replicas", "2", "--on", "ray", "--num-threads", "1", "--kv-memory-mb", "64") as (server, _):
            bodies = [{**body, "prompt": f"{secret} {body['prompt']}"} for body in make_bodies(4, 20)]
            answers: list = [None] * len(bodies)
            await ask_all(server.url, bodies, 4, answers)
            assert all(answer.error is None for answer in answers)
            assert listening_elsewhere() == set()
            (folder,) = left_over() - before
            assert folder.stat().st_mode & 0o777 == 0o700
            logs = [path for path in folder.rglob("*") if path.is_file()]
            assert len(logs) > 5
            assert not any(secret.encode() in path.read_bytes() for path in logs)

    asyncio.run(main())
    assert descendants(os.getpid()) == []
    assert left_over() == before


def test_a_front_that_is_killed_leaves_neither_processes_nor_a_folder_of_its_ray() -> None:
    before = left_over()
    flags = ("--replicas", "2", "--on", "ray", "--num-threads", "1", "--kv-memory-mb", "64")
    with ServeProcess(*flags, timeout_s=START_S) as server:
        (folder,) = left_over() - before
        started = [pid for pid in descendants(server.process.pid) if command_of(pid)]
        assert len(started) > 10
        server.process.kill()
        give_up_s = time.monotonic() + JOB_LOST_S
        while (any(map(is_there, started)) or folder.exists()) and time.monotonic() < give_up_s:
            time.sleep(0.2)
        assert [command_of(pid) for pid in started if is_there(pid)] == []
        assert left_over() == before


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waits for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_replicas_come_back_after_the_raylet_beside_the_front_has_died() -> None:
    before = left_over()
    bodies = make_bodies(8, 40)

    async def ask(url: str) -> list[Any]:
        answers: list[Any] = [None] * len(bodies)
        await ask_all(url, bodies, 4, answers)
        return answers

    async def main() -> None:
        flags = ("--replicas", "2", "--on", "ray", "--num-threads", "1", "--kv-memory-mb", "64")
        async with serving(*flags) as (server, _), httpx.AsyncClient(base_url=server.url) as client:
            first = await ask(server.url)
            assert all(answer.error is None for answer in first)
            (raylet,) = [pid for pid in descendants(os.getpid()) if b"/raylet/raylet" in command_of(pid)]
            os.kill(raylet, signal.SIGKILL)
            async with asyncio.timeout(JOB_LOST_S):  # Ray ends its job
                while "running" in await states(client):
                    await asyncio.sleep(0.5)
            async with asyncio.timeout(JOB_LOST_S):  # and another one begins
                while await states(client) != ["running", "running"]:
                    await asyncio.sleep(0.5)
            again = await ask(server.url)
            assert [answer.text for answer in again] == [answer.text for answer in first]

    asyncio.run(main())
    assert descendants(os.getpid()) == []
    assert left_over() == before


async def states(client: httpx.AsyncClient) -> list[str]:
    return [replica["state"] for replica in (await client.get("/v1/replicas", timeout=300.0)).json()["data"]]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
