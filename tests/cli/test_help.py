"""What a person sees who asks for help or presses the tab key."""

import subprocess
import sys

import pytest

from cloister.cli import VERBS, main
from cloister.cli.help import SUMMARIES, summarize
from cloister.cli.options import list_flags
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.setting_groups import GROUPS


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


def complete(capsys, monkeypatch, words, shell="bash"):
    """Returns what a shell offers after these words; a blank at their end begins a new one."""
    typed = words.split(" ")
    monkeypatch.setenv("_CLOISTER_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    return run(capsys)[1].split("\n")


def test_the_list_of_verbs_has_every_verb_once_and_imports_none():
    code = (
        "import sys, cloister.cli\n"
        "try: cloister.cli.main(['--help'])\n"
        "finally: print([m for m in sys.modules if m in ('numpy', 'cloister.cli.serve', 'cloister.policy')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.strip() == "[]"
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    assert sorted(name for name in listed if name in VERBS) == sorted(VERBS)


@pytest.mark.parametrize("verb", SUMMARIES)
def test_the_list_says_of_a_verb_what_its_own_help_begins_with(capsys, verb):
    _, out, _ = run(capsys, verb, "--help")
    assert summarize(out.split("\n\n")[1]) == SUMMARIES[verb]


def test_help_is_plain_text_in_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("serve", "gateway", "keys add"):
        _, out, _ = run(capsys, *verb.split(), "--help")
        assert out.isascii()
        assert "<" not in out
        assert max(map(len, out.splitlines())) <= 80


def test_help_shows_ten_options_and_help_all_shows_every_one_by_group(capsys):
    _, few, _ = run(capsys, "serve", "--help")
    _, many, _ = run(capsys, "serve", "--help-all")
    options = [flag.declaration.split("/")[0] for cls in (EngineConfig, ServerConfig) for flag in list_flags(cls)]
    shown = [option for option in options if f"  {option} " in few]
    assert len(shown) + sum(f"  {option} " in few for option in ("--explain", "--config")) == 10
    assert "more options: cloister serve --help-all" in few
    assert [option for option in options if f"  {option} " not in many] == []
    headings = [line.rstrip(":") for line in many.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments", "Options", *(group.capitalize() for group in GROUPS)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_that_are_imported_by_name(capsys, monkeypatch, shell):
    assert "keys" in "\n".join(complete(capsys, monkeypatch, "cloister ke", shell))
    assert "remove" in "\n".join(complete(capsys, monkeypatch, "cloister keys rem", shell))
    assert "--block-size" in "\n".join(complete(capsys, monkeypatch, "cloister serve --bl", shell))


def test_a_shell_completes_the_values_that_an_option_takes(capsys, monkeypatch):
    assert complete(capsys, monkeypatch, "cloister policy show --profile p") == ["private", "paranoid", ""]
    assert complete(capsys, monkeypatch, "cloister serve --profile p") == ["private", "paranoid", ""]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(capsys, monkeypatch, shell):
    monkeypatch.setenv("_CLOISTER_COMPLETE", f"source_{shell}")
    assert "_CLOISTER_COMPLETE=complete_" + shell in run(capsys)[1]
