"""A compiler that does not know an instruction set makes the kernels of the others."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "ninja", "nm")
TARGET = "CMakeFiles/_native.dir/src/cloister/backends/native/cpp/cpu.cpp.o"

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, TOOLS)), reason="needs CMake, ninja and nm on x86-64"
)


def run(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.parametrize("lacking", ["AMX", "BF16"])
def test_kernels_that_the_compiler_cannot_make_are_neither_built_nor_named(lacking: str, tmp_path: Path) -> None:
    settings = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCLOISTER_HAS_{lacking}=OFF"]
    run(["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *settings])
    run(["ninja", "-C", tmp_path, TARGET])
    named = run(["nm", "--undefined-only", tmp_path / TARGET])
    built = (tmp_path / "build.ninja").read_text()
    for isa in ("avx2", "avx512", "vnni", "bf16", "amx", "scalar"):
        is_there = isa.upper() != lacking
        assert (f"isa_{isa}.cpp" in built) == is_there
        assert (f"kernels_{isa}" in named) == is_there
