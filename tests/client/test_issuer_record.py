"""An issuer is held to one key at a time: by the log, by what a client remembers, and by what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec import UNSET, UnsetType
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client import AsyncSealedTransport, EpochRefusedError, NoTokensError, Session
from cloister.client.errors import IssuerContradictionError
from cloister.client.issuer_record import MOST_KEYS, IssuerRecord, beside
from cloister.client.limits import Limits
from cloister.client.routing_audit.cloud import ISSUER, RELAY, CloudConfig, SealedCloud
from cloister.client.routing_audit.records import Spell
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.tokens.blind_rsa import encode_public, generate
from cloister.trust.tokens.issuer_keys import EPOCH_S
from cloister.trust.tokens.purchase import STATEMENT_PATH
from cloister.trust.transparency.epoch import IssuerEntry, epoch_leaf, parse_bundle
from cloister.trust.transparency.issuer_keys import (
    OVERLAP_S,
    IssuerIdentity,
    IssuerStatement,
    find_contradiction,
    sign_entry,
    sign_statement,
)
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.trust import encode_trust
from cloister.types.errors import ConfigError
from tests.rsa_keys import shared_keys

NODES = Spell({"a": 1})
CLI = CliRunner()


class Wire(httpx.AsyncBaseTransport):
    """The client's network; one path may be answered by somebody else."""

    def __init__(self, cloud: SealedCloud) -> None:
        self._inner = cloud.carrier()
        self.posted = 0
        self.instead: dict[str, Callable[[], bytes]] = {}
        self.edit_log: Callable[[bytes], bytes] = lambda content: content

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.posted += request.method == "POST"
        if request.url.path in self.instead:
            return httpx.Response(200, content=self.instead[request.url.path]())
        response = await self._inner.handle_async_request(request)
        if "/tile/entries/" not in request.url.path:
            return response
        return httpx.Response(response.status_code, content=self.edit_log(await response.aread()))


class World:
    """A cloud without sockets, whose issuer may lie; `prepare` does what precedes a request, buying included."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cloud = SealedCloud(directory, config=CloudConfig(make_key=shared_keys()))
        self.wire = Wire(self.cloud)
        self.cloud.credentials, self.api_key = self.cloud.credentials.add("ann")
        self.signer: PrivateKey = self.cloud.issuer_key

    @property
    def state(self) -> Path:
        return self.directory / "client" / "view.json"

    def session(self, state: Path | None = None) -> Session:
        accept = AttestationPolicy(accept_software=True)
        return Session(
            RELAY, trust=self.cloud.trust, api_key=self.api_key, now=self.cloud.now, policy=accept, limits=Limits(most_share=1),
            state=state, remember=state is not None,
        )  # fmt: skip

    def prepare(self, session: Session) -> None:
        asyncio.run(AsyncSealedTransport(session, self.wire).prepare())

    def publish(self, *issuers: IssuerEntry) -> None:
        """Publishes an epoch; with the honest issuer's keys where none are given."""
        self.cloud.issuers = issuers or self.cloud.honest_keys()
        asyncio.run(self.cloud.enter(NODES))

    def key(self, begin: float | None = None, life_s: int = EPOCH_S, by: PrivateKey | None = None) -> IssuerEntry:
        """A new key of the issuer's; from now on where nothing else is said."""
        start = int(self.cloud.time if begin is None else begin)
        entry = IssuerEntry(ISSUER, encode_public(generate().public), start, start + life_s)
        return sign_entry(entry, by or self.signer)


@pytest.fixture
def world(directory: Path) -> Iterator[World]:
    world = World(directory)
    yield world
    world.cloud.close()


def test_an_issuer_with_a_key_of_its_own_for_each_epoch_is_refused_and_the_proof_is_kept(world: World) -> None:
    """By the key of a token it knew in which epoch it was bought, and so among whom the buyer is."""
    session = world.session(world.state)
    world.publish()
    world.prepare(session)
    bought = len(session._wallet)
    world.publish(world.key())
    with pytest.raises(IssuerContradictionError, match="in epoch 1, one in epoch 2") as caught:
        world.prepare(session)
    assert world.wire.posted == 1, "nothing was bought under the second key"
    assert bought > 0, "nor was one of the tokens at hand spent"
    (kept,) = world.state.parent.glob("issuer-proof-*.json")
    assert kept.read_bytes() == caught.value.proof
    assert str(kept) in caught.value.message


def test_a_client_that_was_not_there_before_learns_it_from_the_log(world: World) -> None:
    world.publish()
    world.publish(world.key())
    for session in (world.session(), world.session(world.state)):
        with pytest.raises(IssuerContradictionError, match="in epoch 1, one in epoch 2"):
            world.prepare(session)
    assert world.wire.posted == 0


def test_an_epoch_that_is_dated_back_does_not_hide_those_before_it(world: World) -> None:
    world.publish(world.key())
    epoch = parse_bundle(world.cloud.epochs.bundle).epoch
    world.cloud.log.append([epoch_leaf(msgspec.structs.replace(epoch, epoch=2, not_before=1, not_after=2))])
    world.publish()
    with pytest.raises(IssuerContradictionError, match="in epoch 3, one in epoch 1"):
        world.prepare(world.session())
    assert world.wire.posted == 0


def test_a_client_that_lost_its_record_reads_the_log_again(world: World) -> None:
    world.publish()
    world.prepare(world.session(world.state))
    beside(world.state).unlink()
    world.publish(world.key())
    with pytest.raises(IssuerContradictionError):
        world.prepare(world.session(world.state))


def test_a_client_that_lost_its_record_is_shown_no_other_log_than_the_one_it_saw(world: World) -> None:
    """Who carries the log could leave out the key that contradicts the newest; the client saw only its size since."""
    world.publish()
    world.prepare(world.session(world.state))
    beside(world.state).unlink()
    world.publish(world.key())
    hidden = ISSUER.encode()
    world.wire.edit_log = lambda content: content.replace(hidden, hidden[::-1], 1)
    with pytest.raises(EpochRefusedError) as caught:
        world.prepare(world.session(world.state))
    assert caught.value.reason == "not_consistent"


def test_keys_that_are_followed_week_by_week_are_bought_under(world: World) -> None:
    session = world.session(world.state)
    seen = []
    for _ in range(3):
        world.publish()
        world.prepare(session)
        seen.append({token.key_id for tokens in session._wallet._tokens.values() for token in tokens})
        world.cloud.time = (world.cloud.time // EPOCH_S + 1) * EPOCH_S + 2 * OVERLAP_S
    assert all(len(keys) == 1 for keys in seen), "of the key that ended none is left"
    assert len(set.union(*seen)) == 3
    world.publish()
    world.prepare(world.session())
    world.prepare(world.session(world.state))


def test_a_second_key_that_the_issuer_shows_through_the_relay_is_refused(world: World) -> None:
    now = world.cloud.time + 300
    world.publish()
    world.wire.instead[STATEMENT_PATH] = lambda: sign_statement(
        IssuerStatement(ISSUER, b"keys", int(now), int(now) + 600, (world.key(),)), world.signer
    )
    with pytest.raises(IssuerContradictionError, match="one by itself"):
        world.prepare(world.session())
    assert world.wire.posted == 0, "no API key was sealed"


def test_a_key_that_was_seen_once_is_remembered_by_the_next_run(world: World) -> None:
    now = int(world.cloud.time)
    first = IssuerRecord(world.cloud.trust.issuer, beside(world.state))
    first.see((world.key(),), now)
    world.publish()
    with pytest.raises(IssuerContradictionError, match="by itself"):
        world.prepare(world.session(world.state))
    world.prepare(world.session())


def test_two_clients_of_one_file_know_what_either_saw(world: World) -> None:
    records = [IssuerRecord(world.cloud.trust.issuer, beside(world.state)) for _ in range(2)]
    records[0].see((world.key(),), world.cloud.time)
    with pytest.raises(IssuerContradictionError):
        records[1].see((world.key(),), world.cloud.time)


def test_a_contradiction_is_over_when_a_key_has_ended_with_its_tokens(world: World) -> None:
    session = world.session(world.state)
    world.publish()
    world.publish(world.key(world.cloud.time - EPOCH_S + 7200))
    with pytest.raises(IssuerContradictionError):
        world.prepare(session)
    world.cloud.time += 2 * EPOCH_S
    world.publish()
    world.prepare(session)


def test_a_gateway_cannot_accuse_an_issuer(world: World) -> None:
    """An entry of the log stays for ever, so one without the issuer's signature must not stop anybody."""
    stranger = PrivateKey.generate("gateway.test", Kind.NOTE)
    session = world.session(world.state)
    world.publish(world.key(by=stranger))
    with pytest.raises(NoTokensError, match="did not sign"):
        world.prepare(session)
    world.publish()
    world.prepare(session)
    world.prepare(world.session())


def test_an_issuer_of_many_keys_is_refused_however_well_they_follow(world: World) -> None:
    record = IssuerRecord(world.cloud.trust.issuer, beside(world.state))
    keys = [IssuerEntry(ISSUER, b"%d" % n, n * EPOCH_S, (n + 1) * EPOCH_S) for n in range(4000, 4000 + 2 * MOST_KEYS)]
    with pytest.raises(NoTokensError, match=f"{MOST_KEYS} keys or more"):
        record.see([sign_entry(entry, world.signer) for entry in keys], world.cloud.time)
    again = IssuerRecord(world.cloud.trust.issuer, beside(world.state))
    assert len(again.seen) == MOST_KEYS, "and no more is kept of them"
    with pytest.raises(NoTokensError, match=f"{MOST_KEYS} keys or more"):
        again.check()


def test_the_record_of_another_issuer_is_not_read_as_this_ones(world: World) -> None:
    issuer = world.cloud.trust.issuer
    assert issuer is not None
    IssuerRecord(issuer, beside(world.state)).see((world.key(),), world.cloud.time)
    assert IssuerRecord(issuer, beside(world.state)).seen
    stranger = PrivateKey.generate("stranger.test", Kind.NOTE).public
    for other in (IssuerIdentity(ISSUER, stranger), IssuerIdentity("https://other.test", issuer.key)):
        assert not IssuerRecord(other, beside(world.state)).seen


def test_a_broken_record_is_not_passed_over(world: World) -> None:
    world.state.parent.mkdir()
    beside(world.state).write_text("{")
    with pytest.raises(ConfigError, match="remove it to read the log from its beginning"):
        world.session(world.state)


def entry(name: str, begin: int, end: int, budget: int | UnsetType = UNSET) -> IssuerEntry:
    return IssuerEntry(ISSUER, name.encode(), begin, end, budget=budget)


@pytest.mark.parametrize(
    ("entries", "is_one"),
    [
        ([entry("a", 0, 7), entry("b", 7, 14)], False),
        ([entry("a", 0, 7), entry("a", 0, 7)], False),
        ([entry("a", 0, 7), msgspec.structs.replace(entry("a", 0, 7), signature=b"another of the same")], False),
        ([entry("a", 0, 7), entry("b", 9, 16), entry("c", 20, 27)], False),
        ([entry("a", 0, 7), entry("b", 6, 13)], True),
        ([entry("a", 0, 7), entry("b", 0, 7)], True),
        ([entry("a", 0, 7), entry("a", 7, 14)], True),
        ([entry("a", 0, 31), entry("b", 40, 47), entry("c", 30, 37)], True),
        ([entry("a", 0, 7, 256), entry("a", 0, 7, 256)], False),
        ([entry("a", 0, 7), entry("a", 0, 7, 256)], False),
        ([entry("a", 0, 7, 128), entry("a", 0, 7), entry("a", 0, 7, 256)], True),
    ],
)
def test_two_keys_for_one_time_or_two_times_or_budgets_for_one_key_contradict_each_other(
    entries: list[IssuerEntry], is_one: bool
) -> None:
    assert (find_contradiction(entries) is not None) is is_one
    assert (find_contradiction(reversed(entries)) is not None) is is_one


def verify(*arguments: object) -> tuple[int, str]:
    result = CLI.invoke(app, ["verify", "issuer", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_anybody_can_check_the_proof_and_nobody_can_make_one_up(world: World) -> None:
    world.publish()
    world.publish(world.key())
    with pytest.raises(IssuerContradictionError) as caught:
        world.prepare(world.session())
    proof, trust = world.directory / "proof.json", world.directory / "trust.json"
    proof.write_bytes(caught.value.proof)
    trust.write_bytes(encode_trust(world.cloud.trust))
    issuer = world.cloud.trust.issuer
    assert isinstance(issuer, IssuerIdentity)
    for whose in (("--trust", trust), ("--issuer-key", issuer.key)):
        status, said = verify(proof, *whose)
        assert (status, said.count(f"{ISSUER}: the key")) == (0, 2), said

    stranger = PrivateKey.generate("stranger.test", Kind.NOTE)
    assert verify(proof, "--issuer-key", stranger.public)[0] == 1
    read = msgspec.json.decode(proof.read_bytes())
    honest, forged = world.key(0), world.key(0, by=stranger)
    for statements, words in (
        ([honest, honest], "both statements can be true"),
        ([honest, forged], "did not sign both"),
    ):
        proof.write_bytes(msgspec.json.encode({**read, "statements": statements}))
        status, said = verify(proof, "--trust", trust)
        assert status == 1
        assert words in said
    proof.write_text("{}")
    assert verify(proof, "--trust", trust)[0] == 1
    for arguments in ((proof,), (world.directory / "missing", "--trust", trust), (proof, "--issuer-key", "no key")):
        assert verify(*arguments)[0] == 2
