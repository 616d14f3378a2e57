"""Verbs that compute, on a real engine with the small embedded model."""

import errno
import io
import json
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

from cloister import LLM
from cloister.cli import chat, main
from cloister.cli.chat import Conversation
from cloister.types.request import SamplingParams

ENGINE = ("--model", "cloister-draft", "--max-model-len", "512", "--num-threads", "1")


@pytest.fixture(scope="module")
def llm():
    with LLM("cloister-draft", max_model_len=512, num_threads=1) as llm:
        yield llm


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


def test_run_prints_the_answer_and_nothing_else(capsys):
    status, out, err = run(capsys, "run", "hello", *ENGINE, "--max-tokens", "6")
    assert status == 0
    assert out.endswith("\n")
    assert "error" not in err


def test_run_takes_the_model_before_the_prompt(capsys):
    flags = ("--max-model-len", "512", "--num-threads", "1", "--max-tokens", "2", "--json")
    status, out, _ = run(capsys, "run", "cloister-draft", "hello", *flags)
    assert status == 0
    assert json.loads(out)["usage"]["completion_tokens"] <= 2


def test_run_reads_standard_input_and_reports_figures(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def main"))
    status, out, _ = run(capsys, "run", "-", *ENGINE, "--raw", "--json", "--max-tokens", "5", "--temperature", "0")
    answer = json.loads(out)
    assert status == 0
    assert answer["usage"]["completion_tokens"] <= 5
    assert answer["finish_reason"] in ("stop", "length")


def test_the_same_seed_gives_the_same_answer(capsys):
    sampled = ("run", "hello", *ENGINE, "--raw", "--max-tokens", "12", "--temperature", "1")
    answers = [run(capsys, *sampled, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]


def test_a_prompt_that_is_too_long_is_an_error_with_a_figure(capsys):
    status, _, err = run(capsys, "run", "word " * 2000, *ENGINE)
    assert status == 1
    assert "512" in err
    assert "word word" not in err


def test_a_conversation_remembers_and_forgets(llm):
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), "Be short.")
    list(talk.ask("hello"))
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    talk.reset()
    assert [message["role"] for message in talk.messages] == ["system"]


def test_an_answer_that_was_stopped_stays_in_the_conversation(llm):
    letter = llm.tokenizer.encode("a", False)[0]  # whatever the model would say, it says this
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=100, logit_bias={letter: 100.0}))
    answer = talk.ask("hello")
    text = next(output.text for output in answer if output.text)
    answer.close()
    assert talk.messages[-1]["role"] == "assistant"
    assert talk.messages[-1]["content"].endswith(text)


def test_a_question_that_cannot_be_answered_is_forgotten(llm, capsys):
    talk = Conversation(llm, SamplingParams(max_tokens=4))
    chat.answer(talk, "word " * 2000)
    assert talk.messages == []
    assert "512" in capsys.readouterr().err


def test_chat_answers_until_the_input_ends(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\n/nonsense\n\n"))
    status, out, err = run(capsys, "chat", *ENGINE, "--max-tokens", "4")
    assert status == 0
    assert "Forgotten" in err
    assert "no such command" in err
    assert out


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_word_ends_the_chat(capsys, monkeypatch, word):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{word}\nhello\n"))
    status, out, err = run(capsys, "chat", *ENGINE, "--max-tokens", "4")
    assert status == 0
    assert "no such command" not in err
    assert out.strip("> ") == ""


def test_throughput_counts_every_token(capsys, tmp_path):
    flags = ("--num-requests", "3", "--input-tokens", "20", "--output-tokens", "5", "--json", "--output", str(tmp_path))
    status, out, err = run(capsys, "bench", "throughput", *ENGINE, *flags)
    summary = json.loads(out)["summary"]
    assert status == 0
    assert err.startswith("Written: ")  # and nothing of a bar, as this is no terminal
    assert (summary["num_ok"], summary["num_input_tokens"], summary["num_output_tokens"]) == (3, 60, 15)
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "throughput.json").read_text())["summary"]["num_ok"] == 3


def test_a_full_disk_is_named_with_the_folder_that_has_no_room(capsys, tmp_path, monkeypatch):
    def fill(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cloister.bench.plots.plot_run", fill)
    flags = ("--num-requests", "1", "--input-tokens", "8", "--output-tokens", "2", "--output", str(tmp_path / "r"))
    status, _, err = run(capsys, "bench", "throughput", *ENGINE, *flags)
    assert status == 1
    assert err == f"error: there is no space left for {tmp_path / 'r'}; free some, or name another place\n"


def test_latency_runs_one_request_after_the_other(capsys):
    flags = ("--num-requests", "3", "--input-tokens", "8", "--output-tokens", "4", "--json")
    _, out, _ = run(capsys, "bench", "latency", *ENGINE, *flags)
    rows = json.loads(out)["requests"]
    for before, after in pairwise(rows):
        assert after["due_s"] >= before["due_s"] + before["e2e_s"] - 1e-9


def test_a_trace_with_texts_is_tokenized(capsys, tmp_path):
    trace = tmp_path / "own.jsonl"
    trace.write_text('{"prompt": "hello world", "output_tokens": 3}\n')
    status, out, _ = run(capsys, "bench", "throughput", *ENGINE, "--trace", str(trace), "--json", "--num-warmup", "0")
    assert status == 0
    assert json.loads(out)["summary"]["num_output_tokens"] == 3


def test_ctrl_c_ends_quietly_with_130():
    command = [sys.executable, "-m", "cloister.cli", "run", "x", "--raw", *ENGINE, "--max-tokens", "500", "--seed", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode in (130, 0)  # 0 if the answer was quicker
    assert b"Traceback" not in err
