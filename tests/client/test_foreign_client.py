"""`examples/foreign_client`, written from the RFCs in another language: it opens our vectors, and asks a node as others do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister.client import SealedTransport
from cloister.trust.tokens import authorization
from tests.conformance.make_vectors import make_vectors
from tests.sealed_cloud import LoopbackCloud

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "docs/vectors/sealed.json"
OLDEST_NODE = 20


def find_node() -> str | None:
    node = shutil.which("node")
    if node is None:
        return None
    version = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=300).stdout
    return node if int(version.removeprefix("v").partition(".")[0] or 0) >= OLDEST_NODE else None


NODE = find_node()
needs_node = pytest.mark.skipif(NODE is None, reason=f"there is no Node {OLDEST_NODE} on this machine")


def run_client(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    client = ROOT / "examples/foreign_client/client.mjs"
    assert NODE is not None
    return subprocess.run([NODE, str(client), *arguments], input=given, capture_output=True, text=True, timeout=300)


def test_the_published_vectors_are_what_this_program_makes() -> None:
    assert json.loads(VECTORS.read_text()) == make_vectors(), (
        "python -m tests.conformance.make_vectors > docs/vectors/sealed.json"
    )


@needs_node
def test_a_foreign_client_seals_and_opens_the_published_vectors() -> None:
    done = run_client("open", str(VECTORS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [vector["name"] for vector in make_vectors()["vectors"]]


@needs_node
@pytest.mark.parametrize("field", ["encapsulated_request", "encapsulated_response", "content", "shared_secret"])
def test_a_foreign_client_refuses_a_vector_that_was_changed(tmp_path: Path, field: str) -> None:
    content = json.loads(VECTORS.read_text())
    vector = content["vectors"][-1]
    vector[field] = vector[field][:-1] + ("0" if vector[field][-1] != "0" else "1")
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    assert run_client("open", str(changed)).returncode == 1


def ask(cloud: LoopbackCloud, body: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Has the foreign client ask; epoch, verification and token are our client's."""
    transport = SealedTransport(cloud.session())
    try:
        ready = transport.prepare()
        assert ready.token is not None
        request = {
            "relay": cloud.relay_url,
            "gateway": ready.epoch.gateway.url,
            "node_keys": ready.node.keys.hex(),
            "authorization": authorization(ready.token),
            "path": "/v1/chat/completions",
            "content": json.dumps(body),
        }
    finally:
        transport.close()
    return run_client("ask", given=json.dumps(request))


def said_by(client: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert client.returncode == 0, client.stderr
    return json.loads(client.stdout)  # type: ignore[no-any-return]


BODY: dict[str, Any] = {
    "model": "cloister-5m",
    "messages": [{"role": "user", "content": "What is a list in Python?"}],
    "max_tokens": 12,
    "temperature": 0,
}


@needs_node
def test_a_foreign_client_is_streamed_the_answer_that_our_client_gets(cloud: LoopbackCloud) -> None:
    with httpx.Client(transport=SealedTransport(cloud.session()), base_url="https://cloister") as client:
        ours = client.post("/v1/chat/completions", json=BODY, timeout=300).json()["choices"][0]["message"]["content"]
    said = said_by(ask(cloud, {**BODY, "stream": True}))
    assert said["status"] == 200
    assert set(said["frames"]) == {512}
    assert said["said"][-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in said["said"][:-1]]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"]) == ours


@needs_node
def test_a_foreign_client_is_told_what_is_wrong_with_its_request(cloud: LoopbackCloud) -> None:
    said = said_by(ask(cloud, {**BODY, "max_tokens": -1}))
    assert said["status"] == 400
    assert "max_tokens" in said["said"][0]
    assert sum(said["frames"]) == 1024
