"""SmolVLM (Marafioti et al. 2025) and Idefics3 (Laurençon et al. 2024): a SigLIP tower before Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloister.backends.vision import VisionSpec
from cloister.models.config import ConfigFields
from cloister.models.families.llama import LLAMA
from cloister.models.family import PLAIN_TENSORS, VisionConfig
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_MOST_LAYERS = 10000
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "relu": "relu"}
_IGNORED = (
    "_pad_token_id", "vocab_size", "max_image_size", "size", "use_base_siglip", "vision_use_head", "tie_word_embeddings",
    "num_channels",
)  # fmt: skip


def siglip_tensors(prefix: str) -> dict[str, Source]:
    """Returns where a checkpoint has the tensors of a SigLIP tower, whose names begin with `prefix`."""
    layer = f"{prefix}.encoder.layers.{{}}"
    return {
        "vision.patch": Source(f"{prefix}.embeddings.patch_embedding"),
        "vision.positions": Source(f"{prefix}.embeddings.position_embedding"),
        "vision.attention_norm": Source(f"{layer}.layer_norm1"),
        "vision.mlp_norm": Source(f"{layer}.layer_norm2"),
        "vision.q": Source(f"{layer}.self_attn.q_proj"),
        "vision.k": Source(f"{layer}.self_attn.k_proj"),
        "vision.v": Source(f"{layer}.self_attn.v_proj"),
        "vision.o": Source(f"{layer}.self_attn.out_proj"),
        "vision.up": Source(f"{layer}.mlp.fc1"),
        "vision.down": Source(f"{layer}.mlp.fc2"),
        "vision.norm": Source(f"{prefix}.post_layernorm"),
    }


def read_siglip(vision: Mapping[str, Any], defaults: Mapping[str, object]) -> tuple[VisionSpec, tuple[str, ...]]:
    """Returns the tower of a `vision_config`, with patches that become a token each, and fields of which nothing is known.

    Raises:
        ModelError: it is of a shape that nothing here computes.
    """
    fields = ConfigFields(vision, "vision_config of config.json", defaults=defaults)
    fields.require("num_channels", 3)
    activation = fields.take("hidden_act", str, "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {activation!r} of vision_config is not supported", param="vision_config")
    spec = VisionSpec(
        image_size=fields.take_size("image_size", 224),
        patch_size=fields.take_size("patch_size", 32),
        hidden_size=fields.take_size("hidden_size", 1152),
        intermediate_size=fields.take_size("intermediate_size", 3072),
        num_layers=fields.take_size("num_hidden_layers", 12),
        num_heads=fields.take_size("num_attention_heads", 16),
        merge=1,
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        norm_eps=fields.take("layer_norm_eps", float, 1e-6),
    )
    fields.drop(_IGNORED)
    if spec.hidden_size % spec.num_heads or spec.num_layers > _MOST_LAYERS or not spec.num_tokens:
        raise ModelError("the heads, layers or patches of vision_config do not fit together", param="vision_config")
    return spec, tuple(f"vision_config.{name}" for name in fields.find_unknown())


def read_vision(config: Mapping[str, Any]) -> VisionConfig:
    """Returns the decoder's config and the tower of a config.json with `text_config` and `vision_config`.

    Raises:
        ModelError: a part is missing, or of a shape that nothing here computes.
    """
    outer = ConfigFields(config)
    text, vision = outer.take_any("text_config"), outer.take_any("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise ModelError("config.json must have the objects text_config and vision_config", param="vision_config")
    outer.drop(("image_token_id", *_IGNORED))
    merge = outer.take_size("scale_factor", 2)
    tied = config.get("tie_word_embeddings") or False  # of the whole model, whatever the decoder's part says
    spec, unknown = read_siglip(vision, {})
    if spec.patches_per_side % merge:
        raise ModelError("scale_factor must divide the patches along a side of an image", param="scale_factor")
    return VisionConfig({**text, "tie_word_embeddings": tied}, replace(spec, merge=merge), (*outer.find_unknown(), *unknown))


SMOLVLM = replace(
    LLAMA,
    name="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    model_type="smolvlm",
    # of the resampler that other models of this code have
    harmless=frozenset((
        "perceiver_config", "qk_layer_norms", "qk_layer_norms_perceiver", "use_resampler", "pixel_shuffle_factor",
        "_flash_attn_2_enabled", "neftune_noise_alpha",
    )),
    tensors={
        **{name: Source(source.name.replace("model.", "model.text_model.", 1)) for name, source in PLAIN_TENSORS.items()},
        **siglip_tensors("model.vision_model"),
        "vision.projector": Source("model.connector.modality_projection.proj"),
    },
    vision=read_vision,
)  # fmt: skip

IDEFICS3 = replace(SMOLVLM, name="idefics3", architecture="Idefics3ForConditionalGeneration", model_type="idefics3")
