"""`cloister log`: the transparency log, its keys, its proofs, and the client's trust file."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.trust.transparency.log import Log

app = typer.Typer(help="Keep and check a transparency log.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(help="The log's directory.", metavar="DIR")]
LogKey = Annotated[str, typer.Option("--log", help="The log's verifier key.", metavar="KEY")]
Releases = Annotated[list[str], typer.Option("--release", help="A verifier key that is trusted for releases.", metavar="KEY")]

_COLUMNS = ("index", "kind", "number")
"""Columns of `show` that every kind of entry has. Fields of single kinds share one more column, `details`."""


class KeyRole(StrEnum):
    """The role of a signer key."""

    LOG = "log"
    WITNESS = "witness"
    RELEASE = "release"
    ISSUER = "issuer"
    NODE = "node"


@app.callback()
def log() -> None:
    """Keep and check a transparency log: an append-only Merkle tree as plain files (C2SP tiles)."""


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Its name; for a log that is its origin, such as log.example.com.")],
    out: Annotated[Path, typer.Option(help="The new file, mode 0600.", metavar="FILE")],
    role: Annotated[KeyRole, typer.Option(help="What it signs.")] = KeyRole.LOG,
) -> None:
    """Create a signer key, and print its verifier key."""
    from cloister.trust.transparency.files import write_key
    from cloister.trust.transparency.note import Kind, PrivateKey

    private = PrivateKey.generate(name, Kind.COSIGNATURE if role is KeyRole.WITNESS else Kind.NOTE)
    write_key(out, private)
    typer.echo(private.public)


@app.command()
def init(
    directory: Directory,
    key: Annotated[Path, typer.Option(help="The log's signer key (`cloister log key`).", metavar="FILE")],
) -> None:
    """Create an empty log."""
    from cloister.trust.transparency.files import read_key
    from cloister.trust.transparency.log import Log

    typer.echo(Log.create(directory, read_key(key)).key)


@app.command()
def add(
    directory: Directory,
    entries: Annotated[list[Path], typer.Argument(help="Entries written by `cloister release`.", metavar="ENTRY...")],
    key: Annotated[Path, typer.Option(help="The log's signer key.", metavar="FILE")],
    manifest: Annotated[Path | None, typer.Option(help="The manifest that the release names.", metavar="FILE")] = None,
    trust: Annotated[Path | None, typer.Option(help="The trust file that names --witness.", metavar="FILE")] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option(help="A witness of the trust file that is asked first, as NAME=URL; repeat for each.", metavar="NAME=URL"),
    ] = None,
) -> None:
    """Append entries, and print the checkpoint. The gateway's next epoch carries it to clients.

    With --trust and as many --witness as it requires, nothing is added to an older copy of the log: the witnesses must cosign
    it as it is first, as when a gateway starts.
    """
    from cloister.trust.transparency.files import read_key
    from cloister.trust.transparency.log import Log

    if (trust is None) != (not witness):
        raise ConfigError("a trust file and its witnesses go together: give --trust and --witness", param="witness")
    written = Log(directory, read_key(key))
    if trust is not None:
        asyncio.run(_confirm(written, trust, witness or []))
    if manifest:
        written.keep_manifest(_read(manifest))
    typer.echo(written.append([_read(entry) for entry in entries]).note, nl=False)


async def _confirm(log: Log, trust_file: Path, witnesses: list[str]) -> None:
    """Asks witnesses whether the log is the newest copy (`publisher.confirm`)."""
    import httpx

    from cloister.cli.witnesses import open_witnesses
    from cloister.trust.transparency.publisher import confirm
    from cloister.trust.transparency.trust import read_trust
    from cloister.trust.transparency.witness import DEADLINE_S

    trust = read_trust(trust_file)
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
        await confirm(log, open_witnesses(witnesses, trust, client), trust.threshold)


@app.command()
def show(
    directory: Directory, log: LogKey, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the entries: epochs, releases, memberships and revocations. Signatures of releases are checked by `verify`."""
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.replay import describe_entry
    from cloister.trust.transparency.tiles import LogReader

    reader = LogReader(directory, PublicKey.parse(log))
    size = reader.checkpoint()[0].size
    rows = [{"index": index, **describe_entry(entry)} for index, entry in enumerate(reader.entries(0, size, size))]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    lines = [(*_COLUMNS, "details"), *map(_line_of, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:  # no table: digests must stay whole on a narrow terminal, to be copied and searched
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _line_of(row: Mapping[str, str | int]) -> tuple[str, ...]:
    details = {name: value for name, value in row.items() if name not in _COLUMNS}
    if "not_before" in details:
        details["not_before"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(details["not_before"])))
    return (*(str(row.get(name, "")) for name in _COLUMNS), ", ".join(f"{name} {value}" for name, value in details.items()))


@app.command()
def verify(directory: Directory, log: LogKey, release: Releases) -> None:
    """Read a whole copy of a log and check all of it: tiles, entries, the order of epochs, signatures of releases."""
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.replay import verify_log
    from cloister.trust.transparency.tiles import LogReader

    reader = LogReader(directory, PublicKey.parse(log))
    for line in verify_log(reader, tuple(map(PublicKey.parse, release))):
        typer.echo(line)


@app.command()
def proof(
    directory: Directory,
    log: LogKey,
    index: Annotated[int | None, typer.Option(help="Print the inclusion proof of this entry.", min=0)] = None,
    since: Annotated[int | None, typer.Option(help="Print the consistency proof from the tree of this size.", min=0)] = None,
) -> None:
    """Print a proof under the newest checkpoint as JSON, from the tiles alone."""
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.tiles import LogReader

    reader = LogReader(directory, PublicKey.parse(log))
    checkpoint, note = reader.checkpoint()
    if (index is None) == (since is None):
        raise typer.BadParameter("give --index or --since")
    try:
        if index is not None:
            hashes = reader.prove_inclusion(index, checkpoint.size)
        else:
            assert since is not None
            hashes = reader.prove_consistency(since, checkpoint.size)
    except ValueError as error:
        raise ConfigError(f"{error}; the log has {checkpoint.size} entries") from None
    shown = {"checkpoint": str(note), "proof": [base64.b64encode(part).decode() for part in hashes]}
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))


@app.command()
def trust(
    log: LogKey,
    release: Releases,
    witness: Annotated[list[str], typer.Option(help="A witness's verifier key; three of them.", metavar="KEY")],
    issuer: Annotated[
        str, typer.Option(help="The only issuer that gets the API key, https://...; empty buys no tokens.", metavar="URL")
    ] = "",
    issuer_key: Annotated[str, typer.Option(help="That issuer's verifier key (--role issuer).", metavar="KEY")] = "",
    threshold: Annotated[int, typer.Option(help="Number of witnesses that must have cosigned.", min=2)] = 2,
    profile: Annotated[list[str] | None, typer.Option(help="A profile that nodes may run under.", metavar="NAME")] = None,
) -> None:
    """Print a client's trust file, which lists the keys that it trusts. It must never come from the gateway."""
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.trust import Trust, encode_trust, identify_issuer

    witnesses, releases = (tuple(map(PublicKey.parse, keys)) for keys in (witness, release))
    profiles = frozenset(profile or ("private", "paranoid"))
    believed = Trust(PublicKey.parse(log), witnesses, releases, identify_issuer(issuer, issuer_key), threshold, profiles)
    typer.echo(encode_trust(believed).decode(), nl=False)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
