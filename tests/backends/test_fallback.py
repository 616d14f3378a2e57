"""Models without a spec, computed by transformers: its tokens, batch invariance, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from cloister.launch import build_engine, resolve_settings
from cloister.models import load
from cloister.types.errors import CloisterError, ConfigError, ModelError
from cloister.types.events import Submit
from cloister.types.request import Request, SamplingParams
from tests.driving import Driver, build
from tests.model_factory import UNTYPED, randomise, write_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES = {"stablelm": "StableLmForCausalLM", "cohere": "CohereForCausalLM"}
TOKENS = torch.randint(320, (90,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(request.param, architectures=[ARCHITECTURES[request.param]], **SMALL)
        model = UNTYPED.from_config(config)
        randomise(model, tied=bool(config.tie_word_embeddings))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def drive(path: Path, block_size: int = 16) -> Driver:
    model = load(path)
    return build(model.spec, model.weights, backend="transformers", block_size=block_size, num_blocks=4096 // block_size)


def test_logits_are_those_of_the_library(path: Path) -> None:
    theirs = UNTYPED.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(drive(path).run("a", TOKENS, chunk=20) - expected).max() < 1e-4 * np.abs(expected).max()


def test_company_chunks_blocks_and_hits_change_no_bit(path: Path) -> None:
    alone = drive(path).run("a", TOKENS)
    for chunk, block_size in ((1, 16), (7, 4), (33, 64)):
        assert drive(path, block_size).run("a", TOKENS, chunk).tobytes() == alone.tobytes()
    driver = drive(path)
    heads = driver.step({"x": TOKENS[:17], "a": TOKENS[:50], "y": TOKENS[5:60]})["a"]
    driver.share("a", "b", 50)  # whole blocks, and a copy of the last one
    ends = driver.step({"x": [3], "b": TOKENS[50:], "a": TOKENS[50:]})
    assert np.concatenate([heads, ends["a"]]).tobytes() == alone.tobytes()
    assert ends["b"].tobytes() == ends["a"].tobytes()


def test_loading_draws_no_bar_between_the_lines_of_the_log(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers.utils.logging.enable_progress_bar()
    drive(path)
    assert "%|" not in capfd.readouterr().err


def test_wiped_blocks_hold_nothing(path: Path) -> None:
    driver = drive(path)
    driver.run("a", TOKENS)
    driver.free("a")
    assert not any(bool(store.any()) for store in driver.program._stores())  # type: ignore[attr-defined]


def test_an_engine_generates_what_the_library_generates(path: Path) -> None:
    settings = {"model": str(path), "num_threads": 1, "weights_cache": "", "max_model_len": 200}
    core = build_engine(resolve_settings(settings, listens=False).engine.config)
    for name, prompt in (("a", TOKENS[:40]), ("b", TOKENS[:5])):
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        core.input_queue.put(Submit(Request(request_id=name, token_ids=prompt, sampling=sampling)))
    found: dict[str, list[int]] = {"a": [], "b": []}
    while (outputs := core.step()) is not None:
        for output in outputs.outputs:
            found[output.request_id] += output.token_ids
    theirs = UNTYPED.from_pretrained(path, dtype=torch.float32).eval()
    for name, prompt in (("a", TOKENS[:40]), ("b", TOKENS[:5])):
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert found[name] == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("settings", "error"), [({"quant": "int8"}, ConfigError), ({"runtime_adapters": True}, CloisterError)])
def test_what_a_model_without_a_spec_cannot_do_is_told(path: Path, settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_engine(resolve_settings({"model": str(path), "weights_cache": "", **settings}, listens=False).engine.config)


def test_without_the_library_the_error_lists_what_is_supported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.models.transformers_fallback.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*pip install 'cloister\[fallback\]'"):
        load(path)


def test_code_that_a_model_brings_is_never_run(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "of_their_own", "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="never run"):
        drive(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_never_opened(path: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(path, tmp_path / "model")
    model = load(directory)
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot open the model"):
        build(model.spec, model.weights, backend="transformers")


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "mamba", architectures=["MambaForCausalLM"], vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    UNTYPED.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="keys and values by position"):
        drive(tmp_path)
