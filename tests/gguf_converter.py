"""GGUF files of the families with many experts, latent attention or a state, laid out as llama.cpp's converter does.

What it does to names, shapes and numbers is written down here once more, by the names of checkpoints.
`tests/gguf_families.py` has the plainer families.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import load_file

from tests.gguf_factory import finish, write_tokens
from tests.model_factory import make_model

Array = npt.NDArray[Any]
Config = Mapping[str, Any]

ARCHITECTURES = {
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2",
    "llama4_text": "llama4", "ministral3": "mistral3", "cohere2": "cohere2", "olmo3": "olmo2", "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2", "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h_moe", "mamba2": "mamba2",
    "gemma3n_text": "gemma3n", "lfm2_moe": "lfm2moe", "granitemoe": "granitemoe",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens": "token_embd", "backbone.embeddings": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "backbone.norm_f": "output_norm", "model.final_layernorm": "output_norm", "model.embedding_norm": "token_embd_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "model.altup_projections": "altup_proj",
    "model.altup_unembed_projections": "altup_unembd_proj",
}  # fmt: skip
_NAMES = {
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm", "norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "pre_ff_layernorm": "ffn_norm", "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "feed_forward.router": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp", "mixer.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{block}.experts.{stored}": f"ffn_{name}_exps"
        for block, stored, name in (
            *(("mlp", f"{name}_proj", name) for name in ("gate", "up", "down")),
            *(("mixer", f"{name}_proj", name) for name in ("up", "down")),
            *(
                (block, stored, name)
                for block in ("block_sparse_moe", "feed_forward")
                for stored, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
            ),
        )
    },
    **{
        f"{block}.{name}_proj": f"ffn_{name}_shexp"
        for block in ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert", "mixer.shared_experts")
        for name in ("gate", "up", "down")
    },
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    **{
        f"{block}.{stored}": name
        for block in ("mamba", "mixer")
        for stored, name in (
            ("in_proj", "ssm_in"), ("out_proj", "ssm_out"), ("conv1d", "ssm_conv1d"), ("norm", "ssm_norm"),
        )
    },
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
_OWN_NAMES: dict[str, dict[str, str]] = {
    **{
        family: {"post_attention_layernorm": "post_attention_norm"}
        for family in ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
    "olmo3": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "gemma3n_text": {
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm", "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm", "altup.prediction_coefs": "altup_predict_coef",
        "altup.correction_coefs": "altup_correct_coef", "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
}  # fmt: skip


def convert(
    directory: Path, family: str, kind: str = "F32", *, old: bool = False, mtp: bool = False,
    fused: bool = False, changed: Mapping[str, Any] | None = None, architecture: str = "",
    more: Mapping[str, Array] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """Writes a random checkpoint to `directory`, and the GGUF file of the same beside it, which it returns.

    Args:
        kind: of matrices whose rows are whole blocks of it; F32 for all others.
        old: as converters wrote the file before they cut latent attention's `kv_b` and Qwen3-Next's projections.
        mtp: with a layer that predicts further tokens.
        fused: gates and up-projections of experts are one tensor.
        changed: entries that say something else.
        architecture: what the file calls itself, where that is not what `ARCHITECTURES` has.
        more: further tensors of the file.
    """
    make_model(directory, family, **config)
    settings = json.loads((directory / "config.json").read_text())
    file = directory.parent / f"{directory.name}-{kind}.gguf"
    writer = GGUFWriter(file, architecture or ARCHITECTURES[family])
    entries = _list_entries(family, settings, old=old)
    num_layers = entries["block_count"]
    if mtp:
        entries |= {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    for name, value in {**entries, **(changed or {})}.items():
        _write_entry(writer, f"{writer.arch}.{name}", value)
    write_tokens(writer, directory)
    stacks: dict[str, list[Array]] = defaultdict(list)
    stored = load_file(directory / "model.safetensors")
    for name in sorted(
        stored, key=lambda name: [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
    ):
        for target, tensor in _translate(family, name, stored[name], settings, old=old):
            if ("_exps." in target or target.startswith("altup_")) and tensor.ndim == 2:
                stacks[target].append(tensor)
            else:
                _write_tensor(writer, target, tensor, kind)
    for target in [target for target in stacks if fused and "ffn_gate_exps" in target]:
        halves = zip(stacks.pop(target), stacks.pop(target.replace("gate", "up")), strict=True)
        stacks[target.replace("gate", "gate_up")] = [np.concatenate(pair) for pair in halves]
    for target, parts in stacks.items():
        _write_tensor(writer, target, np.stack(parts), kind)
    for target, tensor in (more or {}).items():
        _write_tensor(writer, target, tensor, kind)
    if mtp:
        _write_tensor(writer, f"blk.{num_layers}.nextn.eh_proj.weight", np.ones((64, 128), np.float32), kind)
    finish(writer)
    return file


def _write_entry(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    else:
        kinds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
        kinds[type(value)](name, value)  # type: ignore[operator]


def _write_tensor(writer: GGUFWriter, name: str, tensor: Array, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    small = (
        tensor.shape[-1] % quants.GGML_QUANT_SIZES[number][0]
        or tensor.ndim == 1
        or "ssm_conv1d" in name
        or "ffn_gate_inp" in name
    )
    if small:
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    else:
        writer.add_tensor(name, quants.quantize(np.ascontiguousarray(tensor), number), raw_dtype=number)


def _translate(family: str, name: str, tensor: Array, config: Config, *, old: bool) -> Iterator[tuple[str, Array]]:
    """Yields names and contents of what a tensor of a checkpoint is in a GGUF file."""
    if ".layers." not in name:
        module, _, last = name.rpartition(".")
        scale = _scale_of(family, name, config)
        yield f"{_OUTSIDE[module.rstrip('.0123456789')]}.{last}", _centre(family, name, tensor) * np.float32(scale)
        return
    number, rest = name.split(".layers.")[1].split(".", 1)
    module, _, last = rest.rpartition(".")
    module = ".".join(part for part in module.split(".") if not part.isdigit())
    for target, part in _translate_layer(family, module, last, tensor, config, old=old):
        yield f"blk.{number}.{target}", part


def _translate_layer(
    family: str, module: str, last: str, tensor: Array, config: Config, *, old: bool
) -> Iterator[tuple[str, Array]]:
    is_delta = module == "linear_attn" or module.startswith("linear_attn.")
    if family.startswith("qwen3_5") and is_delta:
        tensor = _tile_values(module, last, tensor, config)
    if last == "A_log":
        yield "ssm_a", -np.exp(tensor if is_delta else tensor[:, None])
    elif last == "D":
        yield "ssm_d", tensor[:, None]
    elif last == "dt_bias":
        yield "ssm_dt.bias", tensor
    elif last == "correct_output_scale":
        yield "altup_correct_scale.weight", tensor
    elif last in ("e_score_correction_bias", "expert_bias"):
        yield "exp_probs_b.bias", tensor
    elif module in ("mamba.norm", "mixer.norm"):
        yield "ssm_norm.weight", tensor.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    elif module == "linear_attn.in_proj_qkvz":
        yield from [("ssm_in.weight", tensor)] if old else _cut_qkvz(tensor, config)
    elif module == "self_attn.kv_b_proj" and not old:
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        yield "attn_k_b.weight", heads[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
        yield "attn_v_b.weight", heads[:, config["qk_nope_head_dim"] :]
    elif module.endswith("input_linear"):
        half, prefix = tensor.shape[-2] // 2, "exps" if "sparse" in module else "shexp"
        suffix = f"_{prefix}.weight" if config["num_local_experts"] else ".weight"
        yield f"ffn_gate{suffix}", tensor[..., :half, :]
        yield f"ffn_up{suffix}", tensor[..., half:, :]
    elif module.endswith("output_linear"):
        prefix = "_exps" if "sparse" in module else "_shexp" if config["num_local_experts"] else ""
        yield f"ffn_down{prefix}.weight", tensor
    elif last == "gate_up_proj":
        halves = np.split(tensor.swapaxes(1, 2), 2, axis=1)
        yield from zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), halves, strict=True)
    elif module == "feed_forward.experts":
        yield "ffn_down_exps.weight", tensor.swapaxes(1, 2)
    else:
        target = {**_NAMES, **_OWN_NAMES.get(family, {})}[module]
        if family in ("granitemoe", "granitemoehybrid", "ministral3") and target in ("attn_q", "attn_k"):
            tensor = _pair(tensor, config["num_attention_heads" if target == "attn_q" else "num_key_value_heads"])
        tensor = tensor.squeeze(1) if tensor.ndim == 3 and tensor.shape[1] == 1 else tensor
        tensor = _centre(family, f"{module}.{last}", tensor) * np.float32(_scale_of(family, module, config))
        if family == "falcon_h1" and target == "ssm_in":
            tensor = tensor * _scales_of_sections(config)
        suffix = "" if family == "falcon_h1" and target == "ffn_norm" else f".{last}"
        yield f"{target}{suffix}", tensor


def _centre(family: str, name: str, tensor: Array) -> Array:
    centred = family.startswith(("qwen3_next", "qwen3_5")) and name.endswith("norm.weight") and "linear_attn" not in name
    return tensor + np.float32(1) if centred else tensor


def _pair(rows: Array, num_heads: int) -> Array:
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _cut_qkvz(tensor: Array, config: Config) -> Iterator[tuple[str, Array]]:
    """Turns by key head become all of q, of k, of v and of z."""
    heads = tensor.reshape(config["linear_num_key_heads"], -1, tensor.shape[1])
    key, values = config["linear_key_head_dim"], (heads.shape[1] - 2 * config["linear_key_head_dim"]) // 2
    q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in np.split(heads, [key, 2 * key, 2 * key + values], axis=1))
    yield "attn_qkv.weight", np.concatenate([q, k, v])
    yield "attn_gate.weight", z


def _tile_values(module: str, last: str, tensor: Array, config: Config) -> Array:
    """Puts the first value head of each key head before the second of each."""
    num_keys, key = config["linear_num_key_heads"], config["linear_num_key_heads"] * config["linear_key_head_dim"]

    def tile(rows: Array, size: int) -> Array:
        return rows.reshape(num_keys, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    size = config["linear_value_head_dim"]
    if module.endswith(("in_proj_qkv", "conv1d")):
        return np.concatenate([tensor[: 2 * key], tile(tensor[2 * key :], size)])
    if module.endswith("in_proj_z"):
        return tile(tensor, size)
    if module.endswith(("in_proj_a", "in_proj_b")) or last in ("A_log", "dt_bias"):
        return tile(tensor, 1)
    return tile(tensor.T, size).T if module.endswith("out_proj") else tensor


def _scale_of(family: str, module: str, config: Config) -> float:
    """Falcon-H1's multipliers."""
    if family != "falcon_h1":
        return 1.0
    into = config["attention_in_multiplier"]
    scales = {
        "feed_forward.down_proj": config["mlp_multipliers"][1], "feed_forward.gate_proj": config["mlp_multipliers"][0],
        "self_attn.q_proj": into, "self_attn.k_proj": into * config["key_multiplier"], "self_attn.v_proj": into,
        "self_attn.o_proj": config["attention_out_multiplier"], "mamba.out_proj": config["ssm_out_multiplier"],
        "mamba.in_proj": config["ssm_in_multiplier"], "lm_head.weight": config["lm_head_multiplier"],
        "model.embed_tokens.weight": config["embedding_multiplier"],
    }  # fmt: skip
    return float(scales.get(module, 1.0))


def _scales_of_sections(config: Config) -> Array:
    inner, states, heads = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"], config["mamba_n_heads"]
    return np.repeat(np.array(config["ssm_multipliers"], np.float32), [inner, inner, states, states, heads])[:, None]


# What the entries of a file say.


def _list_entries(family: str, config: Config, *, old: bool) -> dict[str, Any]:
    said: dict[str, Any] = {
        "block_count": config.get("num_hidden_layers") or len(config["layers_block_type"]),
        "context_length": config.get("max_position_embeddings", 1 << 20),
        "embedding_length": config["hidden_size"],
        "attention.head_count": config.get("num_attention_heads", 0),
        "vocab_size": 320,
    }
    if "intermediate_size" in config:
        said["feed_forward_length"] = config["intermediate_size"]
    if "num_key_value_heads" in config:
        said["attention.head_count_kv"] = config["num_key_value_heads"]
    if config.get("head_dim") and family != "mamba2":
        said |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    eps = "attention.layer_norm_epsilon" if family in ("cohere2", "nemotron_h") else "attention.layer_norm_rms_epsilon"
    names = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    said[eps] = next(config[name] for name in names if config.get(name) is not None)
    said |= _list_routing(config) | _list_rope(family, config)
    own = _ENTRIES.get(family)
    return {
        **said,
        **(own(config, said) if own else {}),
        **(_describe_heads(config) if old and "kv_lora_rank" in config else {}),
    }


def _list_routing(config: Config) -> dict[str, Any]:
    count = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if count is None:
        return {}
    said: dict[str, Any] = {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    keys = {
        "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count", "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
    }  # fmt: skip
    said |= {key: config[name] for name, key in keys.items() if config.get(name) is not None}
    if config.get("n_routed_experts") and config.get("norm_topk_prob"):
        said["expert_weights_norm"] = True
    if config["model_type"] in ("deepseek_v3", "glm4_moe", "minimax_m2"):
        said["expert_gating_func"] = 2
    return said


def _list_rope(family: str, config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if not rope:
        return {}
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    said = {"rope.freq_base": float(rope["rope_theta"])}
    if local:
        said["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope["rope_type"] == "yarn":
        said |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
        said |= {f"rope.scaling.yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
        said |= {"rope.scaling.yarn_attn_factor": rope["attention_factor"]} if "attention_factor" in rope else {}
    if "mscale_all_dim" in rope:
        said["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"] * (1.0 if family == "ministral3" else 0.1)
    if family in ("cohere2", "olmo3", "falcon_h1", "lfm2", "lfm2_moe"):
        return said
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return {**said, "rope.dimension_count": config.get("qk_rope_head_dim") or int(head_dim * part)}


def _describe_latent(config: Config, _said: Config) -> dict[str, Any]:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    said = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": rank, "attention.key_length": rank + turned,
        "attention.value_length": rank, "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
    }  # fmt: skip
    return said | ({"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {})


def _describe_heads(config: Config) -> dict[str, Any]:
    return {
        "attention.head_count_kv": config["num_attention_heads"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"],
    }


def _describe_delta_net(config: Config, said: Config) -> dict[str, Any]:
    sections = {"rope.dimension_sections": [11, 11, 10, 0]} if config["model_type"].startswith("qwen3_5") else {}
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": 4, **sections,
    }  # fmt: skip


def _describe_mamba(config: Config, inner: int) -> dict[str, Any]:
    def get(*names: str) -> Any:
        return next(config[name] for name in names if name in config)

    return {
        "ssm.conv_kernel": get("mamba_d_conv", "conv_kernel"), "ssm.inner_size": inner,
        "ssm.state_size": get("mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.time_step_rank": get("mamba_n_heads", "mamba_num_heads", "num_heads"),
        "ssm.group_count": get("mamba_n_groups", "n_groups"),
    }  # fmt: skip


def _list_multipliers(config: Config) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"], "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"], "logit_scale": config["logits_scaling"],
    }  # fmt: skip


def _describe_granite(config: Config, said: Config) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    counts = [config["num_key_value_heads"] * attending for attending in attends]
    return {
        **_describe_mamba(config, config["mamba_expand"] * config["hidden_size"]),
        **_list_multipliers(config), "attention.head_count_kv": counts,
        "expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
    }  # fmt: skip


def _describe_falcon(config: Config, said: Config) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return {**_describe_mamba(config, config["mamba_d_ssm"]), **sizes}


def _describe_nemotron(config: Config, said: Config) -> dict[str, Any]:
    kinds, sizes = config["layers_block_type"], {"moe": config["moe_intermediate_size"], "mlp": config["intermediate_size"]}
    return {
        **_describe_mamba(config, config["mamba_num_heads"] * config["mamba_head_dim"]),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [sizes.get(kind, 0) for kind in kinds],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"], "expert_shared_count": 1,
        "rope.dimension_count": 16, "rope.scaling.finetuned": False,
    }  # fmt: skip


def _list_convolutions(config: Config) -> dict[str, Any]:
    counts = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
    return {"attention.head_count_kv": counts, "shortconv.l_cache": config["conv_L_cache"]}


def _describe_lfm2(config: Config, said: Config) -> dict[str, Any]:
    size, multiple = 2 * config.get("block_ff_dim", config["intermediate_size"]) // 3, config["block_multiple_of"]
    return {**_list_convolutions(config), "feed_forward_length": -(-size // multiple) * multiple}


def _describe_windows(config: Config, said: Config) -> dict[str, Any]:
    if config["model_type"] == "cohere2":
        scale = {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
        return {"attention.sliding_window": config["sliding_window"], **scale}
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}


def _describe_streams(config: Config, said: Config) -> dict[str, Any]:
    parts, deviations = config["activation_sparsity_pattern"], NormalDist().inv_cdf
    return {
        **_describe_windows(config, said),
        "final_logit_softcapping": config["final_logit_softcapping"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "activation_sparsity_scale": [deviations(part) if part else -math.inf for part in parts],
    }


_ENTRIES: dict[str, Any] = {
    "gemma3n_text": _describe_streams,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _describe_latent),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _describe_delta_net),
    "minimax_m2": lambda config, said: {"expert_feed_forward_length": config["intermediate_size"]},
    "llama4_text": lambda config, said: {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    },
    "ministral3": lambda config, said: {"attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"]},
    "cohere2": _describe_windows,
    "olmo3": _describe_windows,
    "lfm2": _describe_lfm2,
    "lfm2_moe": lambda config, said: {
        **_list_convolutions(config),
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
    },
    "granitemoe": lambda config, said: _list_multipliers(config),
    "granitemoehybrid": _describe_granite,
    "falcon_h1": _describe_falcon,
    "nemotron_h": _describe_nemotron,
    "mamba2": lambda config, said: {
        **_describe_mamba(config, config["expand"] * config["hidden_size"]),
        "feed_forward_length": 0,
    },
}
