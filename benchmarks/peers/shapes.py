"""Shapes of models: what they weigh, what their work costs, and checkpoints of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.peers.work import spread_lengths

KNOWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "q05": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
    "l1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "q15l8": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
    "l8bl8": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "q30bl4": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""Qwen2.5-0.5B, Llama-3.2-1B, 8 of the 28 layers of Qwen2.5-1.5B, 8 of the 32 of Llama-3.1-8B, and 4 of the 48 of the mixture
Qwen3-30B-A3B, all with tied embeddings.

q15l8 is held out: no kernel, tile or default may be chosen by it, so that it shows what the choices are worth elsewhere.
"""
_COMMON: Final = {
    "tie_word_embeddings": True, "max_position_embeddings": 32768, "bos_token_id": 0, "eos_token_id": 0,
    "dtype": "bfloat16", "hidden_act": "silu", "initializer_range": 0.02,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as its config.json has it.

    Attributes:
        intermediate: width of the feed-forward layer, or of one expert.
        experts_per_token: experts that compute each token; 1 without a mixture.
        num_experts: 1 without a mixture.
    """

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    experts_per_token: int = 1
    num_experts: int = 1

    @classmethod
    def read(cls, name: str, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return cls(
            name,
            config["hidden_size"],
            config.get("moe_intermediate_size") or config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            config["max_position_embeddings"],
            config.get("num_experts_per_tok", 1),
            config.get("num_experts", 1),
        )

    @property
    def head_params(self) -> int:
        """Weights of the matrix that makes logits; with tied embeddings the only one of the vocabulary."""
        return self.vocab_size * self.hidden

    @property
    def layer_params(self) -> int:
        """Weights of all matrices inside the layers that one token is multiplied by."""
        attention = self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        router = self.hidden * self.num_experts if self.num_experts > 1 else 0
        return self.num_layers * (attention + router + 3 * self.hidden * self.intermediate * self.experts_per_token)

    @property
    def active_share(self) -> float:
        """Share of the weights that one token is multiplied by; 1 without a mixture."""
        idle = 3 * self.hidden * self.intermediate * (self.num_experts - self.experts_per_token) * self.num_layers
        active = self.layer_params + self.head_params
        return active / (active + idle)

    def count_expert_params(self, num_tokens: int) -> float:
        """Returns the weights of experts that a step reads beyond those of one token, in expectation over uniform routing."""
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        read = self.num_experts * (1 - missed)
        return self.num_layers * 3 * self.hidden * self.intermediate * (read - self.experts_per_token)

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one position at 16 bits."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def weights_bytes(self, layer_bits: float, head_bits: float) -> float:
        """Every matrix once, as a decode step reads them."""
        return (self.layer_params * layer_bits + self.head_params * head_bits) / 8

    def prefill_flops(self, length: int) -> float:
        """Matrices for each token, causal attention, and logits of the last token."""
        attention = 2 * length * length * self.num_layers * self.num_heads * self.head_dim
        return 2 * (self.layer_params * length + self.head_params) + attention


@dataclass(frozen=True, slots=True)
class Roof:
    """The shortest time that work can take on a machine that reads and multiplies so fast.

    Attributes:
        bytes_per_s: of memory.
        flops_per_s: of matrices in the format.
        weights_bytes: read by each decode step.
    """

    shape: Shape
    bytes_per_s: float
    flops_per_s: float
    weights_bytes: float

    def prefill(self, length: int) -> float:
        """Prompt tokens per second: arithmetic alone."""
        return length / (self.shape.prefill_flops(length) / self.flops_per_s)

    def decode(self, context: float) -> float:
        """Tokens per second of one sequence at a mean context: memory alone."""
        return self.bytes_per_s / (self.weights_bytes + context * self.shape.kv_token_bytes)

    def together(self, num_prompts: int, num_new: int) -> float:
        """New tokens per second: every prompt's arithmetic, then steps bound by memory or by arithmetic."""
        lengths = spread_lengths(num_prompts)
        prefill_s = sum(self.shape.prefill_flops(length) for length in lengths) / self.flops_per_s
        shape = self.shape
        kv_bytes = (sum(lengths) + num_prompts * num_new / 2) * shape.kv_token_bytes
        bytes_per_weight = self.weights_bytes / (shape.layer_params + shape.head_params)
        weights_bytes = self.weights_bytes + shape.count_expert_params(num_prompts) * bytes_per_weight
        flops = 2 * num_prompts * (shape.layer_params + shape.head_params)
        step_s = max((weights_bytes + kv_bytes) / self.bytes_per_s, flops / self.flops_per_s)
        return num_prompts * num_new / (prefill_s + (num_new - 1) * step_s)


def write_checkpoint(name: str, folder: Path, seed: int) -> None:
    """Writes a checkpoint of random weights (normal, 0.02, bf16) in the layout of transformers."""
    config = complete_config(name)
    random = np.random.default_rng(seed)
    write_tensors(config, {tensor: draw(random, tensor, size) for tensor, size in iter_tensors(config)}, folder)


def complete_config(name: str) -> dict[str, Any]:
    """Returns the config.json of a known shape."""
    return {**_COMMON, **KNOWN[name]}


def draw(random: np.random.Generator, tensor: str, size: tuple[int, ...]) -> npt.NDArray[Any]:
    """Returns random numbers for a tensor of that name; norms are ones."""
    if len(size) == 1 and not tensor.endswith("bias"):
        return np.ones(size, ml_dtypes.bfloat16)
    return (random.standard_normal(size, np.float32) * 0.02).astype(ml_dtypes.bfloat16)


def write_tensors(config: Mapping[str, Any], tensors: dict[str, npt.NDArray[Any]], folder: Path) -> None:
    """Writes a checkpoint, with a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def iter_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the shape of every tensor."""
    hidden, intermediate, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for part, size in (("q", query), ("k", key), ("v", key)):
            yield f"{layer}.self_attn.{part}_proj.weight", (size, hidden)
            if config["model_type"] == "qwen2":
                yield f"{layer}.self_attn.{part}_proj.bias", (size,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        if config["model_type"] == "qwen3_moe":
            yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
            yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _iter_feed_forward(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            yield from _iter_feed_forward(f"{layer}.mlp", hidden, intermediate)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)


def _iter_feed_forward(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Bytes, and placeholders for the rest of the vocabulary: prompts are token ids, only answers become text."""
    pieces = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ee"]  # llama.cpp loads no vocabulary without a merge
    pieces += [f"<|{number}|>" for number in range(len(pieces), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[("e", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
