"""GPT-2 (Radford et al. 2019), OPT (Zhang et al. 2022), GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family
from cloister.models.sources import Source
from cloister.types.errors import ModelError

# GPT-2 (Radford et al. 2019): layer norms, learned positions, and transposed matrices.


_GPT2_QKV = Source("transformer.h.{}.attn.c_attn", ("q", "k", "v"), transposed=True)


def _scale(fields: ConfigFields, head_dim: int, num_layers: int) -> Sequence[float]:
    scale = head_dim**-0.5 if fields.take("scale_attn_weights", bool, True) else 1.0
    by_layer = fields.take("scale_attn_by_inverse_layer_idx", bool, False)
    return [scale / (number + 1) if by_layer else scale for number in range(num_layers)]


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    max_positions=1024,
    names={
        "hidden_size": ("n_embd",), "max_position_embeddings": ("n_positions",), "num_attention_heads": ("n_head",),
        "num_hidden_layers": ("n_layer",), "intermediate_size": ("n_inner",), "hidden_act": ("activation_function",),
        "rms_norm_eps": ("layer_norm_epsilon",),
    },
    defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    harmless=frozenset((
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "summary_first_dropout", "reorder_and_upcast_attn", "n_ctx",
    )),
    qkv_bias=Bias.ALWAYS,
    output_bias=Bias.ALWAYS,
    mlp_bias=Bias.ALWAYS,
    norm="layer",
    norm_bias=True,
    gated=False,
    grouped=False,
    widening=4,
    learned_positions=True,
    scales=_scale,
    tensors={
        "embed": Source("transformer.wte"),
        "positions": Source("transformer.wpe"),
        "norm": Source("transformer.ln_f"),
        "head": Source("lm_head"),
        "attention_norm": Source("transformer.h.{}.ln_1"),
        "q": _GPT2_QKV,
        "k": _GPT2_QKV,
        "v": _GPT2_QKV,
        "o": Source("transformer.h.{}.attn.c_proj", transposed=True),
        "mlp_norm": Source("transformer.h.{}.ln_2"),
        "up": Source("transformer.h.{}.mlp.c_fc", transposed=True),
        "down": Source("transformer.h.{}.mlp.c_proj", transposed=True),
    },
    prefix="transformer.",
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
)  # fmt: skip


# OPT (Zhang et al. 2022): GPT-3's shape with ReLU; learned positions, stored with an offset of two unused rows.


def _read_opt_ends(fields: ConfigFields, hidden: int) -> Ends:
    if fields.take("word_embed_proj_dim", int, hidden) != hidden:
        raise ModelError(
            "word_embed_proj_dim in config.json must be hidden_size: the one OPT that projects its embeddings (350m) is not "
            "supported; take another size",
            param="word_embed_proj_dim",
        )
    return Ends()


OPT = Family(
    name="opt",
    architecture="OPTForCausalLM",
    model_type="opt",
    max_positions=2048,
    names={"intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",)},
    defaults={"hidden_act": "relu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    only={
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    harmless=frozenset(("dropout", "layerdrop", "init_std", "activation_dropout")),
    qkv_bias=Bias.ALWAYS,
    output_bias=Bias.ALWAYS,
    mlp_bias=Bias.ALWAYS,
    norm="layer",
    norm_bias=True,
    gated=False,
    grouped=False,
    learned_positions=True,
    ends=_read_opt_ends,
    tensors={
        **{module: Source(source.name.replace("model.", "model.decoder.")) for module, source in PLAIN_TENSORS.items()},
        "positions": Source("model.decoder.embed_positions", skip=2),
        "norm": Source("model.decoder.final_layer_norm"),
        "attention_norm": Source("model.decoder.layers.{}.self_attn_layer_norm"),
        "o": Source("model.decoder.layers.{}.self_attn.out_proj"),
        "mlp_norm": Source("model.decoder.layers.{}.final_layer_norm"),
        "up": Source("model.decoder.layers.{}.fc1"),
        "down": Source("model.decoder.layers.{}.fc2"),
    },
    buffers=re.compile(r"(?!)"),
)  # fmt: skip


# GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel blocks, rotary embeddings on a quarter of each head.


_NEOX_QKV = Source("gpt_neox.layers.{}.attention.query_key_value", ("q", "k", "v"), by_head=True)

GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    max_positions=2048,
    names={
        "rms_norm_eps": ("layer_norm_eps",), "rope_theta": ("rotary_emb_base", "rope_theta"),
        "partial_rotary_factor": ("rotary_pct", "partial_rotary_factor"),
    },
    defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": True},
    harmless=frozenset(("hidden_dropout", "classifier_dropout")),
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.ALWAYS,
    norm="layer",
    norm_bias=True,
    gated=False,
    grouped=False,
    parallel="use_parallel_residual",
    partial_rotary=0.25,
    tensors={
        "embed": Source("gpt_neox.embed_in"),
        "norm": Source("gpt_neox.final_layer_norm"),
        "head": Source("embed_out"),
        "attention_norm": Source("gpt_neox.layers.{}.input_layernorm"),
        "q": _NEOX_QKV,
        "k": _NEOX_QKV,
        "v": _NEOX_QKV,
        "o": Source("gpt_neox.layers.{}.attention.dense"),
        "mlp_norm": Source("gpt_neox.layers.{}.post_attention_layernorm"),
        "up": Source("gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        "down": Source("gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    },
    prefix="gpt_neox.",
    buffers=re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)  # fmt: skip
