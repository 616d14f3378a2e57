"""The text part of models that read images too: their decoder's config and tensors, the rest left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister.models.safetensors import TensorEntry
from cloister.types.errors import ModelError

TEXT_PARTS: Mapping[str, Mapping[str, str]] = {
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""By architecture of the whole model: architecture of the decoder, by the model type of `text_config`."""

_DECODERS = {"model.language_model.": "model.", "language_model.": ""}
"""What begins the names of a decoder's tensors, and what stands there in a model of text alone."""
_TOWERS = ("model.vision_tower.", "model.multi_modal_projector.", "model.visual.")
_OTHERS = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "model.vision_model.", "audio_tower.", "embed_vision.",
    "embed_audio.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.", *_TOWERS,
)  # fmt: skip


def take_text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a model's decoder: `text_config` where the model reads images too, else the config as it is.

    Raises:
        ModelError: it has no `text_config`, or one of a type that its architecture does not have.
    """
    names = config.get("architectures")
    given = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    parts = next((TEXT_PARTS[name] for name in given if name in TEXT_PARTS), None)
    if parts is None:
        return dict(config)
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in parts:
        raise ModelError(f"text_config in config.json must have a model_type of: {', '.join(parts)}", param="text_config")
    above = {name: config[name] for name in ("tie_word_embeddings", "eos_token_id") if config.get(name) is not None}
    return {**text, **above, "architectures": [parts[kind]]}


def keep_text_part(found: dict[str, TensorEntry], *, has_tower: bool = False) -> dict[str, TensorEntry]:
    """Returns the tensors of a checkpoint's decoder by the names of a model of text alone; all where it is one.

    Args:
        has_tower: the tower is read too; its tensors lose what only some releases of transformers write.
    """
    if has_tower:
        found = {_shorten(name): entry for name, entry in found.items()}
    prefix = next((prefix for prefix in _DECODERS if any(name.startswith(prefix) for name in found)), None)
    if prefix is None:
        return found
    kept = found if has_tower else {name: entry for name, entry in found.items() if not name.startswith(_OTHERS)}
    return {_DECODERS[prefix] + name[len(prefix) :] if name.startswith(prefix) else name: kept[name] for name in kept}


def _shorten(name: str) -> str:
    """Returns the name of a tower's tensor without "model." before it, and without the name of SigLIP's inner module."""
    short = name.removeprefix("model.") if name.startswith(_TOWERS) else name
    return short.replace("vision_tower.vision_model.", "vision_tower.", 1)
