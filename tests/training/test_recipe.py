"""The whole recipe on a small text, and what happens when it is interrupted."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cloister.train.decoder import Decoder
from cloister.train.optimizer import Checkpoints
from training.__main__ import main
from training.averaging import average
from training.corpus import folder_source
from training.evaluate import as_shipped
from training.export import load_exported
from training.pretrain import pretrain
from training.recipe import DRAFT_NAME, MODEL_NAME, STAGES, Recipe, StageMissingError, load_weights
from training.scale import TINY
from training.tune import tune


def new_model() -> Decoder:
    return Decoder(TINY.model, torch.Generator().manual_seed(0))


def same_weights(left: Path, right: Path) -> bool:
    a, b = (torch.load(path, weights_only=True)["model"] for path in (left, right))
    return all(torch.equal(a[name], b[name]) for name in a)


def test_one_command_makes_both_models(texts: Path, tmp_path: Path) -> None:
    arguments = ["--scale", "tiny", "--text", str(texts), "--work", str(tmp_path / "w"), "--out", str(tmp_path / "m")]
    assert main([*arguments, "--threads", "1"]) == 0
    for name in (MODEL_NAME, DRAFT_NAME):
        files = {path.name for path in (tmp_path / "m" / name).iterdir()}
        assert files == {
            "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
            "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip


def test_exported_model_computes_what_the_trained_ones_do_on_average(finished: Recipe) -> None:
    tuned, retuned = (load_weights(new_model(), finished.work / f"{stage}.pt") for stage in ("tune", "retune"))
    trained = as_shipped(average(tuned, retuned, TINY.retuned_share))
    exported = AutoModelForCausalLM.from_pretrained(finished.out / MODEL_NAME, dtype=torch.float32)
    tokens = torch.randint(0, TINY.model.vocab, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (trained(tokens) - exported(tokens).logits).abs().max().item()
    assert difference < 1e-4


def test_heads_have_pages_and_questions_to_learn_from(finished: Recipe) -> None:
    pages = [file.read_text(encoding="utf-8") for file in (finished.work / "text").iterdir()]
    held_out = [document.text for document in finished._read_documents() if document.held_out]
    assert len(pages) == 60 - len(held_out)
    assert not set(pages) & set(held_out)
    questions = (finished.work / "questions.txt").read_text(encoding="utf-8").splitlines()
    assert len(questions) == TINY.num_asked
    assert all(questions)


def test_resumed_pretraining_ends_with_the_same_weights(finished: Recipe, tmp_path: Path) -> None:
    row, checkpoints = finished._row("train"), Checkpoints(tmp_path / "resumed.pt", every=2)
    for stop in (3, 5, None):  # a new process each time: nothing but the checkpoint carries over
        pretrain(new_model(), row, TINY.pretrain, TINY.pretrain_rate, 0, checkpoints, stop_after=stop)
    assert same_weights(finished.work / "pretrain.pt", checkpoints.path)


def test_resumed_tuning_ends_with_the_same_weights(finished: Recipe, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "resumed.pt", every=2)
    for stop in (3, None):
        model = load_weights(new_model(), finished.work / "pretrain.pt")
        tune(model, finished._row("train"), finished._first_lessons, TINY.tune, 0, checkpoints, stop_after=stop)
    assert same_weights(finished.work / "tune.pt", checkpoints.path)


def test_resumed_retuning_ends_with_the_same_weights(finished: Recipe, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "resumed.pt", every=2)
    for stop in (3, None):
        model = load_weights(new_model(), finished.work / "tune.pt")
        tune(model, finished._row("train"), finished._lessons, TINY.retune, 3, checkpoints, stop_after=stop)
    assert same_weights(finished.work / "retune.pt", checkpoints.path)


def test_a_run_from_exported_models_retunes_them_and_keeps_their_tokenizer(
    finished: Recipe, texts: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more"
    shutil.copytree(texts, more)
    (more / "news.txt").write_text("zyzzyva quokka axolotl " * 200, encoding="utf-8")
    second = replace(finished, sources=folder_source(more), work=tmp_path / "w", out=tmp_path / "m", seed=1)
    second = replace(second, start=finished.out)
    second.run(tuple(stage for stage in STAGES if stage != "evaluate"))
    assert not (second.work / "tune.pt").exists()
    tokenizers = [(folder / MODEL_NAME / "tokenizer.json").read_bytes() for folder in (finished.out, second.out)]
    assert tokenizers[0] == tokenizers[1]
    for name, shape in ((MODEL_NAME, TINY.model), (DRAFT_NAME, TINY.draft)):
        before, after = (
            load_exported(Decoder(shape, torch.Generator()), folder / name) for folder in (finished.out, second.out)
        )
        likeness = torch.cosine_similarity(before.embed_tokens.weight.flatten(), after.embed_tokens.weight.flatten(), dim=0)
        assert 0.3 < likeness < 1  # of weights drawn anew it would be nearly 0


def test_a_start_without_models_says_what_is_missing(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(StageMissingError, match=r"tokenizer\.json is missing"):
        replace(recipe, start=tmp_path).run(("corpus", "tokenizer"))


def test_another_seed_ends_with_other_weights(finished: Recipe, tmp_path: Path) -> None:
    other = replace(finished, work=tmp_path / "other", seed=1)
    other.run(("corpus", "tokenizer", "pretrain"))
    assert not same_weights(finished.work / "pretrain.pt", other.work / "pretrain.pt")


def test_finished_stages_are_not_run_again(recipe: Recipe) -> None:
    recipe.run(("corpus", "tokenizer", "pretrain"))
    before = (recipe.work / "pretrain.pt").read_bytes()
    recipe.run(("corpus", "tokenizer", "pretrain"))
    assert (recipe.work / "pretrain.pt").read_bytes() == before


def test_pretraining_learns_something(recipe: Recipe) -> None:
    longer = replace(recipe, scale=replace(TINY, pretrain=(replace(TINY.pretrain[0], steps=60),)))
    longer.run(("corpus", "tokenizer", "pretrain"))
    row = longer._row("held_out")
    tokens = torch.from_numpy(row[None, :129].astype("int64"))
    trained = load_weights(new_model(), longer.work / "pretrain.pt")
    with torch.no_grad():
        assert trained.loss(tokens[:, :-1], tokens[:, 1:]) < new_model().loss(tokens[:, :-1], tokens[:, 1:]) - 1


def test_a_stage_without_its_input_says_what_to_do(recipe: Recipe) -> None:
    with pytest.raises(StageMissingError, match="run the earlier stages"):
        recipe.run(("tune",))


def test_a_missing_folder_is_named_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale", "tiny", "--text", str(tmp_path / "none"), "--work", str(tmp_path / "w")]) == 1
    assert "none" in capsys.readouterr().err


def test_too_few_documents_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("word " * 100)
    assert main(["--scale", "tiny", "--text", str(tmp_path), "--work", str(tmp_path / "w")]) == 1
    assert "too few" in capsys.readouterr().err


def test_held_out_pages_are_not_trained_on(finished: Recipe) -> None:
    tokenizer = Tokenizer.from_file(str(finished.work / "tokenizer.json"))
    texts = {name: tokenizer.decode(finished._row(name).tolist()) for name in ("train", "held_out")}
    assert "Title of page 14\n" in texts["held_out"]
    assert "Title of page 14\n" not in texts["train"]
    assert folder_source(finished.work)[0].pattern == "*.txt"
