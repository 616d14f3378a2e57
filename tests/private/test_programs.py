"""`cloister relay` and `cloister gateway` as programs of their own, as an operator starts and stops them."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest

from cloister.cli import main
from cloister.policy import Credentials
from cloister.private.node import NodeConfig, node_app
from cloister.private.serving import Lifespan
from cloister.private.unsealing import LocalUnsealer
from cloister.private.witness import witness_app
from cloister.trust.sealing import (
    CHUNKED,
    NODE_KEY_LIFE_S,
    HttpRequest,
    KeyConfiguration,
    KeyRing,
    Receiver,
    ReplayCache,
    RequestHead,
    encode_request,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.tokens import Issuer, IssuerLimits, KeyShelf, QuotaBook, authorization, challenge_between, request_tokens
from cloister.trust.tokens.issuance import encode_answers
from cloister.trust.transparency.files import write_key
from cloister.trust.transparency.issuer_keys import IssuerIdentity
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.trust import Trust, encode_trust
from tests.loopback import Recorder, serve
from tests.private.inner import ANSWER, Inner
from tests.private.messages import Opening, http
from tests.private.test_keeping import Place
from tests.programs import Program
from tests.sealed_cloud import NODE_SECRET, RELAY_SECRET
from tests.trust.transparency.world import World

GATEWAY, ISSUER = "https://gateway.example", "https://issuer.example"


@contextmanager
def running(*arguments: str, says: tuple[str, ...] = ()) -> Iterator[str]:
    """Starts a program at a free port and yields its URL.

    It has to end by itself when it is told to, and to have written a line for each of `says`, and none about any request.
    """
    program = Program(*arguments, "--port", "0", announced=r"at (http://[0-9.:]+),", apart=True)
    try:
        yield program.url
    finally:
        program.process.send_signal(signal.SIGTERM)
        status, _, written = program.end()
    assert status == 0
    assert [line.partition(": ")[2] for line in written.splitlines()] == list(says)


def make_token(directory: Path) -> str:
    """A token of the issuer whose state is in a directory, bought there."""
    credentials, api_key = Credentials.empty().add("ann")
    shelf, book = KeyShelf(directory / "keys", budget=4096), QuotaBook(directory / "issued.db")
    issuer = Issuer(shelf, book, lambda: credentials, IssuerLimits(10), now=time.time)
    key = next(key for key in issuer.current_keys() if key.issues_from <= time.time() < key.issues_until)
    pending = request_tokens(key.encoded, challenge_between(ISSUER, GATEWAY), 1)
    token = pending.finish(encode_answers(issuer.issue(api_key, list(pending.requests))))[0]
    book.close()
    return authorization(token)


@pytest.fixture(scope="module")
def issuer_key(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A key as `cloister issuer --show-keys` prints it."""
    key = KeyShelf(tmp_path_factory.mktemp("shelf"), budget=4096).turn(time.time())[0]
    encoded = base64.b64encode(key.encoded).decode()
    return {"url": ISSUER, "token_key": encoded, "not_before": 0, "taken_until": 2**33, "budget": 1}


def write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def test_relay_and_gateway_carry_a_request_and_end_when_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_key(tmp_path / "issuer.key", PrivateKey.generate("issuer.example", Kind.NOTE))
    shelf = ["--state", str(tmp_path / "issuer"), "--key", str(tmp_path / "issuer.key")]
    with pytest.raises(SystemExit, match="0"):
        main(["issuer", "--url", ISSUER, *shelf, "--show-keys"])
    (tmp_path / "issuer.json").write_text(capfd.readouterr().out)
    write_secret(tmp_path / "relay.secret", f"# this relay's\n{RELAY_SECRET}\n")
    write_secret(tmp_path / "relays", f"{'a' * 32}\n{RELAY_SECRET}\n")
    write_secret(tmp_path / "gateway.secret", NODE_SECRET)
    receiver = Receiver(KeyRing(time.monotonic()), ReplayCache(NODE_KEY_LIFE_S))
    record = Recorder(node_app(Inner(), NodeConfig(gateway_secret=NODE_SECRET), LocalUnsealer(receiver), Lifespan(None)))
    with (
        serve(record) as node_url,
        running(
            *("gateway", "--url", GATEWAY, "--node", node_url, "--spend-store", f"sqlite:///{tmp_path}/spent.db"),
            *("--relay-secrets", str(tmp_path / "relays"), "--issuer-keys", str(tmp_path / "issuer.json")),
            *("--node-secret", str(tmp_path / "gateway.secret")),
        ) as gateway_url,
        running("relay", "--gateway", gateway_url, "--secret-file", str(tmp_path / "relay.secret")) as relay_url,
    ):
        keys = parse_keys(http.get(f"{relay_url}/.well-known/ohttp-gateway").content)[0]
        assert http.get(f"{relay_url}/.well-known/cloister/epoch").status_code == 404, "it was given no log"
        reply, opening = ask(relay_url, keys, receiver.ring, "/v1/echo", make_token(tmp_path / "issuer"))
        opening.feed(reply.content)
        opening.close()
        assert opening.content == ANSWER + b"hello", opening.refusal
        with pytest.raises(httpx.RemoteProtocolError):  # about which no line is written either
            ask(relay_url, keys, receiver.ring, "/v1/break", make_token(tmp_path / "issuer"))


def ask(url: str, keys: KeyConfiguration, node_keys: KeyRing, path: str, token: str) -> tuple[httpx.Response, Opening]:
    request = HttpRequest(RequestHead("POST", "https", "localhost", path), b"hello")
    inner, inner_exchange = seal_chunked_request(node_keys.current.configuration, encode_request(request))
    fields = (
        (b"authorization", token.encode()),
        (b"content-type", CHUNKED.request_type.encode()),
        (b"date", formatdate(usegmt=True).encode()),
    )
    head = RequestHead("POST", "https", "gateway.example", f"/nodes/{hashlib.sha256(node_keys.publish()).hexdigest()}", fields)
    outer, exchange = seal_chunked_request(keys, encode_request(HttpRequest(head, inner)))
    reply = http.post(url, content=outer, headers={"content-type": CHUNKED.request_type})
    return reply, Opening(exchange, inner_exchange)


def test_a_gateway_with_a_log_publishes_an_epoch_that_clients_believe(tmp_path: Path, issuer_key: dict[str, object]) -> None:
    world = World(tmp_path, now=time.time())
    place = Place(world)
    write_key(tmp_path / "log.key", world.log_key)
    (tmp_path / "trust.json").write_bytes(encode_trust(world.trust))
    (tmp_path / "issuer.json").write_text(json.dumps([issuer_key]))
    write_secret(tmp_path / "relays", RELAY_SECRET)
    with ExitStack() as stack:
        witnesses = [f"{w.key.name}={stack.enter_context(serve(witness_app(w)))}" for w in world.witnesses[:2]]
        node_url = stack.enter_context(serve(place.app))
        gateway_url = stack.enter_context(
            running(
                *("gateway", "--url", GATEWAY, "--node", node_url, "--spend-store", f"sqlite:///{tmp_path}/spent.db"),
                *("--relay-secrets", str(tmp_path / "relays"), "--issuer-keys", str(tmp_path / "issuer.json")),
                *("--log", str(world.log.directory), "--log-key", str(tmp_path / "log.key")),
                *("--trust", str(tmp_path / "trust.json"), "--release", world.release.digest),
                *(word for witness in witnesses for word in ("--witness", witness)),
                says=("published epoch 1",),
            )
        )
        give_up_s = time.monotonic() + 300
        while (reply := http.get(f"{gateway_url}/.well-known/cloister/epoch")).status_code != 200:
            assert time.monotonic() < give_up_s, "no epoch was published"
            time.sleep(0.1)
        epoch = world.believe(reply.content).epoch
        assert epoch.gateway.keys == http.get(f"{gateway_url}/.well-known/ohttp-gateway").content
        assert [node.node_id for node in epoch.nodes] == [place.name]
        evidence = http.get(f"{gateway_url}/.well-known/cloister/evidence/{epoch.nodes[0].evidence_sha256}")
        assert hashlib.sha256(evidence.content).hexdigest() == epoch.nodes[0].evidence_sha256
        assert http.get(f"{gateway_url}/.well-known/cloister/log/checkpoint").text in reply.json()["checkpoint"]
        (world.log.directory / "log.key").write_text("put here by mistake")
        for path in ("../log.key", "%2e%2e/log.key", "log.key", "tile/0/../../log.key", "tile", ""):
            assert http.get(f"{gateway_url}/.well-known/cloister/log/{path}").status_code == 404
        served = http.get(f"{gateway_url}/.well-known/cloister/log/tile/entries/000.p/2")
        assert served.content == (world.log.directory / "tile" / "entries" / "000.p" / "2").read_bytes()


def test_a_gateway_whose_spend_store_is_older_than_its_log_does_not_start(
    tmp_path: Path, issuer_key: dict[str, object], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that were spent since the copy would pay again."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, now=time.time())
    newest = world.believe(world.publish().bundle).epoch.epoch
    write_key(tmp_path / "log.key", world.log_key)
    (tmp_path / "trust.json").write_bytes(encode_trust(world.trust))
    (tmp_path / "issuer.json").write_text(json.dumps([issuer_key]))
    write_secret(tmp_path / "relays", RELAY_SECRET)
    command = [
        *("gateway", "--url", GATEWAY, "--node", "http://127.0.0.1:1", "--spend-store", "sqlite:///spent.db", "--port", "0"),
        *("--relay-secrets", "relays", "--issuer-keys", "issuer.json", "--log", str(world.log.directory)),
        *("--log-key", "log.key", "--trust", "trust.json", "--release", world.release.digest),
        *(word for witness in world.witnesses[:2] for word in ("--witness", f"{witness.key.name}=http://127.0.0.1:1")),
    ]

    def end_at_once(_app: object, listener: socket.socket, **_: object) -> int:
        listener.close()
        return 0

    monkeypatch.setattr("cloister.private.program.run_program", end_at_once)

    def start(*more: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as left:
            main([*command, *more])
        return left.value.code, capfd.readouterr().err

    for more in ((), ("--accept-store", str(newest + 1))):
        status, said = start(*more)
        assert (status, f"does not know epoch {newest}" in said) == (1, True)
    assert start("--accept-store", str(newest)) == (
        0,
        f"warning: tokens that were spent before epoch {newest} may be spent once more: --accept-store\n",
    )
    assert start() == (0, "")  # it knows that epoch now


GATEWAY_OPTIONS = {
    "--url": GATEWAY,
    "--node": "http://127.0.0.1:1",
    "--spend-store": "sqlite:///spent.db",
    "--relay-secrets": "good.secret",
    "--issuer-keys": "keys.json",
}
RELAY_OPTIONS = {"--gateway": "http://127.0.0.1:1", "--secret-file": "good.secret"}


@pytest.mark.parametrize(
    ("program", "changed", "words"),
    [
        ("relay", {"--gateway": "gateway.example"}, "must be a URL such as https://"),
        ("relay", {"--secret-file": "missing"}, "openssl rand -hex 32"),
        ("relay", {"--secret-file": "short.secret"}, "of 32 characters or more"),
        ("relay", {"--secret-file": "two.secret"}, "must have one secret"),
        ("relay", {"--secret-file": "open.secret"}, "other users can open open.secret, which has a secret; close it with"),
        ("gateway", {"--node-secret": "open.secret"}, "close it with: chmod 600 open.secret"),
        ("relay", {"--tls-cert": "cert.pem"}, "go together"),
        ("relay", {"--gateway-ca": "good.secret"}, "no certificates in PEM"),
        ("gateway", {"--node": "file:///etc/passwd"}, "must be a URL such as https://"),
        ("gateway", {"--issuer-keys": "missing"}, "cloister issuer --show-keys"),
        ("gateway", {"--issuer-keys": "good.secret"}, "is not what cloister issuer --show-keys prints"),
        ("gateway", {"--issuer-keys": "none.json"}, "has no key"),
        ("gateway", {"--issuer-keys": "broken.json"}, "an issuer's key cannot be used"),
        ("gateway", {"--spend-store": "mysql://x"}, "a spend store is sqlite:///FILE"),
        ("gateway", {"--log": "log"}, "a log needs --log-key"),
        ("gateway", {"--trust": "trust.json"}, "did not sign the keys in the file of issuer keys"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    program: str,
    changed: dict[str, str],
    words: str,
    issuer_key: dict[str, object],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    log, *witnesses, issuer = (PrivateKey.generate(f"{n}.example", Kind(kind)).public for n, kind in enumerate((1, 4, 4, 1)))
    trust_of_somebody = Trust(log, tuple(witnesses), (log,), IssuerIdentity(ISSUER, issuer))
    for name, content in {
        "good.secret": "x" * 32,
        "short.secret": "x" * 31,
        "two.secret": "x" * 32 + "\n" + "y" * 32,
        "open.secret": "x" * 32,
        "keys.json": json.dumps([issuer_key]),
        "none.json": "[]",
        "broken.json": json.dumps([{**issuer_key, "token_key": "AAAA"}]),
        "trust.json": encode_trust(trust_of_somebody).decode(),
    }.items():
        write_secret(tmp_path / name, content)
    (tmp_path / "open.secret").chmod(0o640)
    options = {**(RELAY_OPTIONS if program == "relay" else GATEWAY_OPTIONS), **changed}
    with pytest.raises(SystemExit) as left:
        main([program, *(word for option in options.items() for word in option)])
    assert left.value.code == 1
    assert words in " ".join(capfd.readouterr().err.split())


def test_nothing_is_added_to_an_older_copy_of_a_log_if_its_witnesses_are_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, now=time.time())
    write_key(tmp_path / "log.key", world.log_key)
    (tmp_path / "trust.json").write_bytes(encode_trust(world.trust))
    (tmp_path / "new.entry").write_bytes(b"an entry")
    log, copy = world.log.directory, tmp_path / "copy"
    shutil.copytree(log, copy)
    size = world.log.checkpoint()[0].size

    def add(directory: Path, *words: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as left:
            main(["log", "add", str(directory), str(tmp_path / "new.entry"), "--key", str(tmp_path / "log.key"), *words])
        return left.value.code, capfd.readouterr().err

    with ExitStack() as stack:
        named = [f"{w.key.name}={stack.enter_context(serve(witness_app(w)))}" for w in world.witnesses[:2]]
        asked = ("--trust", str(tmp_path / "trust.json"), *(word for each in named for word in ("--witness", each)))
        assert add(log, *asked)[0] == add(log, *asked)[0] == 0  # the second one has the first one cosigned
        assert world.log.checkpoint()[0].size == size + 2
        status, error = add(copy, *asked)
        assert status == 1
        assert "If this log is an older copy, restore the newest" in error
        for words, reason in ((asked[:2], "give --trust and --witness"), (asked[:4], "asks for 2 witnesses")):
            status, error = add(copy, *words)
            assert status == 1
            assert reason in error
    status, error = add(log, *asked)  # they are gone
    assert status == 1
    assert "too few of its witnesses" in error
    assert Log(copy, world.log_key).checkpoint()[0].size == size, "nothing was added"
    assert world.log.checkpoint()[0].size == size + 2
