"""Llama 4's text part (Meta 2025): local layers that see one chunk of the context, with rotation and norms of q and k; global
layers without either, whose queries grow with their position; mixtures whose experts read inputs weighted by a sigmoid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import AttentionSpec, MlpSpec, MoeSpec, QueryGrowth, RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.families.llama import turn_some
from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.rope import RopeReader
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts
from cloister.types.errors import ModelError

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _see_chunks(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Layers that are turned see chunks, unless `layer_types` says which."""
    kinds = fields.take_any("layer_types")
    if kinds is None:
        interval, turned = fields.look("no_rope_layer_interval") or 4, fields.look("no_rope_layers") or None
        if not isinstance(interval, int) or interval < 1 or (turned is not None and not isinstance(turned, list)):
            raise ModelError("no_rope_layers must be a list, and no_rope_layer_interval positive", param="no_rope_layers")
        turned = turned or [(number + 1) % interval for number in range(num_layers)]
        kinds = [_CHUNKED if is_turned else _FULL for is_turned in turned[:num_layers]]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_CHUNKED, _FULL) for kind in kinds):
        raise ModelError(f"layer_types must list {_CHUNKED} or {_FULL} for each of num_hidden_layers", param="layer_types")
    size = fields.take_size("attention_chunk_size", 8192)
    return [size if kind == _CHUNKED else None for kind in kinds]


def _turn_some(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    ropes = turn_some(fields, reader, windows)
    return [None if rope is None else replace(rope, interleaved=True) for rope in ropes]


def _refine(fields: ConfigFields, layers: list[AttentionSpec]) -> list[AttentionSpec]:
    """Norms of q and k have no weights, so they may come before the rotation, which changes no length."""
    growth = QueryGrowth(fields.take("attn_scale", float, 0.1), fields.take_size("floor_scale", 8192), first=1)
    grows = fields.take_any("attn_temperature_tuning")  # configs of the hub have a number, where others have true
    if any(layer.qk_norm and layer.rope is not None and layer.rope.attention_scale != 1.0 for layer in layers):
        raise ModelError(
            "use_qk_norm goes with no scaling of rotary positions that has an attention factor", param="use_qk_norm"
        )
    return [
        replace(
            layer,
            chunked=layer.window is not None,
            qk_norm=layer.qk_norm and layer.rope is not None,
            qk_norm_weighted=False,
            query_growth=growth if grows and layer.rope is None else None,
        )
        for layer in layers
    ]


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    dense = replace(mlp, intermediate_size=fields.take_size("intermediate_size_mlp", 16384))
    moe = MoeSpec(*take_counts(fields), mlp, renormalize=False, shared=mlp, scoring="sigmoid", weigh_inputs=True)
    step, listed = fields.take_size("interleave_moe_layer_step", 1), fields.take_any("moe_layers")
    mixed = range(step - 1, num_layers, step) if listed is None else listed
    if not isinstance(mixed, list | range) or not all(isinstance(number, int) for number in mixed):
        raise ModelError("moe_layers must list numbers of layers", param="moe_layers")
    return [moe if number in mixed else dense for number in range(num_layers)]


_FEED = "model.layers.{}.feed_forward"
_GATE_UP = Source(f"{_FEED}.experts.gate_up_proj", ("gate", "up"), transposed=True, stacked=True, is_tensor=True)
_DOWN = Source(f"{_FEED}.experts.down_proj", transposed=True, stacked=True, is_tensor=True)

LLAMA4 = Family(
    name="llama4",
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    max_positions=131072,
    names={"num_experts": ("num_local_experts",)},
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts": 16,
        "num_experts_per_tok": 1, "use_qk_norm": True, "attn_temperature_tuning": True,
    },
    harmless=TRAINING_OF_EXPERTS | {"for_llm_compressor"},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    qk_norm="head",
    qk_norm_field="use_qk_norm",
    windows=_see_chunks,
    ropes=_turn_some,
    refine=_refine,
    feed_forwards=_feed,
    tensors={
        **PLAIN_TENSORS,
        "gate": Source(f"{_FEED}.gate_proj"),
        "up": Source(f"{_FEED}.up_proj"),
        "down": Source(f"{_FEED}.down_proj"),
        "router": Source(f"{_FEED}.router"),
        "experts.gate": replace(_GATE_UP, instead=Source(f"{_FEED}.experts.{{}}.gate_proj")),
        "experts.up": replace(_GATE_UP, instead=Source(f"{_FEED}.experts.{{}}.up_proj")),
        "experts.down": replace(_DOWN, instead=Source(f"{_FEED}.experts.{{}}.down_proj")),
        "shared.gate": Source(f"{_FEED}.shared_expert.gate_proj"),
        "shared.up": Source(f"{_FEED}.shared_expert.up_proj"),
        "shared.down": Source(f"{_FEED}.shared_expert.down_proj"),
    },
)  # fmt: skip
