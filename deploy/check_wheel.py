"""What a wheel must do before it is published: answer on the native kernels, without torch, from its own files."""

from __future__ import annotations

import sys
from importlib.metadata import distribution

from cloister import LLM, SamplingParams
from cloister.backends.native import _native


def check_wheel() -> str:
    """Returns a word on what was seen.

    Raises:
        RuntimeError: the wheel is not fit to publish; the message says why.
    """
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
