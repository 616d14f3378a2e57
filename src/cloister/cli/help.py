"""Help pages: the most used options first, all by group with `--help-all`; and the summary of each verb."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from cloister.cli.usage import UsageError, show_argument, suggest

ALL: Final = "cloister.help_all"
"""Key in `Context.meta` while the help of every option is wanted."""
RARE: Final = "rare_settings"
"""Attribute of a verb's function: names of the parameters that `--help` leaves out."""
GENERAL: Final = "Options"
_TYPES: Final = re.compile(r" <([^>]+)>")
_RANGES: Final = (
    (re.compile(r"([\d.-]+)<=x<=([\d.-]+)"), r"from \1 to \2"),
    (re.compile(r"x>=([\d.-]+)"), r"at least \1"),
    (re.compile(r"x<=([\d.-]+)"), r"at most \1"),
)
"""How typer writes the range of a number -> words."""

Row = tuple[str, str]


class Verb(TyperCommand):
    """A verb. Its `--help` leaves out the options that `with_settings` calls rare; `--help-all` has them."""

    @property
    def rare(self) -> frozenset[str]:
        """Names of the parameters that `--help` leaves out."""
        return getattr(self.callback, RARE, frozenset())

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(show_argument(p) for p in self.params if p.param_type_name == "argument")]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            vars(error).update(ctx=ctx)  # the parser itself does not say whose option lacks its value
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        left_out = frozenset() if ALL in ctx.meta else self.rare
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for heading, parameters in _sort_into_sections(self.get_params(ctx), left_out).items():
            _write_section(formatter, heading, (_row(parameter, ctx) for parameter in parameters))
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{len(left_out)} more options: {ctx.command_path} --help-all")


class VerbGroup(TyperGroup):
    """A group of verbs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            ctx.fail(f"there is no verb {name!r}{suggest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for heading, rows in self.list_sections(ctx):
            _write_section(formatter, heading, rows)
        _write_section(formatter, GENERAL, (_row(parameter, ctx) for parameter in self.get_params(ctx)))

    def list_sections(self, ctx: Any) -> Iterator[tuple[str, list[Row]]]:
        """Yields headings, and the verbs under each with their summaries."""
        yield "Verbs", [(name, summarize(verb.help)) for name, verb in self.commands.items()]


def summarize(text: str | None) -> str:
    """Returns the first sentence of a help text, on one line."""
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "." if paragraph else ""


def print_all(ctx: typer.Context, wanted: bool) -> None:
    """Callback of `--help-all`."""
    if wanted and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _sort_into_sections(parameters: Iterable[Any], left_out: frozenset[str]) -> dict[str, list[Any]]:
    """Returns parameters by heading: arguments, general options, then groups in their order."""
    sections: dict[str, list[Any]] = {"Arguments": [], GENERAL: []}
    for parameter in parameters:
        if parameter.name not in left_out:
            is_argument = parameter.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or GENERAL
            sections.setdefault(heading, []).append(parameter)
    return sections


def _write_section(formatter: Any, heading: str, rows: Iterable[Row]) -> None:
    listed = list(rows)
    if listed:
        with formatter.section(heading):
            formatter.write_dl(listed, col_max=26)


def _row(parameter: Any, ctx: Any) -> Row:
    if parameter.param_type_name == "argument":
        return show_argument(parameter), parameter.help or ""
    names, text = parameter.get_help_record(ctx)
    for pattern, words in _RANGES:
        text = pattern.sub(words, text)
    return _TYPES.sub(_show_type, names), " ".join(text.split())


def _show_type(shown: re.Match[str]) -> str:
    """Returns what stands for a value: `N`, `NUMBER`, `TEXT`, `PATH` or its choices; nothing for a switch."""
    kind = shown[1].removeprefix("list[").removesuffix("]").removesuffix(" range")
    named = {"bool": "", "int": " N", "float": " NUMBER", "str": " TEXT"}.get(kind)
    return named if named is not None else " PATH" if kind.lower() in ("path", "file", "directory") else f" {kind}"


# Summaries of verbs for `cloister --help` and completion, which then need not import the verbs.


CONTENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "Use a model": {
        "serve": "Serve a model on the OpenAI API until SIGTERM or Ctrl-C.",
        "run": "Answer one prompt on standard output.",
        "chat": "Talk to a model, several turns.",
        "pull": "Download a model, check it and keep it, with its licence, for `serve`, `run` and `chat`.",
        "list": "List the models on this machine: embedded, pulled, in the hub's cache, and in the directories given.",
        "models": "List the models on this machine: embedded, pulled, in the hub's cache, and in the directories given.",
        "show": "Show a model's source, licence, digest, format and defaults of sampling.",
        "rm": "Delete models that were pulled, or that lie in the hub's cache.",
    },
    "Look after a server": {
        "doctor": "Look at this machine: what works, and what to do about what does not.",
        "keys": "Make, list and remove API keys.",
        "policy": "What each privacy profile allows, mitigates and refuses.",
        "bench": "Measure an engine or a server, with real traces, or the operators of a step.",
        "roofline": "Count every operator of a model, in prefill and in decode, and put it under the roof of a chip.",
    },
    "Make models smaller or faster": {
        "quantize": "Write a model in few bits, and say what that costs in perplexity.",
        "train": "Train what drafts tokens for a model; the model itself stays as it is.",
        "datastore": "Public text that drafts are looked up in.",
    },
    "Use a private cloud": {
        "proxy": "Serve the OpenAI API on this machine: every request is sealed to a node that was drawn and verified.",
        "verify": "Check what a node claims and what it keeps.",
        "monitor": "Replay the log: membership, capacities, keys, cadence and releases; compare with what others were shown.",
    },
    "Run a private cloud": {
        "relay": "Carry sealed requests to a gateway, and sealed purchases to an issuer, until SIGTERM or Ctrl-C.",
        "gateway": "Hand sealed requests to nodes, each against a token, until SIGTERM or Ctrl-C.",
        "issuer": "Give tokens against API keys, without seeing what becomes of them.",
        "log": "Keep and check a transparency log.",
        "release": "Make releases, and revoke them.",
        "witness": "Witness the checkpoints of logs.",
    },
}
"""Heading -> verb -> the first sentence of its help; a verb that is missing here is imported for its help."""

SUMMARIES: Final = {verb: summary for verbs in CONTENTS.values() for verb, summary in verbs.items()}
