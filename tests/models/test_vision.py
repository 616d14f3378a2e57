"""SmolVLM and Idefics3 against transformers: processor, tower, logits and greedy tokens."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout
from cloister.backends.torch.vision import tower_bytes
from cloister.backends.vision import VisionSpec
from cloister.cli import main
from cloister.models import load
from cloister.models.image_processing import TileProcessor, open_image_processor
from cloister.types.errors import ConfigError, ModelError
from tests.thinning import cover
from tests.vision_factory import NUM_TOKENS, TILE, UNTYPED, VOCAB, make_picture, make_vision_model
from tests.vision_serving import Served, place_tiles, serve_one

SIZES = [(24, 24), (48, 48), (100, 30), (30, 100), (7, 3), (33, 90), (500, 499), (1, 300)]


def open_theirs(path: Path) -> Any:
    return UNTYPED.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def their_pixels(path: Path, pictures: list[Any]) -> torch.Tensor:
    """[1, num_tiles, 3, TILE, TILE]: all tiles of one prompt."""
    processor = SmolVLMImageProcessorPil.from_pretrained(path)
    tiles = [processor(picture, return_tensors="pt")["pixel_values"][0] for picture in pictures]
    return torch.cat(tiles)[None]


def our_tiles(path: Path, pictures: list[Any]) -> list[bytes]:
    opened = open_image_processor(path)
    assert opened is not None
    return [tile for picture in pictures for tile in opened[0].cut(picture)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "processor",
    [{}, {"do_image_splitting": False}, {"resample": 3, "size": {"longest_edge": 3 * TILE}}, {"do_resize": False}],
    ids=["split", "whole", "bicubic, three tiles a side", "not resized"],
)
def test_tiles_are_those_of_transformers(size: tuple[int, int], processor: dict[str, Any], path: Path, tmp_path: Path) -> None:
    fields = json.loads((path / "preprocessor_config.json").read_text()) | processor
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    picture = make_picture(*size)
    reference = SmolVLMImageProcessorPil.from_pretrained(tmp_path)
    expected = reference(picture, return_tensors="np", return_row_col_info=True, do_normalize=False, do_rescale=False)
    opened = open_image_processor(tmp_path)
    assert opened is not None
    tiles = np.stack([np.frombuffer(tile, np.uint8).reshape(TILE, TILE, 3) for tile in opened[0].cut(picture)])
    assert np.array_equal(tiles.transpose(0, 3, 1, 2), expected["pixel_values"][0])
    assert opened[0].grid(*size) == (expected["rows"][0][0], expected["cols"][0][0])


FIELDS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"scale_factor": 1},
    {"vision": {"hidden_act": "gelu"}},
    {"vision": {"layer_norm_eps": 0.1}},
    {"vision": {"image_size": TILE, "patch_size": 5}},
    {"processor": {"image_mean": [0.1, 0.9, 0.4], "rescale_factor": 0.002}},
    {"processor": {"do_normalize": False}},
    {"text": {"rms_norm_eps": 0.1, "attention_bias": True}},
]


@pytest.mark.parametrize(
    ("backend", "family", "fields"),
    cover(("native", "torch"), ("smolvlm", "idefics3"), FIELDS),
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_the_tower_and_the_logits_are_those_of_transformers(
    backend: str, family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = make_vision_model(tmp_path, family, **fields)
    pictures = [make_picture(70, 40, 1), make_picture(24, 60, 2)]
    model, theirs = load(path), open_theirs(path)
    tiles, pixels = our_tiles(path, pictures), their_pixels(path, pictures)
    vision = model.spec.vision
    assert isinstance(vision, VisionSpec)
    program = BACKENDS.get(backend)(num_threads=2, device="cpu", dtype="float32").build(
        model.spec, model.weights, KVLayout(4, 16)
    )
    with torch.no_grad():
        expected = torch.cat(theirs.get_image_features(pixels, return_dict=True).pooler_output).numpy()
    prompt, images = place_tiles(list(range(5, 40)), tiles, [3, 4, 9, 17, 20, 21, 30, 34], vision.num_tokens)
    assert np.abs(np.concatenate([program.encode_image(image) for image in images]) - expected).max() <= 1e-4
    served = serve_one(Served(path, backend=backend), prompt, images, max_tokens=16)
    ids = torch.tensor([[*prompt, *served]])
    with torch.no_grad():
        logits = theirs(input_ids=ids[:, :-1], pixel_values=pixels).logits[0, len(prompt) - 1 :]
    logits[:, VOCAB - 1] -= 100
    best = logits.topk(2).values
    equal = (logits.argmax(-1) == ids[0, len(prompt) :]) | (best[:, 0] - best[:, 1] < 1e-4)
    assert int(equal.sum()) == len(served) == 16
    assert len(set(served)) > 3


def test_the_sizes_of_models_on_the_hub_find_the_positions_of_transformers() -> None:
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionConfig, SmolVLMVisionEmbeddings

    from cloister.backends.torch.vision import _position_ids

    for image_size, patch_size in ((512, 16), (384, 14), (364, 14), (24, 6), (24, 5)):
        config = SmolVLMVisionConfig(hidden_size=1, num_attention_heads=1, image_size=image_size, patch_size=patch_size)
        embeddings, count = SmolVLMVisionEmbeddings(config), image_size // patch_size
        embeddings.position_embedding.weight.data = torch.arange(count**2, dtype=torch.float32)[:, None]
        embeddings.patch_embedding.weight.data.zero_()
        embeddings.patch_embedding.bias.data.zero_()
        found = embeddings(torch.zeros(1, 3, image_size, image_size), torch.ones(1, count, count, dtype=torch.bool))
        assert found.flatten().int().tolist() == _position_ids(count).tolist()


def test_the_fingerprint_names_how_pictures_are_prepared(path: Path, tmp_path: Path) -> None:
    before = load(path).info.fingerprint
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load(tmp_path).info.fingerprint == before
    fields = json.loads((path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, "image_mean": [0, 0, 0]}))
    assert load(tmp_path).info.fingerprint != before


def test_a_processor_config_of_newer_versions_is_read(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    fields = json.loads((path / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": fields}))
    assert open_image_processor(tmp_path) == (TileProcessor(NUM_TOKENS, TILE, 2 * TILE), VOCAB - 1)


@pytest.mark.parametrize(
    ("file", "fields", "word"),
    [
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": TILE + 6}}, "max_image_size"),
        ("preprocessor_config.json", {"size": {"height": 5}}, "longest_edge"),
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale|switches off"),
    ],
)
def test_a_processor_that_asks_for_something_else_is_refused(
    file: str, fields: dict[str, Any], word: str, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / file).write_text(json.dumps(json.loads((path / file).read_text()) | fields))
    with pytest.raises(ModelError, match=word):
        open_image_processor(tmp_path)


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("vision_config", "num_channels", 1),
        ("vision_config", "hidden_act", "quick_gelu"),
        ("vision_config", "num_attention_heads", 5),
        (None, "scale_factor", 3),
        (None, "vision_config", None),
        (None, "text_config", "llama"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(
    place: str | None, field: str, value: object, path: Path, tmp_path: Path
) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (config if place is None else config[place])[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load(tmp_path)


def test_the_native_back_end_counts_the_tower_and_says_what_it_is_computed_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(path)
    native = BACKENDS.get("native")(num_threads=2, device="cpu", dtype="float32")
    sizes = {"block_size": 16, "max_batched_tokens": 64}
    assert model.spec.vision is not None
    needs = [native.need(spec, model.weights, **sizes) for spec in (model.spec, replace(model.spec, vision=None))]
    tower = [math.prod(model.weights.shape(name)) for name in model.weights.names() if name.startswith("vision.")]
    assert needs[0].weights_bytes - needs[1].weights_bytes == 4 * sum(tower)
    assert needs[0].activations_bytes - needs[1].activations_bytes == 2 * tower_bytes(model.spec.vision)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'cloister\[torch\]'"):
        native.need(model.spec, model.weights, **sizes)
    native.need(replace(model.spec, vision=None), model.weights, **sizes)


def test_a_text_model_has_no_image_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert open_image_processor(tmp_path) is None
    assert NUM_TOKENS == (TILE // 6 // 2) ** 2


def test_a_model_is_quantised_but_for_its_tower(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path / "plain", text={"hidden_size": 128, "intermediate_size": 128})
    with pytest.raises(SystemExit, match="0"):
        main(["quantize", str(path), str(tmp_path / "few"), "--method", "rtn", "--measure", "0"])
    few, plain = load(tmp_path / "few"), load(path)
    assert few.spec == plain.spec
    for name in plain.weights.names():
        if name.startswith("vision."):
            assert np.array_equal(few.weights.read(name), plain.weights.read(name))
    assert few.weights.form("layers.0.q.weight") is not None
    prompt, images = place_tiles(list(range(5, 20)), our_tiles(path, [make_picture(24, 24)])[:1], [3], NUM_TOKENS)
    for backend in ("torch", "native"):
        assert len(serve_one(Served(tmp_path / "few", backend=backend), prompt, images)) == 12
