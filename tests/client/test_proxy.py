"""`cloister proxy` at a real socket, in front of a whole private cloud."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import openai
import pytest
from starlette.types import ASGIApp

from cloister.cli.proxy import _serve as serve_proxy
from cloister.client import AsyncSealedTransport, Session
from cloister.client.proxy import Proxy, proxy_app
from cloister.client.receipts import ReceiptFolder
from cloister.client.verify_receipt import Shown, verify_receipt
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.receipts import read_jws, read_receipt
from cloister.types.errors import ConfigError
from tests.client.test_sdk import ASK, LONG, MODEL
from tests.loopback import LoopbackNetwork
from tests.private.real_server import RealServer
from tests.sealed_cloud import LoopbackCloud


class Local:
    """A proxy that serves.

    Attributes:
        told: what it printed.
    """

    def __init__(self, session: Session) -> None:
        self.told: list[str] = []
        self._transport = AsyncSealedTransport(session)
        self._network = LoopbackNetwork()
        self.url = self._network.open("http://proxy.test", proxy_app(Proxy(session, self._transport, self.told.append)))

    def close(self) -> None:
        self._network.run(self._transport.aclose())
        self._network.close()


@pytest.fixture(scope="module")
def local(cloud: LoopbackCloud) -> Iterator[Local]:
    local = Local(cloud.session())
    yield local
    local.close()


@pytest.fixture
def client(local: Local) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=local.url, timeout=300) as client:
        yield client


def test_any_program_gets_answers_without_knowing_of_seals(local: Local) -> None:
    with openai.OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        stream = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_what_was_verified_is_told_once_for_each_epoch(local: Local, client: httpx.Client) -> None:
    client.get("/v1/models")
    client.get("/v1/models")
    assert sum(line.startswith("Epoch ") for line in local.told) == 1
    assert sum(line.startswith("Node ") for line in local.told) == 2
    assert any("NOT PROVED" in line and "no hardware" in line for line in local.told)


@pytest.mark.parametrize("accept", [False, True])
def test_the_last_line_says_whether_every_request_will_be_refused(
    cloud: LoopbackCloud, accept: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[ASGIApp] = []
    monkeypatch.setattr("cloister.private.program.run_program", lambda app, listener: apps.append(app) or listener.close() or 0)
    session = cloud.session(policy=AttestationPolicy(accept_software=accept))
    assert serve_proxy(session, "127.0.0.1", 0) == 0
    *_, before, last = capsys.readouterr().out.splitlines()
    if accept:
        assert last.startswith("Serving on ")
    else:
        assert before.startswith("Serving on ")
        assert last.startswith("No node is acceptable: every request will be refused, and nothing is sent.")
    assert len(apps) == 1


def test_nothing_that_was_asked_is_told(local: Local, client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json={"model": MODEL, "messages": ASK, "max_tokens": 4})
    assert not any("list" in line.split() or "Python" in line for line in local.told)


def test_tokens_arrive_while_the_answer_is_being_written(
    cloud: LoopbackCloud, server: RealServer, client: httpx.Client
) -> None:
    body = {"model": MODEL, "messages": LONG, "max_tokens": 30, "stream": True, "ignore_eos": True}
    with server.standing_still(after_steps=20), client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {"))
        assert next(text for chunk in chunks if (text := chunk["choices"][0]["delta"].get("content")))
        assert cloud.num_open == 1


def test_who_hangs_up_ends_the_answer_at_the_node(cloud: LoopbackCloud, client: httpx.Client) -> None:
    body = {"model": MODEL, "messages": LONG, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_raw())
    give_up_at = time.monotonic() + 300
    while cloud.num_open and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert cloud.num_open == 0


class WaitingTransport(AsyncSealedTransport):
    """To a node that does not begin its answer.

    Attributes:
        state: what becomes of the request.
    """

    state = ""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.state = "asked"
        try:
            await anyio.sleep(120)
        except BaseException:
            self.state = "given up"
            raise
        raise AssertionError("nobody gave up")


def test_who_hangs_up_before_an_answer_begins_ends_the_request_too(cloud: LoopbackCloud) -> None:
    session = cloud.session()
    network, transport = LoopbackNetwork(), WaitingTransport(session)

    def wait_for(state: str) -> None:
        give_up_at = time.monotonic() + 300
        while transport.state != state and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert transport.state == state

    try:
        url = httpx.URL(network.open("http://waiting.test", proxy_app(Proxy(session, transport, lambda line: None))))
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", body=json.dumps({"model": MODEL, "messages": ASK}))
        wait_for("asked")
        connection.close()
        wait_for("given up")
    finally:
        network.run(transport.aclose())
        network.close()


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"host": "evil.example"}])
def test_pages_of_a_browser_are_refused(client: httpx.Client, cloud: LoopbackCloud, headers: dict[str, str]) -> None:
    before = cloud.num_asked
    response = client.post("/v1/chat/completions", json={"model": MODEL, "messages": ASK}, headers=headers)
    assert response.status_code == 403
    assert cloud.num_asked == before


def test_a_refusal_is_an_error_that_sdks_understand(cloud: LoopbackCloud) -> None:
    strict = Local(cloud.session(policy=AttestationPolicy()))
    try:
        with (
            openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none") as client,
            pytest.raises(openai.APIStatusError, match="no hardware vouches") as caught,
        ):
            client.models.list()
        assert caught.value.code == "evidence_refused"
        assert any("REFUSED; nothing is sent to it" in line for line in strict.told)
    finally:
        strict.close()


def test_a_body_beyond_the_largest_bucket_is_refused(local: Local) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(local.url).port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", body=bytes(17 << 20))
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "request_too_large"
    except BrokenPipeError:
        pytest.fail("the refusal did not reach the program")
    finally:
        connection.close()


def test_an_api_key_comes_from_a_file_and_never_from_the_command_line(tmp_path: Path) -> None:
    from cloister.cli.proxy import read_api_key

    (tmp_path / "key").write_text("sk-abc\n")
    assert read_api_key(tmp_path / "key") == "sk-abc"
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="cloister keys add"):
        read_api_key(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot read"):
        read_api_key(tmp_path / "missing")


def test_a_proxy_keeps_receipts_of_answers_that_were_read_and_of_none_that_was_left(
    cloud: LoopbackCloud, tmp_path: Path
) -> None:
    local = Local(cloud.session(receipts=ReceiptFolder(tmp_path)))
    try:
        body = {"model": MODEL, "messages": ASK, "max_tokens": 8, "stream": True}
        with httpx.Client(base_url=local.url, timeout=300) as client:
            answer = client.post("/v1/chat/completions", json=body)
            (file,) = tmp_path.iterdir()
            with client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 900, "ignore_eos": True}) as left:
                next(left.iter_raw())
            refused = client.post("/v1/chat/completions", json={**body, "model": "another"})
    finally:
        local.close()
    receipt = read_receipt(file.read_bytes())
    policy = AttestationPolicy(accept_software=True)
    shown, other = Shown(answer.request.content, answer.content), Shown(refused.request.content)
    assert verify_receipt(receipt, shown, cloud.trust, policy).findings.accepted
    assert not verify_receipt(receipt, other, cloud.trust, policy).findings.accepted
    assert refused.status_code == 404
    assert sorted(_status(kept) for kept in tmp_path.iterdir()) == [200, 404]
    assert not any(b"Python" in kept.read_bytes() for kept in tmp_path.iterdir())


def _status(file: Path) -> int:
    return read_jws(read_receipt(file.read_bytes()).jws)[0].status


def test_a_relay_without_a_scheme_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"the address 127\.0\.0\.1:9007 lacks its scheme; give http://127\.0\.0\.1:9007"):
        Session("127.0.0.1:9007", trust=tmp_path / "trust.json", api_key="clo-x")
