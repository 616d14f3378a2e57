"""Command-line options: those generated from the configuration classes, and those that several verbs share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import msgspec
import typer

from cloister.cli.help import RARE, print_all
from cloister.types.config import EngineConfig, ServerConfig, resolve, setting_names
from cloister.types.request import SamplingParams
from cloister.types.setting_groups import COMMON, group_of, list_groups

C = TypeVar("C")

CONFIG_HELP: Final = "TOML file of settings, named as the flags are with `_` for `-`; a flag wins over the file."
GROUPED: Final = (EngineConfig, ServerConfig)
"""Classes whose settings are shown by group, and omitted from `--help` unless common."""
MODEL: Final = "model_argument"
HELP_ALL: Final = "help_all"


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """The configuration on the command line: given flags, and the file.

    Attributes:
        flags: setting name -> value, only those that a flag set.
    """

    flags: dict[str, object]
    config_file: Path | None = None

    def of(self, *classes: type[Any]) -> dict[str, object]:
        """Returns the flags that belong to the classes given."""
        names = setting_names(*classes)
        return {name: value for name, value in self.flags.items() if name in names}

    def resolve(self, cls: type[C]) -> C:
        """Returns a configuration from flags only, such as that of a measurement.

        Raises:
            ConfigError: a value has the wrong type or range.
        """
        return resolve(cls, [("flag", self.of(cls))]).config


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting as the command line and the documentation show it."""

    name: str
    kind: type[Any]
    default: object
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None

    @property
    def declaration(self) -> str:
        """`--kebab-case`, or `--kebab-case/--no-kebab-case` for a switch."""
        kebab = self.name.replace("_", "-")
        return f"--{kebab}/--no-{kebab}" if self.kind is bool else f"--{kebab}"

    @property
    def metavar(self) -> str | None:
        """Placeholder of the value in help: `N`, `FILE` ...; None for a switch."""
        if self.kind is bool:
            return None
        first = self.help.split(maxsplit=1)[0]
        return {"File": "FILE", "Directory": "DIR"}.get(first, {int: "N", float: "NUMBER"}.get(self.kind, "TEXT"))

    @property
    def shown_default(self) -> str:
        """The default in the notation of users."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def complete(self, incomplete: str) -> list[str]:
        """Returns the choices that begin with the typed text."""
        return [choice for choice in self.choices if choice.startswith(incomplete)]

    @property
    def values(self) -> str:
        """Description of valid values: choices, a range, or a type."""
        if self.choices:
            return ", ".join(self.choices)
        word = {str: "text", int: "whole number", float: "number", bool: "switch"}[self.kind]
        if self.low is not None and self.high is not None:
            return f"{word} from {self.low:g} to {self.high:g}"
        return f"{word}, at least {self.low:g}" if self.low is not None else word


def list_flags(cls: type[Any]) -> Iterator[Flag]:
    """Yields a flag for each field of a configuration class, in order."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        kinds = [kind for kind in get_args(hints[field.name]) if kind is not type(None)] or [hints[field.name]]
        about = field.metadata
        choices, low, high = about["choices"], about["low"], about["high"]
        yield Flag(field.name, kinds[0], field.default, about["help"], choices, low, high)


def with_settings(
    *classes: type[Any], config_file: bool = True, rare: Iterable[str] = (), model: str | None = "model"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds the flags of `classes`, and by default `--config`, to a verb.

    The verb takes them as one argument, `settings: GivenSettings`. Flags that were not given are omitted, so that the config
    file and the defaults apply.

    Args:
        rare: parameters of the verb that `--help` omits, like settings that are not common.
        model: the setting that the argument MODEL gives, if the classes have it; None adds no such argument.
    """
    places = {name: place for place, name in enumerate(chain.from_iterable(list_groups().values()))}
    flags = [(cls, flag) for cls in classes for flag in list_flags(cls)]
    flags.sort(key=lambda entry: places[entry[1].name] if entry[0] in GROUPED else -1)
    about = next((flag.help for _, flag in flags if flag.name == model), None)
    hidden = frozenset(rare) | {flag.name for cls, flag in flags if cls in GROUPED and flag.name not in COMMON}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**given: Any) -> None:
            path = given.pop("config", None)
            given.pop(HELP_ALL, None)
            values = {flag.name: given.pop(flag.name) for _, flag in flags}
            if model is not None and about is not None:
                values[model] = choose_model(given.pop(MODEL, None), values[model], model)
            chosen = {name: value for name, value in values.items() if value is not None}
            verb(settings=GivenSettings(chosen, path), **given)

        own = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [_model_parameter(about)] if about is not None else []
        parameters += [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "settings"]
        parameters += [_config_parameter()] if config_file else []
        parameters += [_help_all_parameter()] if hidden else []
        parameters += [_parameter(flag, panel_of(cls, flag.name)) for cls, flag in flags]
        run.__dict__["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__dict__[RARE] = hidden
        return run

    return decorate


def choose_model(argument: str | None, flag: str | None, setting: str = "model") -> str | None:
    """Returns the model that the argument MODEL or the flag names.

    Raises:
        typer.BadParameter: they name different ones.
    """
    if argument is not None and flag is not None and argument != flag:
        name = setting.replace("_", "-")
        raise typer.BadParameter(f"MODEL and --{name} name different models; give one of them")
    return flag if argument is None else argument


def panel_of(cls: type[Any], name: str) -> str:
    """Returns the heading of a setting's flag."""
    return group_of(name).capitalize() if cls in GROUPED else cls.__name__.removesuffix("Config")


def _model_parameter(about: str) -> inspect.Parameter:
    argument = typer.Argument(help=about, metavar="[MODEL]", show_default=False, autocompletion=complete_model)
    return inspect.Parameter(MODEL, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, argument])


def complete_model(incomplete: str) -> list[str]:
    """Returns the names of embedded, pulled and catalogued models that begin with the typed text."""
    from cloister.models import embedded_names
    from cloister.models.pulling.catalogue import CATALOGUE
    from cloister.models.pulling.store import Store

    names = {*embedded_names(), *CATALOGUE, *(model.name for model in Store().list())}
    return sorted(name for name in names if name.startswith(incomplete))


def _help_all_parameter() -> inspect.Parameter:
    option = typer.Option("--help-all", help="Show every option, by group.", callback=print_all, is_eager=True)
    return inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option])


def _number_or_text(kind: type[int] | type[float]) -> Callable[[str], object]:
    """Returns a parser of numbers that leaves other text as it is: it is refused with everything else that is wrong."""

    def parse(given: str) -> object:
        try:
            return kind(given)
        except ValueError:
            return given

    return parse


def _parameter(flag: Flag, panel: str) -> inspect.Parameter:
    parts = [flag.values] if flag.choices or flag.low is not None else []
    parts += [] if flag.default is None else [f"default: {flag.shown_default}"]
    help_text = f"{flag.help} ({'; '.join(parts)})" if parts else flag.help
    option = typer.Option(
        flag.declaration,
        help=help_text,
        metavar=flag.metavar,
        show_default=False,
        rich_help_panel=panel,
        autocompletion=flag.complete if flag.choices else None,
        parser=_number_or_text(flag.kind) if flag.kind in (int, float) else None,
    )
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[flag.kind | None, option]
    )


def _config_parameter() -> inspect.Parameter:
    option = typer.Option("--config", help=CONFIG_HELP, metavar="FILE")
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option])


# Options for a client's limits on cloud membership, shared by every verb that selects or verifies nodes.


LeastPresent = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Minimum fraction of the membership's capacity that the epoch must name.")
]
MostShare = Annotated[float, typer.Option(min=0.0, max=1.0, help="Largest fraction of the capacity that one node may have.")]
AcceptMembership = Annotated[
    int, typer.Option(min=0, help="Accept the membership of this number, whatever changed within a day.", metavar="NUMBER")
]
AcceptMaskedChips = Annotated[
    bool,
    typer.Option(
        "--accept-masked-chips", help="Accept several nodes on hardware whose evidence names no processor; two may share one."
    ),
]
LEAST_PRESENT, MOST_SHARE = 0.66, 0.5
"""Must equal those of `client.limits.Limits`; a test checks this."""


# Sampling options of the verbs that generate text.


PANEL = "Sampling"

MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1, rich_help_panel=PANEL)]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the most likely token; unset, the model's default.", min=0, rich_help_panel=PANEL)
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.", min=0, max=1, rich_help_panel=PANEL)]
TopK = Annotated[int | None, typer.Option(help="Only the k most likely tokens.", min=0, rich_help_panel=PANEL)]
Seed = Annotated[int | None, typer.Option(help="Makes the answer reproducible.", rich_help_panel=PANEL)]


def choose_sampling(defaults: SamplingParams, given: Mapping[str, object]) -> SamplingParams:
    """Returns the model's defaults, replaced by given values; None means not given."""
    return msgspec.structs.replace(defaults, **{name: value for name, value in given.items() if value is not None})
