"""`serve` starts the template of its engines before it knows anything else, where its engines will be forks of one."""

from __future__ import annotations

import gc
import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import cloister.trust
import cloister.trust.hardening
from cloister.cli import commands, forks_engines, main
from cloister.engine import spawning
from cloister.types.logs import OURS
from tests.serving import ServeProcess, find_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates are forked on Linux only")

UNNEEDED = (
    "cloister.scheduler.scheduler", "cloister.models.loading", "cloister.models.families", "cloister.backends.base",
    "cloister.quant", "cloister.launch.engine", "cloister.executor", "torch", "transformers",
)  # fmt: skip
"""What an engine needs and a front does not."""


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A server that is run in this process sets its log up."""
    root, ours, raises = logging.getLogger(), logging.getLogger(OURS), logging.raiseExceptions
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:], logging.raiseExceptions = handlers, raises
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def nothing_hardened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process."""
    monkeypatch.setattr(cloister.trust, "hardening", cloister.trust.hardening)  # what is imported anew takes its place
    monkeypatch.delitem(sys.modules, "cloister.trust.hardening", raising=False)


@pytest.mark.usefixtures("nothing_hardened")
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["serve"], True),
        (["serve", "cloister-5m", "--replicas", "2"], True),
        (["serve", "--profile", "private"], False),
        (["serve", "--profile=paranoid"], False),
        (["serve", "--backend=torch"], False),
        (["serve", "--on=ray"], False),
        (["serve", "--sealed"], False),
        (["serve", "--no-fork-server"], False),
        (["serve", "--backend", "torch"], False),
        (["serve", "--explain"], False),
        (["serve", "--help"], False),
        (["list"], False),
        ([], False),
    ],
)
def test_a_template_is_started_early_where_engines_are_likely_to_be_its_forks(arguments: Sequence[str], wanted: bool) -> None:
    assert forks_engines(arguments) is wanted


def test_a_process_that_may_be_sealed_starts_nothing_early() -> None:
    import cloister.trust.hardening  # noqa: F401

    assert not forks_engines(["serve"])


@pytest.mark.usefixtures("nothing_hardened")
def test_a_server_that_does_not_start_leaves_no_template_and_searches_for_garbage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    start = spawning.start_early_template

    def note(preloaded: str) -> None:
        start(preloaded)
        assert spawning._early is not None
        started.append(spawning._early[0])

    monkeypatch.setattr(spawning, "start_early_template", note)
    with pytest.raises(SystemExit):
        main(["serve", "--model", "/no/such/model", "--port", "0"])
    (process,) = started
    assert process.returncode is not None
    assert gc.isenabled()
    assert "no/such/model" in capsys.readouterr().err


@pytest.mark.parametrize("settings", ['profile = "private"', "fork_server = false"])
def test_one_that_a_file_of_settings_makes_useless_ends_before_the_server_serves(settings: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'model = "cloister-5m"\nnum_threads = 1\n{settings}\n')
    with ServeProcess("--config", str(tmp_path / "settings.toml"), "--weights-cache", str(tmp_path)) as server:
        assert find_processes(server.process.pid, "template") == []
        assert len(find_processes(server.process.pid, "engine")) == 1


def test_a_server_has_one_template_and_loads_no_models_itself(tmp_path: Path) -> None:
    with ServeProcess("--num-threads", "1", "--weights-cache", str(tmp_path)) as server:
        assert len(find_processes(server.process.pid, "template")) == 1
        assert len(find_processes(server.process.pid, "engine")) == 1


def test_a_front_imports_nothing_that_only_an_engine_needs() -> None:
    code = (
        "import json, sys\n"
        "import cloister.cli.serve, cloister.launch.default_model, cloister.launch.serving\n"
        "import cloister.server.app, cloister.server.traces, cloister.engine.client, cloister.cluster\n"
        "from cloister.launch import resolve_settings\n"
        "resolve_settings()\n"
        f"print(json.dumps([name for name in {UNNEEDED!r} if name in sys.modules]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == []


def test_an_engine_may_open_as_many_files_as_a_front_that_has_raised_its_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        spawning.start_early_template("")
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2304, hard), hard))
        taken = spawning.take_early_template()
        assert taken is not None
        process, near = taken
        try:
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (min(2304, hard), hard)
        finally:
            near.close()
            process.wait(timeout=300)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ctrl_c_while_the_command_is_imported_ends_with_130(monkeypatch: pytest.MonkeyPatch, nothing_hardened: None) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 130


@pytest.mark.parametrize("arguments", [["serve"], ["doctor"]])
def test_ctrl_c_before_any_verb_is_imported_ends_with_130(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, nothing_hardened: None
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spawning, "start_early_template", interrupt)
    monkeypatch.setattr(commands, "run", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 130
