"""What can be said of a command without running it: its verb, options, module and files exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from cloister.cli import app
from tests.docs.pages import ROOT

OPERATORS = {"&&", "||", "|", ";", "&"}
OURS = ("benchmarks", "cloister", "deploy", "tests", "training")
FILE = re.compile(r"(?:benchmarks|deploy|docs|examples|src|tests|training)/[\w./-]*\w")
WRITTEN = {"benchmarks/gpu.md"}
"""Files that a command writes."""


def split(script: str) -> Iterator[list[str]]:
    """Yields the words of every simple command of a shell script; redirections and assignments are left out."""
    for line in script.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line.replace("...", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word in OPERATORS:
                yield from _command(words)
                words = []
            elif not set(word) <= set("<>()"):
                words.append(word)
        yield from _command(words)


def _command(words: list[str]) -> Iterator[list[str]]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if words:
        yield words


def find_faults(words: list[str]) -> Iterator[str]:
    """Yields what is wrong with a simple command."""
    program, *others = words
    if program.rpartition("/")[2] == "cloister":
        yield from _check_verb(others)
    elif program.rpartition("/")[2].startswith("python") and others[:1] == ["-m"] and others[1].partition(".")[0] in OURS:
        yield from _check_module(others[1], others[2:])
    elif program == "make":
        targets = {word for word in others if "=" not in word}
        yield from (
            f"make has no target {target}" for target in targets if f"\n{target}:" not in (ROOT / "Makefile").read_text()
        )
    yield from find_lost_files(" ".join(words))


def find_lost_files(text: str) -> Iterator[str]:
    """Yields the files of the repository that a text names and that do not exist."""
    for found in re.finditer(rf"(?<![\w./-]){FILE.pattern}(?![\w*{{/-])", text):
        if found[0] not in WRITTEN and not (ROOT / found[0]).exists():
            yield f"there is no {found[0]}"


def _check_verb(words: list[str]) -> Iterator[str]:
    command: Any = get_command(app)
    path = "cloister"
    while hasattr(command, "commands") and words and not words[0].startswith("-") and not words[0].isupper():
        found = command.get_command(None, words[0])
        if found is None:
            yield f"`{path}` has no verb {words[0]}"
            return
        command, path, words = found, f"{path} {words[0]}", words[1:]
    if "--" in words:  # `release make` takes the settings of nodes behind it
        yield from _check_verb(["serve", *words[words.index("--") + 1 :]])
        words = words[: words.index("--")]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    yield from (f"`{path}` has no option {option}" for option in sorted(given - known))


def _check_module(name: str, words: list[str]) -> Iterator[str]:
    if name.rpartition(".")[2].isupper():
        return
    sources = _read_sources(name, {})
    if not sources:
        yield f"there is no module {name}"
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    text = "".join(sources.values())
    yield from (f"{name} has no option {option}" for option in sorted(given) if sources and f'"{option}"' not in text)


def _read_sources(name: str, read: dict[Path, str]) -> dict[Path, str]:
    """Reads a module of the repository and what it imports of its own package: some options come from there."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        return read
    file = Path(found.origin)
    for source in file.parent.rglob("*.py") if file.name == "__init__.py" else [file]:
        if source not in read:
            read[source] = source.read_text(encoding="utf-8")
            for imported in re.findall(r"^from (benchmarks[\w.]+) import", read[source], re.MULTILINE):
                _read_sources(imported, read)
    return read
