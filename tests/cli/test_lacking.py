"""What people see where something was not installed: one line that says what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cloister.types.extras import install_command
from tests.lacking import KERNELS, lacking
from tests.vision_factory import make_vision_model

ROOT = Path(__file__).parents[2]


def cloister(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cloister.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_without_kernels_and_torch_a_verb_says_in_one_line_what_to_install(verb: str, tmp_path: Path) -> None:
    more = {"run": ["Hello"], "serve": ["--port", "0"]}[verb]
    done = cloister(verb, "cloister-5m", *more, environment=lacking(tmp_path, KERNELS, "torch"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch is not installed, and the native kernels were not compiled")
    assert "apt install g++" in line
    assert "cloister[torch]" in line


def test_without_torch_the_torch_back_end_says_how_to_install_it(tmp_path: Path) -> None:
    done = cloister("run", "cloister-5m", "Hello", "--backend", "torch", environment=lacking(tmp_path, "torch"))
    assert done.stderr == f"error: torch is not installed; install it with: {install_command('torch')}\n"


def test_without_torch_a_model_with_an_image_tower_says_what_needs_it(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path / "model")
    done = cloister("run", "--model", str(path), "Hello", environment=lacking(tmp_path, "torch"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: the image tower of this model needs torch: torch is not installed; ")
    assert "pip install 'cloister[torch]'" in done.stderr


def test_a_torch_that_does_not_load_says_why(tmp_path: Path) -> None:
    environment = lacking(tmp_path, "no.such.module")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    done = cloister("run", "cloister-5m", "Hello", "--backend", "torch", environment=environment)
    assert done.stderr.startswith("error: torch cannot be loaded (libtorch.so: cannot open shared object file)")


def test_the_doctor_names_the_extra_that_brings_torch(tmp_path: Path) -> None:
    environment = {**lacking(tmp_path, KERNELS, "torch"), "COLUMNS": "300"}
    done = cloister("doctor", "--no-hub", environment=environment)
    assert done.returncode == 1
    assert "pip install 'cloister[torch]'" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become a user without a home")
def test_a_user_without_a_home_or_a_name_is_answered_and_told_that_nothing_is_kept() -> None:
    nameless = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--inh-caps=+dac_read_search"]
    nameless += ["--ambient-caps=+dac_read_search", "--securebits=+no_setuid_fixup"]  # the interpreter may lie in root's home
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [*nameless, sys.executable, "-m", "cloister.cli", "run", "cloister-5m", "Hello", "--max-tokens", "1"]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("this user has no home, so packed weights are not kept")


def test_without_a_compiler_tests_of_the_kernels_are_skipped_and_others_collected(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "env"):
        (tools / name).symlink_to(shutil.which(name) or "/bin/false")
    environment = {**lacking(tmp_path, KERNELS), "PATH": str(tools)}
    files = ("tests/policy/attacks/test_prefix_cache.py", "tests/types/test_clock.py")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "test_clock.py" in done.stdout
    assert "test_prefix_cache" not in done.stdout
