"""Compiles kernels for GPUs that are not here: `python -m tests.compiling 90` prints what each kernel takes on sm_90.

With `--spills` every kernel is assembled once more, to count the bytes of registers that went to memory. With `--few` attention
is compiled in three variants, and every other kernel in one.

Triton brings its own assembler, so that everything but running can be checked on any machine. The launches are the real
ones: a driver that only names its target stands in, and a launch ends when the kernel is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class AbsentGpu:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record_compiled(
    capability: int, work: Callable[[], object], *, spills: bool = False, few: bool = False
) -> dict[str, dict[str, int]]:
    """Does `work` with every launch compiled but not run; returns what the largest variant of each kernel takes.

    `shared` is shared memory in bytes, `variants` how many were compiled, `spilled` bytes of registers that went to memory.

    Args:
        few: compiles the first variants of a kernel only, as `--few` says.
    """
    driver.set_active(AbsentGpu(capability))
    launch = JITFunction.run
    found: dict[str, dict[str, int]] = {}
    seen: set[str] = set()

    def compile_only(self: Any, *args: Any, **settings: Any) -> None:
        name = self.fn.__name__
        if few and found.get(name, {}).get("variants", 0) >= (3 if name == "attend_kernel" else 1):
            return
        compiled = launch(self, *args, **{**settings, "warmup": True})
        if compiled.hash in seen:
            return
        seen.add(compiled.hash)
        entry = found.setdefault(name, {"shared": 0, "variants": 0, **({"spilled": 0} if spills else {})})
        entry["shared"] = max(entry["shared"], compiled.metadata.shared)
        if spills:
            entry["spilled"] = max(entry["spilled"], _spilled_bytes(compiled.asm["ptx"], capability))
        entry["variants"] += 1

    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = launch
    return found


def _spilled_bytes(ptx: str, capability: int) -> int:
    """Assembles once more, and reads how much was spilled."""
    name = "ptxas" if capability < 100 else "ptxas-blackwell"
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        suffix = "a" if capability >= 90 else ""
        command = [assembler, "-v", f"--gpu-name=sm_{capability}{suffix}", "--fmad=false", source.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    words = report.replace(",", "").split()
    return max((int(words[i - 1]) for i in range(2, len(words)) if words[i : i + 3] == ["bytes", "spill", "stores"]), default=0)


if __name__ == "__main__":
    from tests.compiling_work import work, work_in_fp8

    capability = int(sys.argv[1])
    spills, few = "--spills" in sys.argv, "--few" in sys.argv
    taken = record_compiled(capability, work, spills=spills, few=few)
    if capability >= 89:
        taken |= record_compiled(capability, work_in_fp8, spills=spills, few=few)
    print(json.dumps(taken))
