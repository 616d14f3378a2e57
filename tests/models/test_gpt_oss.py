"""gpt-oss against transformers, and its experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cloister.backends.spec import MoeSpec
from cloister.backends.tensors import GroupedTensor
from cloister.models import load
from cloister.models.decoder import find_family, read_spec
from cloister.models.safetensors import write_tensors
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model
from tests.reference import compare
from tests.thinning import every_second, thin

TOKENS = np.random.default_rng(2).integers(0, 320, 60).tolist()
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "beyond the window and the original context": {"rope_parameters": YARN, "num_hidden_layers": 3},
    "no biases in attention, one KV head, tied": {
        "attention_bias": False, "num_key_value_heads": 1, "tie_word_embeddings": True, "swiglu_limit": 7.0,
    },
    "windows in other layers, one expert": {
        "layer_types": ["full_attention", "sliding_attention"], "num_experts_per_tok": 1, "swiglu_alpha": 1.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, "gpt_oss", **VARIANTS[name])
    agreement = compare(path)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


HUB: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip


def test_the_config_of_the_20b_on_the_hub_is_read_whole() -> None:
    unknown: list[str] = []
    spec = read_spec(find_family(HUB), HUB, None, unknown.extend)
    assert unknown == []
    assert spec.max_positions == 131072
    assert [layer.attention.window for layer in spec.layers[:4]] == [128, None, 128, None]
    assert all(layer.grouped_attention.sinks and layer.grouped_attention.qkv_bias for layer in spec.layers)
    moe = spec.layers[0].mlp
    assert isinstance(moe, MoeSpec)
    assert (moe.num_experts, moe.num_chosen, moe.expert.intermediate_size) == (32, 4, 2880)
    assert moe.expert.clipped is not None
    assert (moe.expert.clipped.alpha, moe.expert.clipped.limit) == (1.702, 7.0)
    bare = {name: value for name, value in HUB.items() if name not in ("rope_scaling", "rope_theta", "swiglu_limit")}
    assert read_spec(find_family(bare), bare) == spec


def write_in_mxfp4(path: Path) -> dict[str, Any]:
    """Writes a directory's experts in random MXFP4, and returns all tensors with what transformers makes of those."""
    rng, stored, plain = np.random.default_rng(3), {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        blocks = rng.integers(0, 256, (num_experts, num_out, num_in // 32, 16), np.uint8)
        scales = rng.integers(120, 126, (num_experts, num_out, num_in // 32), np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
        plain[name] = unpacked.numpy()
    write_tensors(path / "model.safetensors", stored)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return plain


def make_quantized(tmp_path: Path, **config: Any) -> tuple[Path, Path]:
    """Returns a model in MXFP4 and the same with the numbers that it stands for."""
    quantized, plain = (make_model(tmp_path / name, "gpt_oss", **config) for name in ("mxfp4", "plain"))
    write_tensors(plain / "model.safetensors", write_in_mxfp4(quantized))
    return quantized, plain


def test_experts_in_mxfp4_compute_what_transformers_unpacks(tmp_path: Path) -> None:
    quantized, plain = make_quantized(tmp_path)
    assert build_from(quantized).run("a", TOKENS).tobytes() == build_from(plain).run("a", TOKENS).tobytes()
    agreement = compare(plain, TOKENS, 60)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


def test_the_native_back_end_multiplies_them_in_four_bits_with_the_same_bits(tmp_path: Path) -> None:
    found, expected = (
        build_from(path, backend="native", dtype="bfloat16") for path in make_quantized(tmp_path, num_hidden_layers=3)
    )
    assert found.run("a", TOKENS).tobytes() == expected.run("a", TOKENS).tobytes()
    tensor = load(tmp_path / "mxfp4").weights.read("layers.2.experts.1.up.weight")
    assert isinstance(tensor, GroupedTensor)
    assert tensor.is_mxfp4


def test_they_stay_in_codes_of_a_byte(tmp_path: Path) -> None:
    weights = load(make_quantized(tmp_path)[0]).weights
    for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
        full = f"layers.1.experts.4.{name}.weight"
        tensor, form = weights.read(full), weights.form(full)
        assert isinstance(tensor, GroupedTensor)
        assert isinstance(form, GroupedTensor)
        assert tensor.shape == weights.shape(full) == shape
        assert form.shape == (1, shape[1])
        assert (form.bits, form.group_size, form.activations) == (tensor.bits, tensor.group_size, tensor.activations)


def test_the_greatest_and_smallest_scales_are_exact(tmp_path: Path) -> None:
    path = make_quantized(tmp_path, num_hidden_layers=1)[0]
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    stored[f"{name}_scales"][0, 0, :2] = 0, 252
    stored[f"{name}_blocks"][0, 0, 0, 0] = 0xF1  # half, then minus six
    stored[f"{name}_blocks"][0, 0, 1, 0] = 0x7A  # minus one, then six
    write_tensors(path / "model.safetensors", stored)
    tensor = load(path).weights.read("layers.0.experts.0.down.weight")
    assert isinstance(tensor, GroupedTensor)
    row = tensor.dequantize()[0].astype(np.float64)
    assert row[:2].tolist() == [0.5 * 2.0**-127, -6 * 2.0**-127]
    assert row[32:34].tolist() == [-(2.0**125), 6 * 2.0**125]


def test_damaged_stacks_are_refused(tmp_path: Path) -> None:
    path = make_quantized(tmp_path, num_hidden_layers=1)[0]
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    damaged = {
        "lacks the tensor": {n: t for n, t in stored.items() if n != f"{name}_scales"},
        "is expected": {**stored, f"{name}_scales": stored[f"{name}_scales"][:, :, :1].copy()},
        "supported are": {**stored, f"{name}_bias": stored[f"{name}_bias"].astype(ml_dtypes.float8_e4m3fn)},
    }
    for message, tensors in damaged.items():
        write_tensors(path / "model.safetensors", tensors)
        with pytest.raises(ModelError, match=message):
            load(path)
    write_tensors(path / "model.safetensors", {**stored, f"{name}_scales": np.full_like(stored[f"{name}_scales"], 255)})
    weights = load(path).weights
    with pytest.raises(ModelError, match="no number"):
        weights.read("layers.0.experts.0.down.weight")
