"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel blocks, and a quarter of each head turned."""

import re

from cloister.models.family import Bias, Family
from cloister.models.sources import Source

_QKV = Source("gpt_neox.layers.{}.attention.query_key_value", ("q", "k", "v"), by_head=True)

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
        "q": _QKV,
        "k": _QKV,
        "v": _QKV,
        "o": Source("gpt_neox.layers.{}.attention.dense"),
        "mlp_norm": Source("gpt_neox.layers.{}.post_attention_layernorm"),
        "up": Source("gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        "down": Source("gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    },
    prefix="gpt_neox.",
    buffers=re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)  # fmt: skip
