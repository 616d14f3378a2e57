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
    """Corrects faults of the interpreter of Triton 3.6 to 3.9, which a GPU does not have.

    It multiplies the bit patterns of bfloat16 instead of the numbers; it multiplies with BLAS, where the bits of a row depend
    on its place in a tile (with the kernels for AVX2, and those for some newer processors); and it loses the carry where
    rounding to bfloat16 or FP8 leads to the next power of two. 3.6 takes no array of one element as the bound of a loop; 3.9
    refuses masks that became whole numbers by broadcasting. And at each call of a function inside a kernel it looks through the
    whole language for what to patch, which the kernel's launch has patched.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot, convert_float = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float
    create_load, create_store = (
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    rounded = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def as_numbers(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply(self: Any, left: Any, right: Any, to: Any, *others: Any) -> Any:
        left, right = as_numbers(left), as_numbers(right)
        if left.data.dtype != np.float32 or right.data.dtype != np.float32:
            return create_dot(self, left, right, to, *others)
        total = np.zeros_like(to.data)
        for inner in range(left.data.shape[-1]):
            total += left.data[..., inner, None] * right.data[..., inner, None, :]
        return interpreter.TensorHandle(total + to.data, to.dtype.scalar)

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in rounded:
            return convert_float(values, source, target, rounding)
        codes = torch.from_numpy(np.array(values, np.float32)).to(rounded[target])
        return codes.view(torch.uint16 if codes.itemsize == 2 else torch.uint8).numpy()

    def as_booleans(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        return create_load(self, pointers, as_booleans(mask), *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return create_store(self, pointers, value, as_booleans(mask), *others)

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if is_patched else patch_language(function)

    interpreter.InterpreterBuilder.create_dot = multiply
    interpreter.InterpreterBuilder.create_masked_load = load
    interpreter.InterpreterBuilder.create_masked_store = store
    interpreter._patch_lang_tensor, interpreter._patch_lang = patch, patch_once
    interpreter._convert_float = convert
