"""Which kernels are compiled: those that are asked for, for this machine unless told, as far as the compiler knows them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.thinning import thin

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "ninja", "nm")
TARGET = "CMakeFiles/_native.dir/src/cloister/backends/native/cpp/cpu.cpp.o"

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, TOOLS)), reason="needs CMake, ninja and nm on x86-64"
)


SETS = ("amx", "bf16", "vnni", "avx512", "avxvnni", "avx2")
native = pytest.importorskip("cloister.backends.native._native", reason="this machine has no C++ compiler")


def run(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def configure(folder: Path, *settings: str) -> set[str]:
    """Returns the instruction sets that a build with these settings would compile."""
    fresh = ("-UCLOISTER_ISA", "-UCLOISTER_HAS_AMX", "-UCLOISTER_HAS_BF16")  # not those of the test before
    run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *fresh, *settings])
    built = (folder / "build.ninja").read_text()
    return {isa for isa in (*SETS, "scalar") if f"isa_{isa}.cpp.o:" in built}


@pytest.mark.parametrize("lacking", thin(["AMX", "BF16"], 1))
def test_kernels_that_the_compiler_cannot_make_are_neither_built_nor_named(lacking: str, folder: Path) -> None:
    built = configure(folder, "-DCLOISTER_ISA=all", f"-DCLOISTER_HAS_{lacking}=OFF")
    run(["ninja", "-C", folder, TARGET])
    named = run(["nm", "--undefined-only", folder / TARGET])
    for isa in (*SETS, "scalar"):
        is_there = isa.upper() != lacking
        assert (isa in built) == is_there
        assert (f"kernels_{isa}" in named) == is_there


def test_a_build_compiles_for_this_machine_unless_it_is_told_otherwise(folder: Path, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--kernels") is not None:
        pytest.skip("a build sees the whole processor")
    best = next(isa for isa in native.runnable_names() if isa in native.compiled_names())
    assert configure(folder) == {best, "avx2", "scalar"}
    assert configure(folder, "-DCLOISTER_ISA=all") == {*SETS, "scalar"}
    assert configure(folder, "-DCLOISTER_ISA=avx512,avx2") == {"avx512", "avx2", "scalar"}


def test_an_instruction_set_that_there_is_none_of_is_refused_with_those_that_there_are(folder: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        configure(folder, "-DCLOISTER_ISA=avx2,sse9")
    assert "sse9 is not an instruction set of x86_64" in " ".join(refused.value.stderr.split())
    assert "avx512" in refused.value.stderr
