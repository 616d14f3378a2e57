"""The command line: one file per verb. Verbs import heavy rooms when they run, so that `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cloister import __version__
from cloister.cli import (
    bench,
    chat,
    datastore,
    doctor,
    gateway,
    issuer,
    keys,
    log,
    models,
    policy,
    proxy,
    quantize,
    relay,
    release,
    roofline,
    run,
    serve,
    train,
    verify,
    witness,
)
from cloister.cli.console import print_error
from cloister.types.errors import CloisterError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it (128 + SIGINT)."""

app = typer.Typer(
    name="cloister",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve.serve)
app.command()(run.run)
app.command()(chat.chat)
app.command()(models.models)
app.command()(doctor.doctor)
app.command()(roofline.roofline)
app.command()(quantize.quantize)
app.command()(relay.relay)
app.command()(gateway.gateway)
app.command()(issuer.issuer)
app.command()(proxy.proxy)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(datastore.app, name="datastore")
app.add_typer(policy.app, name="policy")
app.add_typer(keys.app, name="keys")
app.add_typer(log.app, name="log")
app.add_typer(release.app, name="release")
app.add_typer(witness.app, name="witness")
app.add_typer(verify.app, name="verify")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cloister {__version__}")
        raise typer.Exit


@app.callback()
def cloister(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A language-model server that people with secrets can trust."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 an error that says what to do, 2 wrong usage, 130 Ctrl-C.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    try:
        app(arguments)
    except CloisterError as error:
        print_error(error.message)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
