"""Gemma 3n's text part (Gemma Team 2025): several residual streams, inputs of each layer by token, late layers that read the KV
of earlier ones, and sparse gates in the first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from cloister.backends.spec import AttentionSpec, MlpSpec, StreamsSpec
from cloister.models.config import MAX_SIZE, ConfigFields
from cloister.models.families.gemma import turn_by_kind
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family, FeedForwards
from cloister.models.rope import see_by_pattern
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_MOST_STREAMS = 64
_LAYER = "model.layers.{}"
_TENSORS: Mapping[str, Source] = {
    **PLAIN_TENSORS,
    "attention_post_norm": Source(f"{_LAYER}.post_attention_layernorm"),
    "mlp_norm": Source(f"{_LAYER}.pre_feedforward_layernorm"),
    "mlp_post_norm": Source(f"{_LAYER}.post_feedforward_layernorm"),
    "altup.router": Source(f"{_LAYER}.altup.modality_router"),
    "altup.norm": Source(f"{_LAYER}.altup.router_norm"),
    "altup.scale": Source(f"{_LAYER}.altup.correct_output_scale", is_tensor=True),
    "altup.predict": Source(f"{_LAYER}.altup.prediction_coefs"),
    "altup.correct": Source(f"{_LAYER}.altup.correction_coefs"),
    "laurel_left": Source(f"{_LAYER}.laurel.linear_left"),
    "laurel_right": Source(f"{_LAYER}.laurel.linear_right"),
    "laurel_norm": Source(f"{_LAYER}.laurel.post_laurel_norm"),
    "layer_input_gate": Source(f"{_LAYER}.per_layer_input_gate"),
    "layer_input_out": Source(f"{_LAYER}.per_layer_projection"),
    "layer_input_norm": Source(f"{_LAYER}.post_per_layer_input_norm"),
    "layer_inputs.embed": Source("model.embed_tokens_per_layer"),
    "layer_inputs.projection": Source("model.per_layer_model_projection"),
    "layer_inputs.norm": Source("model.per_layer_projection_norm"),
    "streams_in": Source("model.altup_projections.{}"),
    "streams_out": Source("model.altup_unembed_projections.{}"),
}


def _share_kv(fields: ConfigFields, layers: list[AttentionSpec]) -> list[AttentionSpec]:
    """The last `num_kv_shared_layers` read the KV of the last layer of their kind before them."""
    num_shared = fields.take("num_kv_shared_layers", int, 15)
    first = len(layers) - num_shared
    if num_shared < 0 or first < 1:
        raise ModelError("num_kv_shared_layers must leave layers with KV of their own", param="num_kv_shared_layers")
    own = [replace(layer, v_norm=True) for layer in layers[:first]]
    last = {layer.window: number for number, layer in enumerate(own)}
    if any(layer.window not in last for layer in layers):
        raise ModelError(
            "num_kv_shared_layers must leave a layer of each kind of layer_types with KV of its own",
            param="num_kv_shared_layers",
        )
    return [*own, *(replace(layer, v_norm=True, shared_kv=last[layer.window]) for layer in layers[first:])]


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    """`intermediate_size` is one number, or one for each layer; the first ten of more than ten layers are sparse by default."""
    widths = fields.take_any("intermediate_sizes")
    widths = [widths] * num_layers if isinstance(widths, int) else widths
    if not _is_list(widths, num_layers) or not all(type(width) is int and 0 < width <= MAX_SIZE for width in widths):
        raise ModelError("intermediate_size must be a size, or one for each layer", param="intermediate_size")
    num_sparse = 10 if num_layers > 10 else 0
    parts = fields.take_any("activation_sparsity_pattern") or [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    if not _is_list(parts, num_layers) or not all(isinstance(part, float | int) and 0 <= part < 1 for part in parts):
        raise ModelError(
            "activation_sparsity_pattern must have a part of 0 to 1 for each layer", param="activation_sparsity_pattern"
        )
    return [replace(mlp, intermediate_size=width, sparsity=float(part)) for width, part in zip(widths, parts, strict=True)]


def _is_list(values: object, length: int) -> bool:
    return isinstance(values, list) and len(values) == length


def _read_ends(fields: ConfigFields, hidden: int) -> Ends:
    num_streams, active = fields.take_size("altup_num_inputs", 4), fields.take("altup_active_idx", int, 0)
    if num_streams > _MOST_STREAMS:
        raise ModelError(f"altup_num_inputs is {_MOST_STREAMS} at most, not {num_streams}", param="altup_num_inputs")
    if not 0 <= active < num_streams:
        raise ModelError("altup_active_idx must be the number of one of altup_num_inputs", param="altup_active_idx")
    streams = StreamsSpec(
        num_streams=num_streams,
        active=active,
        laurel_rank=fields.take_size("laurel_rank", 64),
        input_size=fields.take_size("hidden_size_per_layer_input", 256),
        input_vocab=fields.take_size("vocab_size_per_layer_input", 262144),
        scaled=fields.take("altup_correct_scale", bool, True),
    )
    return Ends(hidden**0.5, logit_softcap=fields.take_limit("final_logit_softcapping"), streams=streams)


GEMMA3N = Family(
    name="gemma3n",
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    max_positions=32768,
    # the sizes of feed-forwards are read by layer; `widening` stands in for the one that other families have
    names={
        "hidden_act": ("hidden_activation",),
        "intermediate_sizes": ("intermediate_size",),
        "intermediate_size": ("intermediate_size_of_all",),
    },
    widening=8,
    defaults={
        "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "sliding_window": 512, "sliding_window_pattern": 5, "final_logit_softcapping": 30.0, "intermediate_sizes": 16384,
    },
    only={"use_bidirectional_attention": False},
    # only training clips; scores are not scaled, whatever configs on the hub carry
    harmless=frozenset(("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")),
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    post_norm=True,
    qk_norm="head",
    windows=see_by_pattern,
    ropes=turn_by_kind,
    scales=lambda _fields, _head_dim, num_layers: [1.0] * num_layers,
    refine=_share_kv,
    feed_forwards=_feed,
    ends=_read_ends,
    tensors=_TENSORS,
    # checkpoints may hold what layers that read the KV of others have no use for
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)"),
)  # fmt: skip
