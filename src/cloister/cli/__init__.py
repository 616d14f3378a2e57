"""The command line: one file per verb. A verb's module is imported when it is named, and none waits for others' libraries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from cloister import __version__
from cloister.cli.console import print_error
from cloister.types.errors import CloisterError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it (128 + SIGINT)."""

GROUP: Final = "app"
VERBS: Final[Mapping[str, str]] = {
    "serve": "serve",
    "run": "run",
    "chat": "chat",
    "models": "models",
    "pull": "pull",
    "list": "models:models",
    "show": "show",
    "rm": "remove",
    "doctor": "doctor",
    "roofline": "roofline",
    "quantize": "quantize",
    "relay": "relay",
    "gateway": "gateway",
    "issuer": "issuer",
    "proxy": "proxy",
    "monitor": "monitor",
    "bench": GROUP,
    "train": GROUP,
    "datastore": GROUP,
    "policy": GROUP,
    "keys": GROUP,
    "log": GROUP,
    "release": GROUP,
    "witness": GROUP,
    "verify": GROUP,
}
"""Verb, which is also its module here unless one stands before a colon -> the function in it, or the group of verbs."""


class _Verbs(TyperGroup):
    """Finds verbs in the order of the table, and imports the one that is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            for name in VERBS:  # the message about a typing error suggests what is there
                self.get_command(ctx, name)
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands[cmd_name]


def _load(name: str) -> Any:
    module, _, attribute = VERBS[name].rpartition(":")
    found = getattr(importlib.import_module(f"cloister.cli.{module or name}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = get_group(found)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        command = get_command(alone)
    command.name = name
    return command


app = typer.Typer(
    name="cloister",
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
