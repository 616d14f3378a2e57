"""Which GGUF file a name means: a path, a directory, a repository of the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from cloister.models import load, locate
from cloister.models.hub import remove_cached
from cloister.types.errors import ModelError
from tests.gguf_factory import make_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny", "llama", "Q8_0")


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    """A file alone in a directory."""
    path = tmp_path / "repo" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    path.write_bytes(made.read_bytes())
    return path


class Hub:
    """Stands in for the hub: a repository with the files of a directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.patterns, self.answers = root, [], True
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: self.info())
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def info(self) -> Any:
        if not self.answers:
            raise OSError("no network in this test")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in self.root.iterdir()])

    def download(self, name: str, allow_patterns: list[str], **_: Any) -> str:
        assert name == "owner/model"
        self.patterns = allow_patterns
        return str(self.root)


@pytest.fixture
def hub(file: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(file.parent, monkeypatch)


def test_a_file_is_found_by_its_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert locate(str(file)) == locate("tiny-Q8_0.gguf") == locate("./tiny-Q8_0.gguf") == file


def test_a_link_keeps_its_own_name(file: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").symlink_to(file)
    assert load(locate(str(tmp_path / "blob"))).info.name == "blob"


def test_a_directory_stands_for_its_one_file(file: Path) -> None:
    (file.parent / "mmproj-model-f16.gguf").touch()
    assert locate(str(file.parent)) == load(file.parent).path == file


def test_safetensors_go_before_gguf(made: Path, tmp_path: Path) -> None:
    directory = made.parent / "tiny"
    (directory / "also.gguf").touch()
    assert locate(str(directory)) == directory
    assert load(directory).info.name == "tiny"


def test_several_files_are_listed(file: Path) -> None:
    (file.parent / "tiny-Q4_K_M.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"several GGUF files; give one: .*/repo/tiny-Q4_K_M\.gguf, .*/repo/tiny-Q8_0\.gguf"):
        locate(str(file.parent))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"model\.bin is no GGUF file; give"):
        locate(str(tmp_path / "model.bin"))


def test_a_repository_with_one_file_is_that_file(hub: Hub, file: Path) -> None:
    assert locate("owner/model") == file
    assert hub.patterns == ["tiny-Q8_0.gguf"]


def test_a_repository_with_several_files_lists_their_names(hub: Hub, file: Path) -> None:
    (file.parent / "tiny-Q4_K_M.gguf").touch()
    with pytest.raises(ModelError, match=r"give one: owner/model/tiny-Q4_K_M\.gguf, owner/model/tiny-Q8_0\.gguf"):
        locate("owner/model")
    assert hub.patterns == []


def test_only_the_file_that_was_named_is_downloaded(hub: Hub, file: Path) -> None:
    (file.parent / "tiny-Q4_K_M.gguf").touch()
    assert locate("owner/model/tiny-Q8_0.gguf") == file
    assert hub.patterns == ["tiny-Q8_0.gguf"]


def test_a_file_that_the_repository_lacks_is_told(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"no file owner/model/none\.gguf on the hub"):
        locate("owner/model/none.gguf")


def test_a_file_of_the_cache_does_without_the_hub(hub: Hub, file: Path) -> None:
    hub.answers = False
    assert locate("owner/model") == locate("owner/model/tiny-Q8_0.gguf") == file


def test_a_model_is_removed_from_the_hubs_cache_and_its_neighbour_stays(file: Path, tmp_path: Path) -> None:
    for name in ("tiny", "other"):
        repository = tmp_path / "hub" / f"models--owner--{name}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "blobs" / "blob").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to("../../blobs/blob")
    assert remove_cached("owner/tiny", tmp_path / "hub") == file.stat().st_size
    assert [place.name for place in (tmp_path / "hub").iterdir() if place.name.startswith("models")] == ["models--owner--other"]
    with pytest.raises(ModelError, match="no model owner/tiny in the hub's cache"):
        remove_cached("owner/tiny", tmp_path / "hub")
