"""Which layers are mixtures of experts, and what their tensors are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.sources import Source
from cloister.types.errors import ModelError

TRAINING_OF_EXPERTS = frozenset(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"))
"""Fields that only training reads."""

_MOST_EXPERTS = 65536

QWEN_EXPERTS: Mapping[str, Source] = {
    "router": Source("model.layers.{}.mlp.gate"),
    "experts.gate": Source("model.layers.{}.mlp.experts.{}.gate_proj"),
    "experts.up": Source("model.layers.{}.mlp.experts.{}.up_proj"),
    "experts.down": Source("model.layers.{}.mlp.experts.{}.down_proj"),
}


def take_counts(fields: ConfigFields) -> tuple[int, int]:
    """Returns (experts, experts that a token passes)."""
    num_experts, num_chosen = fields.take_size("num_experts"), fields.take_size("num_experts_per_tok")
    if num_experts > _MOST_EXPERTS:
        raise ModelError(f"a layer has {_MOST_EXPERTS} experts at most, not {num_experts}", param="num_experts")
    if num_chosen > num_experts:
        raise ModelError(
            f"num_experts_per_tok is {num_chosen}, but there are {num_experts} experts", param="num_experts_per_tok"
        )
    return num_experts, num_chosen


def take_moe(fields: ConfigFields, mlp: MlpSpec, shared: MlpSpec | None = None) -> MoeSpec:
    """Returns the mixture that Qwen's fields describe; `mlp` is the dense feed-forward, `shared` what all tokens pass."""
    num_experts, num_chosen = take_counts(fields)
    expert = replace(mlp, intermediate_size=fields.take_size("moe_intermediate_size"))
    renormalize = fields.take("norm_topk_prob", bool, False)
    return MoeSpec(num_experts, num_chosen, expert, renormalize, shared, shared_gate=shared is not None)


def place_mixtures(fields: ConfigFields, mlp: MlpSpec, moe: MoeSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    """Returns each layer's feed-forward: every `decoder_sparse_step`-th is a mixture, but for `mlp_only_layers` (Qwen)."""
    step, dense = fields.take_size("decoder_sparse_step", 1), fields.take_any("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise ModelError("mlp_only_layers must list numbers of layers", param="mlp_only_layers")
    return [moe if number not in dense and (number + 1) % step == 0 else mlp for number in range(num_layers)]
