"""What a hypervisor hands to the firmware of a guest to boot. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectBoot:
    """Kernel, initrd and command line, as QEMU takes them with `-kernel`, `-initrd` and `-append`.

    Attributes:
        kernel: the kernel's file, a bzImage with an EFI stub.
        initrd: the initial file system's file; empty without one.
        command_line: of the kernel, ASCII.
    """

    kernel: bytes
    initrd: bytes
    command_line: str
