"""A sealed unit of two machines, as operators start it: a leader and a member, each a hardened node, with a tap of the network
between them. Both run on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloister import LLM, SamplingParams
from tests.e2e.test_sealed_serve import MODEL, Node
from tests.e2e.test_sealed_unit import PROMPTS, used_s
from tests.serving import free_port
from tests.trust.hardening.launching import needs_measures

pytestmark = needs_measures

NUM_TOKENS = 150
TIMEOUT_S = 300
PAIRED = "member 1 of the unit has proved itself"


class Tap:
    """An operator of the network, who records what passes.

    Attributes:
        heard: all bytes of both directions.
    """

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._serve, args=(near, far), daemon=True).start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            back.start()
            self._pass_on(near, far)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def wait_for(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


class Unit:
    """The two nodes."""

    def __init__(self, *flags: str) -> None:
        self.unit_port = free_port()
        self.tap = Tap(self.unit_port)
        flags = ("--sealed", "--num-threads", "1", *flags)
        with ThreadPoolExecutor(2) as pool:
            member = pool.submit(Node, *flags, "--unit-port", str(self.unit_port))
            leader = pool.submit(Node, *flags, "--unit-members", f"127.0.0.1:{self.tap.port}")
            self.member, self.leader = member.result(), leader.result()
        wait_for(lambda: PAIRED in self.leader.printed)

    def close(self) -> None:
        for node in (self.leader, self.member):
            node.kill()
        self.tap.close()

    def ask_all(self, until: Callable[[], bool] | None = None) -> list[str]:
        """Asks the leader for every answer at once, twice: all of them are drawn by one engine once in two thousand times.

        Args:
            until: is called again and again until it has happened; if all answers are there first, they are asked for again.
        """
        with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
            prompts = (*PROMPTS, *PROMPTS)
            asked = [pool.submit(self.leader.complete, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts]
            has_happened = until is None
            while until is not None and not has_happened and not all(each.done() for each in asked):
                has_happened = until()
                time.sleep(0.005)
            replies = [each.result() for each in asked]
        assert [status for status, _ in replies] == [200] * len(prompts), replies
        texts = [json.loads(content)["choices"][0]["text"] for _, content in replies]
        assert texts[: len(PROMPTS)] == texts[len(PROMPTS) :]
        return texts[: len(PROMPTS)] if has_happened else self.ask_all(until)

    def kill_busy_member(self, name: str, how: signal.Signals = signal.SIGKILL) -> Callable[[], bool]:
        """Returns what ends a process of the member once its engine works, and says whether it did."""
        [engine] = self.member.pids_named("cl-engine")
        before_s, victim = used_s(engine), engine if name == "cl-engine" else self.member.process.pid

        def kill() -> bool:
            if used_s(engine) - before_s <= 0.02:
                return False
            os.kill(victim, how)
            return True

        return kill


@pytest.fixture(scope="module")
def unit() -> Iterator[Unit]:
    made = Unit()
    yield made
    made.close()


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """What one engine alone says."""
    with LLM(MODEL, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [completion.outputs[0].text for completion in llm.generate(list(PROMPTS), params)]


def test_engines_of_two_machines_answer_as_one_and_the_network_reads_nothing(unit: Unit, answers: list[str]) -> None:
    engines = [pid for node in (unit.leader, unit.member) for pid in node.pids_named("cl-engine")]
    before_s = [used_s(pid) for pid in engines]
    for _ in range(10):
        assert unit.ask_all() == answers
        if all(used_s(pid) - earlier_s > 0.02 for pid, earlier_s in zip(engines, before_s, strict=True)):
            break
    else:
        pytest.fail("an engine got nothing in ten times")
    heard = bytes(unit.tap.heard)
    assert len(heard) > NUM_TOKENS * 20
    words = [text[start : start + 8].encode() for text in (*PROMPTS, *answers) for start in range(0, len(text) - 8, 8)]
    assert [word for word in words if word in heard] == []
    said = unit.leader.printed + unit.member.printed
    assert not any(text[:12] in said for text in (*PROMPTS, *answers))


def test_a_member_takes_no_requests(unit: Unit) -> None:
    assert unit.member.complete("Once")[0] == 404


def test_accepted_requests_survive_the_death_of_a_members_engine(unit: Unit, answers: list[str]) -> None:
    assert unit.ask_all(unit.kill_busy_member("cl-engine")) == answers
    wait_for(lambda: "runs again" in unit.member.printed)
    [engine] = unit.member.pids_named("cl-engine")
    before_s = used_s(engine)
    for _ in range(10):
        assert unit.ask_all() == answers
        if used_s(engine) - before_s > 0.05:
            return
    pytest.fail("the engine that was started again got nothing in ten times")


def test_accepted_requests_survive_the_death_of_a_machine_and_another_key_in_its_place_gets_nothing(
    unit: Unit, answers: list[str]
) -> None:
    assert unit.ask_all(unit.kill_busy_member("front")) == answers
    assert unit.ask_all() == answers
    with Node("--sealed", "--num-threads", "1", "--unit-port", str(unit.unit_port)) as again:
        wait_for(lambda: unit.leader.printed.count(PAIRED) == 2)
        engines = [*unit.leader.pids_named("cl-engine"), *again.pids_named("cl-engine")]
        before_s = [used_s(engine) for engine in engines]
        for _ in range(3):
            assert unit.ask_all() == answers
        of_leader_s, of_member_s = (used_s(engine) - earlier_s for engine, earlier_s in zip(engines, before_s, strict=True))
        num_answers = 3 * 2 * len(PROMPTS)  # and one of them takes the member that part of what all take the leader
        assert of_member_s < max(0.05, of_leader_s / num_answers), "clients of the older statement know nothing of its key"


@pytest.mark.slow
def test_accepted_requests_survive_a_member_that_is_stopped(answers: list[str]) -> None:
    made = Unit("--drain-timeout-s", "0")
    try:
        assert made.ask_all(made.kill_busy_member("front", signal.SIGTERM)) == answers
        assert made.member.process.wait(300) == 0
        assert made.ask_all() == answers
    finally:
        made.close()


@pytest.mark.slow
def test_accepted_requests_survive_a_machine_that_freezes(answers: list[str]) -> None:
    """Its kernel still answers, as after a SIGSTOP: workers miss its heartbeats, and its leader gives it up after 30 s."""
    made = Unit()
    try:
        stop_engine = made.kill_busy_member("cl-engine", signal.SIGSTOP)

        def freeze() -> bool:
            if not stop_engine():
                return False
            for pid in made.member.pids:
                os.kill(pid, signal.SIGSTOP)
            return True

        assert made.ask_all(freeze) == answers
        assert made.ask_all() == answers
    finally:
        made.close()


@pytest.mark.slow
def test_kv_passes_between_the_machines_of_a_unit_with_roles(answers: list[str]) -> None:
    made = Unit("--replicas", "2", "--prefill", "1", "--decode", "1", "--kv-transfer", "sealed")
    try:
        for _ in range(4):
            assert made.ask_all() == answers
        for node in (made.leader, made.member):  # all KV that was asked for has come, from either machine
            said = node.printed.partition("Serving on")[2]
            assert not any(word in said for word in ("KV", "Error", "Traceback")), said
    finally:
        made.close()
