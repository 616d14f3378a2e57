"""Usage errors: one line says what is wrong, one what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import typer

from cloister.cli.console import err, print_error

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
"""What typer says of a value -> what we say."""


def print_usage_error(error: Any) -> None:
    """Prints what is wrong and what to do on standard error. A group without a verb is answered with its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
        return
    print_error(describe_usage(error))
    context = getattr(error, "ctx", None)
    if context is not None:
        err.print(f"See `{context.command_path} --help`.", markup=False, highlight=False, soft_wrap=True)


def describe_usage(error: Any) -> str:
    """Returns a usage error of typer's as one line, without what was given to arguments, which may be a prompt."""
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
    """Returns `NAME`, or `[NAME]` for an argument that may be left out."""
    if argument.metavar:
        return str(argument.metavar)
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def suggest(given: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the nearest known word, or nothing. Dashes before it make no word nearer."""
    words = {word.lstrip("-"): word for word in known}
    near = difflib.get_close_matches(given.lstrip("-"), list(words), n=1, cutoff=0.6)
    return f"; did you mean {words[near[0]]}?" if near else ""


def _suggest_option(error: Any) -> str:
    """Returns the nearest option, or says that what was meant is an argument."""
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
