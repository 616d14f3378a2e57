"""Small random models of Qwen with a vision tower, as transformers writes them, with the processor's config and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.model_factory import EXPERTS, SMALL, randomise, write_tokenizer
from tests.vision_factory import VOCAB

UNTYPED: Any = AutoModelForImageTextToText  # its constructors carry no types
ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
IMAGE_TOKEN = VOCAB - 1
PATCH = 6
TOKEN = 2 * PATCH
"""Side of a token in pixels."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_VISION: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "depth": 3, "patch_size": PATCH}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": 64, "embed_dim": 32, "num_heads": 4, "depth": 3, "patch_size": PATCH, "mlp_ratio": 3},
    "qwen2_5_vl": {
        **_VISION, "intermediate_size": 44, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 2 * TOKEN,
    },
    "qwen3_vl": {
        **_VISION, "intermediate_size": 44, "out_hidden_size": 64, "num_position_embeddings": 25, "depth": 4,
        "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": _ROPE},
    "qwen2_5_vl": {"rope_parameters": _ROPE},
    "qwen3_vl": {
        "head_dim": 24, "num_hidden_layers": 3,
        "rope_parameters": {**_ROPE, "mrope_section": [5, 4, 3], "mrope_interleaved": True},
    },
}  # fmt: skip
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
TEXT["qwen3_vl_moe"] = {**TEXT["qwen3_vl"], **EXPERTS}
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.4], "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "resample": 3,
    "min_pixels": 4 * TOKEN**2, "max_pixels": 20 * TOKEN**2, "rescale_factor": 1 / 255,
}  # fmt: skip
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "<|endoftext|>{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Qwen's, with the control tokens of the small tokenizer."""


def make_qwen_vl(
    directory: Path,
    family: str,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes a model whose every tensor is random, and returns its directory.

    Args:
        text, vision, processor: fields of the parts that differ from the small ones.
        config: fields of config.json outside of them.
    """
    fields: dict[str, Any] = {"tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0, **config}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = UNTYPED.from_config(
            AutoConfig.for_model(
                family,
                architectures=[ARCHITECTURES[family]],
                text_config={**SMALL, "vocab_size": VOCAB, "pad_token_id": None, **TEXT[family], **(text or {})},
                vision_config={**VISION[family], **(vision or {})},
                image_token_id=IMAGE_TOKEN,
                video_token_id=VOCAB - 5,
                vision_start_token_id=VOCAB - 3,
                vision_end_token_id=VOCAB - 2,
                **fields,
            )
        )
        randomise(made, fields["tie_word_embeddings"])
    made.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **(processor or {})}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "do_sample": False}))
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    filler = [f"<|filler_{i}|>" for i in range(VOCAB - tokenizer.get_vocab_size() - len(MARKS))]
    tokenizer.add_special_tokens([*filler, *MARKS])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE_TOKEN
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
