"""The issuer's program, over HTTP: directory, single requests and batches, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from cloister.cli import main
from cloister.policy.credentials import Credentials
from cloister.policy.keyfile import write_credentials
from cloister.private.issuer import issuer_app, list_issuers, read_issuer_keys
from cloister.trust.tokens import authorization, decode_directory, request_tokens
from cloister.trust.tokens.issuance import (
    BATCH_REQUEST_TYPE,
    BATCH_RESPONSE_TYPE,
    DIRECTORY_PATH,
    DIRECTORY_TYPE,
    REQUEST_TYPE,
    RESPONSE_TYPE,
)
from cloister.trust.tokens.issuer_keys import AHEAD_S, EPOCH_S, KeyShelf
from cloister.trust.transparency.files import write_key
from cloister.trust.transparency.issuer_keys import IssuerIdentity
from cloister.trust.transparency.note import Kind, PrivateKey
from tests.token_service import CHALLENGE, TokenService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TokenService]:
    service = TokenService(tmp_path, tokens_per_epoch=20)
    yield service
    service.close()


@pytest.fixture
def client(service: TokenService) -> Iterator[TestClient]:
    with TestClient(issuer_app(service.issuer, "https://issuer.example/", service.identity, service.clock)) as client:
        yield client


def headers(service: TokenService, kind: str) -> dict[str, str]:
    return {"authorization": f"Bearer {service.api_key}", "content-type": kind}


def test_a_client_goes_from_the_directory_to_a_spent_token(service: TokenService, client: TestClient) -> None:
    directory = client.get(DIRECTORY_PATH)
    assert directory.headers["content-type"] == DIRECTORY_TYPE
    uri, keys = decode_directory(directory.content)
    assert uri == "https://issuer.example/token-request"
    pending = request_tokens(keys[0].encoded_key, CHALLENGE, 4)
    reply = client.post("/token-request", content=pending.encode(), headers=headers(service, BATCH_REQUEST_TYPE))
    assert (reply.status_code, reply.headers["content-type"]) == (200, BATCH_RESPONSE_TYPE)
    for token in pending.finish(reply.content):
        assert service.redeemer.redeem(authorization(token)).budget == 512


def test_a_client_of_rfc_9578_alone_gets_one_token(service: TokenService, client: TestClient) -> None:
    pending = request_tokens(service.signing_key(), CHALLENGE, 1)
    reply = client.post("/token-request", content=pending.requests[0].encode(), headers=headers(service, REQUEST_TYPE))
    assert (reply.status_code, reply.headers["content-type"]) == (200, RESPONSE_TYPE)
    (token,) = pending.finish_each([reply.content])
    service.redeemer.redeem(authorization(token))


def test_refusals_have_their_status_and_cost_no_quota(service: TokenService, client: TestClient) -> None:
    body = request_tokens(service.signing_key(), CHALLENGE, 20).encode()
    good = headers(service, BATCH_REQUEST_TYPE)
    wrong_key = request_tokens(service.signing_key(), CHALLENGE, 1).requests[0].encode()
    wrong_key = wrong_key[:2] + bytes([wrong_key[2] ^ 1]) + wrong_key[3:]
    for status, sent, given in (
        (401, body, {"content-type": BATCH_REQUEST_TYPE}),
        (401, body, {**good, "authorization": "Bearer clo-wrong"}),
        (401, body, {**good, "authorization": f"Basic {service.api_key}"}),
        (415, body, {**good, "content-type": "application/json"}),
        (422, body[:-1], good),
        (422, b"", good),
        (422, body, {**good, "content-type": REQUEST_TYPE}),
        (422, wrong_key, {**good, "content-type": REQUEST_TYPE}),
        (413, body * 2 + bytes(30_000), good),
    ):
        reply = client.post("/token-request", content=sent, headers=given)
        assert reply.status_code == status
        assert service.api_key not in reply.text
        assert reply.json()["error"]["message"]
    assert client.post("/token-request", content=body, headers=good).status_code == 200
    over = client.post("/token-request", content=request_tokens(service.signing_key(), CHALLENGE, 1).encode(), headers=good)
    assert over.status_code == 429
    assert int(over.headers["retry-after"]) > 86400


def test_a_fault_of_the_machine_is_an_error_and_no_signature(
    service: TokenService, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.trust.tokens.blind_rsa._power", lambda private, base: 12345)
    reply = client.post(
        "/token-request",
        content=request_tokens(service.signing_key(), CHALLENGE, 1).encode(),
        headers=headers(service, BATCH_REQUEST_TYPE),
    )
    assert reply.status_code == 500
    assert reply.headers["content-type"] == "application/json"


def test_broken_keys_are_told_to_the_operator_and_not_to_the_client(
    service: TokenService, client: TestClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (tmp_path / "keys").iterdir():
        path.write_text("{}")
    service.clock.now += 3600
    reply = client.get(DIRECTORY_PATH)
    assert reply.status_code == 500
    assert str(tmp_path) not in reply.text
    assert str(tmp_path) in caplog.text


def test_the_verb_serves_writes_nothing_of_a_request_and_keeps_its_keys(tmp_path: Path) -> None:
    credentials, api_key = Credentials.empty().add("ann")
    write_credentials(tmp_path / "keys.json", credentials)
    identity = PrivateKey.generate("issuer.example", Kind.NOTE)
    write_key(tmp_path / "issuer.key", identity)
    verb = [
        sys.executable,
        "-m",
        "cloister.cli",
        "issuer",
        "--url",
        "http://127.0.0.1:8003",
        "--state",
        str(tmp_path / "state"),
        "--key",
        str(tmp_path / "issuer.key"),
    ]
    process = subprocess.Popen(
        [*verb, "--api-keys", str(tmp_path / "keys.json"), "--port", "0", "--token-budget", "77"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert found is not None, first
        _, keys = decode_directory(httpx.get(found[0] + DIRECTORY_PATH, timeout=300).content)
        pending = request_tokens(keys[0].encoded_key, CHALLENGE, 2)
        sent = {"authorization": f"Bearer {api_key}", "content-type": BATCH_REQUEST_TYPE}
        reply = httpx.post(found[0] + "/token-request", content=pending.encode(), headers=sent, timeout=300)
        assert len(pending.finish(reply.content)) == 2
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, rest) == (0, "")
    shown = json.loads(subprocess.run([*verb, "--show-keys"], check=True, capture_output=True, timeout=300).stdout)
    assert {entry["budget"] for entry in shown} == {77}
    assert {entry["taken_until"] for entry in shown} == {key.taken_until for key in keys}
    (tmp_path / "shown.json").write_text(json.dumps(shown))
    known = IssuerIdentity("http://127.0.0.1", identity.public)
    for entry in list_issuers(read_issuer_keys(tmp_path / "shown.json"), time.time()):
        assert entry.budget == 77
        assert replace(known, url=entry.url).has_signed(entry)


def test_an_issuer_that_stood_still_goes_on_if_its_operator_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_key(tmp_path / "issuer.key", PrivateKey.generate("issuer.example", Kind.NOTE))
    now = time.time()
    KeyShelf(tmp_path / "state" / "keys", budget=1).turn(now - 2 * EPOCH_S)
    newest = int(now + AHEAD_S) // EPOCH_S
    verb = ["issuer", "--url", "http://127.0.0.1", "--key", str(tmp_path / "issuer.key"), "--state", str(tmp_path / "state")]

    def show(*more: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*verb, *more, "--show-keys"])
        return left.value.code, *capfd.readouterr()

    for more in ((), ("--accept-keys", str(newest - 1))):
        status, out, err = show(*more)
        assert (status, out) == (1, "")
        assert f"--accept-keys {newest} makes one" in err
    status, out, err = show("--accept-keys", str(newest))
    assert (status, max(key["not_before"] for key in json.loads(out)) // EPOCH_S) == (0, newest)
    assert f"warning: a new key for week {newest} is made" in err
    assert show("--accept-keys", str(newest)) == show() == (0, out, "")


def test_a_file_of_keys_is_replaced_whole_or_not_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_key(tmp_path / "issuer.key", PrivateKey.generate("issuer.example", Kind.NOTE))
    now, written = time.time(), tmp_path / "keys.json"
    KeyShelf(tmp_path / "state" / "keys", budget=1).turn(now - 2 * EPOCH_S)
    verb = ["issuer", "--url", "http://127.0.0.1", "--key", str(tmp_path / "issuer.key"), "--state", str(tmp_path / "state")]

    def run(*more: str) -> object:
        with pytest.raises(SystemExit) as left:
            main([*verb, "--out", str(written), *more])
        return left.value.code

    written.write_text("what a gateway reads")
    assert run("--show-keys") == 1
    assert run() == 1
    assert "give both" in capfd.readouterr().err
    assert written.read_text() == "what a gateway reads"
    assert run("--show-keys", "--accept-keys", str(int(now + AHEAD_S) // EPOCH_S)) == 0
    assert capfd.readouterr().out == ""
    assert read_issuer_keys(written)
