"""Help pages (the most used options first, all by group with `--help-all`), summaries of verbs, and messages on wrong usage."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from cloister.cli.console import err, print_error, print_line

UsageError: Final = cast(type[Exception], typer.BadParameter.__base__)
"""Base of every error that typer raises for wrong usage."""


_COERCION: Final = (
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Input should be a valid boolean.*", "must be yes or no"),
    (r"Input should be greater than or equal to (.*)", r"must be at least \1"),
    (r"Input should be less than or equal to (.*)", r"must be at most \1"),
    (r"Value error, '.*' is not one of (.*?)\.?", r"must be one of \1"),
)
"""typer's message about a value -> our message."""


def print_usage_error(error: Any) -> None:
    """Prints what is wrong and what to do on standard error. A group without a verb shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
        return
    print_error(describe_usage(error))
    context = getattr(error, "ctx", None)
    if context is not None:
        print_line(f"See `{context.command_path} --help`.", console=err)


def describe_usage(error: Any) -> str:
    """Returns a usage error of typer as one line, without the arguments' values, which may be a prompt."""
    match type(error).__name__:
        case "NoSuchOption":
            return f"there is no option {error.option_name}{_suggest_option(error)}"
        case "BadOptionUsage":
            option = next((p for p in _parameters(error) if error.option_name in p.opts), None)
            takes = f": {option.help}" if option is not None and option.help else ""
            return (
                f"{error.option_name} needs a value{takes}"
                if "requires an argument" in error.message
                else _lower(error.message)
            )
        case "MissingParameter" if error.param is not None:
            return f"{_name(error.param)} is missing: {error.param.help or 'give it'}"
        case "BadParameter" if error.param is not None:
            return f"{_name(error.param)} {_translate(error.message)}"
        case "BadParameter":
            hint = f"{error.param_hint}: " if error.param_hint else ""
            return f"{hint}{error.message}"
        case "UsageError" if "unexpected extra argument" in error.message:
            return _describe_extra(error)
    return _lower(str(error.message))


def show_argument(argument: Any) -> str:
    """Returns `NAME`, or `[NAME]` for an optional argument."""
    if argument.metavar:
        return str(argument.metavar)
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def suggest(given: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the closest known word, or "". Leading dashes are ignored."""
    words = {word.lstrip("-"): word for word in known}
    near = difflib.get_close_matches(given.lstrip("-"), list(words), n=1, cutoff=0.6)
    return f"; did you mean {words[near[0]]}?" if near else ""


def _suggest_option(error: Any) -> str:
    """Returns the closest option, or a hint that an argument was meant."""
    known: list[str] = []
    for parameter in _parameters(error):
        if parameter.param_type_name != "argument":
            known += [*parameter.opts, *parameter.secondary_opts]
        elif error.option_name.lstrip("-").upper() == _name(parameter):
            return f"; give {_name(parameter)} without {error.option_name}"
    return suggest(error.option_name, known)


def _describe_extra(error: Any) -> str:
    verb = error.ctx.command_path.partition(" ")[2]
    arguments = [show_argument(p) for p in _parameters(error) if p.param_type_name == "argument"]
    if not arguments:
        return f"{verb} takes no arguments, only options, which begin with --"
    return f"{verb} takes {' '.join(arguments)} and no more; put text of several words into quotes"


def _parameters(error: Any) -> Sequence[Any]:
    return error.ctx.command.get_params(error.ctx) if getattr(error, "ctx", None) is not None else ()


def _name(parameter: Any) -> str:
    """`--option` or `ARGUMENT`."""
    if parameter.param_type_name == "argument":
        return show_argument(parameter).split()[-1].strip("[].")
    return str(max(parameter.opts, key=len))


def _translate(message: str) -> str:
    for pattern, said in _COERCION:
        if match := re.fullmatch(pattern, message, re.DOTALL):
            return match.expand(said).replace("'", "")
    return f"is not right: {_lower(message)}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:].rstrip(".")


ALL: Final = "cloister.help_all"
"""Key in `Context.meta` while the help of every option is wanted."""
RARE: Final = "rare_settings"
"""Attribute of a verb's function: names of the parameters that `--help` omits."""
GENERAL: Final = "Options"
_TYPES: Final = re.compile(r" <([^>]+)>")
_RANGES: Final = (
    (re.compile(r"([\d.-]+)<=x<=([\d.-]+)"), r"from \1 to \2"),
    (re.compile(r"x>=([\d.-]+)"), r"at least \1"),
    (re.compile(r"x<=([\d.-]+)"), r"at most \1"),
)
"""typer's notation of a range -> our wording."""

Row = tuple[str, str]


class Verb(TyperCommand):
    """A verb. Its `--help` omits the options that are rare in `with_settings`; `--help-all` shows them."""

    @property
    def rare(self) -> frozenset[str]:
        """Names of the parameters that `--help` omits."""
        return getattr(self.callback, RARE, frozenset())

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(show_argument(p) for p in self.params if p.param_type_name == "argument")]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            vars(error).update(ctx=ctx)  # the parser itself does not report which option lacks its value
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
    """Returns the placeholder of a value: `N`, `NUMBER`, `TEXT`, `PATH` or its choices; "" for a switch."""
    kind = shown[1].removeprefix("list[").removesuffix("]").removesuffix(" range")
    named = {"bool": "", "int": " N", "float": " NUMBER", "str": " TEXT"}.get(kind)
    return named if named is not None else " PATH" if kind.lower() in ("path", "file", "directory") else f" {kind}"


# Summaries of verbs for `cloister --help` and completion, to avoid importing the verbs.


CONTENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "Use a model": {
        "serve": "Serve a model on the OpenAI API until SIGTERM or Ctrl-C.",
        "run": "Answer one prompt on standard output.",
        "chat": "Talk to a model, several turns.",
        "pull": "Download a model, check it and keep it, with its licence, for `serve`, `run` and `chat`.",
        "list": "List the models on this machine: embedded, pulled, in the hub's cache, and in the directories given.",
        "models": "The same as `list`.",
        "show": "Show a model's source, licence, digest, format and defaults of sampling.",
        "rm": "Delete models that were pulled, or that are in the hub's cache.",
    },
    "Look after a server": {
        "doctor": "Check what works on this machine, and what to do about what does not.",
        "keys": "Make, list and remove API keys.",
        "policy": "What each privacy profile allows, mitigates and refuses.",
        "bench": "Measure an engine or a server, with real traces, the operators of a step, or a disk.",
        "cluster": "Start, show, drain and return replicas; search for faults that they do not survive.",
        "plan": "Choose the roles of replicas for a load, predicted in virtual time.",
        "roofline": "Count every operator of a model, in prefill and in decode, and apply the roofline of a chip.",
    },
    "Make models smaller or faster": {
        "quantize": "Quantize a model, and measure what that costs in perplexity.",
        "train": "Train drafters for a model; the model itself is unchanged.",
        "datastore": "Build datastores of public text for drafts.",
    },
    "Use a private cloud": {
        "proxy": "Serve the OpenAI API on this machine: every request is sealed to a randomly drawn, verified node.",
        "verify": "Verify nodes, receipts, routing and residue.",
        "monitor": "Replay the log: membership, capacities, keys, cadence and releases; compare with what others were shown.",
    },
    "Run a private cloud": {
        "relay": "Forward sealed requests to a gateway, and sealed purchases to an issuer, until SIGTERM or Ctrl-C.",
        "gateway": "Forward sealed requests to nodes, each for a token, until SIGTERM or Ctrl-C.",
        "issuer": "Issue tokens to holders of API keys, without being able to trace them.",
        "log": "Keep and check a transparency log.",
        "release": "Make releases, and revoke them.",
        "witness": "Witness the checkpoints of logs.",
    },
}
"""Heading -> verb -> the first sentence of its help; missing verbs are imported for their help."""

SUMMARIES: Final = {verb: summary for verbs in CONTENTS.values() for verb, summary in verbs.items()}
