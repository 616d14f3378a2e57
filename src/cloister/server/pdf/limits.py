"""What one PDF file may cost."""

from __future__ import annotations

import msgspec


class PdfLimits(msgspec.Struct, frozen=True):
    """Bounds of one file.

    Attributes:
        cpu_s: processor time, whole seconds.
        deadline_s: time until the answer.
        memory_bytes: address space of the process that reads.
        num_chars: of the text.
    """

    cpu_s: int = 20
    deadline_s: float = 30.0
    memory_bytes: int = 1 << 30
    num_pages: int = 500
    num_chars: int = 1 << 20


class PdfAnswer(msgspec.Struct, frozen=True):
    """What the process found.

    Attributes:
        fault: why there is no text, as one of `reading.FAULTS`, or `unconfined`; empty if there is.
    """

    num_pages: int = 0
    text: str = ""
    fault: str = ""
