"""Every code block of README.md and docs/ does what the page says.

The blocks of a page run in order, in one empty directory and, for Python, in one namespace. Blocks that CI cannot run have the
comment `<!-- not run: REASON -->` before them; `test_commands.py` still looks at what they name. Pages speak to a server of the
embedded model, which stands in for the default one: tests download nothing.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloister.launch import resolve_settings
from cloister.policy.oidc import read_oidc
from cloister.trust.attestation.policy_file import read_policy
from tests.docs.conftest import Sandbox
from tests.docs.pages import Block, iterate_blocks, list_pages, read_blocks

TIMEOUT_S = 300
STARTED_FOR_REAL = ("README.md",)
"""Pages whose servers are started; on the others their settings are resolved, which takes a fifth of the time."""
NAMED = re.compile(r"# (\w+\.toml)\n")
"""The first line of a configuration that the page's commands read."""
PARSERS: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads}
READERS: dict[str, Callable[[Path], object]] = {
    "docs/attestation.md": read_policy,
    "docs/cli.md": lambda path: resolve_settings({}, path),
    "docs/oidc.md": read_oidc,
    "docs/operations.md": lambda path: resolve_settings({}, path),
}
"""Who reads the configuration that a page shows."""


def list_run(*languages: str) -> list[str]:
    blocks = [block for block in iterate_blocks(*languages) if not block.reason]
    return [page for page in list_pages() if any(block.page == page for block in blocks)]


@pytest.mark.parametrize("page", list_run("bash", "python"))
def test_the_commands_and_programs_of_a_page_run(
    page: str, sandbox: Sandbox, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sandbox.directory)
    monkeypatch.setenv("HOME", sandbox.environment["HOME"])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in read_blocks(page):
        text = block.text.replace("127.0.0.1:8000", address).replace("localhost:8000", address)
        if block.reason:
            continue
        if block.language == "bash":
            run_shell(block, text, sandbox)
        elif block.language == "toml" and (named := NAMED.match(block.text)):
            Path(named[1]).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + text.replace("smollm2-135m", "cloister-5m"), block.page, "exec"), namespace)
    with warnings.catch_warnings():  # programs of a few lines leave it to their end to close connections
        warnings.simplefilter("ignore", ResourceWarning)
        namespace.clear()
        gc.collect()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("cloister keys add ann --file keys.json\ncloister keys add ann --file keys.json", "there is a key named 'ann'"),
        ("cloister serve cloister-5m --quant int3", "unknown number format"),
        ("curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{}'", "prompt"),
    ],
)
def test_a_command_that_fails_is_found_and_named(script: str, message: str, sandbox: Sandbox, address: str) -> None:
    block = Block("docs/shown.md", 7, "bash", script, reason="")
    with pytest.raises(AssertionError, match=r"docs/shown\.md:7") as caught:
        run_shell(block, script.replace("127.0.0.1:8000", address), sandbox)
    assert message in str(caught.value)


def run_shell(block: Block, script: str, sandbox: Sandbox) -> None:
    for program in ("curl", "openssl"):
        if program in script and shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    environment = {**sandbox.environment, **({} if block.page in STARTED_FOR_REAL else {"EXPLAIN": "1"})}
    script = script.replace("smollm2-135m", "cloister-5m").replace("--seeds 0..100", "--seeds 0..5")
    command = ["bash", "-euo", "pipefail", "-c", script]
    with subprocess.Popen(
        command, cwd=sandbox.directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{block}: not done after {TIMEOUT_S} s") from None
    assert process.returncode == 0, f"{block}: {printed}"
    assert '"error":' not in printed, f"{block}: {printed}"


@pytest.mark.parametrize("block", [block for block in iterate_blocks("python") if block.reason], ids=str)
def test_a_program_that_is_not_run_compiles_and_imports_what_there_is(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] == "cloister":
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("block", list(iterate_blocks("json", "toml")), ids=str)
def test_configuration_and_replies_are_what_they_say(block: Block, tmp_path: Path) -> None:
    assert PARSERS[block.language](block.text)
    is_reply = block.language == "json" and block.page != "docs/attestation.md"
    if block.page in READERS and not is_reply:
        file = tmp_path / f"shown.{block.language}"
        file.write_text(block.text.replace('"..."', f'"{"0" * 96}"'), encoding="utf-8")  # a digest of SHA-384
        READERS[block.page](file)
