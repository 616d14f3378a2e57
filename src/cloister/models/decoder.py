"""Builds a `DecoderSpec`, and the list of tensors it needs, from a family and its config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import (
    Activation,
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    MoeSpec,
    ShortConvSpec,
    StateSpec,
    StreamsSpec,
)
from cloister.backends.vision import vision_shapes
from cloister.models.config import ConfigFields
from cloister.models.families import FAMILIES
from cloister.models.family import Bias, Family
from cloister.models.rope import RopeReader
from cloister.types.errors import ModelError

_MOST_LAYERS = 10000
_MOST_HEAD_DIM = 65536
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def choose_family(config: Mapping[str, Any]) -> Family | None:
    """Returns the family of the first architecture that a config names and that is known; None where there is none.

    Raises:
        ModelError: it names no architectures, but something else.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("architectures in config.json must be a list of names", param="architectures")
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def find_family(config: Mapping[str, Any]) -> Family:
    """Returns the family that a config names.

    Raises:
        ModelError: its architecture is not known (the message lists those that are), or contradicts its model type.
    """
    family = choose_family(config)
    if family is None:
        names = config.get("architectures") or []
        found = ", ".join(str(name) for name in names) or "none"
        known = ", ".join(FAMILIES)
        raise ModelError(f"config.json names the architecture {found}; supported are: {known}", param="architectures")
    if config.get("model_type", family.model_type) not in (family.model_type, *family.other_model_types):
        raise ModelError(f"model_type in config.json must be {family.model_type!r} for {family.architecture}")
    return family


def read_spec(
    family: Family,
    config: Mapping[str, Any],
    max_model_len: int | None = None,
    on_unknown: Callable[[Sequence[str]], None] = lambda names: None,
) -> DecoderSpec:
    """Returns the decoder that a config describes.

    Args:
        max_model_len: the greatest length of a sequence, which decides some kinds of rotary scaling (`rope.RopeReader`); None
            for the positions that the config names.
        on_unknown: told which fields are ignored because nothing is known of them, if there are any.

    Raises:
        ModelError: a field is missing, has no meaning, or is one that changes models and that this family would have to ignore.
    """
    parts = None if family.vision is None else family.vision(config)
    fields = ConfigFields(config if parts is None else parts.text, names=family.names, defaults=family.defaults)
    spec = _read_fields(family, fields, max_model_len)
    if unknown := (*fields.find_unknown(), *(() if parts is None else parts.unknown)):
        on_unknown(unknown)
    return spec if parts is None else replace(spec, vision=parts.spec)


def read_fields(family: Family, fields: ConfigFields, max_model_len: int | None = None) -> DecoderSpec:
    """As `read_spec`, from fields with the names and defaults of the family, none of which may be unknown."""
    spec = _read_fields(family, fields, max_model_len)
    fields.finish()
    return spec


def _read_fields(family: Family, fields: ConfigFields, max_model_len: int | None) -> DecoderSpec:
    for name, only in family.only.items():
        fields.require(name, only)
    hidden, num_layers = fields.take_size("hidden_size"), family.num_layers(fields)
    if num_layers > _MOST_LAYERS:
        raise ModelError(f"a model has {_MOST_LAYERS} layers at most, not {num_layers}", param="num_hidden_layers")
    max_positions = fields.take_size("max_position_embeddings", family.max_positions)
    sizes = (hidden, num_layers, max_positions)
    attentions: Sequence[AnyAttentionSpec | None]
    if family.attentions is None:
        attentions, max_positions = _read_attentions(family, fields, sizes, max_model_len)
    else:
        attentions, max_positions = family.attentions(fields, sizes, max_model_len)
    mlp = _read_mlp(family, fields, hidden)
    states = family.states(fields, hidden, num_layers, mlp.activation) if family.states else [None] * num_layers
    if not family.side_by_side:
        attentions = [attention if state is None else None for attention, state in zip(attentions, states, strict=True)]
    feeds = family.feed_forwards(fields, mlp, num_layers)
    if family.one_part:
        attentions = [attention if feed is None else None for attention, feed in zip(attentions, feeds, strict=True)]
    shape: dict[str, Any] = {
        "pre_norm": family.pre_norm,
        "post_norm": family.post_norm,
        "parallel": fields.take(family.parallel, bool, True) if isinstance(family.parallel, str) else family.parallel,
        "residual_scale": fields.take(family.residual_scale, float, 1.0) if family.residual_scale else 1.0,
    }
    ends = family.ends(fields, hidden)
    spec = DecoderSpec(
        family=family.name,
        vocab_size=fields.take_size("vocab_size"),
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(attention, feed, state=state, **shape)
            for attention, feed, state in zip(attentions, feeds, states, strict=True)
        ),
        norm_eps=_take_eps(fields),
        max_positions=max_positions,
        tied_embeddings=fields.take("tie_word_embeddings", bool, False),
        norm=family.norm,
        norm_bias=family.norm_bias,
        position_embeddings=family.learned_positions,
        embedding_scale=ends.embedding_scale,
        logit_scale=ends.logit_scale,
        logit_softcap=ends.logit_softcap,
        streams=ends.streams,
    )
    if family.encoder is not None:
        spec = family.encoder(fields, spec)
    fields.drop(family.harmless)
    return spec


def _take_eps(fields: ConfigFields) -> float:
    eps = fields.take("rms_norm_eps", float, 1e-6)
    if eps < 0:
        raise ModelError(f"the eps of norms must be 0 or more, not {eps}", param=fields.name_of("rms_norm_eps"))
    return eps


def _read_attentions(
    family: Family, fields: ConfigFields, sizes: tuple[int, int, int], max_model_len: int | None
) -> tuple[list[AttentionSpec], int]:
    """Returns the attention of each layer, and the positions that can be used."""
    hidden, num_layers, max_positions = sizes
    heads = _read_heads(family, fields, hidden)
    windows = family.windows(fields, num_layers)
    reader = RopeReader(heads["head_dim"], max_positions, max_model_len, partial=family.partial_rotary, kinds=family.rope_types)
    ropes = [None] * num_layers if family.learned_positions else family.ropes(fields, reader, windows)
    scales = family.scales(fields, heads["head_dim"], num_layers)
    softcap = fields.take_limit("attn_logit_softcapping") if family.softcap else None
    layers = [
        AttentionSpec(**heads, scale=scale, rope=rope, window=window, softcap=softcap, sinks=family.sinks)
        for scale, rope, window in zip(scales, ropes, windows, strict=True)
    ]
    return family.refine(fields, layers), reader.max_positions


def _read_heads(family: Family, fields: ConfigFields, hidden: int) -> dict[str, Any]:
    num_heads = fields.take_size("num_attention_heads")
    num_kv_heads = fields.take_size("num_key_value_heads", num_heads) if family.grouped else num_heads
    if num_heads % num_kv_heads:
        raise ModelError("num_attention_heads must be a multiple of num_key_value_heads", param="num_key_value_heads")
    head_dim = fields.take_size("head_dim", hidden // num_heads or 1) if family.grouped else hidden // num_heads or 1
    if head_dim > _MOST_HEAD_DIM:
        raise ModelError(f"a head has {_MOST_HEAD_DIM} numbers at most, not {head_dim}", param="head_dim")
    biased = fields.take("attention_bias", bool, False) if Bias.FIELD in (family.qkv_bias, family.output_bias) else False
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "qkv_bias": _has_bias(family.qkv_bias, biased),
        "output_bias": _has_bias(family.output_bias, biased),
        "qk_norm": family.qk_norm is not None
        and (family.qk_norm_field is None or fields.take(family.qk_norm_field, bool, False)),
        "qk_norm_over": family.qk_norm or "head",
        "gated": family.gated_attention,
        **{name: fields.take(field, float, 1.0) for name, field in family.attention_scales.items()},
    }


def _read_mlp(family: Family, fields: ConfigFields, hidden: int) -> MlpSpec:
    name = fields.take("hidden_act", str, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}", param="hidden_act")
    biased = fields.take("mlp_bias", bool, False) if family.mlp_bias is Bias.FIELD else False
    inner = fields.take_size("intermediate_size", family.widening * hidden if family.widening else None)
    return MlpSpec(inner, ACTIVATIONS[name], _has_bias(family.mlp_bias, biased), family.gated)


def _has_bias(rule: Bias, field_value: bool) -> bool:
    return rule is Bias.ALWAYS or (rule is Bias.FIELD and field_value)


Shapes: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]


def list_tensors(spec: DecoderSpec, most: int) -> dict[str, tuple[int, ...]]:
    """Returns `tensor_shapes`, `most` of them at most: a damaged config can ask for any number.

    Raises:
        ModelError: there are more.
    """
    shapes = dict(islice(tensor_shapes(spec), most + 1))
    if len(shapes) > most:
        raise ModelError("the config asks for many more tensors than the checkpoint has; one of the two is damaged")
    return shapes


def tensor_shapes(spec: DecoderSpec) -> Shapes:
    """Yields (canonical name, shape) of every tensor that a decoder has (`backends.base` lists the names)."""
    hidden = spec.hidden_size
    if spec.merges_hidden:
        yield from (*_norm("merge_embedding_norm", hidden, spec.norm_bias), *_norm("merge_hidden_norm", hidden, spec.norm_bias))
        yield "merge.weight", (hidden, 2 * hidden)
    else:
        yield "embed.weight", (spec.vocab_size, hidden)
    if spec.position_embeddings:
        yield "positions.weight", (spec.max_positions, hidden)
    if isinstance(spec, EncoderSpec):
        yield from _encoder_shapes(spec)
        return
    for number, layer in enumerate(spec.layers):
        for name, shape in _layer_shapes(layer, hidden, spec.norm_bias):
            yield f"layers.{number}.{name}", shape
        if spec.streams is not None:
            yield from ((f"layers.{number}.{name}", shape) for name, shape in _stream_layer_shapes(spec.streams, hidden))
    if spec.streams is not None:
        yield from _stream_shapes(spec.streams, hidden, len(spec.layers))
    yield from _norm("norm", hidden, spec.norm_bias)
    if not spec.tied_embeddings and not spec.merges_hidden:
        yield "head.weight", (spec.vocab_size, hidden)
    if spec.head_bias:
        yield "head.bias", (spec.vocab_size,)
    if spec.vision is not None:
        yield from vision_shapes(spec.vision, hidden)


def _stream_layer_shapes(spec: StreamsSpec, hidden: int) -> Shapes:
    num_streams = spec.num_streams
    yield "altup.router.weight", (num_streams, hidden)
    yield "altup.norm.weight", (hidden,)
    yield "altup.scale", (hidden,)
    yield "altup.predict.weight", (num_streams**2, num_streams)
    yield "altup.correct.weight", (num_streams, num_streams)
    yield "laurel_left.weight", (spec.laurel_rank, hidden)
    yield "laurel_right.weight", (hidden, spec.laurel_rank)
    yield "laurel_norm.weight", (hidden,)
    yield "layer_input_gate.weight", (spec.input_size, hidden)
    yield "layer_input_out.weight", (hidden, spec.input_size)
    yield "layer_input_norm.weight", (hidden,)


def _stream_shapes(spec: StreamsSpec, hidden: int, num_layers: int) -> Shapes:
    yield "layer_inputs.embed.weight", (spec.input_vocab, num_layers * spec.input_size)
    yield "layer_inputs.projection.weight", (num_layers * spec.input_size, hidden)
    yield "layer_inputs.norm.weight", (spec.input_size,)
    for name in ("streams_in", "streams_out"):
        for number in range(spec.num_streams - 1):
            yield f"{name}.{number}.weight", (hidden, hidden)


def _encoder_shapes(spec: EncoderSpec) -> Shapes:
    """Yields what follows the embeddings of tokens and positions."""
    hidden = spec.hidden_size
    if spec.num_token_types:
        yield "token_types.weight", (spec.num_token_types, hidden)
    yield from _norm("embed_norm", hidden, spec.norm_bias)
    for number, layer in enumerate(spec.layers):
        for name, shape in _layer_shapes(replace(layer, pre_norm=True), hidden, spec.norm_bias):
            if number or spec.first_norm or not name.startswith("attention_norm."):
                yield f"layers.{number}.{name}", shape
    if spec.final_norm:
        yield from _norm("norm", hidden, spec.norm_bias)
    if spec.classifier is not None:
        yield from _projection("classifier_dense", hidden, hidden, spec.classifier.dense_bias)
        if spec.classifier.norm:
            yield from _norm("classifier_norm", hidden, spec.norm_bias)
        yield from _projection("classifier", spec.classifier.num_labels, hidden, True)


def _layer_shapes(layer: LayerSpec, hidden: int, norm_bias: bool) -> Shapes:
    if layer.pre_norm and layer.mixes:
        yield from _norm("attention_norm", hidden, norm_bias)
    if layer.attention is not None:
        yield from _attention_shapes(layer.attention, hidden)
    if layer.state is not None:
        yield from ((f"mixer.{name}", shape) for name, shape in _STATE_SHAPES[type(layer.state)](layer.state, hidden))
    if layer.post_norm and layer.mixes:
        yield from _norm("attention_post_norm", hidden, norm_bias)
    if layer.mlp is None:
        return
    if layer.pre_norm:
        yield from _norm("mlp_norm", hidden, norm_bias)
    if isinstance(layer.mlp, MoeSpec):
        yield from _moe_shapes(layer.mlp, hidden)
    else:
        yield from _mlp_shapes("", layer.mlp, hidden)
    if layer.post_norm:
        yield from _norm("mlp_post_norm", hidden, norm_bias)


def _mamba2_shapes(spec: Mamba2Spec, hidden: int) -> Shapes:
    yield from _projection("in", spec.inner_size + spec.conv_size + spec.num_heads, hidden, spec.projection_bias)
    yield from _projection("conv", spec.conv_size, spec.kernel_size, spec.conv_bias)
    yield from ((name, (spec.num_heads,)) for name in ("A_log", "D", "dt_bias"))
    if spec.norm is not None:
        yield "norm.weight", (spec.inner_size,)
    yield from _projection("out", hidden, spec.inner_size, spec.output_bias)


def _delta_net_shapes(spec: GatedDeltaNetSpec, hidden: int) -> Shapes:
    sizes = {"q": spec.key_size, "k": spec.key_size, "v": spec.value_size, "z": spec.value_size}
    yield from ((f"{name}.weight", (size, hidden)) for name, size in sizes.items())
    yield from ((f"{name}.weight", (spec.num_value_heads, hidden)) for name in ("b", "a"))
    yield "conv.weight", (spec.conv_size, spec.kernel_size)
    yield from ((name, (spec.num_value_heads,)) for name in ("A_log", "dt_bias"))
    yield "norm.weight", (spec.value_head_dim,)
    yield "out.weight", (hidden, spec.value_size)


def _short_conv_shapes(spec: ShortConvSpec, hidden: int) -> Shapes:
    yield from _projection("in", 3 * hidden, hidden, spec.bias)
    yield from _projection("conv", hidden, spec.kernel_size, spec.bias)
    yield from _projection("out", hidden, hidden, spec.bias)


_STATE_SHAPES: Mapping[type[StateSpec], Callable[[Any, int], Shapes]] = {
    Mamba2Spec: _mamba2_shapes,
    GatedDeltaNetSpec: _delta_net_shapes,
    ShortConvSpec: _short_conv_shapes,
}


def _latent_shapes(spec: LatentAttentionSpec, hidden: int) -> Shapes:
    q_size, q_rank, rank = spec.num_heads * spec.qk_head_dim, spec.q_lora_rank, spec.kv_lora_rank
    if q_rank is None:
        yield "q.weight", (q_size, hidden)
    else:
        yield from _projection("q_a", q_rank, hidden, spec.qkv_bias)
        yield "q_a_norm.weight", (q_rank,)
        yield "q_b.weight", (q_size, q_rank)
    yield from _projection("kv_a", spec.head_dim, hidden, spec.qkv_bias)
    yield "kv_a_norm.weight", (rank,)
    yield "kv_b.weight", (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), rank)
    yield from _projection("o", hidden, spec.num_heads * spec.v_head_dim, spec.output_bias)
    if spec.index is not None:
        yield "index_q.weight", (spec.index.num_heads * spec.index.head_dim, q_rank or 0)
        yield "index_k.weight", (spec.index.head_dim, hidden)
        yield from _norm("index_k_norm", spec.index.head_dim, bias=True)
        yield "index_weights.weight", (spec.index.num_heads, hidden)


def _attention_shapes(spec: AnyAttentionSpec, hidden: int) -> Shapes:
    if isinstance(spec, LatentAttentionSpec):
        yield from _latent_shapes(spec, hidden)
        return
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from _projection("q", q_size, hidden, spec.qkv_bias)
    if spec.shared_kv is None:
        yield from _projection("k", kv_size, hidden, spec.qkv_bias)
        yield from _projection("v", kv_size, hidden, spec.qkv_bias)
    yield from _projection("o", hidden, q_size, spec.output_bias)
    if spec.gated:
        yield from _projection("q_gate", q_size, hidden, spec.qkv_bias)
    if spec.qk_norm and spec.qk_norm_weighted:
        over_head = spec.qk_norm_over == "head"
        yield "q_norm.weight", (spec.head_dim if over_head else q_size,)
        if spec.shared_kv is None:
            yield "k_norm.weight", (spec.head_dim if over_head else kv_size,)
    if spec.sinks:
        yield "attention.sinks", (spec.num_heads,)


def _moe_shapes(spec: MoeSpec, hidden: int) -> Shapes:
    yield from _projection("router", spec.num_experts, hidden, spec.router_bias)
    if spec.correction_bias:
        yield "router.e_score_correction_bias", (spec.num_experts,)
    for number in range(spec.num_experts):
        yield from _mlp_shapes(f"experts.{number}.", spec.expert, hidden)
    if spec.shared is not None:
        yield from _mlp_shapes("shared.", spec.shared, hidden)
    if spec.shared_gate:
        yield "shared_router.weight", (1, hidden)


def _mlp_shapes(prefix: str, spec: MlpSpec, hidden: int) -> Shapes:
    if spec.gated:
        yield from _projection(f"{prefix}gate", spec.intermediate_size, hidden, spec.bias)
    yield from _projection(f"{prefix}up", spec.intermediate_size, hidden, spec.bias)
    yield from _projection(f"{prefix}down", hidden, spec.intermediate_size, spec.bias)


def _norm(name: str, size: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (size,)
    if bias:
        yield f"{name}.bias", (size,)


def _projection(name: str, out_size: int, in_size: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)
