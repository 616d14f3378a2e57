"""Small random models in the directories that Hugging Face's transformers writes, for any test that needs a real one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

UNTYPED: Any = AutoModelForCausalLM  # its constructors carry no types
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
"""By model type."""
CENTRED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families whose norms are stored less one."""
UNSCALED = {"gemma3n_text"}
"""Families whose scores are not divided by the root of the size of a head."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""Fields of Llama, and of all that follow it."""
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3}
DELTA_NET: dict[str, Any] = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}  # fmt: skip
"""Fields of the hybrids with gated delta nets."""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
"""Fields of the hybrids with Mamba 2."""
MULTIPLIERS = {"attention_multiplier": 0.3, "embedding_multiplier": 2.5, "logits_scaling": 1.7, "residual_multiplier": 0.6}
"""Fields of Granite."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "num_hidden_layers": 3,
}  # fmt: skip
"""Fields of DeepSeek."""
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "gemma2": {"head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 24, "query_pre_attn_scalar": 150},
    "gemma3n_text": {
        "head_dim": 24, "num_hidden_layers": 6, "intermediate_size": [100, 80, 60, 100, 60, 80], "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2, "sliding_window": 40,
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.3, 0.0], "laurel_rank": 12, "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": 300, "altup_num_inputs": 3, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    },
    "granite": MULTIPLIERS,
    "granitemoe": {**MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3},
    "smollm3": {"num_hidden_layers": 4},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 24},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24},
    "ministral": {"head_dim": 24},
    "ministral3": {"head_dim": 24},
    "llama4_text": {
        "intermediate_size": 48, "intermediate_size_mlp": 80, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 40, "floor_scale": 16, "num_hidden_layers": 4,
    },
    "gpt_oss": {
        "intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 40,
        "swiglu_limit": 0.7,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "n_shared_experts": 2, "head_dim": 24,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "num_hidden_layers": 3,
    },
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 56},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 56},
    "granitemoehybrid": {
        **MAMBA, **MULTIPLIERS,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
        "shared_intermediate_size": 56, "num_local_experts": 6, "num_experts_per_tok": 3,
    },
    "falcon_h1": {
        **MAMBA, "mamba_d_ssm": 96, "mamba_d_head": 12, "embedding_multiplier": 1.4, "lm_head_multiplier": 0.8,
        "key_multiplier": 0.7, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.3, "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "mlp_multipliers": [1.3, 0.8],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 24},
    "lfm2_moe": {
        **EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
    },
}  # fmt: skip
"""What a family has beside `SMALL`."""
INSTEAD: dict[str, dict[str, Any]] = {
    "cohere2": {name: value for name, value in SMALL.items() if name != "rms_norm_eps"} | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {name: value for name, value in SMALL.items() if name != "intermediate_size"},
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        {name: value for name, value in SMALL.items() if name != "rms_norm_eps"} | {"norm_eps": 1e-5},
    ),
    "mamba2": {
        "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "expand": 2,
        "state_size": 20, "n_groups": 2, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 24, "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7, "rescale_prenorm_residual": False,
    },
    "gpt2": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True},
    "opt": {
        "vocab_size": 320, "hidden_size": 64, "ffn_dim": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""What a family has in place of `SMALL`."""


def small_fields(family: str) -> dict[str, Any]:
    """Returns the fields of a family's small model."""
    return {**INSTEAD.get(family, SMALL), **OWN.get(family, {})}


def make_model(directory: Path, family: str, *, seed: int = 0, shard_size: str = "5GB", **config: Any) -> Path:
    """Writes a model whose every tensor is random, norms and biases too, and returns its directory.

    Args:
        family: a model type of `ARCHITECTURES`.
        config: fields of config.json that differ from `small_fields`.
    """
    directory.mkdir(exist_ok=True)
    for name, content in _model_files(family, seed, shard_size, json.dumps(config)).items():
        (directory / name).write_bytes(content)
    return directory


@lru_cache(maxsize=128)
def _model_files(family: str, seed: int, shard_size: str, config: str) -> dict[str, bytes]:
    """Returns the files of a model by name; many tests ask for the same ones."""
    fields = {"pad_token_id": None, **small_fields(family), **json.loads(config)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = UNTYPED.from_config(
            AutoConfig.for_model(family, architectures=[ARCHITECTURES[family]], bos_token_id=0, eos_token_id=1, **fields)
        )
        randomise(model, fields["tie_word_embeddings"])
        if family in CENTRED:
            centre_norms(model)
        if family in UNSCALED:
            soften_queries(model)
    generation = {"bos_token_id": 0, "eos_token_id": [1, 0], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model.save_pretrained(directory, max_shard_size=shard_size)
        write_tokenizer(directory)
        (directory / "generation_config.json").write_text(json.dumps(generation))
        return {file.name: file.read_bytes() for file in directory.iterdir()}


def centre_norms(model: torch.nn.Module) -> None:
    """Takes one from the norms that are stored less one, so that random attention is no sharper than that of others."""
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor.data.sub_(1)


def soften_queries(model: torch.nn.Module) -> None:
    """Divides the norms of queries by the root of the size of a head, so that random attention is no sharper than that of
    others: else transformers in float32 is as far from itself in float64 as from any other computation."""
    for name, tensor in model.named_parameters():
        if name.endswith("q_norm.weight"):
            tensor.data.mul_(tensor.shape[0] ** -0.5)


def randomise(model: torch.nn.Module, tied: bool) -> None:
    """Fills every parameter so that logits spread over some units and no tensor is 0 or 1 throughout; and the biases by which
    experts are chosen, which are buffers."""
    for name, tensor in model.named_parameters():
        if tensor.dim() >= 2:
            torch.nn.init.normal_(tensor, std=1.0 if "embed" in name and not tied else tensor.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(tensor, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.3)


def write_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja of a byte-level BPE with at most 320 ids."""
    (directory / "tokenizer.json").write_text(_trained_tokenizer())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


@cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    return str(tokenizer.to_str())


def _sentences() -> Iterator[str]:
    yield from ("the cat sat on the mat and the dog ran to the hat", "what is that, and then what was this?") * 8
