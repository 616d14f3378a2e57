"""A small random SmolVLM, as transformers writes it, with the processor's config, tokenizer and template; and pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.model_factory import SMALL, randomise, write_tokenizer

UNTYPED: Any = AutoModelForImageTextToText  # its constructors carry no types
ARCHITECTURES = {"smolvlm": "SmolVLMForConditionalGeneration", "idefics3": "Idefics3ForConditionalGeneration"}
TILE = 24
"""Side of a tile in pixels."""
NUM_TOKENS = 4
"""Positions of a tile."""
VISION = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": TILE,
    "patch_size": 6,
}  # fmt: skip
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4], "max_image_size": {"longest_edge": TILE},
    "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": 2 * TILE},
}  # fmt: skip
MARKS = ("<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)), "<image>")
VOCAB = 330
TEMPLATE = (
    "<|endoftext|>{% for message in messages %}<|{{ message['role'] }}|>{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""SmolVLM's, with the control tokens of the small tokenizer."""


def make_vision_model(
    directory: Path,
    family: str = "smolvlm",
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
    text_config = {"model_type": "llama", **SMALL, "vocab_size": VOCAB, "pad_token_id": None, **(text or {})}
    fields: dict[str, Any] = {"scale_factor": 2, "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0, **config}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = UNTYPED.from_config(
            AutoConfig.for_model(
                family,
                architectures=[ARCHITECTURES[family]],
                text_config=text_config,
                vision_config={**VISION, **(vision or {})},
                image_token_id=VOCAB - 1,
                **fields,
            )
        )
        randomise(made, fields["tie_word_embeddings"])
    made.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **(processor or {})}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "do_sample": False}))
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    filler = [f"<|filler_{i}|>" for i in range(VOCAB - size - len(MARKS))]
    tokenizer.add_special_tokens([*filler, *MARKS])
    assert tokenizer.token_to_id("<image>") == VOCAB - 1
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def make_picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Returns a picture of random blocks of colour, with some detail in it."""
    rng = np.random.default_rng(seed)
    bands = len(Image.new(mode, (1, 1)).getbands())
    coarse = rng.integers(0, 256, (7, 9, bands), np.uint8)
    pixels = coarse.squeeze(-1) if bands == 1 else coarse
    return Image.fromarray(pixels, mode).resize((width, height), Image.Resampling.BICUBIC)


def encode_picture(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Returns a picture as a file."""
    stream = io.BytesIO()
    picture.save(stream, form, **options)
    return stream.getvalue()
