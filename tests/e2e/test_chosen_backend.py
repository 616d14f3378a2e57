"""Which back end computes a model when the settings name none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloister import LLM, SamplingParams
from cloister.backends.native import limits
from cloister.launch import backend, resolve_settings
from cloister.types.errors import CloisterError
from tests.model_factory import make_model

SETTINGS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 8, "max_model_len": 256}
PROMPTS = ["the cat sat on the mat", "what is that"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def _lacks_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native back end says that it lacks something, whatever the model: any family may become native."""
    for module in (limits, backend):
        monkeypatch.setattr(module, "list_missing", lambda _spec: ["attention sinks", "biases of experts"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")


def answer(path: Path, **settings: Any) -> tuple[str, list[Any]]:
    with LLM(str(path), **SETTINGS, **settings) as llm:
        return llm.model.backend, [completion.outputs[0].token_ids for completion in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.usefixtures("_lacks_sinks")
def test_torch_computes_what_the_native_kernels_do_not_and_a_line_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert answer(path) == answer(path, backend="torch")
    (line,) = [record.message for record in caplog.records if "back end" in record.message]
    assert "native back end does not compute attention sinks, biases of experts" in line
    assert "torch computes it" in line


@pytest.mark.usefixtures("_lacks_sinks")
def test_a_number_format_of_weights_needs_no_setting_of_kv(path: Path) -> None:
    assert answer(path, quant="int8") == answer(path, quant="int8", backend="torch")


@pytest.mark.parametrize(
    "family", ["llama", "gpt_oss", "llama4_text", "ministral3", "mamba2", "falcon_h1", "nemotron_h", "gemma3n_text"]
)
def test_a_model_that_the_native_kernels_compute_is_theirs(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_model(tmp_path, family)
    name, tokens = answer(path, dtype="float32")
    assert name == "native"
    assert tokens == answer(path, dtype="float32", backend="torch")[1]
    assert not [record for record in caplog.records if record.name.startswith("cloister")]


@pytest.mark.usefixtures("_lacks_sinks")
def test_a_back_end_that_is_named_is_taken_or_refuses(path: Path) -> None:
    with pytest.raises(CloisterError, match=r"attention sinks.*--backend torch"):
        LLM(str(path), **SETTINGS, backend="native")


@pytest.mark.usefixtures("_lacks_sinks")
def test_without_torch_the_refusal_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.backends.availability.find_spec", lambda _name: None)
    with pytest.raises(CloisterError, match=r"attention sinks.*install torch.*pip install 'cloister\[torch\]'"):
        LLM(str(path), **SETTINGS)


def test_the_explanation_says_that_the_model_decides() -> None:
    (reason,) = (each for each in resolve_settings({"device": "cpu"}).engine.reasons if each.name == "backend")
    assert reason.value is None
    assert reason.why == "native where it computes the model, else torch: the device is a CPU"
