"""Full-width evidence, by hand: families against transformers, and batch invariance on wide models.

python -m benchmarks.families                            logits and 200 greedy tokens of every family, in real widths
python -m benchmarks.families --backend native           the same on the native back end
python -m benchmarks.families --batch-invariance         bits of a row in every arrangement, for every format, KV type and
                                                         instruction set of this machine (native; tests do so on the oracle)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Bench, console, make_parser, make_progress
from cloister.backends.base import Weights
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from cloister.types.errors import ConfigError
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.model_factory import make_model
from tests.reference import compare

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 256}
LATENTS = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}  # fmt: skip
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
WINDOW = {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1}

# Widths of real models, with fewer layers and smaller vocabularies.
WIDE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "TinyLlama 1.1B", {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
                                 "num_key_value_heads": 4, "vocab_size": 32000}),
    ("llama", "Llama 2 7B, half width, MHA", {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16,
                                              "num_key_value_heads": 16, "vocab_size": 32000}),
    ("llama", "Llama 3.2 1B, tied, beyond the context", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "head_dim": 64, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    ("qwen2", "Qwen2.5 0.5B, tied", {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 32000, "tie_word_embeddings": True}),
    ("qwen2", "Qwen2.5 1.5B, beyond the window", {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 32000, **WINDOW}),
    ("qwen3", "Qwen3 0.6B, tied", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": True}),
    ("qwen3", "Qwen3 0.6B, MQA, biases", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 1,
        "head_dim": 128, "vocab_size": 32000, "attention_bias": True}),
    ("llama", "SmolLM 135M, 6 layers", {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "tie_word_embeddings": True, "num_hidden_layers": 6}),
    ("llama", "Llama of SmolLM's width, dynamic scaling", {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 16000, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    ("mistral", "Mistral 7B, half width, beyond the window", {
        "hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 8000, "sliding_window": 300}),
    ("mixtral", "Mixtral 8x7B, quarter width", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 8000, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen2_moe", "Qwen1.5-MoE A2.7B, half width, 30 experts", {
        "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": 8000, "num_experts": 30, "num_experts_per_tok": 4, "moe_intermediate_size": 704,
        "shared_expert_intermediate_size": 2816}),
    ("qwen3_moe", "Qwen3 30B A3B, half width, 64 experts", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 8000, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 384,
        "norm_topk_prob": True}),
    ("gemma2", "Gemma 2 2B, half width, beyond the window", {
        "hidden_size": 1152, "intermediate_size": 4608, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 16000, "sliding_window": 300, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True}),
    ("gemma3_text", "Gemma 3 1B, 6 layers, beyond the window", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 16000, "sliding_window": 300, "query_pre_attn_scalar": 256, "num_hidden_layers": 6,
        "tie_word_embeddings": True}),
    ("gemma3n_text", "Gemma 3n E2B, half width, 10 layers, beyond the window", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "vocab_size": 16000, "sliding_window": 300, "num_hidden_layers": 10, "num_kv_shared_layers": 5, "altup_num_inputs": 4,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2, "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
        "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6, "vocab_size_per_layer_input": 16000,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True}),
    ("phi3", "Phi-3 mini, half width, LongRoPE", {
        "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 8000, "original_max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.02 * i for i in range(48)],
                            "long_factor": [1.0 + 0.5 * i for i in range(48)]}}),
    ("phi3", "Phi-4 mini, half width, partly turned", {
        "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 4,
        "vocab_size": 8000, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}}),
    ("gpt2", "GPT-2, 124M", {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}),
    ("opt", "OPT 125M", {
        "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272,
        "max_position_embeddings": 2048}),
    ("gpt_neox", "Pythia 14M", {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
        "vocab_size": 50304, "max_position_embeddings": 2048}),
    ("gpt_neox", "Pythia 160M", {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "vocab_size": 50304, "max_position_embeddings": 2048}),
    ("smollm3", "SmolLM3 3B, half width, 4 layers", {
        "hidden_size": 1024, "intermediate_size": 5504, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 16000, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    ("granite", "Granite 3.1 2B, half width", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 16000, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
        "logits_scaling": 8.0, "tie_word_embeddings": True}),
    ("granitemoe", "Granite 3.1 3B A800M, half width, 40 experts", {
        "hidden_size": 768, "intermediate_size": 256, "num_attention_heads": 12, "num_key_value_heads": 4,
        "vocab_size": 16000, "num_local_experts": 40, "num_experts_per_tok": 8, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 6.0, "tie_word_embeddings": True}),
    ("olmo2", "OLMo 2 1B, half width", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": 16000}),
    ("olmo3", "OLMo 3 7B, quarter width, 4 layers, beyond the window", {
        "hidden_size": 1024, "intermediate_size": 2752, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": 16000, "sliding_window": 300, "num_hidden_layers": 4,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 10000.0}}}),
    ("deepseek_v2", "DeepSeek-V2-Lite, half width, whole latents, 32 experts", {
        **LATENTS, "hidden_size": 1024, "intermediate_size": 5472, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 16000, "q_lora_rank": None, "n_routed_experts": 32, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "moe_intermediate_size": 704, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v3", "DeepSeek-V3, quarter width, whole latents, 32 experts", {
        **LATENTS, "hidden_size": 1792, "intermediate_size": 4608, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 16000, "q_lora_rank": 1536, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 512, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("glm4_moe", "GLM-4.5, quarter width, 32 experts", {
        "hidden_size": 1280, "intermediate_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 16000, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1, "use_qk_norm": True,
        "attention_bias": True, "moe_intermediate_size": 384, "routed_scaling_factor": 2.5, "num_hidden_layers": 3}),
    ("minimax_m2", "MiniMax-M2, third of its width, 32 experts", {
        "hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 16000, "num_local_experts": 32, "num_experts_per_tok": 8,
        "rope_parameters": {"rope_theta": 5000000.0, "partial_rotary_factor": 0.5}}),
    ("cohere2", "Command R7B, quarter width, 4 layers, beyond the window", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 16000, "sliding_window": 300, "num_hidden_layers": 4, "logit_scale": 0.25,
        "rope_parameters": {"rope_theta": 50000.0}}),
    ("gpt_oss", "gpt-oss 20B, third of its width, beyond the window", {
        "hidden_size": 960, "intermediate_size": 960, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 16000, "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "sliding_window": 128,
        "rope_parameters": {**YARN, "factor": 32.0, "truncate": False}}),
    ("llama4_text", "Llama 4 Scout, quarter width, 4 layers, beyond the chunk", {
        "hidden_size": 1280, "intermediate_size": 2048, "intermediate_size_mlp": 4096, "num_attention_heads": 10,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 16000, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 256, "floor_scale": 64, "num_hidden_layers": 4}),
    ("ministral", "Ministral 8B, quarter width, 4 layers, beyond the window", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 16000, "sliding_window": 300, "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]}),
    ("ministral3", "Ministral 3 8B, quarter width, beyond the original context", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 16000, "rope_parameters": {
            **YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
    ("mamba2", "Mamba 2 130M, 6 layers", {
        "hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1, "vocab_size": 16000,
        "num_hidden_layers": 6}),
    ("qwen3_next", "Qwen3-Next, half width, whole heads, 32 experts", {
        "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 16000,
        "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "num_experts": 32, "num_experts_per_tok": 10, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "num_hidden_layers": 4, "layer_types": None,
        "rope_parameters": {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25}}),
    ("qwen3_5_text", "Qwen3.5 0.8B, 4 layers", {
        "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 16000,
        "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_hidden_layers": 4, "layer_types": None,
        "rope_parameters": {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25}}),
    ("lfm2", "LFM2 350M, 6 layers", {
        "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 6656,
        "block_multiple_of": 256, "vocab_size": 16000, "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"]}),
    ("lfm2_moe", "LFM2 8B A1B, half width, 32 experts", {
        "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3584,
        "moe_intermediate_size": 896, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 1, "vocab_size": 16000,
        "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "routed_scaling_factor": 1.0}),
    ("granitemoehybrid", "Granite 4 Tiny, half width, 32 experts", {
        "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 16000, "mamba_n_heads": 24,
        "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "num_local_experts": 32, "num_experts_per_tok": 6,
        "intermediate_size": 256, "shared_intermediate_size": 512, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}),
    ("falcon_h1", "Falcon-H1 0.5B, 4 layers", {
        "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 2048,
        "vocab_size": 16000, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 128, "num_hidden_layers": 4}),
    ("nemotron_h", "Nemotron 3 Nano, half width, 32 experts", {
        "hidden_size": 1344, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 16000,
        "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 32,
        "num_experts_per_tok": 6, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 1024, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.5, "intermediate_size": 2048}),
]  # fmt: skip
LENGTH = 600
"""Of prompt and answer; the last token is not read, so the greatest length of a sequence is one less."""

NATIVE_SPECS = {
    "tiny": make_spec(hidden=128, intermediate=128, heads=(4, 2), head_dim=32, num_layers=1, vocab=128),
    "narrow": make_spec(hidden=256, intermediate=688, heads=(8, 2), head_dim=32, num_layers=1, vocab=512),
    "wide": make_spec(hidden=1024, intermediate=1408, heads=(8, 2), head_dim=128, num_layers=1, vocab=300),
}
KV_TYPES = ("bfloat16", "int8", "int4")
COMPANIONS = (1, 9, 31, 63)
SLOW = ("avx2", "scalar")
"""Kernels that take long: they get a tiny model."""


@dataclass(frozen=True, slots=True)
class Form:
    """Weights and KV of a native program, and how an int4 is to be written."""

    quant: str = "none"
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    options: FormatOptions = field(default_factory=FormatOptions)

    @property
    def label(self) -> str:
        name = self.dtype if self.quant == "none" else self.quant
        size = self.options.group_size
        inputs = "" if self.options.activations is None else f", inputs in {self.options.activations}"
        return f"{name}{'' if size is None else f', groups of {size}'}{inputs}, KV {self.kv_dtype}"


FORMS = (
    Form(dtype="float32", kv_dtype="float32"),
    *(Form(kv_dtype=kv) for kv in KV_TYPES),
    *(Form("int8", kv_dtype=kv) for kv in KV_TYPES),
    *(Form("int4", kv_dtype=kv, options=FormatOptions(size)) for size in (32, 64, 128) for kv in KV_TYPES),
    Form("int4", options=FormatOptions(activations="bfloat16")),
    *(Form("qoq", kv_dtype=kv, options=FormatOptions(size)) for size, kv in ((32, "int4"), (64, "int4"))),
    *(Form("qoq", kv_dtype=kv, options=FormatOptions(128)) for kv in KV_TYPES),
)


def show_families(console: Console, backend: str, only: str | None) -> None:
    table = Table("family", "variant", "max |logit|", "max |difference|", "greedy tokens equal", title=f"{backend}, float32")
    for family, name, config in WIDE:
        if only is not None and family != only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            layers = {} if "n_layer" in config else LAYERS
            path = make_model(Path(directory), family, **{**layers, **config})
            prompt = np.random.default_rng(0).integers(0, config["vocab_size"], 400).tolist()
            try:
                found = compare(path, prompt, LENGTH - len(prompt), backend=backend, max_model_len=LENGTH - 1)
            except ConfigError:  # the back end says what it does not compute
                table.add_row(family, name, "", "refused", "")
                continue
        counted = f"{found.num_equal}/{found.num_tokens}"
        table.add_row(family, name, f"{found.largest:.1f}", f"{found.difference:.1e}", counted)
    console.print(table)


def show_native_batch_invariance(options: argparse.Namespace) -> int:
    from cloister.backends.native import _native  # not everybody has a compiler

    names = _native.kernel_names()
    bench = Bench(
        "batch_invariance_native",
        "Batch invariance on the native kernels: bits of a sequence's logits in any company",
        f"no arrangement changes a bit, in {len(FORMS)} pairs of weights and KV on {', '.join(names)}",
    )
    runs = [("tiny" if name in SLOW else "narrow", name) for name in names] + [("wide", n) for n in names if n not in SLOW]
    found: dict[tuple[Form, str, str], list[str]] = {}
    with make_progress() as progress:
        task = progress.add_task("arrangements", total=len(runs) * len(FORMS))
        for spec, kernels in runs:
            for form in FORMS:
                found[form, spec, kernels] = arrange(spec, kernels, form)
                progress.advance(task)
    rows = [[form.label, *("; ".join(found[form, *run]) or "none" for run in runs)] for form in FORMS]
    bench.print_rows("Arrangements that differ", ("weights and KV", *(f"{spec}, {name}" for spec, name in runs)), rows)
    total = len(FORMS) * sum(count_arrangements(spec) for spec, _ in runs)
    bench.check(f"of {total:,} arrangements, how many differ", sum(map(len, found.values())), high=0)
    return bench.finish(options)


def arrangements(spec: str) -> dict[str, tuple[int, ...]]:
    """Returns what `differing_arrangements` is to try: all numbers of companions, and fewer cuts of the wide model."""
    if spec == "wide":
        return {"chunks": (33,), "block_sizes": (5,), "companions": COMPANIONS}
    return {"chunks": (1, 7, 64), "block_sizes": (1, 5, 256), "companions": COMPANIONS}


def count_arrangements(spec: str) -> int:
    """Those, and: two threads, three lengths of hits, and companions with one and with two threads."""
    tried = arrangements(spec)
    return 1 + len(tried["chunks"]) + len(tried["block_sizes"]) + 3 + 2 * len(tried["companions"])


def arrange(spec: str, kernels: str, form: Form) -> list[str]:
    """Names the arrangements in which some bit of a program's logits differs from those of the sequence alone."""
    decoder = NATIVE_SPECS[spec]
    weights: Weights = RandomWeights(decoder)
    if form.quant != "none":
        weights = QuantizedWeights(weights, FORMATS.get(form.quant)(form.options))
    num_tokens = 70 if spec == "wide" else 300
    tokens = np.random.default_rng(1).integers(0, decoder.vocab_size, num_tokens).tolist()

    @cache
    def make(block_size: int, num_threads: int) -> Driver:
        return build(
            decoder, weights, num_blocks=3072 // block_size + 64, block_size=block_size, num_threads=num_threads,
            backend="native", dtype=form.dtype, kv_dtype=form.kv_dtype, kernels=kernels,
        )  # fmt: skip

    return differing_arrangements(make, tokens, vocab=decoder.vocab_size, **arrangements(spec))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--batch-invariance", action="store_true", help="bits of a row in every arrangement")
    parser.add_argument("--backend", choices=("torch", "native"), default="torch", help="whose logits")
    parser.add_argument("--family", help="only the variants of one model type")
    options = parser.parse_args()
    if options.batch_invariance:
        return show_native_batch_invariance(options)
    show_families(console, options.backend, options.family)
    return 0


if __name__ == "__main__":
    sys.exit(main())
