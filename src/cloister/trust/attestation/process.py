"""The attester as a separate process: `python -m cloister.trust.attestation.process FD`, its end of a socket pair.

Linux gives reports to processes that can write to configfs, and the other processes of a sealed node have no write access. This
one holds neither keys nor content: its input is a statement, its output is evidence.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from cloister.trust.attestation.base import AttestationError, Attester
from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES, Evidence, read_evidence
from cloister.trust.attestation.nvml import GpuAttester
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.tsm import SnpAttester, TdxAttester
from cloister.types.errors import CloisterError

KINDS: Final = (SoftwareAttester.kind, SnpAttester.kind, TdxAttester.kind)
ANSWER_TIMEOUT_S: Final = 60.0
"""Timeout: a processor answers in milliseconds, GPUs in seconds."""
_MADE: Final = b"+"
_FAILED: Final = b"-"


class AttesterBoot(msgspec.Struct, frozen=True):
    """The first message: which attester to run.

    Attributes:
        kind: one of `KINDS`.
        gpus: require evidence of GPUs too.
        certificates: folder with AMD's certificates (`SnpAttester`).
        collateral: file with Intel's collateral, JSON; re-read for each report, so it may be replaced.
        gpu_collateral: folder with NVIDIA's (`read_collateral`), likewise.
    """

    kind: str = SoftwareAttester.kind
    gpus: bool = False
    certificates: str | None = None
    collateral: str | None = None
    gpu_collateral: str | None = None


class RemoteAttester:
    """Client of an attester in another process.

    Args:
        sock: a datagram socket to it.
    """

    def __init__(self, sock: socket.socket, boot: AttesterBoot) -> None:
        self.kind = boot.kind
        self._sock = sock
        sock.settimeout(ANSWER_TIMEOUT_S)
        sock.send(msgspec.msgpack.encode(boot))

    def attest(self, statement: bytes) -> Evidence:
        """See `Attester.attest`."""
        try:
            self._sock.send(statement)
            answer = self._sock.recv(MAX_EVIDENCE_BYTES + 1)
        except OSError as error:
            raise AttestationError(f"the attester does not answer ({type(error).__name__}); restart the node") from None
        if answer[:1] == _MADE:
            return read_evidence(answer[1:])
        raise AttestationError(answer[1:].decode(errors="replace") or "the attester is gone; the log may say why")

    def close(self) -> None:
        """Lets the process end."""
        self._sock.close()


def make_attester(boot: AttesterBoot) -> Attester:
    """Returns the attester of this machine.

    Raises:
        AttestationError: the kind is unknown, or a required setting is missing.
    """
    attester: Attester
    if boot.kind == SoftwareAttester.kind:
        attester = SoftwareAttester()
    elif boot.kind == SnpAttester.kind:
        attester = SnpAttester(None if boot.certificates is None else Path(boot.certificates).expanduser())
    elif boot.kind == TdxAttester.kind:
        if boot.collateral is None:
            raise AttestationError("evidence of TDX needs Intel's collateral; name its file with --intel-collateral")
        path = Path(boot.collateral).expanduser()
        attester = TdxAttester(lambda quote: _read(path))
    else:
        raise AttestationError(f"there is no attester {boot.kind}; there are {', '.join(KINDS)}")
    folder = None if boot.gpu_collateral is None else Path(boot.gpu_collateral).expanduser()
    return GpuAttester(attester, collateral=folder) if boot.gpus else attester


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a socket whose datagrams hold complete evidence."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (near, far):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_EVIDENCE_BYTES)
    return near, far


def main(descriptor: int) -> int:
    """Serves until the other end is closed; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as sock:
        boot = msgspec.msgpack.decode(sock.recv(MAX_EVIDENCE_BYTES), type=AttesterBoot)
        while statement := sock.recv(MAX_EVIDENCE_BYTES):
            try:
                answer = _MADE + make_attester(boot).attest(statement).encode()
            except CloisterError as error:
                answer = _FAILED + error.message.encode()
            sock.send(answer)
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AttestationError(f"cannot read the collateral {path}: {error.strerror}") from None


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
