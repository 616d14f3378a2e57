"""An audit of a cloud through its relay: honest operators pass, and each dishonest one is named for what it does."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client import Limits, NoTokensError, Session
from cloister.client.routing_audit.audit import Audit, Auditor, AuditUser, Refusal, most_tokens
from cloister.client.routing_audit.charges import AuditVerdict, judge_audit
from cloister.client.routing_audit.cloud import RELAY, CloudConfig, SealedCloud, current_user
from cloister.client.routing_audit.hypotheses import compare_times, rank_sum
from cloister.client.token_purchase import BATCH
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.transparency.trust import encode_trust
from tests import virtual_time
from tests.client.routing_audit.operators import NODES, OPERATORS, Operator
from tests.rsa_keys import shared_keys
from tests.sealed_cloud import LoopbackCloud

HONEST = Operator("")
STATISTICAL = {"loss", "timing"}


class Named(httpx.AsyncBaseTransport):
    """Tells a colluding operator who asks.

    Attributes:
        bought: tokens, of all of these.
    """

    bought = 0

    def __init__(self, name: str, inner: httpx.AsyncBaseTransport) -> None:
        self._name, self._inner = name, inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        current_user.set(self._name)
        Named.bought += BATCH * (request.method == "POST" and request.url.path.endswith("/issuer"))
        return await self._inner.handle_async_request(request)


def run_virtually(work: Coroutine[Any, Any, Audit]) -> Audit:
    """Answers take what operators have them take, and nothing of what else the machine does."""

    async def call(function: Callable[..., Any], *values: Any) -> Any:
        return function(*values)

    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        patch.setattr("cloister.client.routing_audit.audit.time", clock)
        patch.setattr(asyncio, "to_thread", call)
        return virtual_time.run(work)


def audit(directory: Path, operator: Operator, requests: int, users: int = 3, limits: Limits | None = None) -> Audit:
    cloud = SealedCloud(directory, operator.make_book, config=CloudConfig(make_key=shared_keys()))

    def user(number: int) -> AuditUser:
        cloud.credentials, key = cloud.credentials.add(f"user-{number}")
        session = Session(
            RELAY, trust=cloud.trust, api_key=key, policy=AttestationPolicy(accept_software=True), now=cloud.now,
            remember=False, limits=limits, below=random.Random(number).randrange,
        )  # fmt: skip
        return AuditUser(f"user-{number}", session, Named(f"user-{number}", cloud.carrier()))

    async def run() -> Audit:
        await cloud.enter(NODES)
        people = [user(number) for number in range(users)]
        if operator.act is not None:
            await operator.act(cloud)
        return await Auditor(people, random.Random(7)).run(requests)

    try:
        return run_virtually(run())
    finally:
        cloud.close()


def kinds(verdict: AuditVerdict) -> set[str]:
    return {charge.kind for charge in verdict.charges}


def test_an_honest_operator_passes(directory: Path) -> None:
    seen = audit(directory, HONEST, 22)
    verdict = judge_audit(seen)
    assert verdict.charges == ()
    assert verdict.unfinished == ()
    assert len(seen.sent) == 66
    assert verdict.tests > 20


@pytest.mark.parametrize("name", OPERATORS)
def test_each_dishonest_operator_is_named(directory: Path, name: str) -> None:
    operator = OPERATORS[name]
    verdict = judge_audit(audit(directory, operator, 22 if operator.kind in STATISTICAL else 2))
    assert operator.kind in kinds(verdict), verdict
    assert kinds(verdict) <= {operator.kind, "land"}, "a request that was moved lands elsewhere too; nothing else is said"
    assert len(OPERATORS) >= 10


def test_a_user_whose_answers_take_longer_is_told_apart_and_load_on_all_is_not() -> None:
    source = random.Random(3)
    alike = [(f"user-{n % 4}", source.expovariate(1.0)) for n in range(400)]
    assert min(finding.p_value for finding in compare_times(alike)) > 1e-3
    slow = [(user, seconds + 0.5 * (user == "user-1")) for user, seconds in alike]
    worst = min(compare_times(slow), key=lambda finding: finding.p_value)
    assert (worst.user, worst.p_value < 1e-6) == ("user-1", True)
    assert list(compare_times(alike[:40])) == [], "too few to accuse anybody"


def test_the_rank_sum_of_a_small_case_is_what_the_table_says() -> None:
    observed, expected, p_value = rank_sum([1, 2, 3], [4, 5, 6, 7])
    assert (observed, expected) == (6, 12)
    assert 0.03 < p_value < 0.08  # exact: 2 / 35 = 0.057
    assert rank_sum([1.0] * 30, [1.0] * 30)[2] == 1.0


def test_an_audit_buys_no_more_tokens_than_it_said_before(directory: Path) -> None:
    Named.bought = 0
    worst = OPERATORS["withholds everybody's requests from the other nodes"]
    seen = audit(directory, worst, 9, users=2)
    assert len(seen.sent) == 18
    assert 2 * 9 < Named.bought <= most_tokens(2, 9)


def test_an_allowance_that_is_used_up_is_no_charge() -> None:
    error = NoTokensError("There is no token left, and the issuer gave none (429): wait")
    verdict = judge_audit(Audit(refusals=[Refusal("user-1", error)]))
    assert verdict.charges == ()
    assert verdict.unfinished[0].startswith("user-1: ")


def verify(cloud: LoopbackCloud, directory: Path, *arguments: str) -> tuple[int, str]:
    (directory / "trust.json").write_bytes(encode_trust(cloud.trust))
    (directory / "key").write_text(cloud.api_key)
    files = ("--trust", str(directory / "trust.json"), "--api-key-file", str(directory / "key"))
    state = ("--state", str(directory / "seen.json"), "--accept-software", "--users", "2", "--requests", "3")
    result = CliRunner().invoke(app, ["verify", "routing", "--relay", cloud.relay_url, *files, *state, *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_command_audits_a_live_deployment_and_says_first_what_it_spends(cloud: LoopbackCloud, directory: Path) -> None:
    status, told = verify(cloud, directory)
    assert status == 2, told
    assert "sends 6 requests as 2 users, and buys at most 80 tokens" in told
    assert "nothing was spent" in told, "nobody agreed"
    status, told = verify(cloud, directory, "--yes", "--json")
    data = json.loads(told[told.index("{") :])
    assert (data["charges"], data["unfinished"], data["requests"], status) == ([], [], 6, 2), "too few to say so"
    assert data["power"] < 0.99


def test_the_command_names_what_its_client_refuses(cloud: LoopbackCloud, directory: Path) -> None:
    status, told = verify(cloud, directory, "--yes", "--most-share", "0.4")
    assert status == 1
    assert "NOT HONEST: capacity" in told
    assert verify(cloud, directory, "--most-share", "0.4", "--json")[0] == 1
