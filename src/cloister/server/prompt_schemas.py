"""Schemas of prompts: named modules at fixed positions, from which requests choose (Prompt Cache, Gim et al. 2024, section 3).

The modules of a schema follow each other; those of a union share one place. Each is encoded separately after the schema's
prefix, at its own positions, whatever else a request chooses. A parameter leaves as many positions free as its argument may
have tokens; a request's arguments are computed there, together with its prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from cloister.server.documents import DocumentPrompt, check_documents, find_newline, read_question, weigh_documents
from cloister.server.errors import invalid
from cloister.server.kept_content import charge_kept
from cloister.server.responses.keeping import ResponseStore
from cloister.server.sampling import check_text
from cloister.server.schemas import MAX_DOCUMENTS, CompletionBody, ModuleChoice, SchemaName, Strict
from cloister.text import Tokenizer
from cloister.types.documents import Documents
from cloister.types.errors import NotFoundError
from cloister.types.request import ModelInfo

MAX_PARAMETERS: Final = 16
MAX_PARAMETER_TOKENS: Final = 1024
SCHEMAS: Final = "schema-"
"""Prefix of the names under which schemas are kept."""
_MODULES: Final = "prompt_schema.modules"
NO_SCHEMAS: Final = (
    "This server keeps no schemas: with API keys it does with --keep-responses only, and strict profiles never do. Send the "
    "whole prompt."
)


class ParameterInput(Strict):
    """A part of a module that each request fills in; `{name}` in the module's text marks its place."""

    name: SchemaName
    max_tokens: Annotated[int, Field(ge=1, le=MAX_PARAMETER_TOKENS)]


class ModuleInput(Strict):
    """A text that requests may choose."""

    name: SchemaName
    text: Annotated[str, Field(min_length=1)]
    parameters: Annotated[list[ParameterInput], Field(max_length=MAX_PARAMETERS)] | None = None


class UnionInput(Strict):
    """Modules of which a request chooses one at most: they have the same positions."""

    union: Annotated[list[ModuleInput], Field(min_length=1, max_length=MAX_DOCUMENTS)]


def _kind_of(value: object) -> str:
    """Returns which kind of entry is meant, so that an error is about a field of that kind."""
    is_union = "union" in value if isinstance(value, dict) else isinstance(value, UnionInput)
    return "UnionInput" if is_union else "ModuleInput"


AnyModuleInput = Annotated[
    Annotated[ModuleInput, Tag("ModuleInput")] | Annotated[UnionInput, Tag("UnionInput")], Discriminator(_kind_of)
]


class PromptSchemaBody(Strict):
    """Body of POST /v1/prompt_schemas."""

    name: SchemaName
    prefix: str | None = None
    modules: Annotated[list[AnyModuleInput], Field(min_length=1, max_length=MAX_DOCUMENTS)]

    def places(self) -> Iterator[list[ModuleInput]]:
        """Yields the modules of each place, in order."""
        for each in self.modules:
            yield each.union if isinstance(each, UnionInput) else [each]


class PlacedParameter(msgspec.Struct, frozen=True):
    """Where the argument of a parameter begins, and how many positions are free for it."""

    name: str
    start: int
    max_tokens: int


class PlacedModule(msgspec.Struct, frozen=True):
    """A module at its positions.

    Attributes:
        start: its first position, which modules of a union share.
        end: one past the last position of its place.
    """

    name: str
    start: int
    end: int
    parameters: list[PlacedParameter] = []


class PromptSchema(msgspec.Struct, frozen=True):
    """Reply of POST /v1/prompt_schemas: where the modules of a schema stand."""

    name: str
    modules: list[PlacedModule]
    object: Literal["prompt_schema"] = "prompt_schema"


class DeletedPromptSchema(msgspec.Struct, frozen=True):
    """Reply of DELETE /v1/prompt_schemas/{name}."""

    name: str
    object: Literal["prompt_schema"] = "prompt_schema"
    deleted: bool = True


def lay_out_schema(body: PromptSchemaBody, tokenizer: Tokenizer, model: ModelInfo) -> Layout:
    """Returns where the modules of a new schema stand.

    Raises:
        InvalidRequestError: they do not fit into the context window, or as in `Layout`.
    """
    least = tokenizer.least_tokens(body.prefix or "")
    least += sum(max(_least_positions(module, tokenizer) for module in place) for place in body.places())
    _check_positions(least, model, "at least ")
    layout = Layout(body, tokenizer, model.document_block_size)
    _check_positions(layout.num_positions, model)
    return layout


def _least_positions(module: ModuleInput, tokenizer: Tokenizer) -> int:
    """Returns a lower bound for the positions of a module, before any text is tokenized."""
    text = module.text
    for parameter in module.parameters or ():
        text = text.replace(f"{{{parameter.name}}}", "")
    return tokenizer.least_tokens(text) + sum(parameter.max_tokens for parameter in module.parameters or ())


def _check_positions(num_positions: int, model: ModelInfo, counts: str = "") -> None:
    if num_positions >= model.max_model_len:
        message = f"The schema has {counts}{num_positions} positions and the context window holds {model.max_model_len}."
        raise invalid(f"{message} Shorten its modules.", "modules", "too_long")


def keep_schema(store: ResponseStore, owner: bytes, body: PromptSchemaBody) -> None:
    """Keeps a schema as responses are kept, for its owner, and replaces another one of its name.

    Raises:
        InvalidRequestError: it exceeds the limit of everything that may be kept.
    """
    if not store.put(_key(owner, body.name), owner, body.model_dump_json(exclude_none=True).encode()):
        raise invalid("The schema is too long to be kept; make it shorter.", "modules", "too_long")


def find_schema(store: ResponseStore | None, owner: bytes | None, name: str) -> PromptSchemaBody:
    """Returns a schema of an owner, and renews its lifetime.

    Raises:
        NotFoundError: there is none of this name, it belongs to another owner, or it is no longer kept.
    """
    if store is None or owner is None:
        raise NotFoundError(NO_SCHEMAS, param="prompt_schema")
    try:
        kept = store.go_on(owner, _key(owner, name), "prompt_schema.name")
    except NotFoundError:
        message = "There is no such schema, or it is no longer kept; send it to /v1/prompt_schemas again."
        raise NotFoundError(message, param="prompt_schema.name", code="prompt_schema_not_found") from None
    charge_kept(len(kept.items))
    return PromptSchemaBody.model_validate_json(kept.items)


def remove_schema(store: ResponseStore | None, owner: bytes | None, name: str) -> None:
    """Forgets a schema; errors as in `find_schema`."""
    find_schema(store, owner, name)
    assert store is not None
    assert owner is not None
    store.remove(owner, _key(owner, name))


def _key(owner: bytes, name: str) -> str:
    """Returns the name under which a schema is kept: no response has it, and nobody without the owner's secret can produce
    it.
    """
    return f"{SCHEMAS}{hashlib.sha256(owner + name.encode()).hexdigest()}"


@dataclass(slots=True)
class Module:
    """A module's tokens, which fill whole blocks, and the positions by which they are rotated.

    Attributes:
        runs: (token, position) where the positions of tokens do not follow each other, as in `Documents.positions`.
    """

    place: PlacedModule
    token_ids: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


class Layout:
    """Where the modules of a schema stand.

    Args:
        block_size: prefix and modules fill whole blocks of it, with newlines.

    Attributes:
        prefix: its token ids.
        modules: of each place, by name.
        num_positions: those of the prefix and all modules.

    Raises:
        InvalidRequestError: names are used twice, or a text has no place for a parameter.
    """

    def __init__(self, schema: PromptSchemaBody, tokenizer: Tokenizer, block_size: int) -> None:
        self._tokenizer, self._block_size, self._newline = tokenizer, block_size, find_newline(tokenizer)
        names = [module.name for place in schema.places() for module in place]
        if len(set(names)) < len(names):
            raise invalid("Two modules have the same name; give each its own.", "modules", "invalid_value")
        self.prefix = self._fill(tokenizer.encode(schema.prefix or "", add_special_tokens=True))
        self.modules: list[dict[str, Module]] = []
        start = len(self.prefix)
        for number, place in enumerate(schema.places()):
            paths = [f"modules[{number}]" + f".union[{i}]" * (len(place) > 1) for i in range(len(place))]
            found = [self._lay_out(module, start, path) for module, path in zip(place, paths, strict=True)]
            start = max(module.place.end for module in found)
            for module in found:
                module.place = msgspec.structs.replace(module.place, end=start)
            self.modules.append({module.place.name: module for module in found})
        self.num_positions = start

    def _fill(self, token_ids: list[int]) -> list[int]:
        return token_ids + self._newline * (-len(token_ids) % self._block_size if token_ids else self._block_size)

    def _lay_out(self, given: ModuleInput, start: int, path: str) -> Module:
        text, position, module = given.text, start, Module(PlacedModule(given.name, start, start))
        parameters = {f"{{{parameter.name}}}": parameter for parameter in given.parameters or ()}
        if len(parameters) < len(given.parameters or ()) or any(text.count(mark) != 1 for mark in parameters):
            message = f"`{path}` needs each of its parameters once in its text, as its name in braces."
            raise invalid(message, path, "invalid_value")
        for mark in sorted(parameters, key=text.find):
            before, _, text = text.partition(mark)
            position = self._add(module, self._tokenizer.encode(before, add_special_tokens=False), position)
            module.place.parameters.append(PlacedParameter(parameters[mark].name, position, parameters[mark].max_tokens))
            position += parameters[mark].max_tokens
        rest = self._tokenizer.encode(text, add_special_tokens=False)
        num_tokens = len(module.token_ids) + len(rest)
        rest += self._newline * (-num_tokens % self._block_size if num_tokens else self._block_size)
        position = self._add(module, rest, position)
        module.place = msgspec.structs.replace(module.place, end=position)
        return module

    def _add(self, module: Module, token_ids: list[int], position: int) -> int:
        """Appends tokens at a position, and returns the one behind."""
        if token_ids:
            module.runs.append((len(module.token_ids), position))
            module.token_ids += token_ids
        return position + len(token_ids)

    def describe(self, name: str) -> PromptSchema:
        """Returns where everything stands."""
        return PromptSchema(name, [module.place for place in self.modules for module in place.values()])

    def join(self, chosen: Sequence[ModuleChoice], asked: Sequence[int], num_links: int = 0) -> DocumentPrompt:
        """Returns the prompt of chosen modules, in the order of the schema, with their arguments, and of what follows.

        Args:
            num_links: link tokens for each module; they have the positions behind the last one.

        Raises:
            InvalidRequestError: an argument does not fit.
        """
        arguments = {each.name: (each.arguments or {}, f"{_MODULES}[{i}].arguments") for i, each in enumerate(chosen)}
        token_ids, runs, starts = list(self.prefix), [(0, 0)], []
        tail: list[tuple[int, Sequence[int]]] = []
        end = 0
        for place in self.modules:
            for name in [name for name in place if name in arguments]:
                module, first = place[name], len(token_ids)
                starts.append(first)
                runs += [(first + token, position) for token, position in module.runs]
                token_ids += module.token_ids
                tail += self._read_arguments(module.place, *arguments[name])
                end = module.place.end
        bounds = len(token_ids)
        links = self._newline * (num_links * len(starts))
        if links:
            tail.insert(0, (end, links))
        for position, tokens in (*tail, (end + len(links), asked)):
            runs.append((len(token_ids), position))
            token_ids += tokens
        return DocumentPrompt(token_ids, Documents(tuple(starts), bounds, positions=_canonical(runs), num_links=num_links))

    def _read_arguments(self, place: PlacedModule, arguments: Mapping[str, str], path: str) -> Iterator[tuple[int, list[int]]]:
        """Yields the positions and token ids of a module's arguments, which stand at `path` of the request."""
        known = {parameter.name for parameter in place.parameters}
        if arguments.keys() - known:
            message = f"`{path}` has an argument for a parameter that its module does not have; it has {len(known)}."
            raise invalid(f"{message} Leave the argument out.", path, "unknown_parameter")
        if known - arguments.keys():
            message = f"`{path}` needs an argument for each parameter of its module, which has {len(known)}."
            raise invalid(message, path, "missing_required_parameter")
        for parameter in place.parameters:
            token_ids = self._tokenizer.encode(arguments[parameter.name], add_special_tokens=False)
            if len(token_ids) > parameter.max_tokens:
                message = (
                    f"`{path}` has an argument of {len(token_ids)} tokens for a parameter of {parameter.max_tokens} at most."
                )
                raise invalid(f"{message} Shorten it.", path, "too_long")
            if token_ids:
                yield parameter.start, token_ids


def _canonical(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns runs without those that merely continue the previous one, so that equal positions have equal keys."""
    kept: list[tuple[int, int]] = []
    for token, position in runs:
        if not kept or kept[-1][1] + token - kept[-1][0] != position:
            kept.append((token, position))
    return tuple(kept)


def read_schema_prompt(
    body: CompletionBody, schema: PromptSchemaBody, tokenizer: Tokenizer, model: ModelInfo, num_links: int
) -> DocumentPrompt:
    """Returns the prompt of a body with `prompt_schema`.

    Args:
        num_links: link tokens that the request's adapter has for each module.

    Raises:
        InvalidRequestError: the model, or another field, does not support it.
    """
    check_placing(model)
    assert body.prompt_schema is not None
    question = read_question(body, "prompt_schema")
    check_text(question, tokenizer, model, "prompt")
    _check_choice(schema, body.prompt_schema.modules)  # before all of its modules are tokenized
    layout = Layout(schema, tokenizer, model.document_block_size)
    prompt = layout.join(body.prompt_schema.modules, tokenizer.encode(question, add_special_tokens=False), num_links)
    return weigh_documents(prompt, body.documents_temperature, body.documents_scale, model)


def _check_choice(schema: PromptSchemaBody, chosen: Sequence[ModuleChoice]) -> None:
    """Raises InvalidRequestError if a module does not exist, is named twice, or excludes another one."""
    names = {each.name for each in chosen}
    places = [{module.name for module in place} for place in schema.places()]
    if len(names) < len(chosen):
        raise invalid("`prompt_schema.modules` names a module twice; name it once.", _MODULES, "invalid_value")
    if not names <= {name for place in places for name in place}:
        raise invalid("`prompt_schema.modules` names a module that the schema does not have.", _MODULES, "invalid_value")
    if any(len(names & place) > 1 for place in places):
        raise invalid("`prompt_schema.modules` has two modules of one union; choose one.", _MODULES, "invalid_value")


def check_placing(model: ModelInfo) -> None:
    """Raises InvalidRequestError unless a model can place the modules of a schema."""
    check_documents(model)
    if not model.places_documents:
        message = (
            "This model cannot place modules of a schema: it learned each position, or its back end cannot turn tokens so."
        )
        raise invalid(f"{message} Send the whole prompt.", "prompt_schema", "no_documents")
