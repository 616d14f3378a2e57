"""docs/cli.md, written from the verbs and the configuration classes: `python -m cloister.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from cloister.bench.settings import ArrivalsConfig, ObjectiveConfig, TargetConfig, WorkloadConfig
from cloister.cli import app
from cloister.cli.options import Flag, list_flags, panel_of
from cloister.types.config import EngineConfig, ServerConfig

CLASSES = (EngineConfig, ServerConfig, TargetConfig, WorkloadConfig, ArrivalsConfig, ObjectiveConfig)

HEAD = """# Command line

This page is written by `python -m cloister.cli.reference` from the verbs and the configuration classes.

Every verb has `--help`. Exit status: 0 done, 1 an error that says what to do, 2 wrong usage, 130 Ctrl-C. Results go to standard
output, everything else to standard error; `--json` makes results readable by programs.

A configuration file is TOML with the names below, `_` for `-`; a flag wins over the file, the file over what is chosen:

    # cloister serve --config cloister.toml
    model = "cloister-5m"
    port = 9000
    scheduler = "fair"

`cloister serve --explain` prints every setting, its value and why it has it.
"""


def write_reference() -> str:
    """Returns the page as Markdown."""
    command = typer.main.get_command(app)
    verbs = "\n".join(_describe(verb, path) for path, verb in _walk(command, "cloister"))
    settings = "\n".join(_tabulate(cls) for cls in CLASSES)
    return f"{HEAD}\n## Verbs\n\n{verbs}\n## Settings\n\n{settings}"


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every verb under a command with its path; groups yield their verbs."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from _walk(command.get_command(None, name), f"{path} {name}")


def _describe(verb: Any, path: str) -> str:
    panels = [panel_of(cls) for cls in CLASSES]
    shared = [panel for panel in panels if any(_panel(p) == panel for p in verb.params)]
    own = [p for p in verb.params if _panel(p) not in panels and p.name not in ("help", "config")]
    lines = [f"### `{' '.join([path, *(_argument(p) for p in own if p.param_type_name == 'argument')])}`", ""]
    lines += [(verb.help or "").strip(), ""]
    if own:
        lines += ["| option | what |", "|---|---|", *(_row(p) for p in own), ""]
    if shared:
        links = ", ".join(f"[{panel}](#{panel.lower()})" for panel in shared)
        config = " and `--config FILE`" if any(p.name == "config" for p in verb.params) else ""
        lines += [f"And the settings {links}{config}.", ""]
    return "\n".join(lines)


def _panel(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name).upper()


def _row(parameter: Any) -> str:
    names = _argument(parameter) if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
    return f"| `{names}` | {_escape(parameter.help or '')} |"


def _tabulate(cls: type[Any]) -> str:
    about = (cls.__doc__ or "").split("\n")[0]
    rows = [_flag_row(flag) for flag in list_flags(cls)]
    head = ["| flag | takes | default | what |", "|---|---|---|---|"]
    return "\n".join([f"### {panel_of(cls)}", "", about, "", *head, *rows, ""])


def _flag_row(flag: Flag) -> str:
    default = "unset" if flag.default is None else f"`{flag.default}`"
    return f"| `{flag.declaration}` | {_escape(flag.values)} | {default} | {_escape(flag.help)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(write_reference(), end="")
