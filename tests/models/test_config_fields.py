"""Ignoring any field of config.json fails here: whatever a field does in transformers, it does here, or is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import transformers
from _pytest.mark import ParameterSet

from cloister.models import load, transformers_fallback
from cloister.models.config import HARMLESS
from cloister.models.families import FAMILIES
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import ARCHITECTURES, make_model
from tests.reference import reference_logits
from tests.thinning import thin

TOKENS = np.random.default_rng(2).integers(0, 320, 90).tolist()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
OF_GLOBAL = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 1.3, "beta_fast": 2.0, "beta_slow": 1.0,
}  # fmt: skip
PARTLY = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SLIDING = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
BASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": WINDOW,
    "qwen3": {**WINDOW, "attention_bias": True},
    "mistral": {"sliding_window": 40},
    "mixtral": {"sliding_window": 40},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 40, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 40, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "gemma2": SLIDING,
    "gemma3_text": {**SLIDING, "rope_parameters": LOCAL_AND_GLOBAL, "final_logit_softcapping": 3.0},
    "gemma3n_text": {"rope_parameters": LOCAL_AND_GLOBAL},
    "phi3": {"rope_parameters": PARTLY, "sliding_window": 40},
    "gpt2": {},
    "opt": {},
    "gpt_neox": {"rope_parameters": PARTLY},
    "smollm3": {"use_sliding_window": True, "sliding_window": 40,
                "layer_types": ["full_attention", "sliding_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
    "granite": {},
    "granitemoe": {},
    "olmo2": {},
    "deepseek_v2": {"rope_parameters": YARN},
    "deepseek_v3": {"rope_parameters": YARN},
    "deepseek_v32": {"rope_parameters": YARN},
    "olmo3": {**SLIDING, "rope_parameters": {**LOCAL_AND_GLOBAL, "full_attention": OF_GLOBAL}},
    "minimax_m2": {"rope_parameters": PARTLY},
    "cohere2": SLIDING,
    "gpt_oss": {"rope_parameters": {**OF_GLOBAL, "truncate": False}},
    "mamba2": {},
    "qwen3_next": {"rope_parameters": PARTLY, "mlp_only_layers": [1]},
    "qwen3_5_text": {"rope_parameters": PARTLY},
    "qwen3_5_moe_text": {"rope_parameters": PARTLY},
    "lfm2": {},
    "lfm2_moe": {},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "falcon_h1": {"mamba_rms_norm": True},
    "nemotron_h": {},
    "ministral": SLIDING,
    "ministral3": {"sliding_window": 40, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}},
    "llama4_text": {"rope_parameters": LLAMA3},
    "glm4_moe": {"rope_parameters": PARTLY, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True},
}  # fmt: skip
EPS = {"rms_norm_eps": 0.5}
ACTIVATION = {"hidden_act": "gelu"}
THETA = {"rope_parameters.rope_theta": 300.0}
YARN_FIELDS = {
    "rope_parameters.factor": 3.0, "rope_parameters.original_max_position_embeddings": 300, "rope_parameters.mscale": 1.5,
    "rope_parameters.mscale_all_dim": 0.6, "rope_parameters.beta_fast": 8.0, "rope_parameters.beta_slow": 0.3,
}  # fmt: skip
# family -> field (a dot goes into an object) -> another value that transformers computes with the same tensors
HONOURED: dict[str, dict[str, Any]] = {
    "llama": {
        **EPS,
        **ACTIVATION,
        **THETA,
        "rope_parameters.factor": 2.0,
        "rope_parameters.low_freq_factor": 2.0,
        "rope_parameters.high_freq_factor": 8.0,
        "rope_parameters.original_max_position_embeddings": 256,
    },
    "qwen2": {
        **EPS,
        **ACTIVATION,
        **THETA,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {
        **EPS,
        **ACTIVATION,
        **THETA,
        "sliding_window": 10,
        "layer_types": ["full_attention", "full_attention"],
    },
    "mistral": {**EPS, **ACTIVATION, **THETA, "sliding_window": 10},
    "mixtral": {**EPS, **ACTIVATION, **THETA, "sliding_window": 10, "num_experts_per_tok": 3},
    "qwen2_moe": {
        **EPS, **ACTIVATION, **THETA, "sliding_window": 10, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3_moe": {
        **EPS, **ACTIVATION, **THETA, "sliding_window": 10, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "use_sliding_window": False,
    },
    "gemma2": {
        **EPS, **THETA, "hidden_activation": "silu", "sliding_window": 10, "query_pre_attn_scalar": 60,
        "attn_logit_softcapping": 1.0, "final_logit_softcapping": None,
        "layer_types": ["full_attention", "full_attention"],
    },
    "gemma3_text": {
        **EPS, "hidden_activation": "silu", "sliding_window": 10, "query_pre_attn_scalar": 60, "final_logit_softcapping": 1.0,
        "layer_types": ["full_attention", "full_attention"], "rope_parameters.full_attention": {"rope_theta": 300.0},
        "rope_parameters.sliding_attention": {"rope_type": "linear", "factor": 3.0},
    },
    "gemma3n_text": {
        **EPS, "hidden_activation": "silu", "sliding_window": 10, "final_logit_softcapping": 1.0,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
        "rope_parameters.full_attention": {"rope_theta": 300.0},
        "rope_parameters.sliding_attention": {"rope_type": "linear", "factor": 3.0},
        "activation_sparsity_pattern": [0.0, 0.9, 0.3, 0.0, 0.5, 0.0], "altup_active_idx": 2, "altup_correct_scale": False,
        "num_kv_shared_layers": 4,
    },
    "phi3": {**EPS, **ACTIVATION, **THETA, "sliding_window": None, "rope_parameters.partial_rotary_factor": 1.0},
    "gpt2": {
        "layer_norm_epsilon": 0.5, "activation_function": "relu", "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "opt": {"activation_function": "gelu"},
    "gpt_neox": {
        "layer_norm_eps": 0.5, **ACTIVATION, "hidden_act": "relu", **THETA, "use_parallel_residual": False,
        "rope_parameters.partial_rotary_factor": 1.0,
    },
    "smollm3": {
        **EPS, **ACTIVATION, **THETA, "sliding_window": 10, "no_rope_layers": [0, 0, 1, 0],
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
    },
    "granite": {
        **EPS, **ACTIVATION, **THETA, "attention_multiplier": 0.5, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    "granitemoe": {
        **EPS, **ACTIVATION, **THETA, "attention_multiplier": 0.5, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "num_experts_per_tok": 2,
    },
    "olmo2": {**EPS, **ACTIVATION, **THETA},
    "deepseek_v2": {
        **EPS, **ACTIVATION, **THETA, **YARN_FIELDS, "topk_method": "greedy", "topk_group": 3, "n_group": 2,
        "num_experts_per_tok": 2, "routed_scaling_factor": 0.5,
    },
    "deepseek_v3": {
        **EPS, **ACTIVATION, **THETA, **YARN_FIELDS, "topk_group": 3, "n_group": 2, "num_experts_per_tok": 2,
        "routed_scaling_factor": 0.5, "norm_topk_prob": False, "rope_interleave": False,
    },
    "deepseek_v32": {
        **EPS, **ACTIVATION, **THETA, **YARN_FIELDS, "topk_group": 3, "n_group": 2, "num_experts_per_tok": 2,
        "routed_scaling_factor": 0.5, "norm_topk_prob": False, "index_topk": 10,
    },
    "olmo3": {
        **EPS, **ACTIVATION, "sliding_window": 10, "layer_types": ["full_attention", "full_attention"],
        "rope_parameters.full_attention": {"rope_theta": 300.0},
        "rope_parameters.sliding_attention": {"rope_type": "linear", "factor": 3.0},
    },
    "cohere2": {
        "layer_norm_eps": 0.5, **ACTIVATION, **THETA, "sliding_window": 10, "logit_scale": 0.5,
        "layer_types": ["full_attention", "full_attention"],
    },
    "ministral": {
        **EPS, **ACTIVATION, **THETA, "sliding_window": 10, "layer_types": ["full_attention", "full_attention"],
    },
    "ministral3": {
        **EPS, **ACTIVATION, **THETA, **YARN_FIELDS, "sliding_window": 10, "rope_parameters.llama_4_scaling_beta": 0.7,
        "rope_parameters.original_max_position_embeddings": 40,
    },
    "llama4_text": {
        **EPS, **ACTIVATION, **THETA, "rope_parameters.factor": 2.0, "rope_parameters.low_freq_factor": 2.0,
        "rope_parameters.high_freq_factor": 8.0, "rope_parameters.original_max_position_embeddings": 256,
        "attention_chunk_size": 10, "num_experts_per_tok": 3, "use_qk_norm": False, "attn_temperature_tuning": False,
        "floor_scale": 30, "attn_scale": 0.9, "no_rope_layers": [1, 0, 1, 1],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
    },
    "gpt_oss": {
        **EPS, **THETA, "rope_parameters.factor": 3.0, "rope_parameters.original_max_position_embeddings": 300,
        "rope_parameters.truncate": True, "sliding_window": 10, "layer_types": ["full_attention", "full_attention"],
        "num_experts_per_tok": 2, "swiglu_alpha": 0.5, "swiglu_limit": 0.2,
    },
    "minimax_m2": {
        **EPS, **ACTIVATION, **THETA, "num_experts_per_tok": 2, "rope_parameters.partial_rotary_factor": 1.0,
    },
    "glm4_moe": {
        **EPS, **ACTIVATION, **THETA, "topk_group": 3, "n_group": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 0.5,
        "norm_topk_prob": False, "rope_parameters.partial_rotary_factor": 1.0,
    },
}  # fmt: skip
LIMITS = {"time_step_limit": [0.4, 0.9]}
HONOURED |= {
    "mamba2": {"layer_norm_epsilon": 0.5, **ACTIVATION, **LIMITS},
    "qwen3_next": {
        **EPS, **ACTIVATION, **THETA, "num_experts_per_tok": 2, "norm_topk_prob": False,
        "rope_parameters.partial_rotary_factor": 1.0,
    },
    "qwen3_5_text": {**EPS, **ACTIVATION, **THETA, "rope_parameters.partial_rotary_factor": 1.0},
    "qwen3_5_moe_text": {
        **EPS, **ACTIVATION, **THETA, "num_experts_per_tok": 2, "rope_parameters.partial_rotary_factor": 1.0,
    },
    "lfm2": {"norm_eps": 0.5, **THETA},
    "lfm2_moe": {
        "norm_eps": 0.5, **THETA, "num_experts_per_tok": 2, "norm_topk_prob": False, "routed_scaling_factor": 0.4,
    },
    "granitemoehybrid": {
        **EPS, **ACTIVATION, **THETA, **LIMITS, "attention_multiplier": 0.9, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "num_experts_per_tok": 2, "position_embedding_type": None,
    },
    "falcon_h1": {
        **EPS, **ACTIVATION, **THETA, **LIMITS, "attention_in_multiplier": 0.5, "attention_out_multiplier": 0.3,
        "embedding_multiplier": 0.2, "key_multiplier": 2.0, "lm_head_multiplier": 1.5, "mamba_norm_before_gate": False,
        "mlp_multipliers": [0.5, 1.4], "ssm_in_multiplier": 0.4, "ssm_multipliers": [0.2, 0.7, 1.8, 1.6, 1.1],
        "ssm_out_multiplier": 0.6,
    },
    "nemotron_h": {
        "layer_norm_epsilon": 0.5, "mlp_hidden_act": "gelu", "time_step_min": 1.2, "topk_group": 3, "n_group": 2,
        "num_experts_per_tok": 2, "routed_scaling_factor": 0.5, "norm_topk_prob": False,
    },
}  # fmt: skip
# fields that no tensor of the checkpoint would fit any more, or that are not computed
REFUSED: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 48,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "rope_parameters.rope_type": "yarn",
    "rope_parameters.beta_fast": 32,
    "rope_parameters.partial_rotary_factor": 0.7,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "gptq"},
    "attention_chunk_size": 64,
    "is_encoder_decoder": True,
    "rope_interleaved": True,
}
_NO_ROPE = {
    "rope_parameters.rope_type": None,
    "rope_parameters.beta_fast": None,
    "rope_parameters.partial_rotary_factor": None,
}
_GPT = {"num_key_value_heads": 2, "head_dim": 16, "mlp_bias": True}
_LATENT = {
    "use_sliding_window": None, "rope_parameters.rope_type": "linear", "rope_parameters.beta_fast": -1.0,
    "num_key_value_heads": 2, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "qk_head_dim": 24, "v_head_dim": 8, "n_routed_experts": 4,
    "moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 2, "moe_layer_freq": 2,
    "topk_method": "best",
}  # fmt: skip
_NO_ATTENTION = {**_NO_ROPE, "num_attention_heads": None, "num_key_value_heads": None, "attention_bias": None,
                 "use_sliding_window": None, "intermediate_size": None, "mlp_bias": None}  # fmt: skip
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40}
_DELTA_NET = {
    "use_sliding_window": None, "partial_rotary_factor": None, "rope_parameters.partial_rotary_factor": None,
    "linear_num_key_heads": 3, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 4, "mamba_d_state": 16, "mamba_d_conv": 3,
    "mamba_conv_bias": False, "mamba_proj_bias": True,
}  # fmt: skip
REFUSED_OF: dict[str, dict[str, Any]] = {
    "mamba2": {
        **_NO_ATTENTION, "head_dim": 8, "num_heads": 4, "n_groups": 4, "state_size": 16, "conv_kernel": 3, "expand": 1,
        "use_bias": True, "use_conv_bias": False, "rescale_prenorm_residual": True,
    },
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "intermediate_size": None, "norm_topk_prob": False},
    "nemotron_h": {
        **_NO_ROPE, "use_sliding_window": None, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 4, "ssm_state_size": 16,
        "conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "mamba_proj_bias": True, "mamba_hidden_act": "gelu",
        "n_routed_experts": 4, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 20, "n_shared_experts": 2,
        "moe_latent_size": 16, "sliding_window": 40, "layers_block_type": ["mlp"] * 5,
    },
    "lfm2": {
        "use_sliding_window": None, "hidden_act": "gelu", "conv_L_cache": 4, "conv_bias": True, "block_multiple_of": 7,
        "block_ffn_dim_multiplier": 2.0, "block_auto_adjust_ff_dim": False, "layer_types": ["conv"] * 3,
    },
    "lfm2_moe": {
        "use_sliding_window": None, "hidden_act": "gelu", "conv_L_cache": 4, "conv_bias": True, "layer_types": ["conv"] * 3,
        "num_experts": 4, "moe_intermediate_size": 40, "num_dense_layers": 2, "use_expert_bias": False,
    },
    "granitemoehybrid": {
        **_MAMBA, "use_sliding_window": None, "mamba_expand": 1, "shared_intermediate_size": 40, "num_local_experts": 4,
        "layer_types": ["linear_attention"] * 3, "normalization_function": "layernorm",
    },
    "falcon_h1": {
        **_MAMBA, "use_sliding_window": None, "mamba_d_ssm": 64, "mamba_rms_norm": False, "projectors_bias": True,
    },
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "qwen2": {"use_sliding_window": False},
    "mixtral": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "qwen2_moe": {
        "use_sliding_window": False, "num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
        "qkv_bias": False, "mlp_only_layers": [0], "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        "use_sliding_window": "yes", "num_local_experts": 4, "moe_intermediate_size": 40, "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
    },
    "gemma2": {"use_bidirectional_attention": True, "final_logit_softcapping": -1.0},
    "gemma3_text": {
        "use_bidirectional_attention": True, "rope_parameters.other_attention": {}, "rope_parameters.rope_type": None,
    },
    "gemma3n_text": {
        "use_bidirectional_attention": True, "rope_parameters.other_attention": {}, "rope_parameters.rope_type": None,
        "intermediate_size": [100, 80, 60, 100, 60, 64], "altup_num_inputs": 4, "laurel_rank": 10,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "activation_sparsity_pattern": [0.5] * 5,
        "num_kv_shared_layers": 5, "tie_word_embeddings": False, "final_logit_softcapping": -1.0, "altup_active_idx": 3,
    },
    "phi3": {
        "original_max_position_embeddings": "4k", "partial_rotary_factor": None, "lm_head_bias": True, "full_attn_mod": 2,
        "interpolate_factor": 2,
    },
    "gpt2": {**_NO_ROPE, **_GPT, "n_embd": 32, "n_layer": 30, "n_head": 7, "n_inner": 64, "n_positions": 100,
             "tie_word_embeddings": False, "add_cross_attention": True},
    "opt": {**_NO_ROPE, **_GPT, "ffn_dim": 64, "do_layer_norm_before": False, "_remove_final_layer_norm": True,
            "enable_bias": False, "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 32,
            "max_position_embeddings": 100, "tie_word_embeddings": False},
    "gpt_neox": {**_GPT, "attention_bias": False, "partial_rotary_factor": None},
    "smollm3": {"use_sliding_window": False, "num_hidden_layers": 5},
    "deepseek_v2": {**_LATENT, "norm_topk_prob": True, "rope_interleave": False, "scoring_func": "sigmoid"},
    "deepseek_v3": {**_LATENT, "scoring_func": "softmax"},
    "deepseek_v32": {
        **_LATENT, "scoring_func": "softmax", "rope_interleave": False, "index_n_heads": 8, "index_head_dim": 10,
        "first_k_dense_replace": None,
        "layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "olmo3": {
        "use_sliding_window": None, "rope_parameters.other_attention": {}, "rope_parameters.rope_type": None,
        "rope_theta": 300.0, "rope_local_base_freq": 300.0,
    },
    "cohere2": {
        "use_sliding_window": None, "tie_word_embeddings": False, "use_qk_norm": True, "use_parallel_block": False,
        "position_embedding_type": "rope",
    },
    "ministral": {"use_sliding_window": None},
    "ministral3": {
        "use_sliding_window": None, "rope_parameters.rope_type": "linear", "rope_parameters.beta_fast": -1.0,
    },
    "llama4_text": {
        "use_sliding_window": None, "sliding_window": 40, "attention_chunk_size": 0, "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 0, "moe_layers": [0, 1],
    },
    "gpt_oss": {
        "use_sliding_window": None, "attention_bias": False, "rope_parameters.rope_type": "linear",
        "rope_parameters.beta_fast": -1.0, "num_local_experts": 4, "hidden_act": "gelu",
    },
    "minimax_m2": {
        "use_sliding_window": None, "partial_rotary_factor": None, "rope_parameters.partial_rotary_factor": None,
        "num_local_experts": 4, "scoring_func": "softmax", "use_routing_bias": False, "use_qk_norm": False,
        "qk_norm_type": "per_head",
    },
    "glm4_moe": {
        "use_sliding_window": None, "partial_rotary_factor": None, "rope_parameters.partial_rotary_factor": None,
        "attention_bias": False, "use_qk_norm": False,
        "n_routed_experts": 4, "moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 2,
    },
}  # fmt: skip
"""What differs from `REFUSED`; None where the field has no place in the config."""
ALONE = {
    "max_position_embeddings", "max_window_layers", "original_max_position_embeddings", "no_rope_layer_interval",
    "chunk_size", "mamba_chunk_size", "mamba_expand", "full_attn_idxs",
    "first_k_dense_replace",
}  # fmt: skip
"""Fields with tests of their own below."""


def refused(family: str) -> dict[str, Any]:
    """Returns the fields that a family refuses, each with a value."""
    found = {**REFUSED, **REFUSED_OF.get(family, {})}
    return {field: value for field, value in found.items() if value is not None}


OTHER = {
    "summary_type": "mean", "summary_use_proj": False, "summary_proj_to_labels": False, "summary_activation": "tanh",
    "output_router_logits": True, "reorder_and_upcast_attn": True, "_sliding_window_pattern": 2, "max_window_layers": 1,
    "attn_logit_softcapping": 9.0, "residual_in_fp32": False, "rescale_prenorm_residual": True, "time_step_rank": 3,
    "num_logits_to_keep": 3, "expand": 3, "time_step_limit": [0.5, 0.7], "mamba_ssm_cache_dtype": "bfloat16",
    "moe_shared_expert_overlap": False, "mtp_layers_block_type": ["mlp"], "num_nextn_predict_layers": 0,
    "use_mamba_kernels": False,
}  # fmt: skip
"""Values for fields that hold no number between 0 and 1."""


def change(path: Path, field: str, value: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    place, *inner = field.split(".")
    if inner and place in config:
        config[place][inner[0]] = value
    else:
        config[field] = value
    (path / "config.json").write_text(json.dumps(config))


def ours(path: Path) -> npt.NDArray[np.float32]:
    return build_from(path).run("a", TOKENS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_model(tmp_path_factory.mktemp(family), family, **BASES[family]))


@pytest.fixture(scope="module")
def unchanged(base: Callable[[str], Path]) -> Callable[[str], npt.NDArray[np.float32]]:
    """Our logits of a family's base."""
    return cache(lambda family: ours(base(family)))


@pytest.fixture
def copy(base: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def link(family: str) -> Path:
        for file in base(family).iterdir():
            if file.name == "config.json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
            else:
                (tmp_path / file.name).symlink_to(file)
        return tmp_path

    return link


def each_field_once(fields: Mapping[str, Mapping[str, Any]]) -> list[ParameterSet]:
    """Pairs of a family and one of its fields; quick is one for each field, of the last family that has it."""
    listed = [(family, field) for family in fields for field in fields[family]]
    return thin(listed, list({field: (family, field) for family, field in listed}.values()))


@pytest.mark.parametrize(("family", "field"), each_field_once(HONOURED))
def test_a_field_changes_the_logits_as_it_does_in_transformers(
    family: str, field: str, unchanged: Callable[[str], npt.NDArray[np.float32]], copy: Callable[[str], Path]
) -> None:
    path = copy(family)
    change(path, field, HONOURED[family][field])
    changed = ours(path)
    assert np.abs(changed - unchanged(family)).max() > 1e-2
    assert np.abs(changed - reference_logits(path, TOKENS)).max() <= 1e-4


@pytest.mark.parametrize(("family", "field"), each_field_once({family: refused(family) for family in BASES}))
def test_a_field_that_cannot_be_honoured_is_refused(
    family: str, field: str, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers_fallback, "find_spec", lambda _: None
    )  # else an unknown architecture is left to transformers
    path = copy(family)
    change(path, field, refused(family)[field])
    with pytest.raises(ModelError):
        load(path)


@pytest.mark.parametrize("family", BASES)
def test_every_field_that_transformers_writes_is_honoured_refused_or_known_as_harmless(
    family: str, base: Callable[[str], Path]
) -> None:
    config = json.loads((base(family) / "config.json").read_text())
    tested = {field.split(".")[0] for field in (*HONOURED[family], *refused(family))} | ALONE
    assert set(config) - tested - HARMLESS - FAMILIES[ARCHITECTURES[family]].harmless == set()


@pytest.mark.parametrize("family", thin(BASES, 10))
def test_a_field_that_a_family_takes_for_harmless_changes_no_logit_of_transformers(
    family: str, base: Callable[[str], Path], copy: Callable[[str], Path]
) -> None:
    path, spec = copy(family), load(base(family)).spec
    expected = reference_logits(path, TOKENS)
    for field in sorted(FAMILIES[ARCHITECTURES[family]].harmless & set(json.loads((path / "config.json").read_text()))):
        change(path, field, OTHER.get(field, 0.5))
        assert load(path).spec == spec
    assert np.array_equal(reference_logits(path, TOKENS), expected)


@pytest.mark.parametrize("field", sorted(HARMLESS - {"architectures", "model_type"}))
def test_a_harmless_field_may_hold_anything(field: str, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    before = load(path).spec
    change(path, field, 3)
    assert load(path).spec == before


def test_a_field_of_which_nothing_is_known_is_warned_of_by_name(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = copy("llama")
    before = load(path).spec
    assert not caplog.records
    change(path, "frobnication_depth", 30.0)
    assert load(path).spec == before
    assert "frobnication_depth" in caplog.text
    with pytest.raises(ModelError, match="frobnication_depth"):
        load(path, strict=True)


@pytest.mark.parametrize("field", ["sliding_window", "kv_lora_rank", "vision_config"])
def test_a_field_that_changes_models_is_refused_by_a_family_that_does_not_read_it(
    field: str, copy: Callable[[str], Path]
) -> None:
    path = copy("llama")
    change(path, field, {"depth": 3} if field == "vision_config" else 64)
    with pytest.raises(ModelError, match=field):
        load(path)


def test_what_every_config_of_transformers_may_carry_is_no_reason_to_refuse_or_warn(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = copy("llama")
    written = {k: v for k, v in transformers.PretrainedConfig().to_dict().items() if k not in ("architectures", "model_type")}
    for name, value in {**written, "unk_token_id": 0, "_model_name_or_path": "x", "mask_token_id": 1}.items():
        if name not in json.loads((path / "config.json").read_text()):
            change(path, name, str(value) if name == "dtype" else value)
    load(path, strict=True)
    assert not caplog.records


def test_a_field_of_null_counts_as_absent(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    before = load(path, strict=True).spec
    change(path, "frobnication_depth", None)
    change(path, "num_key_value_heads", 2)
    assert load(path).spec == before


YARN_PARAMETERS = [name for name, value in YARN.items() if isinstance(value, float)]
NO_NUMBERS = [(field, value) for value in (math.nan, math.inf, 1e308) for field in (
    "rms_norm_eps", "routed_scaling_factor", *(f"rope_parameters.{name}" for name in YARN_PARAMETERS),
)]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [*NO_NUMBERS, ("rms_norm_eps", -1.0), ("rope_parameters.original_max_position_embeddings", -1)],
)
def test_a_number_that_nothing_can_be_computed_with_is_refused_by_its_name(
    field: str, value: float, copy: Callable[[str], Path]
) -> None:
    path = copy("deepseek_v3")
    change(path, field, value)
    with pytest.raises(ModelError, match=field.split(".")[-1].removeprefix("rms_norm_")):
        load(path)


@pytest.mark.parametrize("field", ["norm_topk_prob", "rope_interleave"])
def test_null_is_refused_where_transformers_takes_it_for_false_and_the_default_is_true(
    field: str, copy: Callable[[str], Path]
) -> None:
    path = copy("deepseek_v3")
    change(path, field, None)
    with pytest.raises(ModelError, match=field):
        load(path)


def test_yarn_stretches_the_context_that_the_config_still_calls_short(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    path = make_model(tmp_path, "qwen2", max_position_embeddings=32, rope_parameters=yarn)  # as Qwen documents it
    model = load(path, max_model_len=128)
    assert model.info.max_model_len == 128
    assert np.abs(ours(path) - reference_logits(path, TOKENS)).max() <= 1e-4  # 90 tokens


def test_an_unknown_architecture_gets_the_list_of_those_known(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_fallback, "find_spec", lambda _: None)
    path = copy("llama")
    change(path, "architectures", ["MambaForCausalLM"])
    with pytest.raises(ModelError, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        load(path)


def test_the_old_rope_keys_mean_the_same(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    before = load(path).spec
    config = json.loads((path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).spec == before
    change(path, "rope_theta", 300.0)
    assert load(path).spec != before


def test_the_original_context_of_llama3_scaling_defaults_to_the_positions(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]["original_max_position_embeddings"]
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    assert np.abs(ours(path) - reference_logits(path, TOKENS)).max() <= 1e-4
    change(path, "max_position_embeddings", 128)
    assert np.abs(ours(path) - reference_logits(path, TOKENS)).max() <= 1e-4


def test_positions_bound_the_model_length(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    change(path, "max_position_embeddings", 777)
    assert load(path).info.max_model_len == 777


def test_windows_begin_at_max_window_layers(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    for first, windows in ((0, [40, 40]), (1, [None, 40]), (2, [None, None])):
        (path / "config.json").write_text(json.dumps({**config, "max_window_layers": first}))
        assert [layer.attention.window for layer in load(path).spec.layers] == windows


def test_a_window_counts_only_where_it_is_switched_on(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    (path / "config.json").write_text(json.dumps({**config, "use_sliding_window": False}))
    assert {layer.attention.window for layer in load(path).spec.layers} == {None}
