"""From a family and a config.json to a DecoderSpec, and the tensors that such a decoder needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from cloister.models.config import ConfigFields
from cloister.models.families import FAMILIES
from cloister.models.family import Bias, Family
from cloister.models.rope import read_rope
from cloister.types.errors import ModelError

ACTIVATIONS: Mapping[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def find_family(config: Mapping[str, Any]) -> Family:
    """Returns the family that a config names.

    Raises:
        ModelError: its architecture is not known (the message lists those that are), or contradicts its model type.
    """
    names = config.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        found = ", ".join(str(name) for name in names) or "none"
        known = ", ".join(FAMILIES)
        raise ModelError(f"config.json names the architecture {found}; supported are: {known}", param="architectures")
    if config.get("model_type", family.model_type) != family.model_type:
        raise ModelError(f"model_type in config.json must be {family.model_type!r} for {family.architecture}")
    return family


def read_spec(family: Family, config: Mapping[str, Any]) -> DecoderSpec:
    """Returns the decoder that a config describes.

    Raises:
        ModelError: a field is missing, has no meaning, or is one that this family would have to ignore.
    """
    fields = ConfigFields(config)
    hidden = fields.take_size("hidden_size")
    max_positions = fields.take_size("max_position_embeddings", family.max_positions)
    attention = _read_attention(family, fields, hidden, max_positions)
    mlp = _read_mlp(family, fields)
    windows = _read_windows(family, fields, fields.take_size("num_hidden_layers"))
    spec = DecoderSpec(
        family=family.name,
        vocab_size=fields.take_size("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerSpec(AttentionSpec(**attention, window=window), mlp) for window in windows),
        norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        max_positions=max_positions,
        tied_embeddings=fields.take("tie_word_embeddings", bool, False),
    )
    fields.finish()
    return spec


def _read_attention(family: Family, fields: ConfigFields, hidden: int, max_positions: int) -> dict[str, Any]:
    num_heads = fields.take_size("num_attention_heads")
    num_kv_heads = fields.take_size("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError("num_attention_heads must be a multiple of num_key_value_heads", param="num_key_value_heads")
    head_dim = fields.take_size("head_dim", family.head_dim or hidden // num_heads or 1)
    if head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary positions, not {head_dim}", param="head_dim")
    biased = fields.take("attention_bias", bool, False) if Bias.FIELD in (family.qkv_bias, family.output_bias) else False
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "rope": read_rope(fields, head_dim, max_positions),
        "qkv_bias": _has_bias(family.qkv_bias, biased),
        "output_bias": _has_bias(family.output_bias, biased),
        "qk_norm": family.qk_norm,
    }


def _read_mlp(family: Family, fields: ConfigFields) -> MlpSpec:
    name = fields.take("hidden_act", str, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}", param="hidden_act")
    biased = fields.take("mlp_bias", bool, False) if family.mlp_bias is Bias.FIELD else False
    return MlpSpec(fields.take_size("intermediate_size"), ACTIVATIONS[name], _has_bias(family.mlp_bias, biased))


def _read_windows(family: Family, fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Returns each layer's window, by the rules of transformers: `layer_types` where given, else by layer number."""
    if not family.windows:
        return [None] * num_layers
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, 4096 if used else None)
    first = fields.take("max_window_layers", int, 28)
    kinds = fields.take_any("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if used and i >= first else "full_attention" for i in range(num_layers)]
    _check_layer_types(kinds, num_layers, used)
    if used and (window is None or window < 1):
        raise ModelError("sliding_window must be at least 1 where use_sliding_window is set", param="sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _check_layer_types(kinds: object, num_layers: int, used: bool) -> None:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError("layer_types must list one kind for each of num_hidden_layers", param="layer_types")
    allowed = ("full_attention", "sliding_attention") if used else ("full_attention",)
    for kind in kinds:
        if kind not in allowed:
            raise ModelError(
                f"layer_types may hold {' and '.join(allowed)} with use_sliding_window {str(used).lower()}",
                param="layer_types",
            )


def _has_bias(rule: Bias, field_value: bool) -> bool:
    return rule is Bias.ALWAYS or (rule is Bias.FIELD and field_value)


def tensor_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (canonical name, shape) of every tensor that a decoder has (`backends.base` lists the names)."""
    hidden = spec.hidden_size
    yield "embed.weight", (spec.vocab_size, hidden)
    for number, layer in enumerate(spec.layers):
        for name, shape in _layer_shapes(layer, hidden):
            yield f"layers.{number}.{name}", shape
    yield "norm.weight", (hidden,)
    if not spec.tied_embeddings:
        yield "head.weight", (spec.vocab_size, hidden)


def _layer_shapes(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention, mlp = layer.attention, layer.mlp
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    yield "attention_norm.weight", (hidden,)
    yield from _projection("q", q_size, hidden, attention.qkv_bias)
    yield from _projection("k", kv_size, hidden, attention.qkv_bias)
    yield from _projection("v", kv_size, hidden, attention.qkv_bias)
    yield from _projection("o", hidden, q_size, attention.output_bias)
    if attention.qk_norm:
        yield "q_norm.weight", (attention.head_dim,)
        yield "k_norm.weight", (attention.head_dim,)
    yield "mlp_norm.weight", (hidden,)
    yield from _projection("gate", mlp.intermediate_size, hidden, mlp.bias)
    yield from _projection("up", mlp.intermediate_size, hidden, mlp.bias)
    yield from _projection("down", hidden, mlp.intermediate_size, mlp.bias)


def _projection(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)
