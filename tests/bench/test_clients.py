"""The runner of `benchmarks/clients`: what a script says, what a broken one becomes, and the table of the page."""

from __future__ import annotations

import sys

import pytest

from benchmarks.clients.__main__ import main
from benchmarks.clients.catalogue import CLIENTS, FOLDER, Client
from benchmarks.clients.environments import Environment, read_lines
from benchmarks.clients.table import BEGIN, END, PAGE, fill_page, read_results, write_table


def run(tmp_path, script, limit_s=10.0):
    """Returns what the checks of a shell script said."""
    (tmp_path / "script.sh").write_text(script)
    client = Client("stub", str(tmp_path / "script.sh"), limit_s=limit_s)
    environment = Environment(client, tmp_path / "environment")
    environment.install()
    return environment.run("http://127.0.0.1:1")


def test_lines_of_checks_are_read_and_others_are_not():
    text = "a warning\nllm\tchat\tok: 3 tokens\nllm\ttools\tFAILED: Error: no: call\n"
    assert read_lines(text) == [
        {"check": "chat", "result": "ok", "seen": "3 tokens"},
        {"check": "tools", "result": "FAILED", "seen": "Error: no: call"},
    ]


def test_a_script_is_told_the_server_and_says_what_it_saw(tmp_path):
    assert run(tmp_path, 'printf "stub\\tchat\\tok: %s\\n" "$1"') == [
        {"check": "chat", "result": "ok", "seen": "http://127.0.0.1:1"}
    ]


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ("echo broken >&2; exit 3", "exit status 3: broken"),
        ("exit 0", "exit status 0: it said nothing"),
        ('printf "stub\\tchat\\tok: x\\n"; exit 1', "exit status 1: it said nothing"),
    ],
)
def test_a_script_that_breaks_is_a_failed_check(tmp_path, script, seen):
    last = run(tmp_path, script)[-1]
    assert (last["result"], last["seen"]) == ("FAILED", seen)


def test_a_script_that_hangs_is_a_failed_check_after_those_that_it_did(tmp_path):
    found = run(tmp_path, 'printf "stub\\tchat\\tok: x\\n"; exec sleep 60', limit_s=0.3)
    assert [(check["check"], check["result"]) for check in found] == [("chat", "ok"), ("time", "FAILED")]


def test_every_client_has_a_script():
    assert [client.script for client in CLIENTS.values() if not (FOLDER / client.script).is_file()] == []


def test_an_unknown_client_is_answered_with_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["clients", "curly"])
    with pytest.raises(SystemExit):
        main()
    assert "no client 'curly'; there are openai-python" in capsys.readouterr().err


def test_the_table_has_failures_with_their_reasons():
    check = {"check": "chat", "result": "ok", "seen": "x"}
    wrong = {"check": "tools", "result": "FAILED", "seen": "a | b\nc"}
    *_, row = write_table({"curl": {"version": "8.0", "checks": [check, wrong]}})
    assert row == "| `curl`: curl | 8.0 | chat | tools: a \\| b c |"


def test_the_page_shows_what_the_last_runs_left():
    page = PAGE.read_text(encoding="utf-8")
    assert fill_page(page, read_results()) == page


def test_a_page_without_the_marks_is_not_written():
    with pytest.raises(ValueError, match="the page needs the lines"):
        fill_page(END + BEGIN, {})
