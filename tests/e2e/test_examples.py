"""The examples, as their README says to run them, on the embedded model: what starts alike once as a process, the rest here."""

import csv
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JSON = "Encode and decode the JSON format."
NAMES = sorted(file.name for file in (ROOT / "examples").glob("*.py"))


def run(name, *arguments, lines=""):
    """Runs an example and returns its standard output."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments], input=lines, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs an example in this process, which has imported what it needs; returns its standard output."""

    def run_main(name, *arguments, lines=""):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run_main


def test_every_example_is_in_the_readme_and_tested():
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    named = ["chat.py", "batch_csv.py", "rag.py", "judge.py", "agent.py", "sealed.py"]  # the last in tests/client
    assert re.findall(r"`python examples/(\w+\.py)", readme) == named
    assert sorted(re.findall(r"examples/(\w+\.py)", readme)) == NAMES


def test_chat_answers_one_question():
    assert run("chat.py", "What is the Python module json?") == f"{JSON}\n"


def test_chat_answers_line_after_line(run_here):
    answers = run_here("chat.py", lines="What is the Python module json?\nWhat is the Python module csv?\n\n").splitlines()
    assert answers[0] == JSON
    assert len(answers) == 2


def test_batch_adds_an_answer_to_every_row(tmp_path, run_here):
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text('id,question\n7,"What is the Python module json?"\n8,"What, if anything, is zzz?"\n', encoding="utf-8")
    run_here("batch_csv.py", str(source), str(target))
    with target.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"id": "7", "question": "What is the Python module json?", "answer": JSON}
    assert rows[1]["answer"]


def test_batch_has_questions_of_its_own():
    rows = list(csv.DictReader(io.StringIO(run("batch_csv.py"))))
    assert [row["id"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0]["answer"] == JSON


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("After how many days are log files deleted?", "logging.txt"),
        ("How is the hash of a password computed?", "passwords.txt"),
    ],
)
def test_rag_finds_the_note_that_has_the_answer(question, name, run_here):
    lines = run_here("rag.py", question).splitlines()
    assert lines[0].split()[1] == name
    assert len(lines) >= 3


def test_judge_puts_the_true_answer_first(run_here):
    lines = run_here("judge.py").splitlines()
    assert lines[1].endswith(JSON)
    assert "1.000" in lines[1]
    assert len(lines) == 5


def test_agent_calls_its_tool_and_ends_its_server():
    lines = run("agent.py", "What is the Python module csv?").splitlines()
    assert re.fullmatch(r'call: describe_module\(\{"name": ?"csv"\}\)', lines[0])
    assert lines[1] == "found: CSV parsing and writing."
    assert lines[2].startswith("answer: ")
