"""Where Triton kernels run in tests: on a CUDA device, or in Triton's interpreter where there is none.

`use_interpreter` must have been called before anything imports triton, which reads the choice once.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HAS_GPU = Path("/dev/nvidiactl").exists()
DEVICE = "cuda" if HAS_GPU else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (pip install 'cloister[gpu]')")


def use_interpreter() -> None:
    """Lets kernels that are imported from now on run in the interpreter, if there is no GPU."""
    if HAS_GPU or not HAS_TRITON:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    _mend_interpreter()


def _mend_interpreter() -> None:
    """Corrects two faults of the interpreter of Triton 3.7, which a GPU does not have.

    It multiplies the bit patterns of bfloat16 instead of the numbers, and loses the carry where rounding to bfloat16 or FP8
    leads to the next power of two.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot, convert_float = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float
    rounded = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def as_numbers(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return create_dot(self, as_numbers(left), as_numbers(right), *others)

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in rounded:
            return convert_float(values, source, target, rounding)
        codes = torch.from_numpy(np.array(values, np.float32)).to(rounded[target])
        return codes.view(torch.uint16 if codes.itemsize == 2 else torch.uint8).numpy()

    interpreter.InterpreterBuilder.create_dot = multiply
    interpreter._convert_float = convert
