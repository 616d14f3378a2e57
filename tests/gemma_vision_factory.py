"""A small random Gemma 3 with a vision tower, as transformers writes it, with the processor's config and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.model_factory import OWN, SMALL, randomise, write_tokenizer
from tests.vision_factory import VOCAB

UNTYPED: Any = AutoModelForImageTextToText  # its constructors carry no types
SIDE = 24
NUM_TOKENS = 9
"""Positions of an image."""
IMAGE_TOKEN = VOCAB - 1
TEXT: dict[str, Any] = {
    **SMALL, **OWN["gemma3_text"], "num_hidden_layers": 3, "vocab_size": VOCAB, "pad_token_id": None, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4], "image_seq_length": NUM_TOKENS, "resample": 2,
    "rescale_factor": 1 / 255, "size": {"height": SIDE, "width": SIDE},
}  # fmt: skip
MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
TEMPLATE = (
    "<|endoftext|>{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Gemma's, with the control tokens of the small tokenizer."""


def make_gemma_vision(
    directory: Path,
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
    fields: dict[str, Any] = {"tie_word_embeddings": False, "eos_token_id": 1, "mm_tokens_per_image": NUM_TOKENS, **config}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = UNTYPED.from_config(
            AutoConfig.for_model(
                "gemma3",
                architectures=["Gemma3ForConditionalGeneration"],
                text_config={**TEXT, "tie_word_embeddings": fields["tie_word_embeddings"], **(text or {})},
                vision_config={**VISION, **(vision or {})},
                image_token_index=IMAGE_TOKEN,
                boi_token_index=VOCAB - 3,
                eoi_token_index=VOCAB - 2,
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
    assert tokenizer.token_to_id("<image_soft_token>") == IMAGE_TOKEN
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
