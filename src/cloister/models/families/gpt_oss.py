"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, a window in every other layer, YaRN, and experts with biases and a
clipped SwiGLU, in MXFP4 on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import ClippedSwiGLU, MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.rope import see_by_pattern
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts
from cloister.types.errors import ModelError

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""When the config says nothing of rotation."""


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    """The softmax over the chosen experts' logits is that over all of them, divided by the sum of the chosen."""
    alpha, limit = fields.take("swiglu_alpha", float, 1.702), fields.take("swiglu_limit", float, 7.0)
    if limit <= 0:
        raise ModelError(f"swiglu_limit must be positive, not {limit}", param="swiglu_limit")
    expert = replace(mlp, bias=True, clipped=ClippedSwiGLU(alpha, limit))
    return [MoeSpec(*take_counts(fields), expert, router_bias=True)] * num_layers


def _stack(name: str, *parts: str, transposed: bool = True) -> Source:
    tensor = f"model.layers.{{}}.mlp.experts.{name}"
    return Source(tensor, parts, by_row=bool(parts), transposed=transposed, stacked=True, is_tensor=True)


_GATE_UP, _GATE_UP_BIAS = (
    _stack("gate_up_proj", "gate", "up"),
    _stack("gate_up_proj_bias", "gate", "up", transposed=False),
)

GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    max_positions=131072,
    names={"num_experts": ("num_local_experts", "num_experts")},
    defaults={
        "num_key_value_heads": 8, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "rms_norm_eps": 1e-5, "sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150000.0,
        "rope_parameters": _YARN,
    },
    only={"hidden_act": "silu"},
    harmless=TRAINING_OF_EXPERTS | {"initial_context_length", "experts_per_token"},  # doubles of what other fields say
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    sinks=True,
    windows=see_by_pattern,
    feed_forwards=_feed,
    tensors={
        **PLAIN_TENSORS,
        "attention.sinks": Source("model.layers.{}.self_attn"),
        "router": Source("model.layers.{}.mlp.router"),
        "experts.gate": _GATE_UP,
        "experts.up": _GATE_UP,
        "experts.down": _stack("down_proj"),
        "experts.gate.bias": _GATE_UP_BIAS,
        "experts.up.bias": _GATE_UP_BIAS,
        "experts.down.bias": _stack("down_proj_bias", transposed=False),
    },
)  # fmt: skip
