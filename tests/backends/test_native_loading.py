"""A compiled module that cannot be loaded is as good as none: another back end serves, and `doctor` says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from cloister.backends.availability import why_no_kernels

WHOLE = Path(pytest.importorskip("cloister.backends.native._native").__file__)
ASK = """
import sys
from importlib.machinery import PathFinder

NAME = "cloister.backends.native._native"

class OnlyThere:  # before the finders of an editable installation, which know where the whole module is
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        found = PathFinder.find_spec(name, sys.argv[1:])
        if found is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
        return found

sys.meta_path.insert(0, OnlyThere())
from cloister.backends.availability import why_no_kernels
from cloister.launch import resolve_settings
from cloister.launch.backend_choice import chosen_backend
from cloister.backends import BACKENDS
from cloister.cli.doctor import check_kernels
from cloister.types.errors import ConfigError
check = check_kernels(needed=False)
print(why_no_kernels(), chosen_backend(resolve_settings().engine.config), check.good, check.detail, sep="\\n")
try:
    BACKENDS.get("native")(num_threads=1, device="cpu")
except ConfigError as error:
    print(error.message)
"""


def ask(directory: Path) -> list[str]:
    """Returns, of a new process that looks for the module there: why not, the default back end, and what `doctor` finds."""
    told = subprocess.run([sys.executable, "-c", ASK, str(directory)], capture_output=True, text=True, timeout=300, check=True)
    return told.stdout.splitlines()


def cut_short(file: Path) -> None:
    file.write_bytes(WHOLE.read_bytes()[:40])


def be_no_module(file: Path) -> None:
    file.write_bytes(b"not compiled for this machine\n" * 100)


def lack_a_symbol(file: Path) -> None:
    symbol = b"\0_ZSt19__throw_logic_errorPKc\0"
    assert symbol in WHOLE.read_bytes()
    file.write_bytes(WHOLE.read_bytes().replace(symbol, symbol.swapcase()))


@pytest.mark.parametrize("damage", [cut_short, be_no_module, lack_a_symbol])
def test_kernels_that_do_not_load_are_not_chosen_and_doctor_says_why(damage: Callable[[Path], None], tmp_path: Path) -> None:
    damage(tmp_path / f"_native{EXTENSION_SUFFIXES[0]}")
    reason, backend, good, detail, refusal = ask(tmp_path)
    assert "cannot be loaded" in reason
    assert "reinstall" in reason
    assert backend == "torch"
    assert good == "False"
    assert detail.startswith("they cannot be loaded: ")
    assert refusal == reason


def test_kernels_that_are_not_there_were_not_compiled(tmp_path: Path) -> None:
    reason, backend, good, detail, refusal = ask(tmp_path)
    assert "C++ compiler" in reason
    assert (backend, good, detail.split(":")[0]) == ("torch", "False", "not compiled")
    assert refusal == reason


def test_kernels_that_load_are_available() -> None:
    assert why_no_kernels() is None


def test_a_module_from_a_machine_with_another_cpu_computes_and_says_that_it_could_be_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cloister.backends import BACKENDS
    from cloister.backends.native import _native

    BACKENDS.get("native")(num_threads=1, device="cpu")
    assert caplog.messages == []
    monkeypatch.setattr(_native, "compiled_names", lambda: ["scalar"])
    monkeypatch.setattr(_native, "runnable_names", lambda: ["avx2", "scalar"])
    BACKENDS.get("native")(num_threads=1, device="cpu")
    (message,) = caplog.messages
    assert message.startswith("computing with the kernels scalar; those for avx2, which this processor runs faster, were not")
