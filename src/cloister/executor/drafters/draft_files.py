"""Finds the draft model of a model, and checks that both use the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cloister.executor.drafters.base import DrafterContext, DraftModel
from cloister.executor.drafters.heads import heads_directory
from cloister.models import embedded_names, locate
from cloister.types.errors import ConfigError

EMBEDDED: Final = {"cloister-5m": "cloister-draft"}
"""Model -> draft model, for those embedded in the package."""
TRAINED: Final = "draft_model"
"""Subdirectory in which `cloister train draft` stores a draft model."""


def draft_names(context: DrafterContext) -> list[str]:
    """Returns the names of the draft models: those in the settings, else the trained one, else the embedded one.

    Raises:
        ConfigError: no draft model was found; the message says what to do.
    """
    if context.files is not None:
        names = [name.strip() for name in context.files.split(",")]
        if not all(names):
            raise ConfigError("a draft model has an empty name; give one name, or several with a comma between two")
        return names
    trained = heads_directory(context.model_path, TRAINED)
    if (trained / "config.json").is_file():
        return [str(trained)]
    for model, draft in EMBEDDED.items():
        if model in embedded_names() and context.model_path == locate(model):
            return [draft]
    raise ConfigError(
        "this model has no draft model; train one with `cloister train draft`, or name a smaller model with the same tokens",
        param="draft_model",
    )


def open_drafts(context: DrafterContext) -> list[DraftModel]:
    """Opens the draft models.

    Raises:
        ConfigError: none was found, or one has another vocabulary.
        ModelError: one cannot be read.
    """
    return [_open(context, name) for name in draft_names(context)]


def open_draft(context: DrafterContext) -> DraftModel:
    """Opens the draft model of a drafter that uses one (errors as in `open_drafts`)."""
    names = draft_names(context)
    if len(names) > 1:
        raise ConfigError(f"{len(names)} draft models are named where this drafter takes one; `spec_infer` takes several")
    return _open(context, names[0])


def _open(context: DrafterContext, name: str) -> DraftModel:
    model = context.open_model(name)
    if model.vocab_size != context.vocab_size:
        raise ConfigError(
            f"the draft model {name} has {model.vocab_size} tokens and the model {context.vocab_size}; "
            "name one that was made with the same tokenizer"
        )
    own, other = _vocabulary(context.model_path), _vocabulary(locate(name))
    if own is not None and other is not None and own != other:
        raise ConfigError(
            f"the tokens of the draft model {name} do not mean what the model's mean; name one that was made with its tokenizer"
        )
    return model


def _vocabulary(path: Path) -> Any:
    """Returns the tokens and ids in tokenizer.json; None if the file does not exist, as with a GGUF file."""
    try:
        read = json.loads((path / "tokenizer.json").read_bytes())
        return read["model"]["vocab"], [(token["id"], token["content"]) for token in read.get("added_tokens", ())]
    except (OSError, ValueError, KeyError, TypeError):
        return None
