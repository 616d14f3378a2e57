"""`cloister release`: the digests a node may be built from, signed here and logged elsewhere; launch measurements."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.options import MODEL, choose_model
from cloister.policy.verdict import Profile
from cloister.trust.attestation.base import REGISTERS
from cloister.trust.attestation.launch import CPU_SIGNATURES, DirectBoot, measure_snp, measure_td, read_firmware
from cloister.types.config import EngineConfig, ServerConfig, setting_names
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.launch.settings import Settings
    from cloister.trust.transparency.note import PublicKey


# Launch measurements on the command line: predicted from the files of an image, or read from a file of `NAME=HEX` lines.


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
    """Prints the expected hardware measurements, one `KIND=HEX` line each.

    Raises:
        ConfigError: a file cannot be read, or has the wrong format.
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
        typer.BadParameter: one is not `NAME=HEX` with the name of a register, or a name occurs twice.
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


app = typer.Typer(help="Make releases, and revoke them.", no_args_is_help=True)

Key = Annotated[Path, typer.Option(help="The release's signer key (`cloister log key --role release`).", metavar="FILE")]
PIP_DEADLINE_S = 600.0
NODE_PARTS = (
    "cloister.launch.engine",
    "cloister.launch.serving",
    "cloister.backends.native._native",
    "cloister.engine.engine_process",
    "cloister.private.node",
)
"""Loaded before a release is measured, so that the system libraries that a node maps are mapped here too."""


@app.callback()
def release() -> None:
    """Make releases, and revoke them. The release key stays here; `cloister log add` logs the results."""


@app.command()
def lock(
    wheel: Annotated[Path, typer.Argument(help="The wheel.", metavar="WHEEL")],
    extra: Annotated[list[str] | None, typer.Option(help="An extra of the package, such as attest.", metavar="NAME")] = None,
    constraint: Annotated[Path | None, typer.Option(help="Versions to keep to (`pip freeze`).", metavar="FILE")] = None,
) -> None:
    """Print the lock file of a wheel: each dependency with its version and SHA-256, as `pip --require-hashes` reads it."""
    from cloister.trust.transparency.release import make_lock

    what = f"{wheel}[{','.join(extra)}]" if extra else str(wheel)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", what]
    command += ["--disable-pip-version-check", *(("--constraint", str(constraint)) if constraint else ())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PIP_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip did not resolve the dependencies within {PIP_DEADLINE_S:.0f} s; try again") from None
    if done.returncode:
        raise ConfigError(
            f"pip cannot resolve the dependencies of {wheel}: {done.stderr.decode(errors='replace').strip()[-500:]}"
        )
    typer.echo(make_lock(done.stdout), nl=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def make(
    context: typer.Context,
    number: Annotated[int, typer.Option(help="Increasing number; a revocation covers all lower ones.", min=1)],
    wheel: Annotated[Path, typer.Option(help="The wheel that nodes install.", metavar="FILE")],
    lock: Annotated[Path, typer.Option(help="Their lock file (`cloister release lock`).", metavar="FILE")],
    model: Annotated[Path, typer.Option(help="The model: a directory, or a GGUF file.", metavar="PATH")],
    key: Key,
    out: Annotated[Path, typer.Option(help="Output directory.", metavar="DIR")],
    profile: Annotated[Profile, typer.Option(help="The privacy profile that nodes run under.")] = Profile.PRIVATE,
    launch: Annotated[
        list[str] | None,
        typer.Option(help="Launch measurement by register, such as sev-snp=HEX or tdx-rtmr0=HEX.", metavar="NAME=HEX"),
    ] = None,
    launch_file: Annotated[
        Path | None, typer.Option(help="Launch measurements, as `cloister release image` prints them.", metavar="FILE")
    ] = None,
    repository: Annotated[str, typer.Option(help="Location of the source.", metavar="URL")] = "",
    revision: Annotated[str, typer.Option(help="Its commit.", metavar="COMMIT")] = "",
    builder: Annotated[str, typer.Option(help="Builder, as a URI.", metavar="URI")] = "urn:cloister:builder:local",
) -> None:
    """Measure the parts of a node and sign them. Run it where the wheel and its lock file are installed, as on a node.

    Further settings of nodes, besides model and profile, come last, as for `cloister serve`: `cloister release make ... --
    --quant int8 --lora claims=DIR`. Every setting is part of the release.

    Writes release.json (the settings of nodes), manifest.json (every file of the installation) and release.entry (for the log),
    and prints the release's digest.
    """
    from cloister import __version__
    from cloister.launch.sealed import loaded_beside
    from cloister.trust.attestation.configuration import describe_settings
    from cloister.trust.attestation.measuring import (
        encode_manifest,
        measure_configuration,
        measure_file,
        measure_installed,
        measure_loaded,
        measure_profile,
    )
    from cloister.trust.transparency.files import read_key, write_whole
    from cloister.trust.transparency.release import Release, release_entry

    measurements = read_launch(launch or (), launch_file)
    signer = read_key(key)
    settings = _resolve(context.args, model, profile)
    for name in NODE_PARTS:
        importlib.import_module(name)
    manifest = encode_manifest(measure_installed())
    beside = loaded_beside(settings.engine.config, model)
    stated = describe_settings(settings.engine.config, settings.server.config)
    document = Release(
        number=number,
        version=__version__,
        wheel=measure_file(wheel),
        lock=measure_file(lock),
        interpreter=measure_file(Path(sys.executable).resolve()),
        files=hashlib.sha256(manifest).hexdigest(),
        model=measure_loaded(model, beside),
        profile=profile,
        profile_digest=measure_profile(profile),
        configuration=measure_configuration(stated, model, beside),
        launch=measurements,
    )
    source = {name: value for name, value in (("repository", repository), ("revision", revision)) if value}
    entry = release_entry(document, source=source, builder=builder, keys=[signer])
    for name, data in (("release.json", document.encode()), ("manifest.json", manifest), ("release.entry", entry)):
        write_whole(out / name, data)
    typer.echo(document.digest)


@app.command()
def image(
    firmware: Annotated[Path, typer.Option(help="OVMF: its AmdSev or IntelTdx build.", metavar="FILE")],
    kernel: Annotated[Path, typer.Option(help="The image's kernel.", metavar="FILE")],
    initrd: Annotated[Path, typer.Option(help="The image's initrd.", metavar="FILE")],
    command_line: Annotated[Path, typer.Option(help="File with the kernel's command line.", metavar="FILE")],
    kind: Annotated[TeeKind, typer.Option(help="The hardware.")] = TeeKind.SEV_SNP,
    vcpus: Annotated[int, typer.Option(help="SEV-SNP: processors of the guest.", metavar="N")] = 1,
    cpu: Annotated[str, typer.Option(help="SEV-SNP: the guest's processor (`-cpu` of QEMU).", metavar="NAME")] = "EPYC-v4",
    features: Annotated[str, typer.Option(help="SEV-SNP: SEV_FEATURES that the host sets.", metavar="HEX")] = "0x1",
) -> None:
    """Predict the hardware measurements when QEMU starts this image, as KIND=HEX lines for `release make`."""
    print_measurements(firmware, kernel, initrd, command_line, kind, vcpus, cpu, features)


@app.command()
def revoke(
    below: Annotated[int, typer.Option(help="The lowest release that may still run.", min=1)],
    key: Key,
    out: Annotated[Path, typer.Option(help="The entry for the log.", metavar="FILE")],
) -> None:
    """Make the entry that revokes every release below a number. Clients refuse those as soon as it is logged."""
    from cloister.trust.transparency.files import read_key, write_whole
    from cloister.trust.transparency.release import minimum_entry

    write_whole(out, minimum_entry(below, [read_key(key)]))


def _resolve(arguments: list[str], model: Path, profile: Profile) -> Settings:
    """Returns the settings of a sealed node that is started with these arguments.

    Raises:
        ConfigError, PolicyError: see `resolve_settings`.
    """
    from cloister.cli.serve import serve
    from cloister.launch import resolve_settings

    verb = typer.Typer(add_completion=False)
    verb.command()(serve)
    given = typer.main.get_command(verb).make_context("serve", list(arguments)).params
    names = setting_names(EngineConfig, ServerConfig)
    given["model"] = choose_model(given[MODEL], given["model"])
    flags = {name: value for name, value in given.items() if name in names and value is not None}
    for name, value in (("model", str(model)), ("profile", str(profile)), ("sealed", True)):
        if flags.setdefault(name, value) != value:
            raise ConfigError(
                f"{name} is {flags[name]} among the nodes' arguments, but {value} in the release; make them the same, or "
                "leave the argument out",
                param=name,
            )
    config_file = given["config"]
    assert config_file is None or isinstance(config_file, Path)
    return resolve_settings(flags, config_file)


@app.command()
def members(
    number: Annotated[int, typer.Option(help="Increasing number; clients compare each with earlier ones.", min=1)],
    log: Annotated[str, typer.Option(help="Verifier key of its log.", metavar="KEY")],
    member: Annotated[
        list[str],
        typer.Option(
            help="A node: the verifier key that `cloister log key --role node` printed, and its capacity, 1 unless said.",
            metavar="KEY[=CAPACITY]",
        ),
    ],
    key: Key,
    out: Annotated[Path, typer.Option(help="The entry for the log.", metavar="FILE")],
    after_s: Annotated[
        float, typer.Option(help="Seconds until it becomes valid: 0 for the first one, over 600 for others.", min=0)
    ] = 900.0,
) -> None:
    """Make the entry that lists the nodes of the cloud with their capacities. The gateway can change neither.

    It becomes valid at its stated time if it was logged 600 s before, and the gateway published an epoch meanwhile; otherwise
    never. Clients refuse one that changes more than half of the capacity within a day.
    """
    from cloister.trust.transparency.files import read_key, write_whole
    from cloister.trust.transparency.membership import build_membership, membership_entry
    from cloister.trust.transparency.note import PublicKey

    capacities = dict(_read_member(one) for one in member)
    begins = int(time.time() + after_s)
    membership = build_membership(number, PublicKey.parse(log).name, begins, capacities)
    write_whole(out, membership_entry(membership, [read_key(key)]))
    names = ", ".join(f"{one.name} {one.capacity / membership.capacity:.0%}" for one in membership.members)
    typer.echo(f"membership {number}: {names}")


def _read_member(text: str) -> tuple[PublicKey, int]:
    from cloister.trust.transparency.note import PublicKey

    key, _, capacity = text.partition("=")  # a verifier key has none: 33 bytes need no padding
    if capacity and not capacity.isdecimal():
        raise ConfigError(f"--member is KEY or KEY=CAPACITY with a whole number, not ={capacity}", param="member")
    return PublicKey.parse(key), int(capacity or 1)
