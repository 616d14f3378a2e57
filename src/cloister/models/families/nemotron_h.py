"""Nemotron-H and Nemotron 3 Nano (NVIDIA, arXiv:2504.03624): each layer is Mamba 2, attention, a feed-forward or a mixture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import Activation, MlpSpec, MoeSpec, RopeSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.families.deepseek import EXPERT_NAMES, limit_groups
from cloister.models.family import Bias, Family, FeedForwards
from cloister.models.mixers import FULL, INITIALISATION, LINEAR, take_mamba2
from cloister.models.rope import RopeReader
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts
from cloister.types.errors import ModelError

_MIXTURE, _DENSE = "moe", "mlp"
_KINDS = {
    "M": LINEAR, "E": _MIXTURE, "*": FULL, "-": _DENSE, LINEAR: LINEAR, _MIXTURE: _MIXTURE, FULL: FULL, _DENSE: _DENSE,
    "mamba": LINEAR, "attention": FULL,
}  # fmt: skip
"""Kinds of layers by all their names; the letters are those of `hybrid_override_pattern` in the configs of the hub."""


def _peek_kinds(fields: ConfigFields) -> Sequence[str]:
    """Returns the kind of each layer; the fields are taken by `_feed`, the last to read them."""
    names = fields.peek_any("layer_types") or fields.peek_any("hybrid_override_pattern")
    if not isinstance(names, list | str) or not names or any(type(name) is not str or name not in _KINDS for name in names):
        raise ModelError(
            f"layers_block_type in {fields.source} must list the kind of each layer; known: {', '.join(_KINDS)}",
            param="layers_block_type",
        )
    return [_KINDS[name] for name in names]


def _count_layers(fields: ConfigFields) -> int:
    """The kinds decide it: transformers writes no `num_hidden_layers`."""
    count = len(_peek_kinds(fields))
    fields.require("num_hidden_layers", count)
    return count


def _turn_nowhere(_fields: ConfigFields, _reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    return [None] * len(windows)


def _read_states(fields: ConfigFields, _hidden: int, _num_layers: int, _activation: Activation) -> Sequence[StateSpec | None]:
    """transformers clamps time steps at `time_step_min`, whatever `time_step_limit` says."""
    inner, biased = fields.peek("mamba_n_heads") * fields.peek("mamba_d_head"), fields.take("use_bias", bool, False)
    spec = take_mamba2(fields, inner, "silu", projection_bias=biased, output_bias=biased)
    least = fields.take("time_step_min", float, 0.001)
    if not 0 <= least < math.inf:
        raise ModelError(f"time_step_min must be a number of at least 0, not {least}", param="time_step_min")
    spec = replace(spec, time_step_limit=(least, math.inf))
    return [spec if kind == LINEAR else None for kind in _peek_kinds(fields)]


def _feed(fields: ConfigFields, mlp: MlpSpec, _num_layers: int) -> FeedForwards:
    inner, shared = (fields.take_size(name) for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size"))
    moe = MoeSpec(
        *take_counts(fields),
        expert=replace(mlp, intermediate_size=inner, bias=False),
        renormalize=fields.take("norm_topk_prob", bool, True),
        shared=replace(mlp, intermediate_size=shared),
        scoring="sigmoid",
        correction_bias=True,
        routed_scale=fields.take("routed_scaling_factor", float, 1.0),
    )
    feeds: dict[str, MlpSpec | MoeSpec] = {_DENSE: mlp, _MIXTURE: limit_groups(fields, moe, num_group_scores=2)}
    kinds = _peek_kinds(fields)
    fields.drop((fields.name_of("layer_types"), "hybrid_override_pattern"))
    return [feeds.get(kind) for kind in kinds]


_NAMES_OF_MAMBA = {
    "rms_norm_eps": ("layer_norm_epsilon",), "mamba_n_heads": ("mamba_num_heads",), "mamba_d_head": ("mamba_head_dim",),
    "mamba_n_groups": ("n_groups",), "mamba_d_state": ("ssm_state_size",), "mamba_d_conv": ("conv_kernel",),
    "mamba_chunk_size": ("chunk_size",), "mamba_conv_bias": ("use_conv_bias",),
}  # fmt: skip
_MIXER = "backbone.layers.{}.mixer"

NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    max_positions=4096,
    names={**EXPERT_NAMES, **_NAMES_OF_MAMBA, "layer_types": ("layers_block_type",), "hidden_act": ("mlp_hidden_act",)},
    defaults={
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "relu2", "intermediate_size": 21504,
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_chunk_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1,
    },
    only={
        "tie_word_embeddings": False, "attention_bias": False, "mamba_proj_bias": False, "mamba_hidden_act": "silu",
        "sliding_window": None, "moe_latent_size": None, "n_shared_experts": 1,
    },
    harmless=TRAINING_OF_EXPERTS | (INITIALISATION - {"time_step_min"}) | {
        "expand", "time_step_limit", "residual_in_fp32", "hidden_dropout", "mamba_ssm_cache_dtype", "use_mamba_kernels",
        "num_logits_to_keep", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern", "norm_eps", "rope_theta",
    },
    mlp_bias=Bias.FIELD,
    gated=False,
    num_layers=_count_layers,
    ropes=_turn_nowhere,
    states=_read_states,
    one_part=True,
    feed_forwards=_feed,
    tensors={
        "embed": Source("backbone.embeddings"),
        "norm": Source("backbone.norm_f"),
        "head": Source("lm_head"),
        "attention_norm": Source("backbone.layers.{}.norm"),
        "mlp_norm": Source("backbone.layers.{}.norm"),
        **{name: Source(f"{_MIXER}.{name}_proj") for name in ("q", "k", "v", "o", "up", "down")},
        "router": Source(f"{_MIXER}.gate"),
        **{f"experts.{name}": Source(f"{_MIXER}.experts.{{}}.{name}_proj") for name in ("up", "down")},
        **{f"shared.{name}": Source(f"{_MIXER}.shared_experts.{name}_proj") for name in ("up", "down")},
        "mixer": Source(_MIXER),
        "mixer.in": Source(f"{_MIXER}.in_proj"),
        "mixer.conv": Source(f"{_MIXER}.conv1d", filters=True),
        "mixer.norm": Source(f"{_MIXER}.norm"),
        "mixer.out": Source(f"{_MIXER}.out_proj"),
    },
    prefix="backbone.",
    buffers=re.compile(r"mtp\..+"),  # layers that predict further tokens
)  # fmt: skip
