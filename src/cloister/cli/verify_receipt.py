"""`cloister verify receipt`: verifies which release answered a request, and under which policy."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import leave, print_json, print_line
from cloister.cli.verify_node import CANNOT_CHECK, REFUSED, print_steps, steps_to_data
from cloister.types.errors import CloisterError, ConfigError

if TYPE_CHECKING:
    from cloister.client.verify_receipt import Proof, Shown


def receipt(
    file: Annotated[Path, typer.Argument(help="The receipt.")],
    request: Annotated[Path | None, typer.Option(help="Exact content of the request.", metavar="FILE")] = None,
    answer: Annotated[Path | None, typer.Option(help="Exact content of the answer.", metavar="FILE")] = None,
    method: Annotated[str, typer.Option(help="Method of the request.")] = "POST",
    target: Annotated[str, typer.Option(help="Path and query of the request.")] = "/v1/chat/completions",
    trust: Annotated[
        Path | None,
        typer.Option(help="Trust file with public keys; without it, only signature and evidence are checked.", metavar="FILE"),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Requirements, JSON; unset ones are taken from the log.", metavar="FILE")
    ] = None,
    accept_software: Annotated[
        bool, typer.Option("--accept-software", help="Accept nodes without hardware attestation: NOT PROVED.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a receipt offline: its signer, the signer's release, and the request and answer it covers.

    Exit status 0: nothing is refused (what is not proved is said); 1: it proves nothing; 2: it could not be checked.
    """
    from cloister.client.verify_receipt import Shown, verify_receipt
    from cloister.trust.attestation import AttestationPolicy
    from cloister.trust.attestation.policy_file import read_policy, with_demands
    from cloister.trust.receipts import MAX_RECEIPT_BYTES, read_receipt
    from cloister.trust.transparency.trust import read_trust

    try:
        wanted = with_demands(AttestationPolicy() if policy is None else read_policy(policy), accept_software=accept_software)
        keys = None if trust is None else read_trust(trust.expanduser())
        read = read_receipt(_read(file, MAX_RECEIPT_BYTES))
        shown = Shown(_read_shown(request), _read_shown(answer), method, target)
    except CloisterError as error:
        leave(f"could not check: {error.message}", CANNOT_CHECK)
    proof = verify_receipt(read, shown, keys, wanted)
    if as_json:
        print_json(_to_data(proof))
    else:
        _print(proof, shown)
    raise typer.Exit(0 if proof.findings.accepted else REFUSED)


def _read(path: Path, most_bytes: int = 1 << 28) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{path} has more than {most_bytes:,} bytes; is it the right file?")
    return content


def _read_shown(path: Path | None) -> bytes | None:
    return None if path is None else _read(path)


def _print(proof: Proof, shown: Shown) -> None:
    if proof.moment:
        print_line(
            f"As of {datetime.fromtimestamp(proof.moment, UTC):%Y-%m-%d %H:%M} UTC, when this node was listed or said so:"
        )
    print_steps(proof.findings)
    if proof.statement is not None:
        told = proof.statement
        print_line(
            f"\nrelease {proof.release or told.release}\nmodel   {told.model}\nprofile {told.profile}\nnode    {told.node_id}"
        )
    if not proof.findings.accepted:
        print_line("\nREFUSED: this receipt proves nothing", "bold red")
    elif proof.findings.proved and shown.request is not None and shown.answer is not None:
        print_line("\nPROVED: this release gave this answer to this request", "bold green")
    else:
        print_line("\nNOT PROVED in full: unproved steps are listed above", "bold yellow")


def _to_data(proof: Proof) -> dict[str, object]:
    told = proof.statement
    about = {} if told is None else {"model": told.model, "profile": told.profile, "node": told.node_id}
    return {
        "accepted": proof.findings.accepted,
        "proved": proof.findings.proved,
        "steps": steps_to_data(proof.findings),
        "release": proof.release or (told.release if told else ""),
        **about,
    }
