"""`cloister release`: what a node may be made of, as digests that are signed here and logged elsewhere."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.privacy.verdict import Profile
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.privacy.transparency.note import PublicKey

app = typer.Typer(help="Make releases, and revoke them.", no_args_is_help=True)

Key = Annotated[Path, typer.Option(help="The release's signer key (`cloister log key --role release`).", metavar="FILE")]
PIP_DEADLINE_S = 600.0
NODE_PARTS = (
    "cloister.app.engine",
    "cloister.app.serving",
    "cloister.backends.native._native",
    "cloister.engine.child",
    "cloister.sealed.node",
)
"""Loaded before a release is measured, so that the system's libraries that a node maps are mapped here too."""


@app.callback()
def release() -> None:
    """Make releases, and revoke them. The release's key stays here; `cloister log add` logs what is made."""


@app.command()
def lock(
    wheel: Annotated[Path, typer.Argument(help="The wheel.", metavar="WHEEL")],
    extra: Annotated[list[str] | None, typer.Option(help="An extra of the package, such as attest.", metavar="NAME")] = None,
    constraint: Annotated[Path | None, typer.Option(help="Versions to keep to (`pip freeze`).", metavar="FILE")] = None,
) -> None:
    """Print the lock file of a wheel: each dependency with its version and SHA-256, as `pip --require-hashes` reads it."""
    from cloister.privacy.transparency.lockfile import make_lock

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


@app.command()
def make(
    number: Annotated[int, typer.Option(help="Counts up; a revocation takes all below one.", min=1)],
    wheel: Annotated[Path, typer.Option(help="The wheel that nodes install.", metavar="FILE")],
    lock: Annotated[Path, typer.Option(help="Their lock file (`cloister release lock`).", metavar="FILE")],
    model: Annotated[Path, typer.Option(help="The model: a directory, or a GGUF file.", metavar="PATH")],
    key: Key,
    out: Annotated[Path, typer.Option(help="Directory for what is made.", metavar="DIR")],
    profile: Annotated[Profile, typer.Option(help="The privacy profile that nodes run under.")] = Profile.PRIVATE,
    launch: Annotated[
        list[str] | None, typer.Option(help="Launch measurement by kind of hardware, such as sev-snp=HEX.", metavar="KIND=HEX")
    ] = None,
    repository: Annotated[str, typer.Option(help="Where the source is.", metavar="URL")] = "",
    revision: Annotated[str, typer.Option(help="Its commit.", metavar="COMMIT")] = "",
    builder: Annotated[str, typer.Option(help="Who built, as a URI.", metavar="URI")] = "urn:cloister:builder:local",
) -> None:
    """Measure what a node is made of and sign it. Run it where the wheel and its lock file are installed, as on a node.

    Writes release.json (what nodes are started with), manifest.json (every file of the installation) and release.entry (for
    the log), and prints the release's digest.
    """
    from cloister import __version__
    from cloister.privacy.attestation.measuring import (
        encode_manifest,
        measure_file,
        measure_installed,
        measure_model,
        measure_profile,
    )
    from cloister.privacy.transparency.files import write_whole
    from cloister.privacy.transparency.keyfiles import read_key
    from cloister.privacy.transparency.release import Release, release_entry

    signer = read_key(key)
    for name in NODE_PARTS:
        importlib.import_module(name)
    manifest = encode_manifest(measure_installed())
    document = Release(
        number=number,
        version=__version__,
        wheel=measure_file(wheel),
        lock=measure_file(lock),
        interpreter=measure_file(Path(sys.executable).resolve()),
        files=hashlib.sha256(manifest).hexdigest(),
        model=measure_model(model),
        profile=profile,
        profile_digest=measure_profile(profile),
        launch=dict(_split(one) for one in launch or ()),
    )
    source = {name: value for name, value in (("repository", repository), ("revision", revision)) if value}
    entry = release_entry(document, source=source, builder=builder, keys=[signer])
    for name, data in (("release.json", document.encode()), ("manifest.json", manifest), ("release.entry", entry)):
        write_whole(out / name, data)
    typer.echo(document.digest)


@app.command()
def revoke(
    below: Annotated[int, typer.Option(help="The least release that may still run.", min=1)],
    key: Key,
    out: Annotated[Path, typer.Option(help="The entry for the log.", metavar="FILE")],
) -> None:
    """Make the entry that revokes every release below a number. Clients refuse those as soon as it is logged."""
    from cloister.privacy.transparency.files import write_whole
    from cloister.privacy.transparency.keyfiles import read_key
    from cloister.privacy.transparency.release import minimum_entry

    write_whole(out, minimum_entry(below, [read_key(key)]))


@app.command()
def members(
    number: Annotated[int, typer.Option(help="Counts up; clients hold each against those before.", min=1)],
    log: Annotated[str, typer.Option(help="Verifier key of the log that it is for.", metavar="KEY")],
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
        float, typer.Option(help="In how many seconds it begins to hold: 0 for the first one, over 600 for others.", min=0)
    ] = 900.0,
) -> None:
    """Make the entry that says which nodes belong to the cloud, and with what capacity. The gateway can change neither.

    It holds from the time that it names if the log had it 600 s before, and the gateway published an epoch meanwhile;
    else it never does. Clients refuse one that changes more than half of the capacity within a day.
    """
    from cloister.privacy.transparency.files import write_whole
    from cloister.privacy.transparency.keyfiles import read_key
    from cloister.privacy.transparency.membership import build_membership, membership_entry
    from cloister.privacy.transparency.note import PublicKey

    capacities = dict(_read_member(one) for one in member)
    begins = int(time.time() + after_s)
    membership = build_membership(number, PublicKey.parse(log).name, begins, capacities)
    write_whole(out, membership_entry(membership, [read_key(key)]))
    names = ", ".join(f"{one.name} {one.capacity / membership.capacity:.0%}" for one in membership.members)
    typer.echo(f"membership {number}: {names}")


def _read_member(text: str) -> tuple[PublicKey, int]:
    from cloister.privacy.transparency.note import PublicKey

    key, _, capacity = text.partition("=")  # a verifier key has none: 33 bytes need no padding
    if capacity and not capacity.isdecimal():
        raise ConfigError(f"--member is KEY or KEY=CAPACITY with a whole number, not ={capacity}", param="member")
    return PublicKey.parse(key), int(capacity or 1)


def _split(text: str) -> tuple[str, str]:
    kind, equals, measurement = text.partition("=")
    if not equals:
        raise typer.BadParameter("--launch is KIND=HEX, such as sev-snp=...")
    return kind, measurement.lower()
