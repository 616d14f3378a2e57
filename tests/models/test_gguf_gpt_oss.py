"""GGUF files of gpt-oss, experts in MXFP4 as llama.cpp's converter writes them, against the directory that they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import load_file

from cloister.backends.tensors import GroupedTensor, dequantized
from cloister.models import load
from cloister.models.gguf.tensors import TYPES, BlockType
from cloister.models.safetensors import write_tensors
from cloister.types.errors import ModelError
from tests.driving import GivenWeights, build, build_from
from tests.gguf_factory import finish, write_tokens
from tests.gguf_families import write_settings
from tests.model_factory import make_model

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
    "self_attn": "attn_sinks",
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
TOKENS = np.random.default_rng(2).integers(0, 320, 90).tolist()


def rename(name: str) -> str:
    module, _, last = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{last}"
    _, _, number, module = module.split(".", 3)
    return f"blk.{number}.{NAMES[module]}.{'weight' if last == 'sinks' else last}"


def cut_experts(name: str, tensor: npt.NDArray[Any]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yields name and contents of what a stack of a checkpoint is in a GGUF file; rows are outputs."""
    number, what = name.split(".")[2], name.rpartition(".")[2]
    suffix = "bias" if what.endswith("_bias") else "weight"
    rows = tensor if suffix == "bias" else tensor.swapaxes(1, 2)
    if what.startswith("down"):
        yield f"blk.{number}.ffn_down_exps.{suffix}", rows
    else:
        yield f"blk.{number}.ffn_gate_exps.{suffix}", rows[:, 0::2]
        yield f"blk.{number}.ffn_up_exps.{suffix}", rows[:, 1::2]


def make_gguf(directory: Path, **config: Any) -> Path:
    """Writes a directory whose experts hold numbers of MXFP4, and the GGUF file of the same beside it."""
    make_model(directory, "gpt_oss", **{"rope_parameters": YARN, "swiglu_limit": 7.0, **config})
    settings = json.loads((directory / "config.json").read_text())
    file = directory.parent / f"{directory.name}.gguf"
    writer = GGUFWriter(file, "gpt-oss")
    write_settings(writer, settings)
    writer.add_expert_feed_forward_length(settings["intermediate_size"])
    write_tokens(writer, directory)
    plain = load_file(directory / "model.safetensors")
    kind = GGMLQuantizationType.MXFP4
    for name, tensor in plain.items():
        if ".experts." not in name:
            writer.add_tensor(rename(name), tensor)
            continue
        for target, rows in cut_experts(name, tensor):
            if target.endswith("bias"):
                writer.add_tensor(target, np.ascontiguousarray(rows))
                continue
            blocks = quants.quantize(np.ascontiguousarray(rows), kind)
            writer.add_tensor(target, blocks, raw_dtype=kind)
            rows[...] = quants.dequantize(blocks, kind)  # views of the checkpoint's tensor
    write_tensors(directory / "model.safetensors", plain)
    finish(writer)
    return file


@pytest.mark.parametrize("config", [{}, {"attention_bias": False, "tie_word_embeddings": True}], ids=["biases", "tied"])
def test_a_file_computes_what_its_directory_computes(config: dict[str, Any], tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", **config)
    ours, expected = load(file), load(tmp_path / "tiny")
    assert ours.spec.layers[0].mlp == expected.spec.layers[0].mlp
    assert [layer.attention.window for layer in ours.spec.layers] == [40, None]
    assert set(ours.weights.names()) == set(expected.weights.names())
    assert isinstance(ours.weights.read("layers.1.experts.3.up.weight"), GroupedTensor)
    for name in ("gate", "up", "down"):
        for part in ("weight", "bias"):
            full = f"layers.1.experts.4.{name}.{part}"
            found, wanted = (dequantized(model.weights.read(full)) for model in (ours, expected))
            assert np.array_equal(found, wanted)
    logits = build_from(tmp_path / "tiny").run("a", TOKENS)
    numbers = {name: dequantized(tensor) for name, tensor in ours.weights}  # codes of a GGUF file round inputs to int8
    assert np.abs(build(ours.spec, GivenWeights(numbers)).run("a", TOKENS) - logits).max() <= 1e-4


def test_blocks_of_any_scale_have_the_bits_of_the_reference() -> None:
    raw = np.random.default_rng(3).integers(0, 256, (255, 17), np.uint8)
    raw[:, 0] = np.arange(255)
    kind = TYPES[GGMLQuantizationType.MXFP4]
    assert isinstance(kind, BlockType)
    codes, scales, offsets = kind.unpack(raw)
    tensor = GroupedTensor(codes, scales, None, offsets, kind.bits, kind.group_size, "bfloat16")
    with np.errstate(over="ignore"):
        found, expected = tensor.dequantize(), quants.dequantize(raw, GGMLQuantizationType.MXFP4)
    assert found.tobytes() == expected.tobytes()
    assert np.isnan(kind.unpack(np.full((1, 17), 255, np.uint8))[1]).all()


def test_a_message_of_harmony_may_be_followed_by_another(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny")
    content = file.read_bytes()
    place = content.index(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id") + 4
    content = content[:place] + (2).to_bytes(4, "little") + content[place + 4 :]
    file.write_bytes(content)
    assert load(file).info.eos_token_ids == (2, 0, 1)  # the file's own, <|endoftext|> and <|end|>
    file.write_bytes(content.replace(b"<|system|>", b"<|return|>").replace(b"<|user|>", b"<|call|>"))
    assert load(file).info.eos_token_ids == (2, 0, 3)


def test_a_file_without_biases_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny")
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up_exps.bias", b"blk.1.ffn_up_exps.blas"))
    with pytest.raises(ModelError, match=r"lacks the tensor 'blk\.1\.ffn_up_exps\.bias'"):
        load(file)
