"""GPT-2 (Radford et al. 2019): layer norms, learned positions, and matrices stored the other way round."""

import re
from collections.abc import Sequence

from cloister.models.config import ConfigFields
from cloister.models.family import Bias, Family
from cloister.models.sources import Source

_QKV = Source("transformer.h.{}.attn.c_attn", ("q", "k", "v"), transposed=True)


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
        "q": _QKV,
        "k": _QKV,
        "v": _QKV,
        "o": Source("transformer.h.{}.attn.c_proj", transposed=True),
        "mlp_norm": Source("transformer.h.{}.ln_2"),
        "up": Source("transformer.h.{}.mlp.c_fc", transposed=True),
        "down": Source("transformer.h.{}.mlp.c_proj", transposed=True),
    },
    prefix="transformer.",
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
)  # fmt: skip
