"""Makes the file docs/vectors/sealed.json, always alike: `python -m tests.conformance.make_vectors > docs/vectors/sealed.json`.

Each vector is one exchange with a node that answers as Binary HTTP: keys, request, sealed request, sealed answer, and what the
answer says. Time is virtual. The private keys are published ones. OpenSSL draws the randomness of ML-KEM itself, so the
encapsulated key of X-Wing is that of the official vector.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cloister.trust.sealing import (
    CHUNKED,
    DRAFT,
    SUITES,
    BinaryHttpWriter,
    ChunkSealer,
    Context,
    Header,
    HttpRequest,
    KemPrivateKey,
    KeyConfiguration,
    OhttpContext,
    RequestHead,
    ResponseHead,
    ResponseSealer,
    bucket_bytes,
    decode_response,
    encode_request,
)
from cloister.trust.sealing.hpke import derive_secrets
from cloister.trust.sealing.kem import X25519Key, XWingKey
from cloister.trust.shape import BINARY_HTTP, FRAMING_FIELD, BinaryHttpShaper, shape_of

XWING_VECTORS = Path(__file__).parents[1] / "vectors/hpke/xwing.json"
EVENTS = [f'data: {{"choices":[{{"delta":{{"content":"{word}"}}}}]}}\n\n'.encode() for word in ("A ", "cloister", " is quiet.")]
STREAM, WHOLE = b"text/event-stream", b"application/json"
FLUSH_EVERY_S = 0.05


def main() -> None:
    json.dump(make_vectors(), sys.stdout, indent=1)
    sys.stdout.write("\n")


def make_vectors() -> dict[str, Any]:
    """Returns the file's content."""
    return {
        "what": "exchanges with a node, sealed as the sealed client does it; byte strings are hex",
        "standards": ["RFC 9180", "RFC 9292", "RFC 9458", DRAFT, "draft-ietf-hpke-pq", "draft-connolly-cfrg-xwing-kem"],
        "vectors": list(_vectors()),
    }


def _vectors() -> Iterator[dict[str, Any]]:
    for profile, kind in (("private", STREAM), ("private", WHOLE), ("paranoid", STREAM)):
        yield _exchange(f"X25519, {profile}, {kind.decode()}", *_x25519(), profile=profile, kind=kind)
    yield _exchange("X-Wing, private, text/event-stream", *_xwing(), profile="private", kind=STREAM)


def _x25519() -> tuple[KemPrivateKey, bytes, dict[str, str]]:
    """A key, an encapsulated key, and what both are made of."""
    secret, ephemeral = (hashlib.sha256(b"cloister vector: " + name).digest() for name in (b"recipient", b"ephemeral"))
    enc = X25519PrivateKey.from_private_bytes(ephemeral).public_key().public_bytes_raw()
    made_of = {"recipient_private_key": secret.hex(), "ephemeral_private_key": ephemeral.hex()}
    return X25519Key(X25519PrivateKey.from_private_bytes(secret)), enc, made_of


def _xwing() -> tuple[KemPrivateKey, bytes, dict[str, str]]:
    vector = json.loads(XWING_VECTORS.read_text())[0]
    seeds = hashlib.shake_256(bytes.fromhex(vector["sk"])).digest(96)
    key = XWingKey(MLKEM768PrivateKey.from_seed_bytes(seeds[:64]), X25519PrivateKey.from_private_bytes(seeds[64:]))
    return key, bytes.fromhex(vector["ct"]), {"recipient_private_key": vector["sk"]}


def _exchange(
    name: str, key: KemPrivateKey, enc: bytes, made_of: dict[str, str], *, profile: str, kind: bytes
) -> dict[str, Any]:
    configuration = KeyConfiguration(1, key.public_bytes(), SUITES, key.kem_id)
    header, shared_secret = Header(1, key.kem_id, SUITES[0], enc), key.decapsulate(enc)
    secrets = derive_secrets(key.kem_id, SUITES[0], shared_secret, header.info(CHUNKED))
    content = json.dumps({"messages": [{"role": "user", "content": "What is a cloister?"}], "stream": kind == STREAM}).encode()
    fields = ((b"content-type", b"application/json"), (FRAMING_FIELD, BINARY_HTTP.encode()))
    request = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/chat/completions", fields), content)
    message = encode_request(request, padded_to=bucket_bytes(len(encode_request(request))))
    frames = _answer(profile, kind)
    nonce = hashlib.sha256(b"cloister vector: nonce").digest()[:16]
    sealer = ResponseSealer(OhttpContext(CHUNKED, header, Context(secrets)), nonce=nonce)
    response = decode_response(b"".join(frames))
    return {
        "name": name,
        "profile": profile,
        "kem_id": key.kem_id,
        **made_of,
        "key_configuration": configuration.encode().hex(),
        "shared_secret": shared_secret.hex(),
        "request": message.hex(),
        "encapsulated_request": ChunkSealer(Context(secrets), header.encode()).finish(message).hex(),
        "num_frames": len(frames),
        "encapsulated_response": b"".join([*map(sealer.seal, frames[:-1]), sealer.finish(frames[-1])]).hex(),
        "status": response.head.status,
        "content_type": kind.decode(),
        "num_informational": len(response.informational),
        "content": response.content.hex(),
        "said": [event.decode().strip() for event in EVENTS] if kind == STREAM else [b"".join(EVENTS).decode().strip()],
    }


def _answer(profile: str, kind: bytes) -> list[bytes]:
    """The frames of an answer whose events come `FLUSH_EVERY_S` apart, or all at once where it is no stream."""
    shape = shape_of(profile)
    assert shape is not None, "the profile has a shape"
    shaper, writer, frames = BinaryHttpShaper(shape, 0.0), BinaryHttpWriter(), list[bytes]()

    def send_until(now_s: float) -> None:
        while (due_s := shaper.due_s) is not None and due_s <= now_s:
            frame = shaper.take(due_s)
            assert frame is not None
            frames.append(frame.data)

    shaper.head(writer.head(ResponseHead(200, ((b"content-type", kind),))))
    now_s = 0.0
    for flush in EVENTS if kind == STREAM else [b"".join(EVENTS)]:
        now_s += FLUSH_EVERY_S
        send_until(now_s)
        shaper.write(writer.content(flush), now_s)
    shaper.write(writer.end(), now_s, last=True)
    while not shaper.is_over:
        send_until(shaper.due_s or now_s)
    return frames


if __name__ == "__main__":
    main()
