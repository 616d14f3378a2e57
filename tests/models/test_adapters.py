"""Adapters as PEFT writes them: what is read, and what is refused."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cloister.models import load
from cloister.models.adapters import read_adapter
from cloister.models.safetensors import write_tensors
from cloister.types.errors import ModelError
from tests.adapter_factory import ALL, write_adapter
from tests.model_factory import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def change(path: Path, **config: object) -> Path:
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return path


def test_updates_have_the_products_names_and_the_scale_is_in_b(model: Path, tmp_path: Path) -> None:
    spec = load(model).spec
    once = read_adapter(write_adapter(tmp_path, model, rank=8, alpha=8.0), spec, max_rank=8)
    twice = read_adapter(change(tmp_path, lora_alpha=16), spec, max_rank=8)
    stabilised = read_adapter(change(tmp_path, lora_alpha=8, use_rslora=True), spec, max_rank=8)
    assert set(once.weights.updates) == {f"layers.{layer}.{name}" for layer in range(2) for name in ALL}
    assert once.weights.rank == 8
    for product, (a, b) in once.weights.updates.items():
        assert np.array_equal(twice.weights.updates[product][0], a)
        assert np.array_equal(twice.weights.updates[product][1], 2 * b)
        assert np.allclose(stabilised.weights.updates[product][1], np.sqrt(8) * b)


def test_a_digest_is_of_the_weights_and_not_of_the_name(model: Path, tmp_path: Path) -> None:
    spec = load(model).spec

    def digest(name: str, *, seed: int = 1, rank: int = 8, **config: object) -> str:
        path = change(write_adapter(tmp_path / name, model, seed=seed, rank=rank), **config)
        return read_adapter(path, spec, max_rank=8).digest

    assert digest("a") == digest("b")
    assert len({digest("a"), digest("c", seed=2), digest("d", lora_alpha=8.0), digest("e", rank=4)}) == 4


def test_bfloat16_adapters_are_read(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, model, dtype=ml_dtypes.bfloat16)
    a, b = read_adapter(path, load(model).spec, max_rank=8).weights.updates["layers.0.q"]
    assert a.dtype == b.dtype == np.float32


@pytest.mark.parametrize(("config", "message"), [
    ({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"bias": "all"}, "bias"),
    ({"peft_type": "IA3"}, "IA3"), ({"task_type": "SEQ_CLS"}, "SEQ_CLS"), ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa"), ({"r": 4}, "shapes"), ({"r": 0}, "'r'"),
    ({"lora_alpha": "x"}, "lora_alpha"),
    ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"), ({"trainable_token_indices": [1]}, "embeddings"),
    ({"alora_invocation_tokens": [1, 2]}, "middle of a text"), ({"target_parameters": ["x"]}, "no products"),
])  # fmt: skip
def test_what_would_change_the_answers_is_refused(model: Path, tmp_path: Path, config: dict[str, object], message: str) -> None:
    path = change(write_adapter(tmp_path, model), **config)
    with pytest.raises(ModelError, match=message):
        read_adapter(path, load(model).spec, max_rank=8)


@pytest.mark.parametrize(("name", "message"), [
    ("base_model.model.model.embed_tokens.lora_embedding_A", "no low-rank update"),
    ("base_model.model.lm_head.lora_A.weight", "lm_head"),
    ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "layers.9"),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "no low-rank update"),
])  # fmt: skip
def test_tensors_that_the_model_has_no_place_for_are_refused(model: Path, tmp_path: Path, name: str, message: str) -> None:
    path = write_adapter(tmp_path, model)
    write_tensors(path / "adapter_model.safetensors", {name: np.zeros((8, 64), np.float32)})
    with pytest.raises(ModelError, match=message):
        read_adapter(path, load(model).spec, max_rank=8)


def test_a_missing_side_is_refused(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, model)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_tensors(path / "adapter_model.safetensors", {name: np.zeros((8, 64), np.float32)})
    with pytest.raises(ModelError, match="shapes"):
        read_adapter(path, load(model).spec, max_rank=8)


def test_numbers_that_are_not_finite_are_refused(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, model, size=float("nan"))
    with pytest.raises(ModelError, match="finite"):
        read_adapter(path, load(model).spec, max_rank=8)


def test_a_rank_without_room_is_refused_with_the_setting_to_raise(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="max-lora-rank"):
        read_adapter(write_adapter(tmp_path, model, rank=16), load(model).spec, max_rank=8)


def write_links(path: Path, **tensors: np.ndarray) -> Path:
    path.mkdir(exist_ok=True)
    write_tensors(path / "link_tokens.safetensors", tensors)
    return path


def test_link_tokens_come_alone_or_beside_updates_and_change_the_digest(model: Path, tmp_path: Path) -> None:
    spec = load(model).spec
    rows = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    alone = read_adapter(write_links(tmp_path / "alone", link_tokens=rows), spec, max_rank=8)
    beside = read_adapter(write_links(write_adapter(tmp_path / "beside", model), link_tokens=rows), spec, max_rank=8)
    without = read_adapter(write_adapter(tmp_path / "without", model), spec, max_rank=8)
    others = read_adapter(write_links(tmp_path / "others", link_tokens=rows + 1), spec, max_rank=8)
    for adapter in (alone, beside):
        assert adapter.links is not None
        assert np.array_equal(adapter.links, rows)
    assert without.links is None
    assert not alone.weights.updates
    assert len({adapter.digest for adapter in (alone, beside, without, others)}) == 4
    assert beside.weights.updates.keys() == without.weights.updates.keys()


@pytest.mark.parametrize(("tensors", "message"), [
    ({"link_tokens": np.zeros((3, 65), np.float32)}, "train them for this model"),
    ({"link_tokens": np.zeros((65, 64), np.float32)}, "K from 1 to 64"),
    ({"link_tokens": np.zeros(64, np.float32)}, "shape"), ({"link_tokens": np.full((3, 64), np.inf, np.float32)}, "finite"),
    ({"link_tokens": np.zeros((3, 64), np.int32)}, "I32"), ({"links": np.zeros((3, 64), np.float32)}, "one tensor"),
    ({"link_tokens": np.zeros((3, 64), np.float32), "more": np.zeros(1, np.float32)}, "one tensor"),
])  # fmt: skip
def test_link_tokens_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_adapter(write_links(tmp_path / "links", **tensors), load(model).spec, max_rank=8)


def test_missing_files_are_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(tmp_path, load(model).spec, max_rank=8)
    path = write_adapter(tmp_path / "a", model)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read_adapter(path, load(model).spec, max_rank=8)
