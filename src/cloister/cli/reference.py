"""Generates docs/cli.md from the verbs and the configuration classes: `python -m cloister.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import typer.main

from cloister.bench.settings import ArrivalsConfig, ObjectiveConfig, TargetConfig, WorkloadConfig
from cloister.cli import app
from cloister.cli.options import HELP_ALL, Flag, list_flags
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.setting_groups import GROUPS, list_groups

OTHERS = (TargetConfig, WorkloadConfig, ArrivalsConfig, ObjectiveConfig)
"""Classes of settings whose headings are their names."""

HEAD = """# Command line

This page is written by `python -m cloister.cli.reference` from the verbs and the configuration classes.

Every verb has `--help`. Exit status: 0 done, 1 an error that says what to do, 2 wrong usage, 130 Ctrl-C. Wrong usage is an
unknown option or verb, a missing argument, or a value that is not a number, a path or one of the words that the option takes.
All other errors are 1, including values that a setting (the tables below) cannot have, because a file may name those as well:
`policy show --profile secret` exits with 2, `serve --profile secret` with 1. The help of `verify` and `monitor` says what 1 and
2 mean there. On Ctrl-C or SIGTERM a server lets open requests end and exits with 0; a second Ctrl-C ends it at once, with 130.
Results go to standard output (`serve` prints what was started, and its address), everything else to standard error; `--json`
makes results readable by programs.

`--help` shows what matters most, `--help-all` every option. `--install-completion` sets up completion for bash, zsh, fish and
PowerShell.

A configuration file is TOML, with the names below in tables by group, or without tables; a flag wins over the file, the file
over what is chosen:

```toml
# cloister serve --config cloister.toml
[model]
model = "cloister-5m"

[scheduling]
scheduler = "fair"

[network]
port = 9000
```

`cloister serve --explain` prints every setting, its value and why it has it.
"""


def write_reference() -> str:
    """Returns the page as Markdown."""
    command = typer.main.get_command(app)
    verbs = "\n".join(_describe(verb, path) for path, verb in _walk(command, "cloister"))
    settings = "\n".join([*_tabulate_groups(), *(_tabulate(cls) for cls in OTHERS)])
    return f"{HEAD}\n## Verbs\n\n{verbs}\n## Settings\n\n{settings}"


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every verb under a command with its path; groups yield their verbs."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from _walk(command.get_command(None, name), f"{path} {name}")


def _describe(verb: Any, path: str) -> str:
    panels = [*(group.capitalize() for group in GROUPS), *(cls.__name__.removesuffix("Config") for cls in OTHERS)]
    shared = [panel for panel in panels if any(_panel(p) == panel for p in verb.params)]
    own = [p for p in verb.params if _panel(p) not in panels and p.name not in ("help", "config", HELP_ALL)]
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


def _tabulate_groups() -> Iterator[str]:
    """Yields the settings of engine and server, by group."""
    flags = {flag.name: flag for cls in (EngineConfig, ServerConfig) for flag in list_flags(cls)}
    for group, names in list_groups().items():
        yield _table(group.capitalize(), f"Table `[{group}]` of the file.", (flags[name] for name in names))


def _tabulate(cls: type[Any]) -> str:
    return _table(cls.__name__.removesuffix("Config"), (cls.__doc__ or "").split("\n")[0], list_flags(cls))


def _table(heading: str, about: str, flags: Iterable[Flag]) -> str:
    head = ["| flag | takes | default | what |", "|---|---|---|---|"]
    return "\n".join([f"### {heading}", "", about, "", *head, *map(_flag_row, flags), ""])


def _flag_row(flag: Flag) -> str:
    default = "unset" if flag.default is None else f"`{flag.shown_default}`"
    return f"| `{flag.declaration}` | {_escape(flag.values)} | {default} | {_escape(flag.help)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(write_reference(), end="")
