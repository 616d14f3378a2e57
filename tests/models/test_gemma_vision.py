"""Gemma 3 with images against transformers: processor, tower, logits and greedy tokens."""

from __future__ import annotations

import json
from itertools import product
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
from cloister.models.decoder import read_spec
from cloister.models.families.gemma_vision import GEMMA3_VISION
from cloister.models.image_processing import SquareProcessor, open_image_processor
from cloister.models.safetensors import read_header, write_tensors
from cloister.types.errors import ModelError
from tests.gemma_vision_factory import IMAGE_TOKEN, NUM_TOKENS, SIDE, UNTYPED, make_gemma_vision
from tests.thinning import thin
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


FIELDS: list[dict[str, Any]] = [
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
]


@pytest.mark.parametrize(
    ("backend", "fields"),
    thin(product(["torch", "native"], FIELDS), [("torch", FIELDS[0]), *(("native", fields) for fields in FIELDS)]),
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_the_tower_and_the_logits_are_those_of_transformers(backend: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = make_gemma_vision(tmp_path, **fields)
    pictures = [make_picture(70, 40, 1), make_picture(24, 60, 2)]
    model, theirs = load(path), UNTYPED.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    vision = model.spec.vision
    assert isinstance(vision, VisionSpec)
    pixels = Gemma3ImageProcessorPil.from_pretrained(path)(pictures, return_tensors="pt")["pixel_values"]
    prompt, images = place_tiles(
        [5 + 41 * i % 300 for i in range(60)], prepare(path, pictures), [3, 17], vision.num_tokens, bidirectional=True
    )
    program = BACKENDS.get(backend)(num_threads=2, device="cpu", dtype="float32").build(
        model.spec, model.weights, KVLayout(4, 16)
    )
    with torch.no_grad():
        expected = theirs.get_image_features(pixels, return_dict=True).pooler_output.numpy()
    assert np.abs(np.stack([program.encode_image(image) for image in images]) - expected).max() <= 1e-4
    served = serve_one(Served(path, backend=backend), prompt, images, max_tokens=12)
    ids = torch.tensor([[*prompt, *served]])
    kinds = (ids == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = theirs(input_ids=ids[:, :-1], pixel_values=pixels, token_type_ids=kinds[:, :-1]).logits[0]
    logprobs = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), ids[0, 1 : len(prompt)]]
    scored = torch.tensor([entry.logprob for entry in score(Served(path, backend=backend), prompt, images)])
    assert (scored - logprobs).abs().max() <= 1e-4
    assert scored.std() > 0.3
    logits = logits[len(prompt) - 1 :]
    logits[:, IMAGE_TOKEN] -= 100
    best = logits.topk(2).values
    equal = (logits.argmax(-1) == ids[0, len(prompt) :]) | (best[:, 0] - best[:, 1] < 1e-4)
    assert int(equal.sum()) == len(served) == 12


def test_names_of_published_checkpoints_are_read(path: Path, tmp_path: Path) -> None:
    """They have SigLIP's inner module, which this release of transformers leaves out when it writes."""
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = read_header(path / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): np.array(entry.read()) for name, entry in stored.items()
    }
    write_tensors(tmp_path / "model.safetensors", renamed)
    before, after = load(path), load(tmp_path)
    assert set(before.weights.names()) == set(after.weights.names())
    name = "vision.layers.1.q.weight"
    assert np.array_equal(before.weights.read(name), after.weights.read(name))


def test_a_config_may_leave_out_what_published_ones_do(path: Path, tmp_path: Path) -> None:
    fields = json.loads((path / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "model_type", "num_hidden_layers", "sliding_window")
    fields["text_config"] = {name: fields["text_config"][name] for name in sizes}
    spec = read_spec(GEMMA3_VISION, fields)
    assert spec.vocab_size == 262208
    assert spec.layers[0].grouped_attention.num_heads == 8


@pytest.mark.parametrize(
    ("place", "field", "value", "word"),
    [
        ("vision_config", "num_channels", 1, "num_channels"),
        ("vision_config", "hidden_act", "quick_gelu", "hidden_act"),
        ("vision_config", "num_attention_heads", 5, "heads"),
        ("text_config", "use_bidirectional_attention", True, "use_bidirectional_attention"),
        ("text_config", "final_logit_softcapping", 3.0, "final_logit_softcapping"),
        (None, "mm_tokens_per_image", 8, "mm_tokens_per_image"),
        (None, "mm_tokens_per_image", 16, "mm_tokens_per_image"),
        (None, "vision_config", None, "vision_config"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(place: str | None, field: str, value: object, word: str, path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (config if place is None else config[place])[field] = value
    with pytest.raises(ModelError, match=word):
        read_spec(GEMMA3_VISION, config)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"do_resize": False}, "do_resize"),
        ({"size": {"height": SIDE, "width": SIDE + 1}}, "size"),
        ({"image_seq_length": NUM_TOKENS + 1}, "image_seq_length"),
    ],
)
def test_a_processor_that_asks_for_something_else_is_refused(
    fields: dict[str, object], word: str, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    processor = json.loads((path / "preprocessor_config.json").read_text()) | fields
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=word):
        open_image_processor(tmp_path)


def test_a_processor_is_read(path: Path) -> None:
    assert open_image_processor(path) == (SquareProcessor(SIDE, NUM_TOKENS), IMAGE_TOKEN)
