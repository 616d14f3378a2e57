"""OPT (Zhang et al. 2022): GPT-3's shape with ReLU; learned positions, stored with an offset of two unused rows."""

import re

from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family
from cloister.models.sources import Source
from cloister.types.errors import ModelError


def _read_ends(fields: ConfigFields, hidden: int) -> Ends:
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
    ends=_read_ends,
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
