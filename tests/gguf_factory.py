"""GGUF files of the models that `model_factory` makes, by the reference library, and the same weights dequantised by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors.numpy import load_file, save_file

from tests.model_factory import SPECIAL_TOKENS, make_model

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4")
BLOCKS = {"hidden_size": 256, "intermediate_size": 512}
"""Sizes that hold whole blocks of every type."""
_FLOATS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "NVFP4": ()}
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def make_gguf(
    directory: Path, family: str, kind: str, *, edit: Callable[[GGUFWriter], object] | None = None, **config: Any
) -> Path:
    """Writes `directory`, a model with dequantised weights in safetensors, and beside it the GGUF file that they come from.

    Args:
        kind: type of every matrix, a name of `TYPES`.
        edit: adds to the metadata, before the tensors.

    Returns:
        The GGUF file.
    """
    make_model(directory, family, **{**BLOCKS, **config})
    settings = json.loads((directory / "config.json").read_text())
    file = directory.parent / f"{directory.name}-{kind}.gguf"
    writer = GGUFWriter(file, family)
    write_settings(writer, settings)
    write_tokens(writer, directory)
    if edit is not None:
        edit(writer)
    stored = load_file(directory / "model.safetensors")
    save_file(
        {name: _write(writer, name, tensor, kind, settings) for name, tensor in stored.items()}, directory / "model.safetensors"
    )
    finish(writer)
    return file


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any]) -> None:
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_parameters"]["rope_theta"])
    if settings.get("head_dim"):
        writer.add_key_length(settings["head_dim"])
        writer.add_value_length(settings["head_dim"])


def write_tokens(writer: GGUFWriter, directory: Path, pre: str = "gpt-2") -> None:
    """Writes a byte-level tokenizer.json as llama.cpp's converter does."""
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens += [f"[PAD{place}]" for place in range(len(tokens), 320)]
    kinds = [
        TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.UNUSED if t.startswith("[PAD") else TokenType.NORMAL
        for t in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())


def quantise(tensor: npt.NDArray[np.float32], kind: str) -> npt.NDArray[Any]:
    """Returns blocks [rows, bytes] of a matrix; where the library has no quantiser, valid blocks with random contents."""
    number = GGMLQuantizationType[kind]
    if kind not in _FLOATS:
        blocks: npt.NDArray[Any] = quants.quantize(tensor, number)
        return blocks
    rng = np.random.default_rng(tensor.size)
    num_bytes = quants.quant_shape_to_byte_shape(tensor.shape, number)[-1]
    size = quants.GGML_QUANT_SIZES[number][1]
    raw = rng.integers(0, 256, (len(tensor), num_bytes // size, size), np.uint8)
    for start in _FLOATS[kind]:
        scale = rng.uniform(1e-5, 1e-4, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., start : start + 2] = scale.view(np.uint8)
    if kind == "NVFP4":
        raw[..., :4] = rng.integers(0, 24, (*raw.shape[:2], 4))  # E4M3 from 0 to 15 / 128, some below its normal numbers
    return raw.reshape(len(tensor), num_bytes)


def _write(writer: GGUFWriter, name: str, tensor: npt.NDArray[Any], kind: str, settings: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Writes one tensor and returns its reference dequantisation."""
    parts = name.removeprefix("model.").split(".")
    module = ".".join(parts[2:-1] if parts[0] == "layers" else parts[:-1])
    stored = f"blk.{parts[1]}.{_NAMES[module]}.{parts[-1]}" if parts[0] == "layers" else f"{_NAMES[module]}.{parts[-1]}"
    number = GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
    rows = quantise(tensor, kind) if tensor.ndim == 2 else tensor
    reference: npt.NDArray[Any] = quants.dequantize(rows, number).reshape(tensor.shape)
    if settings["model_type"] == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        rows = _pair(rows, settings["num_attention_heads" if "q_proj" in module else "num_key_value_heads"])
    writer.add_tensor(stored, np.ascontiguousarray(rows), raw_dtype=number)
    return np.ascontiguousarray(reference)


def _pair(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Puts row i + j * head_dim / 2 of each head at 2 i + j, as llama.cpp wants rows to rotate neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
