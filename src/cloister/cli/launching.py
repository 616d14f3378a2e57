"""Launch measurements on the command line: predicted from the files of an image, read from a file of `NAME=HEX` lines."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import typer

from cloister.privacy.attestation.launch import CPU_SIGNATURES, DirectBoot, measure_snp, measure_td, read_firmware
from cloister.privacy.attestation.registers import REGISTERS
from cloister.types.errors import ConfigError


class TeeKind(StrEnum):
    """The hardware that measures."""

    SEV_SNP = "sev-snp"
    TDX = "tdx"


def print_measurements(
    firmware: Path,
    kernel: Path,
    initrd: Path,
    command_line: Path,
    kind: TeeKind,
    vcpus: int,
    cpu: str,
    features: str,
) -> None:
    """Prints what the hardware will measure, a `KIND=HEX` line each.

    Raises:
        ConfigError: a file cannot be read, or is not what it should be.
    """
    ovmf = read_firmware(_read(firmware))
    line = _read(command_line).decode("ascii", errors="replace").rstrip("\n")
    if "�" in line or "\n" in line:
        raise ConfigError(f"{command_line} is not one line of ASCII, as a kernel takes it")
    boot = DirectBoot(_read(kernel), _read(initrd), line)
    if kind is TeeKind.SEV_SNP:
        digest = measure_snp(ovmf, boot, vcpus=vcpus, cpu_signature=_find_cpu(cpu), features=_read_hex(features))
        typer.echo(f"{kind}={digest.hex()}")
        return
    measured = measure_td(ovmf, boot)
    typer.echo(f"{kind}={measured.mrtd.hex()}")
    for number, value in measured.rtmrs.items():
        typer.echo(f"{kind}-rtmr{number}={value.hex()}")


def read_launch(given: Iterable[str], file: Path | None) -> dict[str, str]:
    """Returns the hex value of each register, from `NAME=HEX` arguments and from a file of such lines.

    Raises:
        typer.BadParameter: one is not `NAME=HEX` with the name of a register, or a name comes twice.
        ConfigError: the file cannot be read.
    """
    lines = [*given, *(() if file is None else _read(file).decode("ascii", errors="replace").split())]
    found: dict[str, str] = {}
    for line in lines:
        name, equals, measurement = line.partition("=")
        if not equals or name not in REGISTERS:
            raise typer.BadParameter(f"--launch is NAME=HEX, such as sev-snp=...; names are {', '.join(sorted(REGISTERS))}")
        if name in found:
            raise typer.BadParameter(f"{name} is measured twice; a release names one image")
        found[name] = measurement.lower()
    return found


def _read(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _find_cpu(name: str) -> int:
    try:
        return CPU_SIGNATURES[name]
    except KeyError:
        raise typer.BadParameter(f"--cpu is one of {', '.join(CPU_SIGNATURES)}") from None


def _read_hex(text: str) -> int:
    try:
        value = int(text, 16)
    except ValueError:
        value = -1
    if not 0 <= value < 2**64:
        raise typer.BadParameter("--features is a number in hex, such as 0x1")
    return value
