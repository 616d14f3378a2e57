"""Receipts from request to folder: the client takes one only if the attested key signed just this request and answer."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.client import SealedTransport
from cloister.client.receipts import ReceiptFolder
from cloister.client.verify_receipt import Shown, verify_receipt
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.receipts import Receipt, read_jws, read_receipt
from cloister.types.errors import ConfigError
from tests.client.world import NODES, World
from tests.sealed_cloud import LoopbackCloud

SOFTWARE = AttestationPolicy(accept_software=True)
TARGET = "/v1/chat/completions"


def ask(world: World, receipts: Callable[[Receipt], None] | None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with world.client(world.session(receipts=receipts)) as client:
            return await client.post(TARGET, json={"mark": "a secret"})

    return asyncio.run(run())


def test_who_asks_gets_a_receipt_that_the_whole_chain_stands_behind(world: World) -> None:
    kept: list[Receipt] = []
    response = ask(world, kept.append)
    (receipt,) = kept
    assert response.extensions["cloister"]["receipt"].receipt is receipt
    shown = Shown(response.request.content, response.content, "POST", TARGET)
    proof = verify_receipt(receipt, shown, world.cloud.trust, SOFTWARE)
    assert [(step.slug, step.text) for step in proof.findings if step.outcome == "failed"] == []
    assert {"signature", "evidence", "profile", "epoch", "listed", "key", "request", "answer"} <= {
        s.slug for s in proof.findings
    }


def test_nobody_gets_a_receipt_who_did_not_ask(world: World) -> None:
    response = ask(world, None)
    assert response.status_code == 200
    assert response.extensions["cloister"]["receipt"] is None


def test_a_receipt_tells_nothing_of_the_texts_without_its_salt_and_no_two_are_alike(world: World) -> None:
    kept: list[Receipt] = []
    for _ in range(2):
        ask(world, kept.append)
    first, second = (read_jws(receipt.jws)[0] for receipt in kept)
    assert (first.request, first.answer) != (second.request, second.answer)
    assert b"a secret" not in kept[0].encode()


def test_a_folder_keeps_receipts_that_only_their_owner_can_read(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "receipts"
    ask(world, ReceiptFolder(folder))
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_receipt(file.read_bytes()).bundle


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        ReceiptFolder(tmp_path / "file" / "receipts")


def test_a_node_that_signs_with_another_key_is_told_of_and_the_request_is_not_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Ed25519PrivateKey.generate()
    for node in world.cloud.nodes.values():
        monkeypatch.setattr(node.ring, "find_receipt_key", lambda key_id, now_s: other)
    kept: list[Receipt] = []
    with pytest.raises(httpx.RemoteProtocolError, match="not one of this node"):
        ask(world, kept.append)
    assert kept == []
    assert world.wire.sent == 1


def test_receipts_go_on_in_the_next_epoch_with_its_own_evidence(world: World) -> None:
    kept: list[Receipt] = []

    async def run() -> None:
        async with world.client(world.session(receipts=kept.append)) as client:
            for _ in range(2):
                await client.post(TARGET, json={"mark": "m"})
                await world.cloud.enter(NODES)

    asyncio.run(run())
    assert kept[0].bundle != kept[1].bundle
    for receipt in kept:
        assert verify_receipt(receipt, Shown(), world.cloud.trust, SOFTWARE).findings.accepted


def test_a_blocking_client_is_told_too_and_does_not_ask_again(cloud: LoopbackCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Ed25519PrivateKey.generate()
    for node in cloud.nodes.values():
        monkeypatch.setattr(node.ring, "find_receipt_key", lambda key_id, now_s: other)
    before = cloud.num_asked
    with (
        httpx.Client(transport=SealedTransport(cloud.session(receipts=[].append))) as client,
        pytest.raises(httpx.RemoteProtocolError, match="not one of this node"),
    ):
        client.get("http://cloister/v1/models")
    assert cloud.num_asked == before + 1
