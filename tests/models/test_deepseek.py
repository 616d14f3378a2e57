"""DeepSeek V2 and V3, R1 and Kimi K2 against transformers, and what their checkpoints on the hub have beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cloister import LLM, SamplingParams
from cloister.backends.spec import LatentAttentionSpec, MoeSpec, kv_size
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
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 1.3,
}  # fmt: skip
ONE_GROUP = {"n_group": 1, "topk_group": 1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2, groups, beyond the original context": ("deepseek_v2", {"rope_parameters": YARN}),
    "V2-Lite: one projection of queries, no groups": (
        "deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", **ONE_GROUP, "rope_parameters": YARN},
    ),
    "V2, dense layers only, biases": ("deepseek_v2", {"first_k_dense_replace": 3, "attention_bias": True}),
    "V2, experts in every layer, tied": ("deepseek_v2", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "V3, beyond the original context": ("deepseek_v3", {"rope_parameters": YARN}),
    "V3, YaRN with one mscale": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "V3, half-split rotation, biases, not renormalised": (
        "deepseek_v3", {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "Kimi K2: one group": ("deepseek_v3", {**ONE_GROUP, "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0}}),
    "Moonlight: one projection of queries, one group": ("deepseek_v3", {"q_lora_rank": None, **ONE_GROUP}),
    "V3.2, beyond the original context": ("deepseek_v32", {"rope_parameters": YARN}),
    "V3.2, biases, few positions, an index turned whole, other layers dense": (
        "deepseek_v32",
        {"attention_bias": True, "index_topk": 7, "index_head_dim": 8, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "V3.2, more positions than there are": ("deepseek_v32", {"index_topk": 400}),
}  # fmt: skip


@pytest.mark.parametrize("name", thin(VARIANTS, every_second(VARIANTS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    path = make_model(tmp_path, family, **config)
    agreement = compare(path)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


def test_a_list_of_dense_layers_counts_before_their_number(tmp_path: Path) -> None:
    path = make_model(tmp_path, "deepseek_v32", mlp_layer_types=["dense", "sparse", "dense"])
    for number in (1, 2):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "first_k_dense_replace": number}))
        assert [isinstance(layer.mlp, MoeSpec) for layer in load(path).spec.layers] == [False, True, False]


_OF_ALL: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512,
    "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "max_position_embeddings": 163840,
}  # fmt: skip
_STRETCHED = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
_V3 = {
    **_OF_ALL, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "rope_scaling": {**_STRETCHED, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "V3 and R1": _V3,
    "V3.2": {
        **_V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 2048,
    },
    "Kimi K2": {
        **_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "max_position_embeddings": 131072,
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840,
        "rope_scaling": {**_V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    },
    "V2-Lite": {
        **_OF_ALL, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "rope_scaling": _STRETCHED,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mscale", "num_dense"),
    [("V3 and R1", 1.368888, 3), ("V3.2", 1.368888, 3), ("Kimi K2", 1.346574, 1), ("V2-Lite", 1.260804, 1)],
)
def test_a_config_of_the_hub_is_read_whole(name: str, mscale: float, num_dense: int) -> None:
    unknown: list[str] = []
    config = HUB[name]
    spec = read_spec(find_family(config), config, None, unknown.extend)
    assert unknown == []
    assert spec.max_positions == config["max_position_embeddings"]
    assert [isinstance(layer.mlp, MoeSpec) for layer in spec.layers].index(True) == num_dense
    attention = spec.layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    index = attention.index
    assert (index is None) == (name != "V3.2")
    assert index is None or (index.num_heads, index.head_dim, index.num_chosen) == (64, 128, 2048)
    assert kv_size(attention) == 576 + (128 if index else 0)  # in place of 2 * 128 heads * 128 and more
    assert attention.scale == pytest.approx(192**-0.5 * mscale**2, rel=1e-5)
    assert attention.rope is not None
    assert attention.rope.attention_scale == 1.0


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def add_tensors(path: Path, *names: str) -> None:
    stored = load_file(path / "model.safetensors")
    save_file({**stored, **{name: np.ones((4, 4), np.float32) for name in names}}, path / "model.safetensors")


def test_kimi_k2_is_the_same_decoder_under_a_model_type_of_its_own(tmp_path: Path) -> None:
    path = make_model(tmp_path, "deepseek_v3")
    before = load(path).spec
    edit(path, model_type="kimi_k2")
    assert load(path).spec == before
    edit(path, model_type="kimi_k3")
    with pytest.raises(ModelError, match="model_type"):
        load(path)


def test_queries_have_a_latent_unless_the_config_says_null(tmp_path: Path) -> None:
    path = make_model(tmp_path, "deepseek_v3", q_lora_rank=None)
    assert load(path).spec.layers[0].attention.q_lora_rank is None  # type: ignore[union-attr]
    edit(path, q_lora_rank=24)
    with pytest.raises(ModelError, match="q_a_proj"):
        load(path)


def test_layers_that_predict_further_tokens_are_left_out_and_no_others(tmp_path: Path) -> None:
    path = make_model(tmp_path, "deepseek_v3")
    before = build_from(path).run("a", TOKENS)
    add_tensors(path, "model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight", "model.layers.3.mlp.gate.weight")
    assert build_from(path).run("a", TOKENS).tobytes() == before.tobytes()
    add_tensors(path, "model.layers.4.mlp.gate.weight")
    with pytest.raises(ModelError, match=r"layers\.4\.mlp\.gate"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "n_group"),  # groups of one expert, whose two best scores are no sum
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1}, "topk_group"),  # two experts to choose three from
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"kv_lora_rank": 10**6}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 7, "head_dim": 7, "qk_head_dim": 19}, "head_dim"),
    ],
    ids=str,
)
def test_sizes_that_do_not_go_together_are_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, "deepseek_v3")
    edit(path, **changes)
    with pytest.raises(ModelError) as error:
        load(path)
    assert error.value.param == field


def test_a_checkpoint_in_blocks_of_fp8_computes_what_its_numbers_say(tmp_path: Path) -> None:
    path = make_model(tmp_path / "fp8", "deepseek_v3")
    block, stored, plain = 16, {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if tensor.ndim == 2 and "layers" in name and not name.endswith("mlp.gate.weight"):
            scales = np.random.default_rng(3).uniform(0.5, 2.0, [-(-size // block) for size in tensor.shape]).astype(np.float32)
            spread = scales.repeat(block, 0).repeat(block, 1)[: len(tensor), : tensor.shape[1]]
            stored[name] = (tensor / spread).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            plain[name] = (stored[name].astype(np.float32) * spread).astype(ml_dtypes.bfloat16).astype(np.float32)
    save_file(plain, path / "model.safetensors")
    expected = build_from(path).run("a", TOKENS)
    write_tensors(path / "model.safetensors", stored)
    edit(path, quantization_config={
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [block, block],
    })  # fmt: skip
    assert build_from(path).run("a", TOKENS).tobytes() == expected.tobytes()


def test_quant_alone_serves_it_on_the_torch_back_end(tmp_path: Path) -> None:
    path = make_model(tmp_path, "deepseek_v3")
    settings: dict[str, Any] = {"backend": "torch", "weights_cache": "", "max_model_len": 64}
    answers = []
    for quant in ({}, {"quant": "int8"}, {"quant": "int8", "kv_dtype": "float32"}):
        with LLM(str(path), **settings, **quant) as llm:
            params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
            logprobs = llm.generate([TOKENS[:20]], params)[0].outputs[0].logprobs
            answers.append([entry.logprob for entry in logprobs or ()])
    assert answers[1] == answers[2] != answers[0]
