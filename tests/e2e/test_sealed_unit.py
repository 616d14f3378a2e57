"""A sealed node with several engines, as an operator starts it: one trust unit, whose evidence covers each engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from cloister import LLM, SamplingParams
from cloister.client.verify_node import check_url, fetch_from
from cloister.private.nodes import EVIDENCE_PATH
from cloister.trust.attestation import AttestationPolicy, Statement, read_evidence, read_statement
from cloister.trust.hardening import MEASURES
from cloister.trust.transparency.checks import View
from tests.e2e.test_sealed_serve import MODEL, Node
from tests.trust.hardening.launching import needs_measures

pytestmark = needs_measures

PROMPTS = tuple(f"Story {number}. Once upon a time there was a small house beside a large river, and " for number in range(6))
NUM_TOKENS = 250
START_TIMEOUT_S = 300.0
NUM_ENGINES = 3
ROLES = ("--prefill", "1", "--decode", "1", "--kv-transfer", "sealed")
NO_ROLES = ()


@pytest.fixture(scope="module", params=[ROLES, pytest.param(NO_ROLES, marks=pytest.mark.slow)], ids=["roles", "mixed"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node("--sealed", "--replicas", str(NUM_ENGINES), "--num-threads", "1", *request.param) as running:
        yield running


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """What one engine alone says."""
    with LLM(MODEL, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [completion.outputs[0].text for completion in llm.generate(list(PROMPTS), params)]


def statement_of(node: Node) -> Statement:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while (answer := httpx.get(node.url + EVIDENCE_PATH, timeout=300)).status_code != 200:
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    return read_statement(read_evidence(answer.content).statement)


def ask_all(node: Node, until: Callable[[], bool] | None = None) -> list[str]:
    """Asks for every answer at once.

    Args:
        until: is called again and again until it has happened; if all answers are there first, they are asked for again.
    """
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        waiting = [pool.submit(node.complete, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        has_happened = until is None
        while until is not None and not has_happened and not all(each.done() for each in waiting):
            has_happened = until()
            time.sleep(0.002)
        replies = [each.result() for each in waiting]
    assert [status for status, _ in replies] == [200] * len(PROMPTS), replies
    texts = [json.loads(content)["choices"][0]["text"] for _, content in replies]
    return texts if has_happened else ask_all(node, until)


def used_s(pid: int) -> float:
    """Processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_engines_of_a_unit_answer_as_one_and_each_of_them_is_drawn(node: Node, answers: list[str]) -> None:
    before_s = {pid: used_s(pid) for pid in node.pids_named("cl-engine")}
    assert len(before_s) == NUM_ENGINES
    for _ in range(10):
        assert ask_all(node) == answers
        if all(used_s(pid) - earlier_s > 0.02 for pid, earlier_s in before_s.items()):
            break
    else:
        pytest.fail("an engine got nothing in ten times")
    said = node.printed.partition("Serving on")[2]
    assert not any(word in said for word in ("KV", "Error", "Traceback")), said  # all KV that was asked for has come


def test_accepted_requests_survive_the_death_of_an_engine_with_the_same_tokens(node: Node, answers: list[str]) -> None:
    printed, victims = len(node.printed), list[int]()
    before_s = {pid: used_s(pid) for pid in node.pids_named("cl-engine")}

    def kill() -> bool:
        """Kills one that computes some of them, if there is one."""
        victims.extend([pid for pid, earlier_s in before_s.items() if used_s(pid) - earlier_s > 0.05][:1])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return bool(victims)

    assert ask_all(node, kill) == answers
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while len(node.pids_named("cl-engine")) < NUM_ENGINES or "runs again" not in node.printed:
        assert time.monotonic() < give_up_s, node.printed
        time.sleep(0.1)
    assert ask_all(node) == answers
    said = node.printed[printed:]
    assert not any(words in said for prompt, answer in zip(PROMPTS, answers, strict=True) for words in (prompt, answer[:12]))


def test_a_request_goes_on_in_engines_that_were_started_after_it_began(node: Node, answers: list[str]) -> None:
    """More engines die under it than the node has; each has another in its place before the next one dies."""
    printed = len(node.printed)
    before_s = {pid: used_s(pid) for pid in node.pids_named("cl-engine")}

    def kill_in_turn(waiting: Future[tuple[int, bytes]]) -> None:
        nonlocal before_s
        for num_killed in range(NUM_ENGINES + 1):
            give_up_s = time.monotonic() + START_TIMEOUT_S
            while not (busy := [pid for pid, earlier_s in before_s.items() if used_s(pid) - earlier_s > 0.03]):
                assert not waiting.done(), f"the answer was there after {num_killed} deaths: a longer one would not have been"
                assert time.monotonic() < give_up_s, f"no engine computes after {num_killed} deaths: {node.printed[printed:]}"
            os.kill(busy[0], signal.SIGSTOP)  # else the answer would have ended before
            while node.printed.count("runs again", printed) < num_killed:
                assert time.monotonic() < give_up_s, node.printed
                time.sleep(0.05)
            before_s = {pid: used_s(pid) for pid in node.pids_named("cl-engine") if pid != busy[0]}
            os.kill(busy[0], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.complete, PROMPTS[0], max_tokens=12 * NUM_TOKENS, ignore_eos=True)
        kill_in_turn(waiting)
        status, content = waiting.result()
    assert status == 200, content
    assert json.loads(content)["choices"][0]["text"].startswith(answers[0])


def test_its_evidence_has_the_measures_of_each_engine_and_the_capacity_of_all(node: Node) -> None:
    statement = statement_of(node)
    every = {f"{role}.{measure.name}" for role in ("engine", "engine-1", "engine-2") for measure in MEASURES}
    assert every <= statement.hardening.keys()
    assert statement.configuration["setting replicas"] == str(NUM_ENGINES)
    assert statement.configuration["setting router"] == '"capacity_random"'
    assert statement.capacity == NUM_ENGINES
    policy = AttestationPolicy(accept_software=True, releases=frozenset({statement.release}))
    with httpx.Client() as client:
        fetch = fetch_from(node.url, client)
        checked = check_url(fetch, None, policy, View(), time.time())
        other = replace(policy, configuration={**statement.configuration, "setting replicas": "2"})
        refused = check_url(fetch, None, other, View(), time.time())
    [findings] = checked.nodes.values()
    assert checked.accepted
    assert "one unit of 3 engines" in next(step.text for step in findings if step.slug == "unit")
    assert not refused.accepted  # another number than the release has
