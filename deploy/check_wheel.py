"""What a wheel must do before it is published: answer with its own kernels, of every instruction set, and without torch."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import distribution

from cloister import LLM, SamplingParams
from cloister.backends.native import _native

SETS: Mapping[str, set[str]] = {
    "x86_64": {"amx", "bf16", "vnni", "avx512", "avxvnni", "avx2", "scalar"},
    "aarch64": {"neon", "scalar"},
}
"""Instruction sets that a published wheel has kernels for (CMakeLists.txt), whatever machine built it."""


def check_wheel() -> str:
    """Returns a word on what was seen.

    Raises:
        RuntimeError: the wheel is not fit to publish; the message says why.
    """
    missing = sorted(SETS[platform.machine()] - set(_native.compiled_names()))
    if missing:
        raise RuntimeError(f"the kernels {', '.join(missing)} are missing; build with -C cmake.define.CLOISTER_ISA=all")
    with LLM(backend="native") as llm:
        answer = llm.generate("The king", SamplingParams(temperature=0.0, max_tokens=8))[0]
    if not answer.text:
        raise RuntimeError("the embedded model answered with nothing")
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported on the way")
    sources = [str(path) for path in distribution("cloister").files or () if path.suffix in (".cpp", ".hpp", ".inc")]
    if sources:
        raise RuntimeError(f"the wheel carries sources: {', '.join(sources)}")
    return f"{distribution('cloister').version} answers with the kernels {', '.join(_native.kernel_names())}"


if __name__ == "__main__":
    print(check_wheel())
