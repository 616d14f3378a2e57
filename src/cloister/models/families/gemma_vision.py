"""Gemma 3 with images (Gemma Team 2025, arXiv:2503.19786): a SigLIP tower, whose patches are averaged to few tokens that see
each other in the decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloister.models.config import ConfigFields
from cloister.models.families.gemma import GEMMA3
from cloister.models.families.smolvlm import read_siglip, siglip_tensors
from cloister.models.family import VisionConfig
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_OUTER = ("boi_token_index", "eoi_token_index", "image_token_index", "tie_word_embeddings")


def read_gemma_vision(config: Mapping[str, Any]) -> VisionConfig:
    """Returns the decoder's config and the tower of a config.json with `text_config` and `vision_config`.

    Raises:
        ModelError: a part is missing, or of a shape that nothing here computes.
    """
    outer = ConfigFields(config)
    text, vision = outer.take_any("text_config"), outer.take_any("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise ModelError("config.json must have the objects text_config and vision_config", param="vision_config")
    num_tokens = outer.take_size("mm_tokens_per_image", 256)
    outer.drop(_OUTER)
    spec, unknown = read_siglip(vision, {"image_size": 224, "patch_size": 16, "hidden_size": 768, "num_attention_heads": 12})
    side, per_side = math.isqrt(num_tokens), spec.patches_per_side
    if side**2 != num_tokens or per_side % side:
        raise ModelError(
            "mm_tokens_per_image must be a square whose side divides the patches along a side of an image",
            param="mm_tokens_per_image",
        )
    spec = replace(spec, merge=per_side // side, projection="mean", bidirectional=True)
    tied = {name: config[name] for name in ("tie_word_embeddings",) if config.get(name) is not None}
    return VisionConfig({**text, **tied}, spec, (*outer.find_unknown(), *unknown))


GEMMA3_VISION = replace(
    GEMMA3,
    name="gemma3_vision",
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    other_model_types=("gemma3_text",),
    # what the published configs leave out
    defaults={**GEMMA3.defaults, "vocab_size": 262208, "num_attention_heads": 8},
    only={**GEMMA3.only, "final_logit_softcapping": None},  # transformers ignores it here
    tensors={
        **GEMMA3.tensors,
        **siglip_tensors("vision_tower"),
        "vision.pool_norm": Source("multi_modal_projector.mm_soft_emb_norm", added=1.0),
        "vision.projector": Source("multi_modal_projector.mm_input_projection_weight", is_tensor=True, transposed=True),
    },
    vision=read_gemma_vision,
)
