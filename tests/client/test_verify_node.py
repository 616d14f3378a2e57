"""`cloister verify node`: an honest list is checked step by step, and each way to cheat a client is refused."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client.errors import RelayUnreachableError
from cloister.client.limits import Limits
from cloister.client.verify_node import Checked, cannot_check, check_url, fetch_from
from cloister.trust.attestation import (
    AttestationPolicy,
    Evidence,
    Findings,
    Outcome,
    Statement,
    read_evidence,
    read_statement,
    report_data,
)
from cloister.trust.attestation.cbor import encode_bytes
from cloister.trust.attestation.measuring import measure_profile
from cloister.trust.attestation.nitro import nitro_nonce
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import VERIFIERS
from cloister.trust.transparency.checks import Memory, View
from cloister.trust.transparency.epoch import IssuerEntry, parse_bundle
from cloister.trust.transparency.issuer_keys import IssuerIdentity, sign_entry
from cloister.trust.transparency.membership import sign_member
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.trust import encode_trust
from cloister.types.errors import ConfigError
from tests import attestation_vectors as real
from tests.nitro_platform import PCRS, NitroPlatform
from tests.trust.transparency.world import World, keys_of, make_evidence, make_release, member_key

SOFTWARE = AttestationPolicy(accept_software=True)
HALF = Limits(least_present=0.5)
"""One of two nodes serves."""
HARDENING = {"front.seccomp": "applied: on", "host": "missing: host not excluded"}


def sign(evidence: Evidence) -> bytes:
    return sign_member(member_key("node"), evidence).encode()


@dataclass
class ServedCloud(World):
    """A world whose files are served as a gateway serves them, and whose one node runs the newest release."""

    files: dict[str, bytes] = field(default_factory=dict)

    members: dict[str, int] = field(default_factory=lambda: {"node": 2, "b": 2})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.release = msgspec.structs.replace(make_release(), profile_digest=measure_profile("private"))
        self.log_release(self.release)
        self.checkpoint = parse_bundle(
            self.publish(evidence=(make_evidence(self.release, name="b", now=self.now, capacity=2),)).bundle
        ).checkpoint

    def state(self, **changes: object) -> bytes:
        """Evidence of the node."""
        statement = Statement(
            release=self.release.digest,
            model=self.release.model,
            profile=self.release.profile,
            profile_digest=self.release.profile_digest,
            configuration=self.release.configuration,
            hardening=HARDENING,
            keys=keys_of("the node"),
            capacity=2,
            not_before=int(self.now),
            not_after=int(self.now) + 3600,
            checkpoint=self.checkpoint,
        )
        return sign(SoftwareAttester().attest(msgspec.structs.replace(statement, **changes).encode()))

    def serve(self, evidence: bytes) -> None:
        """Publishes an epoch with the node."""
        published = self.publish(evidence=(evidence,))
        self.files = {"epoch": published.bundle} | {f"evidence/{digest}": one for digest, one in published.evidence.items()}

    def find(self, path: str, most_bytes: int = 0) -> bytes | None:
        """What is served below `/.well-known/cloister/`."""
        if path.startswith("log/"):
            resource = self.log.resource(path.removeprefix("log/"))
            return resource[0] if resource else None
        return self.files.get(path)

    def check(self, policy: AttestationPolicy = SOFTWARE, view: View | None = None) -> Checked:
        return check_url(self.find, self.trust, policy, view or View(), self.now, HALF)


@pytest.fixture
def served(tmp_path: Path) -> ServedCloud:
    served = ServedCloud(tmp_path)
    served.serve(served.state())
    return served


def slugs(findings: Findings, outcome: Outcome) -> list[str]:
    return [step.slug for step in findings.of(outcome)]


def only_node(checked: Checked) -> Findings:
    (findings,) = checked.nodes.values()
    return findings


def test_an_honest_list_is_proved_and_software_is_said_to_be_not_proved(served: ServedCloud):
    checked = served.check()
    assert checked.accepted
    assert not checked.proved
    assert slugs(checked.epoch, Outcome.PROVED) == ["epoch", "witnesses", "history", "membership", "release", "key-exchange"]
    assert slugs(only_node(checked), Outcome.NOT_PROVED) == ["hardware"]
    proved = slugs(only_node(checked), Outcome.PROVED)
    assert proved[:6] == ["listed", "key", "capacity", "key-exchange", "member", "nonce"]
    assert {"expiry", "profile", "profile-digest", "release", "model", "hardening"} <= set(proved)


def test_a_node_that_was_started_with_another_setting_is_refused_and_the_setting_is_named(served: ServedCloud):
    served.serve(served.state(configuration={"setting quant": '"int4"'}))
    (step,) = only_node(served.check()).of(Outcome.FAILED)
    assert step.slug == "configuration"
    assert 'setting quant is "int4" and was published as "none"' in step.text


@dataclass
class KeySigner:
    """A served whose issuer signs keys for a week."""

    served: ServedCloud
    signer: PrivateKey = field(default_factory=lambda: PrivateKey.generate("issuer.example", Kind.NOTE))

    def __post_init__(self) -> None:
        self.url = self.served.contents().issuers[0].url
        self.served.trust = replace(self.served.trust, issuer=IssuerIdentity(self.url, self.signer.public))

    def key(self, name: bytes, by: PrivateKey | None = None, age_s: int = 0) -> IssuerEntry:
        begin = int(self.served.now) - age_s
        return sign_entry(IssuerEntry(self.url, name, begin, begin + 7 * 86400, budget=512), by or self.signer)

    def check(self, *issuers: IssuerEntry, view: View | None = None) -> Checked:
        self.served.files["epoch"] = self.served.publish(evidence=(self.served.state(),), issuers=issuers).bundle
        return self.served.check(view=view)


def test_the_issuers_key_is_checked_as_a_client_would_that_buys(served: ServedCloud):
    issuer, stranger = KeySigner(served), PrivateKey.generate("stranger.example", Kind.NOTE)
    assert "issuer" in slugs(issuer.check(issuer.key(b"ours")).epoch, Outcome.PROVED)
    for issuers, words in (
        ((issuer.key(b"forged", by=stranger),), "did not sign"),
        ((issuer.key(b"second", age_s=60),), "signed two statements that contradict each other"),
    ):
        (step,) = issuer.check(*issuers).epoch.of(Outcome.FAILED)
        assert step.slug == "issuer"
        assert words in step.text


def test_a_check_that_goes_on_where_the_last_one_left_it_knows_the_issuers_earlier_keys(served: ServedCloud):
    issuer = KeySigner(served)
    seen = issuer.check(issuer.key(b"ours")).view
    (step,) = issuer.check(issuer.key(b"second", age_s=60), view=seen).epoch.of(Outcome.FAILED)
    assert step.slug == "issuer"
    assert "signed two statements that contradict each other" in step.text


def test_without_accept_software_the_same_list_is_refused(served: ServedCloud):
    checked = served.check(AttestationPolicy())
    assert not checked.accepted
    assert slugs(only_node(checked), Outcome.FAILED) == ["hardware"]


@pytest.fixture
def enclave(served: ServedCloud, monkeypatch: pytest.MonkeyPatch) -> NitroPlatform:
    """A hypervisor that is trusted, and a release that names what it measures."""
    platform = NitroPlatform(made=datetime.fromtimestamp(served.now, UTC))
    monkeypatch.setattr(VERIFIERS["nitro"], "_roots", platform.roots)
    launch = {f"nitro-pcr{number}": PCRS[number].hex() for number in range(3)}
    served.release = msgspec.structs.replace(served.release, number=served.release.number + 1, launch=launch)
    served.log_release(served.release)
    return platform


def serve_enclave(served: ServedCloud, platform: NitroPlatform, **changes: object) -> None:
    """Publishes an epoch with one node, which is a Nitro enclave."""
    statement = read_evidence(served.state()).statement
    read = read_statement(statement)
    bound = {"user_data": report_data(statement), "public_key": read.keys, "nonce": nitro_nonce(read)}
    document = platform.document(**({name: encode_bytes(value) for name, value in bound.items()} | changes))
    served.serve(sign_member(member_key("node"), Evidence("nitro", statement, document)).encode())


def test_an_enclave_is_proved_by_the_registers_that_its_release_names(served: ServedCloud, enclave: NitroPlatform):
    serve_enclave(served, enclave)
    checked = served.check(AttestationPolicy(kinds=frozenset({"nitro"})))
    assert checked.proved, slugs(only_node(checked), Outcome.FAILED)


def test_an_enclave_of_another_image_than_its_release_is_refused(served: ServedCloud, enclave: NitroPlatform):
    serve_enclave(served, enclave, pcrs=PCRS | {1: b"\x5a" * 48})
    assert slugs(only_node(served.check(AttestationPolicy(kinds=frozenset({"nitro"})))), Outcome.FAILED) == ["pcr-1"]


def test_an_enclave_is_refused_where_the_user_did_not_ask_for_one(served: ServedCloud, enclave: NitroPlatform):
    serve_enclave(served, enclave)
    findings = only_node(served.check(AttestationPolicy()))
    (step,) = findings.of(Outcome.FAILED)
    assert "accepted are sev-snp, tdx" in step.text


def test_what_was_seen_of_the_log_is_remembered(served: ServedCloud):
    first = served.check()
    served.now += 60
    served.serve(served.state())
    again = served.check(view=first.view)
    assert again.accepted
    assert any("where we left it" in step.text for step in again.epoch)


def test_a_log_that_was_rolled_back_is_refused(served: ServedCloud, tmp_path: Path):
    before = dict(served.files)
    served.now += 60
    served.serve(served.state())
    view = served.check().view
    served.files = before
    checked = served.check(view=view)
    assert not checked.accepted
    assert slugs(checked.epoch, Outcome.FAILED) == ["log_rolled_back"]
    assert checked.nodes == {}


def test_an_epoch_of_another_log_is_refused(served: ServedCloud, tmp_path: Path):
    other = ServedCloud(tmp_path / "other")
    other.serve(other.state())
    served.files = other.files
    assert not served.check().accepted


def test_an_epoch_that_is_over_is_refused(served: ServedCloud):
    served.now += 3600
    assert slugs(served.check().epoch, Outcome.FAILED) == ["epoch_expired"]


def test_evidence_that_is_not_the_listed_one_is_refused(served: ServedCloud):
    (name,) = (name for name in served.files if name.startswith("evidence/"))
    served.files[name] = served.state(capacity=100)
    assert slugs(only_node(served.check()), Outcome.FAILED) == ["listed"]
    del served.files[name]
    assert slugs(only_node(served.check()), Outcome.FAILED) == ["evidence"]


def test_evidence_without_a_checkpoint_is_refused_as_of_unknown_age(served: ServedCloud):
    served.serve(served.state(checkpoint=""))
    assert slugs(only_node(served.check()), Outcome.FAILED) == ["nonce"]


def test_stale_evidence_is_refused_though_its_statement_says_it_is_fresh(served: ServedCloud):
    served.now += 25 * 3600
    served.serve(served.state())  # a new statement, over the checkpoint of yesterday
    assert slugs(only_node(served.check()), Outcome.FAILED) == ["nonce"]


def test_a_node_without_its_hardening_is_refused(served: ServedCloud):
    served.serve(served.state(hardening={"front.seccomp": "missing: no filter"}))
    assert slugs(only_node(served.check()), Outcome.FAILED) == ["hardening"]


@pytest.mark.parametrize(
    ("demand", "slug"), [({"releases": frozenset({"00" * 32})}, "release"), ({"models": frozenset({"00" * 32})}, "model")]
)
def test_what_the_user_demands_stands_above_what_the_log_says(
    served: ServedCloud, demand: dict[str, frozenset[str]], slug: str
):
    assert slugs(only_node(served.check(replace(SOFTWARE, **demand))), Outcome.FAILED) == [slug]


def test_a_node_by_itself_is_checked_and_what_only_the_log_shows_stays_open(served: ServedCloud):
    served.files = {"evidence": served.state()}
    policy = replace(SOFTWARE, releases=frozenset({served.release.digest}))
    checked = check_url(served.find, None, policy, View(), served.now)
    assert checked.accepted
    assert slugs(checked.epoch, Outcome.NOT_PROVED) == ["epoch"]
    assert slugs(only_node(checked), Outcome.NOT_PROVED) == ["nonce", "hardware", "model", "configuration"]
    with_trust = check_url(served.find, served.trust, policy, View(), served.now)
    assert "nonce" in slugs(only_node(with_trust), Outcome.PROVED)


def test_a_node_of_profile_open_is_refused_where_private_is_wanted(served: ServedCloud):
    served.files = {"evidence": served.state(profile="open", profile_digest=measure_profile("open"))}
    policy = replace(SOFTWARE, releases=frozenset({served.release.digest}))
    checked = check_url(served.find, None, policy, View(), served.now)
    assert slugs(only_node(checked), Outcome.FAILED) == ["profile", "profile-digest"]


def test_a_node_that_runs_open_under_the_name_of_private_is_refused(served: ServedCloud):
    served.files = {"evidence": served.state(profile_digest=measure_profile("open"))}
    policy = replace(SOFTWARE, releases=frozenset({served.release.digest}))
    checked = check_url(served.find, None, policy, View(), served.now)
    assert slugs(only_node(checked), Outcome.FAILED) == ["profile-digest"]


def test_a_check_that_cannot_be_run_here_is_no_refusal(served: ServedCloud, monkeypatch: pytest.MonkeyPatch):
    statement = read_evidence(served.state()).statement
    served.serve(sign(Evidence("tdx", statement, real.td_quote(), {"collateral": real.td_collateral()})))
    assert slugs(only_node(served.check()), Outcome.FAILED) == ["report-signature"], "its collateral is over"
    assert not cannot_check(served.check())
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    checked = served.check()
    assert cannot_check(checked)
    assert not checked.accepted
    assert any("pip install" in step.text for step in only_node(checked).of(Outcome.FAILED))


def test_an_epoch_without_anybody_to_believe_is_an_error(served: ServedCloud):
    with pytest.raises(ConfigError, match="--trust"):
        check_url(served.find, None, SOFTWARE, View(), served.now)


def test_an_address_that_serves_neither_is_an_error(served: ServedCloud):
    served.files = {}
    with pytest.raises(RelayUnreachableError, match="neither"):
        served.check()


@pytest.mark.parametrize("status", [301, 500])
def test_an_answer_that_is_none_is_an_error(status: int):
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(status)))
    with client, pytest.raises(RelayUnreachableError, match=str(status)):
        fetch_from("http://relay.example/", client)("epoch", 100)


def test_an_address_without_its_scheme_is_refused_before_anything_is_asked():
    client = httpx.Client(transport=httpx.MockTransport(lambda request: pytest.fail("asked")))
    with client, pytest.raises(ConfigError, match=r"the address relay\.example:9007 lacks its scheme; give http://"):
        fetch_from("relay.example:9007", client)


def test_an_answer_that_is_too_long_is_not_read_to_its_end():
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, content=b"x" * 101)))
    with client, pytest.raises(RelayUnreachableError, match="more than 100 bytes"):
        fetch_from("http://relay.example", client)("epoch", 100)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, ServedCloud, Path]]:
    """A server of a served that lives now, and the trust file."""
    served = ServedCloud(tmp_path, now=time.time())
    served.serve(served.state())
    (tmp_path / "trust.json").write_bytes(encode_trust(served.trust))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = served.find(self.path.removeprefix("/.well-known/cloister/"))
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", served, tmp_path / "trust.json"
        server.shutdown()
        thread.join(300)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", "node", *arguments, "--least-present", "0.5"])
    return result.exit_code, result.output


def test_the_command_says_every_step_and_its_exit_status_says_the_outcome(
    address: tuple[str, ServedCloud, Path], tmp_path: Path
):
    url, _, trust = address
    status, told = run(url, "--trust", str(trust))
    assert status == 1
    assert "REFUSED     no hardware vouches for this node" in told
    assert "a client would send nothing" in told
    state = tmp_path / "view.json"
    status, told = run(url, "--trust", str(trust), "--accept-software", "--state", str(state))
    assert status == 0
    assert "not proved  no hardware vouches for this node" in told
    assert "proved      the evidence is the one that the epoch names" in told
    assert "NOT PROVED in full" in told
    assert json.loads(state.read_bytes())["size"] > 0


def test_the_command_begins_again_if_another_program_wrote_its_file_meanwhile(
    address: tuple[str, ServedCloud, Path], tmp_path: Path
):
    url, served, trust = address
    state, find, asked = tmp_path / "view.json", served.find, []

    def find_and_overtake(path: str, most_bytes: int = 0) -> bytes | None:
        content = find(path)
        if path == "epoch":
            asked.append(path)
            if len(asked) == 1:
                assert Memory(state).save(served.believe(served.files["epoch"]).view, View())
        return content

    served.find = find_and_overtake  # type: ignore[method-assign]
    status, told = run(url, "--trust", str(trust), "--accept-software", "--state", str(state))
    assert (status, len(asked)) == (0, 2)
    assert "where we left it" in told
    assert Memory(state).load().past, "the limits' memory of the second check"


def test_the_command_prints_json(address: tuple[str, ServedCloud, Path]):
    url, _, trust = address
    status, told = run(url, "--trust", str(trust), "--accept-software", "--json")
    assert status == 0
    data = json.loads(told)
    assert (data["accepted"], data["proved"]) == (True, False)
    assert {step["outcome"] for step in data["epoch"]} == {"proved"}


def test_the_command_says_when_it_cannot_check(address: tuple[str, ServedCloud, Path], tmp_path: Path):
    url, _, trust = address
    assert run(url)[0] == 2
    assert run("http://127.0.0.1:1", "--trust", str(trust))[0] == 2
    assert run("not an address")[0] == 2
    (tmp_path / "policy.json").write_text('{"realeses": []}')
    status, told = run(url, "--trust", str(trust), "--policy", str(tmp_path / "policy.json"))
    assert status == 2
    assert "realeses" in told
