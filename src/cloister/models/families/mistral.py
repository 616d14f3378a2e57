"""Mistral (Jiang et al. 2023): Llama with one sliding window in every layer; Mixtral (Jiang et al. 2024): with eight
experts in every layer."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Family
from cloister.models.rope import see_one_window
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    max_positions=131072,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=see_one_window,
)


# Mixtral (Jiang et al. 2024): Mistral with eight experts in every layer, two active per token.


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    return [MoeSpec(*take_counts(fields), mlp)] * num_layers


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    max_positions=131072,
    names={"num_experts": ("num_local_experts", "num_experts")},
    defaults={
        "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
    },
    harmless=TRAINING_OF_EXPERTS,
    windows=see_one_window,
    feed_forwards=_feed,
    tensors={
        **PLAIN_TENSORS,
        "router": Source("model.layers.{}.block_sparse_moe.gate"),
        "experts.gate": Source("model.layers.{}.block_sparse_moe.experts.{}.w1"),
        "experts.up": Source("model.layers.{}.block_sparse_moe.experts.{}.w3"),
        "experts.down": Source("model.layers.{}.block_sparse_moe.experts.{}.w2"),
    },
)  # fmt: skip
