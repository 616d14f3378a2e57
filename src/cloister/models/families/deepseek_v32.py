"""DeepSeek-V3.2 (arXiv:2512.02556): V3 whose queries see the positions that a lightning indexer chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import IndexSpec, LatentAttentionSpec, MlpSpec
from cloister.models.config import ConfigFields
from cloister.models.families.deepseek import DEEPSEEK_V3, feed_v3, read_attentions, take_v3_mixture
from cloister.models.family import FeedForwards
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_KINDS = {"layer_types": ("indexed_attention",), "mlp_layer_types": ("dense", "sparse")}
_MOST_HEAD_DIM = 65536


def _read_indexed(
    fields: ConfigFields, sizes: tuple[int, int, int], max_model_len: int | None
) -> tuple[Sequence[LatentAttentionSpec], int]:
    layers, max_positions = read_attentions(fields, sizes, max_model_len)
    _take_kinds(fields, "layer_types", sizes[1])
    index = IndexSpec(
        num_heads=fields.take_size("index_n_heads", 64),
        head_dim=fields.take_size("index_head_dim", 128),
        num_chosen=fields.take_size("index_topk", 2048),
    )
    if any(layer.q_lora_rank is None for layer in layers):
        raise ModelError("q_lora_rank must be positive: the indexer reads the latents of queries", param="q_lora_rank")
    if not layers[0].qk_rope_head_dim <= index.head_dim <= _MOST_HEAD_DIM:
        raise ModelError(f"index_head_dim must be from qk_rope_head_dim to {_MOST_HEAD_DIM}", param="index_head_dim")
    return [replace(layer, index=index) for layer in layers], max_positions


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    """As V3's, but where `mlp_layer_types` says which layers are dense."""
    kinds = _take_kinds(fields, "mlp_layer_types", num_layers)
    if kinds is None:
        return feed_v3(fields, mlp, num_layers)
    fields.drop(("first_k_dense_replace",))
    moe = take_v3_mixture(fields, mlp)
    return [mlp if kind == "dense" else moe for kind in kinds]


def _take_kinds(fields: ConfigFields, name: str, num_layers: int) -> list[str] | None:
    kinds = fields.take_any(name)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS[name] for kind in kinds):
        raise ModelError(f"{name} must have for each layer one of: {', '.join(_KINDS[name])}", param=name)
    return kinds


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    other_model_types=(),
    only={**DEEPSEEK_V3.only, "rope_interleave": True},
    attentions=_read_indexed,
    feed_forwards=_feed,
    tensors={
        **DEEPSEEK_V3.tensors,
        "index_q": Source("model.layers.{}.self_attn.indexer.wq_b"),
        "index_k": Source("model.layers.{}.self_attn.indexer.wk"),
        "index_k_norm": Source("model.layers.{}.self_attn.indexer.k_norm"),
        "index_weights": Source("model.layers.{}.self_attn.indexer.weights_proj"),
    },
)
