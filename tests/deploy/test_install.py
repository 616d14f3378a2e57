"""How an installation shows how far it is, and what it says when it fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.install import describe
from tests.package_index import package_index

PROGRAM = Path(__file__).parents[2] / "deploy" / "install.py"


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--log", str(folder / "logs" / "pip.log"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_each_object_of_the_compiler_is_counted_and_named() -> None:
    said = (
        "  [3/27] Building CXX object CMakeFiles/_native.dir/src/cloister/backends/native/cpp/isa_avx2.cpp.o\n",
        "  [27/27] Linking CXX shared module _native.cpython-311-x86_64-linux-gnu.so\n",
        "Collecting numpy>=1.26 (from cloister==0.1.0)\n",
        "  warning: nobody needs to see this\n",
    )
    assert list(describe(said)) == ["compiled 3 of 27: isa_avx2.cpp", "installing numpy"]


def test_an_installation_names_its_packages_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with package_index(monkeypatch) as index:
        index.add("tiny", "1.0", {"tiny.py": b"A = 1"})
        done = install(tmp_path, "--no-cache-dir", "--dry-run", "tiny")
    assert (done.returncode, done.stdout) == (0, "  installing tiny\n"), done.stderr
    assert index.asked[-1] == "/files/tiny-1.0-py3-none-any.whl"


def test_an_installation_that_fails_says_what_pip_said_and_where_the_rest_is(tmp_path: Path) -> None:
    done = install(tmp_path, "--no-index", "tiny")
    assert done.returncode == 1
    assert "No matching distribution found for tiny" in done.stderr
    assert f"{tmp_path / 'logs' / 'pip.log'} has all that it said" in done.stderr


def test_an_installation_that_is_ended_ends_pip(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text("import os, time\nprint(f'Collecting pid{os.getpid()}', flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as program:
        assert program.stdout is not None
        pid = program.stdout.readline().split("pid")[1].strip()
        program.send_signal(signal.SIGTERM)
        assert program.wait(300) == 143
    assert not Path(f"/proc/{pid}").exists()
