"""GGUF files of every family as llama.cpp's converter lays them out, beside directories with the same dequantised weights."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import load_file, save_file

from tests.gguf_factory import finish, write_tokens
from tests.model_factory import make_model

Array = npt.NDArray[Any]

_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "embed_in": "token_embd", "embed_out": "output", "final_layer_norm": "output_norm",
    "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
ARCHITECTURES = {
    "mixtral": "llama", "mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
}  # fmt: skip
_AROUND = ("model", "transformer", "gpt_neox", "layers", "h")
_PAIRED = ("llama", "mixtral", "mistral", "granite", "smollm3")
_KEYS = {
    "hidden_size": "embedding_length", "n_embd": "embedding_length", "num_hidden_layers": "block_count",
    "n_layer": "block_count", "max_position_embeddings": "context_length", "n_positions": "context_length",
    "intermediate_size": "feed_forward_length", "n_inner": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon", "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window", "num_local_experts": "expert_count", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "use_parallel_residual": "use_parallel_residual",
}  # fmt: skip


def make_family_gguf(directory: Path, family: str, kind: str, **config: Any) -> Path:
    """Writes `directory`, a model with dequantised weights in safetensors, and the GGUF file that they come from beside it."""
    make_model(directory, family, **config)
    settings = json.loads((directory / "config.json").read_text())
    file = directory.parent / f"{directory.name}-{kind}.gguf"
    writer = GGUFWriter(file, ARCHITECTURES.get(family, family))
    write_settings(writer, settings)
    write_tokens(writer, directory)
    stored = load_file(directory / "model.safetensors")
    experts: dict[str, list[Array]] = defaultdict(list)
    written: dict[str, Array] = {}
    for name in sorted(stored, key=_in_order):
        tensor = _to_gguf(family, name, stored[name], settings)
        rows = quants.quantize(tensor, GGMLQuantizationType[kind]) if tensor.ndim == 2 and "wpe" not in name else tensor
        number = GGMLQuantizationType[kind if rows is not tensor else "F32"]
        dequantised: Array = quants.dequantize(rows, number).reshape(tensor.shape)
        written[name] = _from_gguf(family, name, dequantised, settings).reshape(stored[name].shape)
        if family in _PAIRED and re.search(r"[qk]_proj", name):
            rows = _pair(rows, settings["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        target = _name(family, name)
        if ".experts." in name:
            experts[target].append(rows)
            continue
        writer.add_tensor(target, np.ascontiguousarray(rows), raw_dtype=number)
    for target, parts in experts.items():
        writer.add_tensor(target, np.stack(parts), raw_dtype=GGMLQuantizationType[kind])
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in written.items()}, directory / "model.safetensors")
    _write_factors(writer, settings)
    finish(writer)
    return file


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any]) -> None:
    """Writes a config as llama.cpp's converter does."""
    for name, value in settings.items():
        if name in _KEYS and value is not None and (name != "sliding_window" or value):
            kind = type(value)
            write = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[kind]
            write(f"{writer.arch}.{_KEYS[name]}", value)  # type: ignore[operator]
    if settings["model_type"] == "gpt2" and not settings.get("n_inner"):
        writer.add_feed_forward_length(4 * settings["n_embd"])
    if settings.get("head_dim"):
        writer.add_value_length(settings["head_dim"])
    rope = settings.get("rope_parameters")
    if rope and "sliding_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if rope:
        _write_rope(writer, settings, rope.get("full_attention", rope))


def _write_rope(writer: GGUFWriter, settings: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{writer.arch}.rope.scaling.factor", rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "yarn")
        writer.add_float32(f"{writer.arch}.rope.scaling.factor", rope["factor"])
        writer.add_uint32(f"{writer.arch}.rope.scaling.original_context_length", rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_uint32(f"{writer.arch}.rope.scaling.original_context_length", settings["original_max_position_embeddings"])
        writer.add_float32(f"{writer.arch}.rope.scaling.attn_factor", rope["attention_factor"])


def _write_factors(writer: GGUFWriter, settings: Mapping[str, Any]) -> None:
    rope = settings.get("rope_parameters") or {}
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _name(family: str, name: str) -> str:
    """Returns what a tensor of a checkpoint is called in a GGUF file."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    kept = [
        part for part in parts[:-1] if not part.isdigit() and part not in ("model", "transformer", "gpt_neox", "layers", "h")
    ]
    module = ".".join(kept)
    own = _POST_NORMS if family.startswith("gemma") or family == "olmo2" else {}
    stored = own.get(module) or _NAMES[module]
    return f"blk.{numbers[0]}.{stored}.{parts[-1]}" if numbers else f"{stored}.{parts[-1]}"


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _to_gguf(family: str, name: str, tensor: Array, settings: Mapping[str, Any]) -> Array:
    if family == "gpt2" and tensor.ndim == 2 and ".h." in name:
        return np.ascontiguousarray(tensor.T)
    if family.startswith("gemma") and tensor.ndim == 1:
        return tensor + np.float32(1)
    if "query_key_value" in name:  # from turns by head to all of q, of k and of v
        heads = tensor.reshape(settings["num_attention_heads"], 3, -1, *tensor.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(tensor.shape))
    return tensor.reshape(-1) if "shared_expert_gate" in name else tensor


def _from_gguf(family: str, name: str, tensor: Array, settings: Mapping[str, Any]) -> Array:
    if family == "gpt2" and tensor.ndim == 2 and ".h." in name:
        return tensor.T
    if family.startswith("gemma") and tensor.ndim == 1:
        return tensor - np.float32(1)
    if "query_key_value" in name:
        heads = tensor.reshape(3, settings["num_attention_heads"], -1, *tensor.shape[1:])
        return heads.swapaxes(0, 1).reshape(tensor.shape)
    return tensor


def _pair(rows: Array, num_heads: int) -> Array:
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
