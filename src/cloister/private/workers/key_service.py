"""The key service: the only process with private keys. Started as `python -m cloister.private.workers.key_service FD`, where FD
is its end of a socket pair.

Given the header of a request, it returns the secrets of that request. It keeps the replay cache and rotates its keys on time.
It never sees a body. Its memory is locked, so that no key reaches swap. It exits with its parent, which destroys its keys.

The front holds the other end of the socket, through which it gets public keys only. At the start, the front sends one
listener's descriptor, which it then passes to the zygote and closes. Workers open channels through that listener
(`engine.sealed_channels`). Questions are datagrams: publish, begin, accept, sign.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from cloister.trust import hardening
from cloister.trust.sealing import (
    CHUNKED,
    FORMS,
    NODE_KEY_LIFE_S,
    NODE_KEY_OVERLAP_S,
    Header,
    KeyRing,
    Receiver,
    ReplayCache,
    ReplayCacheFullError,
    UnsealError,
    parse_keys,
)
from cloister.trust.sealing.ohttp import begin_request
from cloister.types.processes import name_process

MESSAGE_BYTES: Final = 65536
PUBLISH: Final = "publish"
UNSEAL_FAILED: Final = "unseal"
CACHE_FULL: Final = "full"
_MCL_CURRENT, _MCL_FUTURE = 1, 2
_PR_SET_PDEATHSIG: Final = 1


class KeyServiceBoot(msgspec.Struct, frozen=True):
    """The first message to a key service.

    Attributes:
        must_lock: refuse to start if memory cannot be locked and there is swap.
    """

    life_s: float = NODE_KEY_LIFE_S
    overlap_s: float = NODE_KEY_OVERLAP_S
    must_lock: bool = True


class KeyServiceReady(msgspec.Struct, frozen=True):
    """Its reply: how its memory is kept from swap, or why it cannot start."""

    memory: str = ""
    error: str = ""


class Question(msgspec.Struct, frozen=True):
    """A question on a channel: publish, begin, accept or sign, with a request's header, its media type, and what to sign.

    Attributes:
        number: comes back with the answer, which may come after the asker has stopped to wait for it.
    """

    what: str
    header: bytes = b""
    media_type: str = ""
    message: bytes = b""
    number: int = 0


class KeyServiceAnswer(msgspec.Struct, frozen=True):
    """The reply to a question: an error or the result.

    Attributes:
        number: of the question.
    """

    error: str = ""
    keys: bytes = b""
    receipt_key: bytes = b""
    signature: bytes = b""
    key: bytes = b""
    base_nonce: bytes = b""
    exporter: bytes = b""
    kem_id: int = 0
    kdf_id: int = 0
    aead_id: int = 0
    number: int = 0


class KeyService:
    """Answers questions; no I/O.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, boot: KeyServiceBoot, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._receiver = Receiver(KeyRing(now(), life_s=boot.life_s, overlap_s=boot.overlap_s), ReplayCache(boot.life_s))

    @property
    def patience_s(self) -> float:
        """Seconds until the next key rotation is due."""
        return max(0.0, self._receiver.ring.next_change_s - self._now())

    def turn(self) -> None:
        """Rotates and destroys keys that are due."""
        self._receiver.ring.rotate(self._now())

    def answer(self, question: Question) -> KeyServiceAnswer:
        """Returns the reply. A request that cannot be opened gets secrets of a key that no client seals to (`Receiver`)."""
        try:
            match question.what:
                case "publish":
                    self.turn()
                    ring = self._receiver.ring
                    return KeyServiceAnswer(keys=ring.publish(), receipt_key=ring.publish_receipt_key())
                case "begin":
                    header = Header.parse(question.header)
                    secrets = self._receiver.begin(header, FORMS[question.media_type], self._now()).context.secrets
                    suite = secrets.suite
                    return KeyServiceAnswer(
                        key=secrets.key,
                        base_nonce=secrets.base_nonce,
                        exporter=secrets.exporter,
                        kem_id=secrets.kem_id,
                        kdf_id=suite.kdf_id,
                        aead_id=suite.aead_id,
                    )
                case "accept":
                    self._receiver.accept(Header.parse(question.header), self._now())
                    return KeyServiceAnswer()
                case "sign":
                    return KeyServiceAnswer(
                        signature=self._receiver.sign(Header.parse(question.header), question.message, self._now())
                    )
        except ReplayCacheFullError:
            return KeyServiceAnswer(error=CACHE_FULL)
        except (UnsealError, KeyError):
            pass
        return KeyServiceAnswer(error=UNSEAL_FAILED)


def lock_memory() -> str:
    """Locks all present and future memory of this process. Returns how it is kept from swap.

    Raises:
        OSError: memory cannot be locked, and there is swap.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE) == 0:
        return "locked"
    swaps = Path("/proc/swaps")
    if swaps.exists() and len(swaps.read_text().splitlines()) <= 1:
        return "not locked, but there is no swap"
    raise OSError(ctypes.get_errno(), "memory cannot be locked; raise the limit (ulimit -l), or switch swap off")


def serve(control: socket.socket, key_service: KeyService) -> None:
    """Serves every channel until the other end of `control` is closed."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    listener: socket.socket | None = None
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(Question).decode
    while True:
        for key, _ in selector.select(key_service.patience_s):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                message, descriptors, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 1)
                for one in [socket.socket(fileno=descriptor) for descriptor in descriptors]:
                    if sock is listener or (sock is control and listener is None):
                        selector.register(one, selectors.EVENT_READ)
                        listener = listener or one
                    else:
                        one.close()
                if message and not descriptors:
                    question = decode(message)
                    may_ask = question.what == PUBLISH or sock not in (control, listener)
                    answer = key_service.answer(question) if may_ask else KeyServiceAnswer(error=UNSEAL_FAILED)
                    sock.send(encode(replace(answer, number=question.number)), socket.MSG_DONTWAIT)
            except (OSError, msgspec.MsgspecError):
                message = b""
            if not message:
                if sock is control:
                    return
                selector.unregister(sock)
                sock.close()
        key_service.turn()


def _rehearse(boot: KeyServiceBoot) -> None:
    """Runs every operation once with temporary keys, so that all of its code is loaded."""
    key_service = KeyService(boot)
    for configuration in parse_keys(key_service.answer(Question("publish")).keys):
        header = begin_request(configuration, CHUNKED).header.encode()
        for what in ("begin", "accept", "sign"):
            key_service.answer(Question(what, header, CHUNKED.request_type))


def main(descriptor: int) -> int:
    """Runs the key service; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    name_process("sealer")
    control = socket.socket(fileno=descriptor)
    boot = msgspec.msgpack.decode(control.recv(MESSAGE_BYTES), type=KeyServiceBoot)
    try:
        memory = lock_memory()
    except OSError as error:
        if boot.must_lock:
            control.send(msgspec.msgpack.encode(KeyServiceReady(error=str(error.strerror))))
            return 1
        memory = "not locked"
    _rehearse(boot)
    if hardening.sealed() is not None:
        hardening.preload(["cloister.trust.sealing"])
        hardening.close_this()
    key_service = KeyService(boot)
    control.send(msgspec.msgpack.encode(KeyServiceReady(memory=memory)))
    serve(control, key_service)
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    os._exit(status)
