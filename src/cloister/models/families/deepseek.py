"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434), V3 (arXiv:2412.19437), R1 (arXiv:2501.12948) and Kimi K2 (arXiv:2507.20534):
latent attention, and mixtures of many small experts beside shared ones.

R1 has the decoder of V3; so has Kimi K2, under a model type of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloister.backends.spec import LatentAttentionSpec, MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Family
from cloister.models.rope import RopeReader
from cloister.models.sources import QWEN_EXPERTS, TRAINING_OF_EXPERTS, Source, take_counts
from cloister.types.errors import ModelError

_LATENT_NORM_EPS = 1e-6
"""Of the norms on latents, whatever `rms_norm_eps` says."""
_MOST_HEAD_DIM = 65536


def read_attentions(
    fields: ConfigFields, sizes: tuple[int, int, int], max_model_len: int | None
) -> tuple[Sequence[LatentAttentionSpec], int]:
    """Returns the latent attention of each layer, and the positions that can be used (`family.Family.attentions`)."""
    _, num_layers, max_positions = sizes
    num_heads = fields.take_size("num_attention_heads")
    fields.require("num_key_value_heads", num_heads)
    rank, turned = _take_dim(fields, "kv_lora_rank"), _take_dim(fields, "qk_rope_head_dim")
    plain, biased = _take_dim(fields, "qk_nope_head_dim"), fields.take("attention_bias", bool, False)
    fields.require("head_dim", turned)
    fields.require("qk_head_dim", plain + turned)
    q_rank = fields.take_nullable("q_lora_rank", int)
    if q_rank is not None and not 0 < q_rank <= _MOST_HEAD_DIM:
        raise ModelError("q_lora_rank must be positive, or null for none", param="q_lora_rank")
    reader = RopeReader(turned, max_positions, max_model_len)
    scaling, parameters = fields.take_any("rope_scaling"), fields.take_any("rope_parameters")
    parameters = scaling or parameters or {}
    rope = reader.read_parameters(parameters, fields.take("rope_theta", float, 10000.0))
    attention = LatentAttentionSpec(
        num_heads=num_heads,
        q_lora_rank=q_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=turned,
        v_head_dim=_take_dim(fields, "v_head_dim"),
        scale=(plain + turned) ** -0.5 * _mscale(parameters) ** 2,
        rope=replace(rope, interleaved=fields.take("rope_interleave", bool, True)),
        latent_norm_eps=_LATENT_NORM_EPS,
        qkv_bias=biased,
        output_bias=biased,
    )
    return [attention] * num_layers, reader.max_positions


def _take_dim(fields: ConfigFields, name: str) -> int:
    size = fields.take_size(name)
    if size > _MOST_HEAD_DIM:
        raise ModelError(f"{name} is {_MOST_HEAD_DIM} at most, not {size}", param=name)
    return size


def _mscale(parameters: Mapping[str, Any]) -> float:
    """Returns what queries and keys are each multiplied by in a stretched context (YaRN, Peng et al. 2023, equation 22).

    The fields have been checked by `RopeReader`, which takes `mscale_all_dim` with YaRN only.
    """
    factor, amount = parameters.get("factor") or 1.0, parameters.get("mscale_all_dim")
    return 0.1 * amount * math.log(factor) + 1.0 if amount and factor > 1 else 1.0


# The mixtures of V2: softmax, and where the config says so only the experts of a token's best groups.


def _feed_v2(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    fields.require("scoring_func", "softmax")
    method = fields.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method {method!r} is not supported; known: greedy, group_limited_greedy", param="topk_method")
    moe = _take_moe(fields, mlp)
    if method == "greedy":
        fields.drop(("n_group", "topk_group"))
    else:
        moe = limit_groups(fields, moe, num_group_scores=1)
    return _place(fields, mlp, moe, num_layers)


# Those of V3: sigmoids, a bias for the choice, and groups, of which there may be one.


def feed_v3(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    """Returns each layer's feed-forward: the first `first_k_dense_replace` are dense, the others mixtures like V3's."""
    return _place(fields, mlp, take_v3_mixture(fields, mlp), num_layers)


def take_v3_mixture(fields: ConfigFields, mlp: MlpSpec) -> MoeSpec:
    """Returns the mixture that V3's fields describe."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    moe = replace(_take_moe(fields, mlp), scoring="sigmoid", correction_bias=True)
    renormalized = replace(moe, renormalize=fields.take("norm_topk_prob", bool, True))
    return limit_groups(fields, renormalized, num_group_scores=2)


def _take_moe(fields: ConfigFields, mlp: MlpSpec) -> MoeSpec:
    num_experts, num_chosen = take_counts(fields)
    inner, num_shared = fields.take_size("moe_intermediate_size"), fields.take_size("n_shared_experts")
    return MoeSpec(
        num_experts,
        num_chosen,
        expert=replace(mlp, intermediate_size=inner),
        renormalize=False,
        shared=replace(mlp, intermediate_size=num_shared * inner),
        routed_scale=fields.take("routed_scaling_factor", float, 1.0),
    )


def limit_groups(fields: ConfigFields, moe: MoeSpec, num_group_scores: int) -> MoeSpec:
    """Returns a mixture whose tokens choose in the best of `n_group` groups of experts, `topk_group` of them."""
    num_groups, num_chosen = fields.take_size("n_group"), fields.take_size("topk_group")
    group_size = moe.num_experts // num_groups
    if moe.num_experts % num_groups or group_size < num_group_scores:
        raise ModelError(
            f"n_group must cut {moe.num_experts} experts into equal groups of at least {num_group_scores}", param="n_group"
        )
    if num_chosen > num_groups or num_chosen * group_size < moe.num_chosen:
        raise ModelError(
            f"topk_group must be at most n_group, and leave {moe.num_chosen} experts to choose from", param="topk_group"
        )
    return replace(moe, num_groups=num_groups, num_chosen_groups=num_chosen, num_group_scores=num_group_scores)


def _place(fields: ConfigFields, mlp: MlpSpec, moe: MoeSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    num_dense = fields.take("first_k_dense_replace", int)
    return [mlp if number < num_dense else moe for number in range(num_layers)]


EXPERT_TENSORS: Mapping[str, Source] = {
    **QWEN_EXPERTS,
    "shared.gate": Source("model.layers.{}.mlp.shared_experts.gate_proj"),
    "shared.up": Source("model.layers.{}.mlp.shared_experts.up_proj"),
    "shared.down": Source("model.layers.{}.mlp.shared_experts.down_proj"),
}
_TENSORS: Mapping[str, Source] = {
    **PLAIN_TENSORS,
    **EXPERT_TENSORS,
    "q_a": Source("model.layers.{}.self_attn.q_a_proj"),
    "q_a_norm": Source("model.layers.{}.self_attn.q_a_layernorm"),
    "q_b": Source("model.layers.{}.self_attn.q_b_proj"),
    "kv_a": Source("model.layers.{}.self_attn.kv_a_proj_with_mqa"),
    "kv_a_norm": Source("model.layers.{}.self_attn.kv_a_layernorm"),
    "kv_b": Source("model.layers.{}.self_attn.kv_b_proj"),
}
EXPERT_NAMES = {"num_experts": ("n_routed_experts", "num_local_experts")}
_TRAINING = TRAINING_OF_EXPERTS | {"aux_loss_alpha", "seq_aux", "ep_size"}

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    max_positions=2048,
    names=EXPERT_NAMES,
    defaults={"q_lora_rank": 1536, "first_k_dense_replace": 0},
    only={"mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "rope_interleave": True},
    harmless=_TRAINING,
    attentions=read_attentions,
    feed_forwards=_feed_v2,
    tensors=_TENSORS,
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    max_positions=4096,
    other_model_types=("kimi_k2",),
    names=EXPERT_NAMES,
    defaults={"q_lora_rank": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    only={"mlp_bias": False, "moe_layer_freq": 1},
    harmless=_TRAINING | {"num_nextn_predict_layers"},
    attentions=read_attentions,
    feed_forwards=feed_v3,
    tensors=_TENSORS,
)
