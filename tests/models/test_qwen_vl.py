"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers: processor, tower, positions, logits and greedy tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout
from cloister.backends.torch.cuda.limits import check_computable
from cloister.backends.vision import QwenVisionSpec
from cloister.models import load
from cloister.models.image_processing import open_image_processor
from cloister.models.safetensors import read_header, write_tensors
from cloister.types.errors import ConfigError, ModelError
from cloister.types.images import ImageTile
from tests.qwen_vl_factory import ARCHITECTURES, IMAGE_TOKEN, PATCH, TOKEN, UNTYPED, make_qwen_vl
from tests.thinning import cover
from tests.vision_factory import make_picture
from tests.vision_serving import Served, make_request, place_tiles, score, serve_one

FAMILIES = list(ARCHITECTURES)
SIZES = [(48, 48), (100, 30), (30, 100), (7, 3), (33, 90), (500, 499), (2, 300), (TOKEN, TOKEN), (61, 47)]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_vl(tmp_path_factory.mktemp("model"), request.param)


def open_theirs(path: Path) -> Any:
    return UNTYPED.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def prepare(path: Path, pictures: list[Any]) -> tuple[list[bytes], list[tuple[int, int] | None]]:
    """Returns pixels and grids of pictures."""
    opened = open_image_processor(path)
    assert opened is not None
    processor, token_id = opened
    assert token_id == IMAGE_TOKEN
    grids = [processor.token_grid(processor.grid(*picture.size)) for picture in pictures]
    return [processor.cut(picture)[0] for picture in pictures], grids


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(size: tuple[int, int], path: Path) -> None:
    picture = make_picture(*size)
    expected = Qwen2VLImageProcessorPil.from_pretrained(path)(picture, return_tensors="np")
    (pixels,), (grid,) = prepare(path, [picture])
    assert grid is not None
    assert [1, 2 * grid[0], 2 * grid[1]] == expected["image_grid_thw"][0].tolist()
    model = load(path)
    tower = build(path)._vision  # type: ignore[attr-defined]
    assert isinstance(model.spec.vision, QwenVisionSpec)
    image = ImageTile(offset=0, num_tokens=grid[0] * grid[1], digest=b"", pixels=pixels, grid=grid)
    assert model.spec.vision.find_misfit(image) is None
    assert np.array_equal(tower._cut_patches(pixels, *grid).numpy(), expected["pixel_values"])


def build(path: Path) -> Any:
    model = load(path)
    return BACKENDS.get("torch")(num_threads=2, device="cpu", dtype="float32").build(model.spec, model.weights, KVLayout(4, 16))


FIELDS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"vision": {"hidden_act": "gelu_pytorch_tanh"}},
    {"vision": {"spatial_merge_size": 1}, "processor": {"merge_size": 1, "max_pixels": 40 * PATCH**2}},
    {"vision": {"temporal_patch_size": 1}, "processor": {"temporal_patch_size": 1}},
    {"vision": {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}},
    {"text": {"rms_norm_eps": 0.1}},
    {"processor": {"image_mean": [0.1, 0.9, 0.4], "rescale_factor": 0.002}},
    {"processor": {"do_normalize": False}},
]


@pytest.mark.parametrize(
    ("family", "fields"),
    cover(FAMILIES, FIELDS),
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_the_tower_and_the_logits_are_those_of_transformers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    compare(make_qwen_vl(tmp_path, family, **fields), "torch", "native", num_tokens=8 if fields else 16)


@pytest.mark.parametrize(
    "vision",
    [{"window_size": 4 * TOKEN}, {"window_size": TOKEN + 5}, {"fullatt_block_indexes": [0, 2]}, {"fullatt_block_indexes": []}],
    ids=str,
)
def test_windows_are_those_of_transformers(vision: dict[str, Any], tmp_path: Path) -> None:
    compare(make_qwen_vl(tmp_path, "qwen2_5_vl", vision=vision), "torch")


@pytest.mark.parametrize(
    "text",
    [
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "mrope_section": [5, 2, 1]}},
    ],
    ids=["windows", "yarn"],
)
def test_the_decoder_is_that_of_qwen2(text: dict[str, Any], tmp_path: Path) -> None:
    compare(make_qwen_vl(tmp_path, "qwen2_5_vl", text=text), "torch", "native", num_tokens=20)


@pytest.mark.parametrize(
    "fields",
    [
        {"vision": {"deepstack_visual_indexes": []}},
        {"vision": {"deepstack_visual_indexes": [3, 1]}},
        {"vision": {"num_position_embeddings": 9}},
        {"text": {"attention_bias": True}},
        {"text": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 3, 7]}}},
    ],
    ids=str,
)
def test_deepstack_and_learned_positions_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    compare(make_qwen_vl(tmp_path, "qwen3_vl", **fields), "torch", "native")


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_deepstack_behind_a_step_of_text_and_images_of_several_requests(backend: str, tmp_path: Path) -> None:
    """Every sequence of a step has what its own images add, whatever stands before it."""
    path = make_qwen_vl(tmp_path, "qwen3_vl")
    pixels, grids = prepare(path, [make_picture(70, 40, 1), make_picture(24, 60, 2)])
    parts = [place_tiles(list(range(5, 20)), [tile], [3], grids=[grid]) for tile, grid in zip(pixels, grids, strict=True)]
    requests = [make_request("a", *parts[0]), make_request("t", list(range(30)), ()), make_request("b", *parts[1])]
    alone = [Served(path, backend=backend).serve([request]) for request in requests]
    assert Served(path, backend=backend, chunk=300).serve(requests) == {
        name: tokens for one in alone for name, tokens in one.items()
    }


@pytest.mark.parametrize(
    "text",
    [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"num_experts_per_tok": 1}, {"attention_bias": True}],
    ids=str,
)
def test_experts_are_those_of_transformers(text: dict[str, Any], tmp_path: Path) -> None:
    compare(make_qwen_vl(tmp_path, "qwen3_vl_moe", text=text), "torch", "native")


@pytest.mark.parametrize("inner", [48, 32], ids=["of other sizes", "gate and up as high as they are wide"])
def test_experts_are_read_either_way(inner: int, tmp_path: Path) -> None:
    """Published files hold them as [in, out], transformers 5 writes [out, in] and takes what fits both for that."""
    path, other = make_qwen_vl(tmp_path / "a", "qwen3_vl_moe", text={"moe_intermediate_size": inner}), tmp_path / "b"
    other.mkdir()
    for file in path.glob("*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    stored = {name: np.array(entry.read()) for name, entry in read_header(path / "model.safetensors").items()}
    for name, values in stored.items():
        if "experts" in name and values.shape[1] != values.shape[2]:
            stored[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    write_tensors(other / "model.safetensors", stored)
    ours, turned = load(path).weights, load(other).weights
    for name in ours.names():
        assert np.array_equal(ours.read(name), turned.read(name)), name
    theirs = open_theirs(other).state_dict()["model.language_model.layers.1.mlp.experts.gate_up_proj"].numpy()
    assert np.array_equal(turned.read("layers.1.experts.4.up.weight"), theirs[4, inner:])
    if inner == 48:
        compare(other, "torch")


def test_weights_of_experts_that_do_not_sum_to_one_are_refused(tmp_path: Path) -> None:
    path = make_qwen_vl(tmp_path, "qwen3_vl_moe")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["norm_topk_prob"] = True
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).spec.layers[0].mlp.renormalize  # type: ignore[union-attr]
    config["text_config"]["norm_topk_prob"] = False
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="norm_topk_prob"):
        load(path)


def test_a_config_whose_decoder_is_not_apart_is_read(tmp_path: Path) -> None:
    """As the hub has Qwen2.5-VL."""
    path = make_qwen_vl(tmp_path, "qwen2_5_vl")
    before = load(path).spec
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {name: value for name, value in text.items() if name not in ("model_type", "layer_types")}
    config |= {"eos_token_id": 1, "bos_token_id": 0}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (path / "config.json").write_text(json.dumps(config))
    assert load(path, strict=True).spec == before


@pytest.mark.parametrize(
    ("place", "field", "value", "word"),
    [
        ("vision_config", "hidden_act", "tanh", "hidden_act"),
        ("vision_config", "num_heads", 5, "heads"),
        ("vision_config", "in_channels", 1, "in_channels"),
        ("vision_config", "out_hidden_size", 32, "out_hidden_size"),
        ("vision_config", "fullatt_block_indexes", [3], "fullatt_block_indexes"),
        ("vision_config", "window_size", 5, "window_size"),
        ("vision_config", "rope_parameters", {"rope_type": "yarn"}, "rope_type"),
        ("vision_config", "rope_parameters", ["axial"], "rope_parameters"),
        ("text_config", "rope_parameters", {"mrope_section": [1, 2, 3]}, "mrope_section"),
        (None, "vision_config", None, "vision_config"),
        (None, "text_config", "qwen2", "vision_config"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(
    place: str | None, field: str, value: object, word: str, tmp_path: Path
) -> None:
    path = make_qwen_vl(tmp_path, "qwen2_5_vl")
    config = json.loads((path / "config.json").read_text())
    (config if place is None else config[place])[field] = value
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=word):
        load(path)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"patch_size": PATCH + 1}, "patch_size"),
        ({"merge_size": 1}, "merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"do_resize": False}, "do_resize"),
        ({"min_pixels": 0}, "min_pixels"),
        ({"max_pixels": 5}, "max_pixels"),
        ({"size": 5}, "size"),
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


def test_newer_processor_configs_have_their_bounds_in_size(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    fields = json.loads((path / "preprocessor_config.json").read_text())
    size = {"shortest_edge": fields.pop("min_pixels"), "longest_edge": fields.pop("max_pixels")}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, "size": size}))
    assert open_image_processor(tmp_path) == open_image_processor(path)


def test_cuda_says_what_it_lacks(path: Path) -> None:
    with pytest.raises(ConfigError, match="rotation by time, row and column"):
        check_computable(load(path).spec)


def compare(path: Path, *backends: str, num_tokens: int = 8) -> None:
    """Compares a model with transformers: embeddings of images, and on each back end log-probabilities of a prompt and a greedy
    answer."""
    pictures = [make_picture(70, 40, 1), make_picture(24, 60, 2)]
    theirs = open_theirs(path)
    pixels, grids = prepare(path, pictures)
    batch = Qwen2VLImageProcessorPil.from_pretrained(path)(pictures, return_tensors="pt")
    prompt, images = place_tiles([5 + 41 * i % 300 for i in range(60)], pixels, [3, 17], grids=grids)
    with torch.no_grad():
        found = theirs.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    deepstack = getattr(found, "deepstack_features", None) or []
    features = [torch.cat(list(parts)) for parts in (found.pooler_output, *deepstack)]
    expected = torch.cat(features, dim=1).numpy()
    program = build(path)
    assert np.abs(np.concatenate([program.encode_image(image) for image in images]) - expected).max() <= 1e-4

    @cache
    def read_by_them(answer: tuple[int, ...]) -> torch.Tensor:
        """Logits of prompt and answer."""
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.no_grad():
            logits: torch.Tensor = theirs(
                input_ids=ids,
                pixel_values=batch["pixel_values"],
                image_grid_thw=batch["image_grid_thw"],
                mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
            ).logits[0]
        return logits

    for backend in backends:
        served = serve_one(Served(path, backend=backend), prompt, images, max_tokens=num_tokens)
        logits = read_by_them(tuple(served))
        logprobs = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        scored = torch.tensor([entry.logprob for entry in score(Served(path, backend=backend), prompt, images)])
        assert (scored - logprobs[: len(scored)]).abs().max() <= 1e-4
        assert scored.std() > 0.3
        answer = logits[len(prompt) - 1 :].clone()
        answer[:, IMAGE_TOKEN] -= 100
        best = answer.topk(2).values
        equal = (answer.argmax(-1) == torch.tensor(served)) | (best[:, 0] - best[:, 1] < 1e-4)
        assert int(equal.sum()) == num_tokens
