"""The table of verbs: one module per verb, imported on demand."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from typer.main import get_command, get_group

from cloister import __version__
from cloister.cli.console import print_error
from cloister.cli.help import CONTENTS, SUMMARIES, Row, UsageError, Verb, VerbGroup, print_usage_error, summarize
from cloister.types.errors import OUT_OF_MEMORY, CloisterError, lacks_memory

PROGRAM: Final = "cloister"
WRONG_USAGE: Final = 2
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells (128 + SIGINT)."""

GROUP: Final = "app"
VERBS: Final[Mapping[str, str]] = {
    "serve": "serve",
    "run": "run",
    "chat": "chat",
    "models": "models",
    "pull": "models:pull",
    "list": "models:models",
    "show": "models:show",
    "rm": "models:remove",
    "doctor": "doctor",
    "roofline": "roofline",
    "quantize": "quantize",
    "relay": "relay",
    "gateway": "gateway",
    "issuer": "issuer",
    "proxy": "proxy",
    "monitor": "monitor",
    "bench": GROUP,
    "cluster": GROUP,
    "plan": GROUP,
    "train": GROUP,
    "datastore": GROUP,
    "policy": GROUP,
    "keys": GROUP,
    "log": GROUP,
    "release": GROUP,
    "witness": GROUP,
    "verify": GROUP,
}
"""Verb (also its module here, unless one precedes a colon) -> function in the module, or group of verbs."""

ALIASES: Final[Mapping[str, str]] = {"models": "list"}
"""Alias -> verb."""


class _Verbs(VerbGroup):
    """Lists verbs in the order of the table, and imports only the one that is used."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if self._is_listing and cmd_name in SUMMARIES:
            return Verb(cmd_name, help=SUMMARIES[cmd_name])
        self.commands[cmd_name] = _load(cmd_name)
        return self.commands[cmd_name]

    def list_sections(self, ctx: Any) -> Iterator[tuple[str, list[Row]]]:
        for heading, verbs in CONTENTS.items():
            yield heading, list(verbs.items())
        yield "More", [(name, summarize(self.get_command(ctx, name).help)) for name in VERBS if name not in SUMMARIES]

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._is_listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._is_listing = False


def _load(name: str) -> Any:
    module, _, attribute = VERBS[name].rpartition(":")
    found = getattr(importlib.import_module(f"cloister.cli.{module or name}"), attribute)
    if isinstance(found, typer.Typer):
        found.info.cls = VerbGroup
        for registered in found.registered_commands:
            registered.cls = Verb
        command: Any = get_group(found)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name, cls=Verb)(found)
        command = get_command(alone)
    command.name = name
    if name in ALIASES:
        command.help = f"The same as `{ALIASES[name]}`."
    return command


app = typer.Typer(
    name="cloister",
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
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
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A language-model server that people with secrets can trust."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits (`cloister.cli.main`)."""
    try:
        status = get_command(app).main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except CloisterError as error:
        print_error(error.message)
        sys.exit(1)
    except UsageError as error:
        print_usage_error(error)
        sys.exit(WRONG_USAGE)
    except (MemoryError, ImportError) as error:
        if not lacks_memory(error):
            raise
        print_error(OUT_OF_MEMORY)
        sys.exit(1)
    except OSError as error:
        if lacks_memory(error):
            print_error(OUT_OF_MEMORY)
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            print_error("there is no space left on the disk that this writes to; free some, or name another place")
        elif error.filename is not None:
            print_error(f"cannot use {error.filename}: {error.strerror}; check the path and who may use it")
        else:
            raise
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)
