"""Which models are on this machine."""

import shutil
from pathlib import Path

import pytest

from cloister.models import transformers_fallback
from cloister.models.local_models import LocalModel, list_models
from cloister.models.pulling.store import Store
from tests.gguf_factory import make_gguf
from tests.model_factory import make_model


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a safetensors model, a GGUF file, a model of an unknown architecture, and a folder of something else."""
    root = tmp_path_factory.mktemp("shelf")
    make_model(root / "tiny", "llama")
    (root / "files").mkdir()
    make_gguf(root / "files" / "tiny", "llama", "Q8_0")
    strange = shutil.copytree(root / "tiny", root / "strange")
    config = strange / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "StrangeForCausalLM"))
    (root / "photos").mkdir()
    return root


def find(root: Path, name: str, **options: Path) -> LocalModel:
    return next(model for model in list_models([root], **options) if model.name.endswith(name))


def test_embedded_models_are_always_there(tmp_path: Path) -> None:
    names = [model.name for model in list_models(hub_cache=tmp_path / "none", store=Store(tmp_path / "pulled"))]
    assert names == ["cloister-5m", "cloister-draft"]


def test_a_directory_shows_what_lies_right_under_it(shelf: Path) -> None:
    found = {Path(model.name).name: model for model in list_models([shelf]) if model.source == "directory"}
    assert set(found) == {"tiny", "strange", *(file.name for file in shelf.rglob("*.gguf"))}


def test_size_is_that_of_the_weights(shelf: Path) -> None:
    weights = sum(file.stat().st_size for file in (shelf / "tiny").glob("*.safetensors"))
    model = find(shelf, "/tiny")
    assert model.size_bytes == weights
    assert (model.architecture, model.obstacle) == ("LlamaForCausalLM", None)


def test_format_is_that_of_most_weights(shelf: Path) -> None:
    assert find(shelf, ".gguf").format == "Q8_0"


def test_a_model_that_cannot_be_served_says_why(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_fallback, "find_spec", lambda _: None)
    strange = find(shelf, "/strange")
    assert strange.obstacle is not None
    assert "StrangeForCausalLM" in strange.obstacle
    assert "LlamaForCausalLM" in strange.obstacle


def test_a_model_without_a_tokenizer_says_so(shelf: Path, tmp_path: Path) -> None:
    (shutil.copytree(shelf / "tiny", tmp_path / "mute") / "tokenizer.json").unlink()
    obstacle = find(tmp_path, "/mute").obstacle
    assert obstacle is not None
    assert "tokenizer.json" in obstacle


def test_a_model_that_transformers_may_run_is_not_called_unsupported(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_fallback, "find_spec", lambda name: name)
    strange = find(shelf, "/strange")
    assert (strange.architecture, strange.format) == ("StrangeForCausalLM", find(shelf, "/tiny").format)
    assert strange.obstacle is not None
    assert "transformers" in strange.obstacle
    assert "LlamaForCausalLM" not in strange.obstacle


def test_the_newest_snapshot_of_the_hubs_cache_goes_by_its_hub_name(shelf: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "models--owner--tiny" / "blobs").mkdir()
    shutil.copytree(shelf / "tiny", snapshot)
    model = next(model for model in list_models(hub_cache=tmp_path) if model.source == "hub")
    assert (model.name, model.path) == ("owner/tiny", snapshot)
