"""Asking witnesses for cosignatures: over HTTP (C2SP tlog-witness), or one in the same process."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import httpx

from cloister.privacy.transparency.checkpoint import parse_checkpoint
from cloister.privacy.transparency.note import Note, PublicKey, Signature, cosigned_at, parse_signatures
from cloister.privacy.transparency.refusal import Reason, TransparencyError
from cloister.privacy.transparency.witness import MAX_REQUEST_BYTES, SIZE_TYPE, CosignResponse, Witness, encode_request

DEADLINE_S = 10.0
ATTEMPTS = 3
"""The first names the size that was cosigned last; if the witness knows another, it says so, and the second names that."""


class HasProofs(Protocol):
    """A log, or a reader of one from afar."""

    def prove_consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """The proof that the first `new` leaves begin with the first `old`."""


class SplitViewError(TransparencyError):
    """A witness cosigned another tree of this log."""


class _Asking:
    """The protocol's turns, whatever carries them."""

    def __init__(self, key: PublicKey) -> None:
        self.key = key
        self._known = 0

    async def cosign(self, log: HasProofs, note: Note) -> Sequence[Signature]:
        """Its cosignature on a checkpoint of the log, checked.

        Raises:
            SplitViewError: it knows another tree of this log.
            TransparencyError: it refused, answered nonsense, or did not answer in time.
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
                raise self._refused(f"it cosigned {known} entries before, and this checkpoint has {size}")
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
    """A witness in this process: for tests, and for trying things out. It protects nobody from who runs the log."""

    def __init__(self, witness: Witness, clock: Callable[[], float] = time.time) -> None:
        super().__init__(witness.key)
        self._witness = witness
        self._clock = clock

    async def _ask(self, body: bytes) -> CosignResponse:
        return self._witness.add_checkpoint(body, self._clock())
