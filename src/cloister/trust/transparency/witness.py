"""A witness (C2SP tlog-witness) cosigns a checkpoint only if the log extends what it cosigned before; and its clients.

It stores one checkpoint for each log on disk, written before the cosignature is sent, so that a crash cannot make it sign two
histories.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from cloister.trust.transparency.files import locked, write_whole
from cloister.trust.transparency.merkle import EMPTY_ROOT, HASH_BYTES, verify_consistency
from cloister.trust.transparency.note import (
    Checkpoint,
    Kind,
    Note,
    PrivateKey,
    PublicKey,
    Signature,
    cosign,
    cosigned_at,
    open_checkpoint,
    parse_checkpoint,
    parse_note,
    parse_signatures,
)
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.types.errors import ConfigError

MAX_PROOF = 63
MAX_REQUEST_BYTES = 32_768
SIZE_TYPE = "text/x.tlog.size"


@dataclass(frozen=True)
class CosignResponse:
    """A witness's HTTP reply.

    Attributes:
        status: 200 with cosignatures; 409 with its stored size; 400, 403, 404 or 422 with a reason.
        body: text.
        media_type: media type of the body.
    """

    status: int
    body: str
    media_type: str = "text/plain; charset=utf-8"


def encode_request(old: int, proof: Iterable[bytes], note: Note) -> bytes:
    """The body of `add-checkpoint`.

    Args:
        old: size of the checkpoint that the witness has stored.
        proof: consistency proof from there to the checkpoint; empty from size 0.
        note: the checkpoint, signed by its log.
    """
    lines = [f"old {old}", *(base64.b64encode(part).decode() for part in proof)]
    return ("\n".join(lines) + "\n\n" + str(note)).encode()


class Witness:
    """A key, the logs that it witnesses, and the last cosigned checkpoints.

    Attributes:
        key: its verifier key.
    """

    def __init__(self, directory: Path, key: PrivateKey, logs: Iterable[PublicKey]) -> None:
        if key.kind is not Kind.COSIGNATURE:
            raise ConfigError("a witness signs with a key of the kind COSIGNATURE; a log's key cannot be a witness's")
        self.key = key.public
        self._private = key
        self._logs = {log.name: log for log in logs}
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the witness's directory {directory}: {error.strerror}") from None

    def add_checkpoint(self, body: bytes, now: float) -> CosignResponse:
        """Answers a request of a log.

        Args:
            body: the output of `encode_request`.
            now: Unix time in seconds.

        Raises:
            ConfigError: its state cannot be read or written; nothing was cosigned.
        """
        try:
            old, proof, text = _decode_request(body)
            log = self._logs.get(parse_checkpoint(parse_note(text).text).origin)
        except TransparencyError as error:
            return CosignResponse(400, f"{error.message}\n")
        if log is None:
            return CosignResponse(404, "this witness does not watch a log of this origin\n")
        try:
            checkpoint, note = open_checkpoint(text, log)
        except TransparencyError as error:
            return CosignResponse(403, f"{error.message}\n")
        if old > checkpoint.size:
            return CosignResponse(400, "the old size is larger than the checkpoint's\n")
        with locked(self._directory):  # compare and store are atomic: an older checkpoint cannot overwrite a newer one
            return self._judge(old, proof, checkpoint, note, log, int(now))

    def known(self, log: PublicKey) -> Checkpoint:
        """Returns the last cosigned checkpoint of a log; the empty tree if there is none.

        Raises:
            ConfigError: its state was damaged.
        """
        path = self._path(log)
        try:
            return open_checkpoint(path.read_text(), log)[0]
        except FileNotFoundError:
            return Checkpoint(log.name, 0, EMPTY_ROOT)
        except (OSError, UnicodeDecodeError, TransparencyError):
            raise ConfigError(
                f"the witness's state {path} is damaged; restore it, or it could cosign a second history"
            ) from None

    def _judge(
        self, old: int, proof: list[bytes], checkpoint: Checkpoint, note: Note, log: PublicKey, now: int
    ) -> CosignResponse:
        known = self.known(log)
        if old != known.size:
            return CosignResponse(409, f"{known.size}\n", SIZE_TYPE)
        if old == checkpoint.size and checkpoint.root != known.root:
            return CosignResponse(409, f"{known.size}\n", SIZE_TYPE)
        try:
            if old == 0:
                if proof or (checkpoint.size == 0 and checkpoint.root != EMPTY_ROOT):
                    raise TransparencyError(Reason.NOT_CONSISTENT, "a proof from an empty tree is empty")
            else:
                verify_consistency(old, checkpoint.size, known.root, checkpoint.root, proof)
        except TransparencyError as error:
            return CosignResponse(422, f"{error.message}\n")
        write_whole(self._path(log), str(note).encode())
        return CosignResponse(200, str(cosign(note.text, self._private, now)))

    def _path(self, log: PublicKey) -> Path:
        return self._directory / f"{hashlib.sha256(log.name.encode()).hexdigest()}.checkpoint"


def _decode_request(body: bytes) -> tuple[int, list[bytes], str]:
    malformed = TransparencyError(Reason.MALFORMED, "the body is: old SIZE, proof lines, an empty line, a checkpoint")
    if len(body) > MAX_REQUEST_BYTES:
        raise TransparencyError(Reason.TOO_LARGE, f"the body has {MAX_REQUEST_BYTES:,} bytes at most")
    try:
        head, blank, note = body.decode().partition("\n\n")
    except UnicodeDecodeError:
        raise malformed from None
    first, *lines = head.split("\n")
    size = first.removeprefix("old ")
    if (
        not blank
        or len(lines) > MAX_PROOF
        or not size.isascii()
        or not size.isdecimal()
        or len(size) > 16
        or first != f"old {int(size)}"
    ):
        raise malformed
    try:
        proof = [base64.b64decode(line, validate=True) for line in lines]
    except (binascii.Error, ValueError):
        raise malformed from None
    if any(len(part) != HASH_BYTES for part in proof):
        raise malformed
    return int(size), proof, note


# Requests cosignatures from witnesses, over HTTP (C2SP tlog-witness) or in the same process.


DEADLINE_S = 10.0
ATTEMPTS = 3
"""Number of attempts: the first uses the size that was cosigned last; if the witness reports another, the second uses that."""


class HasProofs(Protocol):
    """A log, or a remote reader of one."""

    def prove_consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """The proof that the first `new` leaves begin with the first `old`."""


class SplitViewError(TransparencyError):
    """A witness cosigned another tree of this log."""


class OlderLogError(TransparencyError):
    """A witness says that it cosigned more entries of this log."""


class _Asking:
    """The protocol's steps, for any transport."""

    def __init__(self, key: PublicKey) -> None:
        self.key = key
        self._known = 0

    async def cosign(self, log: HasProofs, note: Note) -> Sequence[Signature]:
        """Returns its verified cosignature on a checkpoint of the log.

        Raises:
            SplitViewError: it has cosigned another tree of this log.
            OlderLogError: it has cosigned more entries of it.
            TransparencyError: it refused, sent an invalid answer, or did not answer in time.
        """
        size = parse_checkpoint(note.text).size
        for _ in range(ATTEMPTS):
            proof = log.prove_consistency(self._known, size) if self._known <= size else ()
            answer = await self._ask(encode_request(min(self._known, size), proof, note))
            if answer.status == 200:
                signed = Note(note.text, tuple(line for line in parse_signatures(answer.body) if line.is_by(self.key)))
                if not cosigned_at(signed, [self.key]):
                    raise self._refused("its answer has no cosignature of its own")
                self._known = size
                return signed.signatures
            if answer.status == 422:
                raise self._split()
            if answer.status != 409 or not answer.media_type.startswith(SIZE_TYPE):
                raise self._refused(f"status {answer.status}")
            known = answer.body.strip()
            if not re.fullmatch("[0-9]{1,16}", known):
                raise self._refused("its answer names no size")
            if int(known) > size:
                raise OlderLogError(
                    Reason.TOO_FEW_WITNESSES,
                    f"the witness {self.key.name} did not cosign: it cosigned {known} entries before, and this checkpoint has "
                    f"{size}",
                )
            if int(known) == self._known:
                raise self._split()
            self._known = int(known)
        raise self._refused("its state keeps changing")

    async def _ask(self, body: bytes) -> CosignResponse:
        raise NotImplementedError

    def _split(self) -> SplitViewError:
        return SplitViewError(
            Reason.TOO_FEW_WITNESSES, f"the witness {self.key.name} did not cosign: it knows another tree of this log"
        )

    def _refused(self, why: str) -> TransparencyError:
        return TransparencyError(Reason.TOO_FEW_WITNESSES, f"the witness {self.key.name} did not cosign: {why}")


class HttpWitness(_Asking):
    """A witness at a URL."""

    def __init__(self, url: str, key: PublicKey, client: httpx.AsyncClient, deadline_s: float = DEADLINE_S) -> None:
        """
        Args:
            url: its submission prefix.
            key: its verifier key.
            client: pooled connections; the caller closes it.
            deadline_s: for one answer.
        """
        super().__init__(key)
        self._url = url.rstrip("/") + "/add-checkpoint"
        self._client = client
        self._deadline_s = deadline_s

    async def _ask(self, body: bytes) -> CosignResponse:
        received = bytearray()
        try:
            async with asyncio.timeout(self._deadline_s), self._client.stream("POST", self._url, content=body) as response:
                async for part in response.aiter_bytes():
                    received += part
                    if len(received) > MAX_REQUEST_BYTES:
                        raise self._refused("its answer is too long")
            text = received.decode()
        except (httpx.HTTPError, TimeoutError, UnicodeDecodeError) as error:
            raise self._refused(type(error).__name__) from None
        return CosignResponse(response.status_code, text, response.headers.get("content-type", ""))


class NearWitness(_Asking):
    """A witness in this process: for tests and trials. It gives no protection from the log's operator."""

    def __init__(self, witness: Witness, clock: Callable[[], float] = time.time) -> None:
        super().__init__(witness.key)
        self._witness = witness
        self._clock = clock

    async def _ask(self, body: bytes) -> CosignResponse:
        return self._witness.add_checkpoint(body, self._clock())
