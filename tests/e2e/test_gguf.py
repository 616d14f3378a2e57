"""A GGUF file from end to end: the same answers as the directory that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister import LLM, SamplingParams
from cloister.cli import main
from tests.gguf_factory import make_gguf

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
CHAT = [{"role": "user", "content": "the cat sat <|end|>"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny", "qwen2", "BF16")


def answer(path: Path) -> tuple[list[int], str, str]:
    with LLM(str(path), num_threads=1, kv_memory_mb=2, max_model_len=128) as llm:
        (plain,) = llm.generate(["the cat sat on the mat"], GREEDY)
        chat = llm.chat(CHAT, GREEDY)
        return plain.prompt_token_ids, plain.text, chat.text


def test_answers_are_those_of_the_directory(file: Path) -> None:
    assert answer(file) == answer(file.parent / "tiny")


def test_a_directory_with_one_file_is_that_file(file: Path) -> None:
    with LLM(str(file.parent), num_threads=1, kv_memory_mb=2, max_model_len=128) as llm:
        assert llm.model.path == str(file)
        assert llm.model.fingerprint.startswith("fp_")


def test_the_command_line_opens_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--model", str(file), "--max-tokens", "4", "--max-model-len", "128", "the cat"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()


def test_a_file_in_few_bits_answers_and_repeats_itself(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", "llama", "Q4_K")
    assert answer(file) == answer(file)
