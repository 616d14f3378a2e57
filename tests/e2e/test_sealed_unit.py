"""A sealed node with several engines, as an operator starts it: one trust unit, whose evidence covers each engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cloister import LLM, SamplingParams
from cloister.client.verify_node import check_url, fetch_from
from cloister.private.nodes import EVIDENCE_PATH
from cloister.trust.attestation import AttestationPolicy, Statement, read_evidence, read_statement
from cloister.trust.hardening import MEASURES
from cloister.trust.transparency.checks import View
from tests.e2e.test_sealed_serve import MODEL, Node, serve_in_vain
from tests.trust.hardening.launching import needs_measures

pytestmark = needs_measures

PROMPTS = tuple(f"Once upon a time, number {number}," for number in range(8))
NUM_TOKENS = 400
OPTIONS = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
START_TIMEOUT_S = 120
SETTINGS = ("--replicas", "2", "--num-threads", "1", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node("--sealed", *SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """What one engine alone says."""
    with LLM(MODEL, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [completion.outputs[0].text for completion in llm.generate(list(PROMPTS), params)]


def statement_of(node: Node) -> Statement:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while (answer := httpx.get(node.url + EVIDENCE_PATH, timeout=30)).status_code != 200:
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    return read_statement(read_evidence(answer.content).statement)


def ask_all(node: Node, during: Any = lambda: None, **options: Any) -> list[str]:
    """Asks for every answer at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        waiting = [pool.submit(node.complete, prompt, **{**OPTIONS, **options}) for prompt in PROMPTS]
        during()
        replies = [each.result() for each in waiting]
    assert [status for status, _ in replies] == [200] * len(PROMPTS), replies
    return [json.loads(content)["choices"][0]["text"] for _, content in replies]


def used_s(pid: int) -> float:
    """Processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_two_engines_answer_as_one_and_both_are_drawn(node: Node, answers: list[str]) -> None:
    engines = node.pids_named("cl-engine")
    assert len(engines) == 2
    before_s = [used_s(pid) for pid in engines]
    assert ask_all(node) == answers
    assert all(used_s(pid) - earlier_s > 0.02 for pid, earlier_s in zip(engines, before_s, strict=True))


def test_accepted_requests_survive_the_death_of_an_engine_with_the_same_tokens(node: Node, answers: list[str]) -> None:
    victim = node.pids_named("cl-engine")[0]
    printed = len(node.printed)
    before_s = used_s(victim)

    def kill() -> None:
        give_up_s = time.monotonic() + 60
        while used_s(victim) - before_s < 0.1:  # it computes some of them
            assert time.monotonic() < give_up_s
            time.sleep(0.005)
        os.kill(victim, signal.SIGKILL)

    assert ask_all(node, kill) == answers
    said = node.printed[printed:]
    assert "Once" not in said
    assert not any(answer[:12] in said for answer in answers)
    wait_for_engines(node)
    assert ask_all(node) == answers


def wait_for_engines(node: Node, count: int = 2) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while len(node.pids_named("cl-engine")) < count or "runs again" not in node.printed:
        assert time.monotonic() < give_up_s, node.printed
        time.sleep(0.1)


def test_its_evidence_has_the_measures_of_each_engine_and_the_capacity_of_all(node: Node) -> None:
    statement = statement_of(node)
    every = {f"{role}.{measure.name}" for role in ("engine", "engine-1") for measure in MEASURES}
    assert every <= statement.hardening.keys()
    assert statement.configuration["setting replicas"] == "2"
    assert statement.configuration["setting router"] == '"capacity_random"'
    assert statement.capacity == 2
    with httpx.Client() as client:
        policy = AttestationPolicy(accept_software=True, releases=frozenset({statement.release}))
        checked = check_url(fetch_from(node.url, client), None, policy, View(), time.time())
        [findings] = checked.nodes.values()
        [unit] = [step for step in findings if step.slug == "unit"]
        assert checked.accepted
        assert "one unit of 2 engines" in unit.text
        other = replace(policy, configuration={**statement.configuration, "setting replicas": "3"})
        refused = check_url(fetch_from(node.url, client), None, other, View(), time.time())
        assert not refused.accepted


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--replicas", "2", "--router", "least_load"), "set router to capacity_random"),
        (("--replicas", "3", "--standby", "1"), "leave standby out"),
        (("--replicas", "2", "--slow-replicas", "avoid"), "leave slow_replicas out"),
        (("--replicas", "2", "--rebalance"), "leave rebalance out"),
        (("--replicas", "2", "--verify-replay", "0.5"), "leave verify_replay out"),
        (("--replicas", "13",), "start more nodes"),
        (("--on", "ray", "--replicas", "2"), "one machine"),
    ],
)  # fmt: skip
def test_what_needs_a_front_that_sees_requests_is_refused(flags: tuple[str, ...], reason: str) -> None:
    assert reason in serve_in_vain(*flags)


def test_engines_with_roles_answer_as_one_and_survive_a_death(answers: list[str]) -> None:
    flags = ("--replicas", "3", "--prefill", "1", "--decode", "2", "--kv-transfer", "sealed", "--num-threads", "1")
    with Node("--sealed", *flags) as node:
        _, *decoders = node.pids_named("cl-engine")
        assert ask_all(node) == answers
        statement = statement_of(node)
        assert (statement.configuration["setting prefill"], statement.configuration["setting decode"]) == ("1", "2")
        before_s = used_s(decoders[0])

        def kill() -> None:
            while used_s(decoders[0]) - before_s < 0.1:
                time.sleep(0.005)
            os.kill(decoders[0], signal.SIGKILL)

        assert ask_all(node, kill) == answers
        wait_for_engines(node, 3)
        assert ask_all(node) == answers
        assert "KV" not in node.printed.partition("Serving on")[2]
