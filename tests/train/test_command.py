"""`cloister train` on a small model, from a file of text to what `serve` takes."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends.base import LOGITS
from cloister.cli import main
from cloister.executor.drafters import DRAFTERS
from cloister.executor.drafters.head_runner import NumpyHeadRunner
from cloister.executor.drafters.heads import heads_directory, read_card
from cloister.launch import build_program, resolve_settings
from cloister.models import load
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.train.decoder import Decoder, Shape
from cloister.train.hidden_states import batch_passages
from cloister.train.passages import Passage
from tests.executor.drafters.answering import context_for
from tests.model_factory import make_model

QUICK = ("--steps", "4", "--rows", "16", "--tokens", "2500", "--num-threads", "1", "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("train") / "small", "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "some.txt"
    file.write_text(read_passages(HELD_OUT)[:12_000], encoding="utf-8")
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def train(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, out, err = run(capsys, "train", *arguments, *QUICK)
    assert status == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_heads_lie_in_the_models_directory_and_draft_for_it(
    capsys: pytest.CaptureFixture[str], model: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("".join(f"What is {number}?\n" for number in range(30)), encoding="utf-8")
    own = ("--questions", questions, "--continue", "--answers", "30", "--answer-tokens", "8", "--work", tmp_path / "work")
    report = train(capsys, kind, "--model", model, "--text", text, "--heads", "2", *own)
    directory = heads_directory(model, kind)
    assert report["directory"] == str(directory)
    assert report["num_own_tokens"] > 100
    assert {(one["source"], one["head"]) for one in report["accuracy"]} == {(s, h) for s in ("answers", "text") for h in (1, 2)}
    opened = load(model)
    assert read_card(directory).fingerprint == opened.info.fingerprint
    drafter = DRAFTERS.get(kind)(
        replace(
            context_for(model, vocab_size=opened.spec.vocab_size),
            hidden_size=opened.spec.hidden_size,
            head_runner=lambda heads: NumpyHeadRunner(heads, lambda hidden: hidden),
            fingerprint=opened.info.fingerprint,
        )
    )
    assert drafter.max_drafts == (2 if kind == "blockwise" else 64)
    command = ("--model", model, "--text", text, "--heads", "2", *own)
    card = (directory / "heads.json").read_bytes()
    status, _, err = run(capsys, "train", kind, *command, *QUICK)
    assert status == 1
    assert "--replace" in err
    assert (directory / "heads.json").read_bytes() == card
    again = train(capsys, kind, *command, "--replace")
    assert again["accuracy"] == report["accuracy"]
    assert len(list((tmp_path / "work").glob("hidden-*.bin"))) == 1


def test_a_draft_is_a_model_that_computes_what_was_trained(
    capsys: pytest.CaptureFixture[str], model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    report = train(capsys, "draft", "--model", model, "--text", text, "--hidden-size", "64", "--layers", "1", "--out", out)
    assert 0 <= report["agreement"][0]["top1"] <= 1
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    opened = load(out)
    assert opened.info.eos_token_ids == load(model).info.eos_token_ids
    shape = Shape(320, 64, 160, 1, 2, 1, 32, max_positions=2048)
    decoder = Decoder(shape, torch.Generator(), torch.float32)
    weights = dict(opened.weights)
    named = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight"}
    for long in ("q", "k", "v", "o"):
        named[f"layers.0.self_attn.{long}_proj.weight"] = f"layers.0.{long}.weight"
    for long in ("gate", "up", "down"):
        named[f"layers.0.mlp.{long}_proj.weight"] = f"layers.0.{long}.weight"
    named |= {"layers.0.input_layernorm.weight": "layers.0.attention_norm.weight"}
    named |= {"layers.0.post_attention_layernorm.weight": "layers.0.mlp_norm.weight"}
    decoder.load_state_dict({ours: torch.from_numpy(np.asarray(weights[name], np.float32)) for ours, name in named.items()})
    program = build_program(resolve_settings({"model": str(out), "num_threads": 1}, listens=False).engine.config, 4)
    passage = Passage.own(0, list(range(5, 25)))
    with torch.no_grad():
        wanted = decoder(torch.tensor([list(passage.token_ids)]))[0].numpy()
    got = program.step(batch_passages([passage], 16), LOGITS).logits
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()
    assert report["num_parameters"] == sum(weight.numel() for weight in decoder.parameters())


@pytest.mark.parametrize("kind", ["medusa", "blockwise", "draft"])
def test_what_cannot_be_trained_on_is_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], model: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    short, empty, blocked = tmp_path / "short.txt", tmp_path / "empty.txt", tmp_path / "blocked"
    short.write_text("Too short.")
    empty.write_text("")
    blocked.touch()
    for arguments, words in (
        (("--model", model, "--text", short), "2000"),
        (("--model", model, "--text", empty), "2000"),
        (("--model", model, "--text", tmp_path / "missing"), "missing: No such file"),
        (("--model", tmp_path / "missing", "--text", text), "no model"),
        (("--model", model, "--text", text, "--questions", empty), "no line"),
        (("--model", model, "--text", text, "--work", blocked), "cannot be written"),
        (("--model", model, "--text", text, "--out", blocked / "here"), "is a file"),
    ):
        status, out, err = run(capsys, "train", kind, *arguments, "--replace", "--num-threads", "1")
        assert (status, out) == (1, "")
        assert words in " ".join(err.split())
        assert "Traceback" not in err


@pytest.mark.parametrize("keeps", [False, True])
def test_who_stops_it_is_told_what_is_kept(
    capsys: pytest.CaptureFixture[str], model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cloister.train.head_training.learn", stop)
    work = ("--work", tmp_path / "work") if keeps else ()
    command = ("--model", model, "--text", text, "--out", tmp_path / "heads", *work)
    status, _, err = run(capsys, "train", "medusa", *command, *QUICK)
    assert status == 130
    assert ("run it again" if keeps else "nothing is kept") in err


def test_without_torch_the_error_names_the_extra(
    capsys: pytest.CaptureFixture[str], model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest))
    status, _, err = run(capsys, "train", "medusa", "--model", model, "--text", text)
    assert status == 1
    assert "cloister[torch]" in err
