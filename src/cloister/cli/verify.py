"""`cloister verify`: checks of what a node claims and what it keeps."""

from __future__ import annotations

import typer

from cloister.cli import verify_issuer, verify_node, verify_receipt, verify_routing, verify_traces

app = typer.Typer(help="Check what a node claims and what it keeps.", no_args_is_help=True)


@app.callback()
def verify() -> None:
    """Check what a node claims and what it keeps."""


app.command("node")(verify_node.node)
app.command("receipt")(verify_receipt.receipt)
app.command("issuer")(verify_issuer.issuer)
app.command("traces")(verify_traces.traces)
app.command("routing")(verify_routing.routing)
