"""`cloister verify`: checks of nodes, receipts, routing and residue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from cloister.cli import verify_node, verify_receipt, verify_routing, verify_traces
from cloister.cli.console import leave, print_line
from cloister.types.errors import CloisterError, ConfigError

app = typer.Typer(help="Verify nodes, receipts, routing and residue.", no_args_is_help=True)

PROVES_NOTHING: Final = 1
CANNOT_CHECK: Final = 2


@app.callback()
def verify() -> None:
    """Verify nodes, receipts, routing and residue."""


app.command("node")(verify_node.node)
app.command("receipt")(verify_receipt.receipt)


@app.command()
def issuer(
    proof: Annotated[Path, typer.Argument(help="Proof that a client wrote (issuer-proof-....json).", metavar="FILE")],
    trust: Annotated[Path | None, typer.Option(help="Trust file that names the issuer and its key.", metavar="FILE")] = None,
    issuer_key: Annotated[str, typer.Option(help="Its verifier key, instead of a trust file.", metavar="KEY")] = "",
) -> None:
    """Check a client's proof that an issuer could identify the owners of tokens by the key that signed them.

    Exit status 0: the issuer signed both, and they contradict each other; 1: the file proves nothing; 2: it could not be
    checked.
    """
    from cloister.trust.transparency.issuer_keys import check_proof
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.refusal import TransparencyError
    from cloister.trust.transparency.trust import read_trust

    try:
        if (trust is None) == (not issuer_key):
            raise ConfigError("the issuer is missing: give --trust FILE or --issuer-key KEY", param="trust")
        named = None if trust is None else read_trust(trust.expanduser()).issuer
        if trust is not None and named is None:
            raise ConfigError(f"{trust} names no issuer; give its key with --issuer-key", param="trust")
        key = named.key if named is not None else PublicKey.parse(issuer_key)
        content = proof.expanduser().read_bytes()
    except OSError as error:
        leave(f"could not check: cannot read {proof}: {error.strerror}", CANNOT_CHECK)
    except CloisterError as error:
        leave(f"could not check: {error.message}", CANNOT_CHECK)
    try:
        statements = check_proof(content, key)
    except TransparencyError as error:
        leave(f"PROVES NOTHING: {error.message}", PROVES_NOTHING)
    print_line(f"PROVED: the issuer {key.name} signed both of these, which contradict each other:")
    for entry in statements:
        shown = entry.token_key.hex()[-32:]
        print_line(
            f"  {entry.url}: the key ...{shown} signs from {entry.not_before} until {entry.not_after} (Unix seconds)",
        )


app.command("traces")(verify_traces.traces)
app.command("routing")(verify_routing.routing)
