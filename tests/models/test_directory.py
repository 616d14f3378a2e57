"""What a model directory tells beside its weights, and where models are found."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from cloister.models import embedded_names, hub, load, locate
from cloister.types.errors import ModelError
from tests.model_factory import make_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny", "llama")


def write(path: Path, name: str, **settings: Any) -> None:
    content = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps({**content, **settings}))


def test_every_eos_id_of_both_files_counts(path: Path) -> None:
    write(path, "generation_config.json", eos_token_id=[5, 7])
    write(path, "config.json", eos_token_id=9)
    assert load(path).info.eos_token_ids == (5, 7, 9)


def test_a_single_eos_id_and_no_generation_config_do(path: Path) -> None:
    (path / "generation_config.json").unlink()
    write(path, "config.json", eos_token_id=4)
    assert load(path).info.eos_token_ids == (4,)
    assert load(path).info.defaults == {}


def test_sampling_defaults_are_those_of_the_generation_config(path: Path) -> None:
    assert load(path).info.defaults == {"temperature": 0.7, "top_p": 0.9, "top_k": 20.0}


def test_a_model_that_does_not_sample_is_greedy(path: Path) -> None:
    write(path, "generation_config.json", do_sample=False)
    assert load(path).info.defaults["temperature"] == 0.0


@pytest.mark.parametrize("value", [320, -1, "2", [1, 2.5]])
def test_an_eos_id_outside_the_vocabulary_is_refused(path: Path, value: object) -> None:
    write(path, "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match="eos_token_id"):
        load(path)


def test_a_sampling_default_that_is_no_number_is_refused(path: Path) -> None:
    write(path, "generation_config.json", temperature="hot")
    with pytest.raises(ModelError, match="'temperature'"):
        load(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(path: Path, name: str) -> None:
    (path / name).unlink()
    with pytest.raises(ModelError, match=name):
        load(path)


def test_a_config_that_is_no_json_is_refused(path: Path) -> None:
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable JSON"):
        load(path)


def test_an_embedded_model_is_found_by_its_name_and_loads() -> None:
    assert "cloister-5m" in embedded_names()
    model = load(locate("cloister-5m"))
    assert model.info.name == "cloister-5m"
    assert model.info.eos_token_ids
    assert model.spec.vocab_size == model.info.vocab_size


def test_a_directory_is_found_by_its_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    assert locate("tiny") == locate("./tiny") == locate(str(path)) == path


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "no-such-model", "a/b/c"])
def test_a_name_that_is_nowhere_is_told_so(name: str) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        locate(name)


def test_without_network_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="cannot be reached; connect to the network, or copy") as caught:
        locate("owner/model")
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_network_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(300))
    monkeypatch.setattr(hub, "REACH_TIMEOUT_S", 0.2)
    try:
        began = time.monotonic()
        with pytest.raises(ModelError, match="cannot be reached"):
            locate("owner/model")
        assert time.monotonic() - began < 50
    finally:
        ended.set()


def test_a_download_fetches_the_files_of_a_model_and_draws_their_bytes(
    monkeypatch: pytest.MonkeyPatch, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked.update(name=name, patterns=allow_patterns)
        bar = tqdm_class(desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True)
        with tqdm_class(desc="Fetching 1 files", total=1) as files:
            bar.total = (bar.total or 0) + 2_000_000
            bar.update(2_000_000)
            files.update(1)
        bar.set_description("done")
        return str(path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=None))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate("owner/model", progress=True) == path
    assert asked["name"] == "owner/model"
    assert {"config.json", "tokenizer.json", "model*.safetensors"} <= set(asked["patterns"])
    assert "2.0/2.0 MB" in capsys.readouterr().err
    locate("owner/model")
    assert capsys.readouterr().err == ""
