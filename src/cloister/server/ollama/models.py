"""Replies of Ollama's /api/tags, /api/ps and /api/show."""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from cloister.server.answers import Model
from cloister.server.state import ServerState
from cloister.text.infill import Infill
from cloister.text.tools import detect_family

FOREVER: Final = datetime(9999, 12, 31, tzinfo=UTC)
"""Expiry time of a model on a server whose operator controls unloading."""

_UNKNOWN: Final = "0" * 64
"""Digest of a model that is not loaded; clients show its first twelve characters."""


class OllamaDetails(msgspec.Struct, frozen=True):
    """Details of a model; empty if unknown."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True):
    """One entry of a list. `digest` is the fingerprint of answers, `size` the bytes of its weights in memory."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct, frozen=True):
    """Reply of /api/tags."""

    models: list[OllamaModel]


class OllamaRunning(msgspec.Struct, frozen=True):
    """One entry of /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: datetime
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct, frozen=True):
    """Reply of /api/ps."""

    models: list[OllamaRunning]


class OllamaShown(msgspec.Struct, frozen=True):
    """Reply of /api/show. `template` is the model's Jinja template; `parameters` has its sampling defaults."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


def list_tags(state: ServerState) -> OllamaModels:
    """Returns the model under each of its names, and its adapters."""
    return OllamaModels([_entry(state, name, created_s) for name, created_s in _names(state)])


def list_running(state: ServerState) -> OllamaRunningModels:
    """Returns the loaded models: all that are served."""
    model = state.reader.model
    return OllamaRunningModels(
        [
            OllamaRunning(
                name=name,
                model=name,
                size=_weights_bytes(state),
                digest=state.engine.model.fingerprint,
                details=describe_details(state, name),
                expires_at=FOREVER,
                size_vram=_weights_bytes(state) if model.is_on_device else 0,
                context_length=model.max_model_len,
            )
            for name, _ in _names(state)
        ]
    )


def show_model(state: ServerState, name: str) -> OllamaShown:
    """Returns the description of the model that is served under a name."""
    reader, model = state.reader, state.reader.model
    created_s = dict(_names(state))[name]
    family = model.family or "unknown"
    info: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.context_length": model.max_model_len,
        f"{family}.vocab_size": model.vocab_size,
    }
    if model.num_parameters:
        info["general.parameter_count"] = model.num_parameters
    if model.hidden_size:
        info[f"{family}.embedding_length"] = model.hidden_size
    return OllamaShown(
        modelfile=f"FROM {model.name}\n",
        parameters="\n".join(f"{key} {value}" for key, value in model.defaults.items()),
        template=reader.chat_format.template.source,
        details=describe_details(state, name),
        model_info=info,
        capabilities=list(_capabilities(state)),
        modified_at=_time(created_s),
    )


def list_entries(models: Iterable[Model]) -> OllamaModels:
    """Returns models of which only the list entry is known, because they may not be loaded."""
    return OllamaModels([OllamaModel(m.id, m.id, _time(m.created), 0, _UNKNOWN, OllamaDetails()) for m in models])


def describe_details(state: ServerState, name: str) -> OllamaDetails:
    """Returns the details of the model with a name."""
    model = state.reader.model
    return OllamaDetails(
        parent_model=state.reader.model_name if name in state.reader.adapters else "",
        format="gguf" if model.path.endswith(".gguf") else "safetensors",
        family=model.family,
        families=[model.family] if model.family else [],
        parameter_size=write_count(model.num_parameters) if model.num_parameters else "",
        quantization_level=model.number_format,
    )


def write_count(count: int) -> str:
    """Formats a number of weights, such as `4.7M` or `1.2B`."""
    for size, unit in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _entry(state: ServerState, name: str, created_s: int) -> OllamaModel:
    fingerprint = state.engine.model.fingerprint
    return OllamaModel(name, name, _time(created_s), _weights_bytes(state), fingerprint, describe_details(state, name))


def _names(state: ServerState) -> Iterable[tuple[str, int]]:
    reader = state.reader
    yield from ((name, reader.model.created_s) for name in (reader.model_name, *reader.other_names))
    yield from ((adapter.name, adapter.created_s) for adapter in reader.adapters.values())


def _capabilities(state: ServerState) -> Iterable[str]:
    if state.reader.model.encoder is not None:
        yield "embedding"
        return
    yield "completion"
    template = state.reader.chat_format.template
    if template.exists and detect_family(template.source) is not None:
        yield "tools"
    if state.reader.chat_format.marks is not None:
        yield "thinking"
    if state.reader.chat_format.takes_images:
        yield "vision"
    if Infill.of(state.reader.tokenizer) is not None:
        yield "insert"


def _weights_bytes(state: ServerState) -> int:
    return dict(state.engine.memory).get("weights", 0)


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# Model names of Ollama's clients: `NAME:latest` is `NAME`. Pure.


LATEST: Final = ":latest"


def served_name(name: str | None, served: Container[str]) -> str | None:
    """Returns the name under which a model is served: `name` itself, or without the tag that clients add."""
    if name is None or name in served or not name.endswith(LATEST):
        return name
    return name.removesuffix(LATEST)
