"""What an operator reads at start: what drafts tokens, and how much."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from cloister.launch import build_engine, resolve_settings
from cloister.launch.app import build_gate, describe_start, open_plain
from cloister.models import locate
from cloister.server.files.service import FileService
from cloister.types.errors import ConfigError
from cloister.types.request import ModelInfo


def read_drafts(drafters: tuple[str, ...], **flags: object) -> str:
    model = ModelInfo(name="m", path="", max_model_len=64, vocab_size=8, eos_token_ids=(), drafters=drafters)
    (line,) = (line for line in describe_start(resolve_settings(flags), model, [], [], None) if line.startswith("drafts: "))
    return line.removeprefix("drafts: ")


def test_the_start_says_what_was_found_to_draft() -> None:
    assert read_drafts(("medusa", "rest", "ngram"), speculate="auto") == "medusa, rest, ngram (auto)"
    assert read_drafts(("ngram",), speculate="ngram") == "ngram"
    assert read_drafts((), speculate="none") == "none"


def test_the_start_names_the_back_end_that_computes() -> None:
    model = ModelInfo(name="m", path="", max_model_len=64, vocab_size=8, eos_token_ids=(), backend="torch")
    settings = resolve_settings({"device": "cpu"})
    assert " on torch, cpu" in next(iter(describe_start(settings, model, [], [], None)))


def test_the_start_says_what_a_tier_takes_of_the_disk_and_how_many_threads_there_are() -> None:
    model = ModelInfo(name="m", path="", max_model_len=64, vocab_size=8, eos_token_ids=())
    settings = resolve_settings({"device": "cpu", "num_threads": 1, "kv_tier": "host:8M+disk:/var/tmp,50M"})
    lines = list(describe_start(settings, model, [], [], None))
    assert "disk, at most: KV tier 50 MiB in /var/tmp" in lines
    assert lines[0].endswith(", 1 thread")
    for flags, said in (
        ({"kv_tier": "disk:/var/tmp"}, "KV tier 50% of what is free in /var/tmp"),
        ({"kv_tier": "disk:/var/tmp,1G", "replicas": 2}, "KV tier 1024 MiB in /var/tmp for each replica"),
    ):
        assert f"disk, at most: {said}" in list(describe_start(resolve_settings(flags), model, [], [], None))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"replicas": 3, "standby": 1}, "3 replicas, 1 of them stands by until another one is lost, router"),
        ({"replicas": 4, "standby": 2}, "4 replicas, 2 of them stand by until another one is lost, router"),
        ({"replicas": 3}, "3 replicas, router"),
    ],
)
def test_the_start_says_how_many_replicas_get_no_requests_yet(flags: dict[str, int], said: str) -> None:
    model = ModelInfo(name="m", path="", max_model_len=64, vocab_size=8, eos_token_ids=())
    assert next(iter(describe_start(resolve_settings(flags), model, [], [], None))).startswith(said)


def test_the_start_says_how_much_is_drafted_where_that_is_fixed() -> None:
    assert read_drafts(("medusa",), draft_tokens=8) == "medusa (auto, 8 tokens a step)"
    assert read_drafts(("ngram",), speculate="ngram", draft_tokens=1) == "ngram (1 token a step)"


@pytest.mark.parametrize(
    ("flags", "drafters"),
    [
        ({}, ()),
        ({"speculate": "auto"}, ("medusa", "rest", "ngram")),
        ({"speculate": "none"}, ()),
        ({"speculate": "recycling,ngram"}, ("recycling", "ngram")),
        ({"speculate": "recycling,ngram", "draft_tokens": 4}, ("recycling",)),
    ],
)
def test_an_engine_says_which_drafters_it_asks(flags: dict[str, object], drafters: tuple[str, ...]) -> None:
    settings = resolve_settings({"kv_memory_mb": 64, "max_model_len": 256, "num_threads": 1, **flags})
    assert build_engine(settings.engine.config).model.drafters == drafters


@pytest.mark.parametrize("name", ["auto", "none"])
def test_what_names_no_drafter_stands_alone(name: str) -> None:
    with pytest.raises(ConfigError, match=f"speculate takes {name} alone"):
        resolve_settings({"speculate": f"{name},ngram"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"speculate": "ngram", "draft_model": "cloister-draft"}, "auto, draft_model, spec_infer, long_spec"),
        ({"speculate": "draft_model", "datastore": "store"}, "auto, rest"),
    ],
)
def test_files_that_no_named_drafter_would_read_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"does not read it.*speculate with {words}"):
        resolve_settings(flags)


@pytest.mark.parametrize(
    ("name", "file", "others"), [("medusa", "heads.json", ("rest", "ngram")), ("rest", "datastore.json", ("medusa", "ngram"))]
)
def test_auto_says_why_it_does_without_what_lies_beside_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, file: str, others: tuple[str, ...]
) -> None:
    home = tmp_path / "model"
    shutil.copytree(locate("cloister-5m"), home)
    (home / "drafters" / name / file).write_text("{")
    settings = resolve_settings(
        {"model": str(home), "kv_memory_mb": 64, "max_model_len": 256, "num_threads": 1, "speculate": "auto"}
    )
    with caplog.at_level("WARNING"):
        core = build_engine(settings.engine.config)
    assert core.model.drafters == others
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"auto does without {name}"]
    assert "damaged" in caplog.text


def test_a_directory_that_cannot_keep_files_is_said_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.launch.app.make_engine", lambda *arguments: pytest.fail("the model is loaded"))
    settings = resolve_settings({"model": "cloister-5m", "files": "/proc/nowhere/files"})
    with pytest.raises(ConfigError, match=r"/proc/nowhere/files\.key cannot be made"):
        asyncio.run(open_plain(settings, build_gate(settings), print))


class Unstartable:
    """An engine that does not start."""

    async def start(self) -> None:
        raise ConfigError("it does not start")

    async def drain(self, timeout_s: float) -> None:
        pass


def test_a_directory_of_files_is_left_to_another_server_if_the_engine_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.launch.app.make_engine", lambda *arguments: Unstartable())
    settings = resolve_settings({"model": "cloister-5m", "files": str(tmp_path / "files")})
    gate = build_gate(settings)
    with pytest.raises(ConfigError, match="it does not start") as kept:  # its traceback holds all that was opened
        asyncio.run(open_plain(settings, gate, print))
    assert kept.value.__traceback__ is not None
    opened = FileService.open(settings.server.config, gate)
    assert opened is not None
    opened.close()
