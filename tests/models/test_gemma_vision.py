"""Gemma 3 with images against transformers: processor, tower, logits and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout
from cloister.backends.vision import VisionSpec
from cloister.models import load
from cloister.models.image_processing import open_image_processor
from tests.gemma_vision_factory import IMAGE_TOKEN, SIDE, UNTYPED, make_gemma_vision
from tests.vision_factory import make_picture
from tests.vision_serving import Served, place_tiles, score, serve_one


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma_vision(tmp_path_factory.mktemp("model"))


def prepare(path: Path, pictures: list[Any]) -> list[bytes]:
    opened = open_image_processor(path)
    assert opened is not None
    return [opened[0].cut(picture)[0] for picture in pictures]


@pytest.mark.parametrize("size", [(24, 24), (100, 30), (30, 100), (7, 3), (500, 499), (1, 300)])
def test_pixels_are_those_of_transformers(size: tuple[int, int], path: Path) -> None:
    picture = make_picture(*size)
    processor = Gemma3ImageProcessorPil.from_pretrained(path)
    expected = processor(picture, return_tensors="np", do_normalize=False, do_rescale=False)["pixel_values"][0]
    pixels = np.frombuffer(prepare(path, [picture])[0], np.uint8).reshape(SIDE, SIDE, 3)
    assert np.array_equal(pixels.transpose(2, 0, 1), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"mm_tokens_per_image": 36, "processor": {"image_seq_length": 36}},
        {"mm_tokens_per_image": 1, "processor": {"image_seq_length": 1}},
        {"vision": {"hidden_act": "gelu", "layer_norm_eps": 0.1}},
        {"vision": {"image_size": 26}, "processor": {"size": {"height": 26, "width": 26}}},
        {"processor": {"image_mean": [0.1, 0.9, 0.4], "rescale_factor": 0.002}},
        {"processor": {"do_normalize": False}},
        {"text": {"sliding_window": 5}},
        {"text": {"rms_norm_eps": 0.1, "attention_bias": True}},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_the_tower_and_the_logits_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    path = make_gemma_vision(tmp_path, **fields)
    pictures = [make_picture(70, 40, 1), make_picture(24, 60, 2)]
    model, theirs = load(path), UNTYPED.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    vision = model.spec.vision
    assert isinstance(vision, VisionSpec)
    pixels = Gemma3ImageProcessorPil.from_pretrained(path)(pictures, return_tensors="pt")["pixel_values"]
    prompt, images = place_tiles(
        [5 + 41 * i % 300 for i in range(60)], prepare(path, pictures), [3, 17], vision.num_tokens, bidirectional=True
    )
    program = BACKENDS.get("torch")(num_threads=2, device="cpu", dtype="float32").build(
        model.spec, model.weights, KVLayout(4, 16)
    )
    with torch.no_grad():
        expected = theirs.get_image_features(pixels, return_dict=True).pooler_output.numpy()
    assert np.abs(np.stack(program.encode_images(images)) - expected).max() <= 1e-4
    served = serve_one(Served(path), prompt, images, max_tokens=40)
    ids = torch.tensor([[*prompt, *served]])
    kinds = (ids == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = theirs(input_ids=ids[:, :-1], pixel_values=pixels, token_type_ids=kinds[:, :-1]).logits[0]
    logprobs = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), ids[0, 1 : len(prompt)]]
    scored = torch.tensor([entry.logprob for entry in score(Served(path), prompt, images)])
    assert (scored - logprobs).abs().max() <= 1e-4
    assert scored.std() > 0.3
    logits = logits[len(prompt) - 1 :]
    logits[:, IMAGE_TOKEN] -= 100
    best = logits.topk(2).values
    equal = (logits.argmax(-1) == ids[0, len(prompt) :]) | (best[:, 0] - best[:, 1] < 1e-4)
    assert int(equal.sum()) == 40
