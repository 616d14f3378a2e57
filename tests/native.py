"""What tests of the native back end share: instruction sets of this machine, specs of awkward sizes, weights made by hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends import native
from cloister.backends.base import FloatArray
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import Tensor, dequantized
from cloister.cli.doctor import COMPILERS
from tests.driving import Driver, build, make_spec

if native.available() is not None and not any(shutil.which(name) for name in COMPILERS):
    pytest.skip("there is no C++ compiler here", allow_module_level=True)

from cloister.backends.native import _native

KERNELS = tuple(_native.kernel_names())
NARROW = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32)
WINDOWED = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, window=50, qk_norm=True)
MANY_HEADS = make_spec(hidden=100, intermediate=50, heads=(6, 6), head_dim=10)
SPECS = {"narrow": NARROW, "windowed": WINDOWED, "many heads": MANY_HEADS}


class GivenWeights:
    """Weights from a dict (protocol `backends.base.Weights`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def form(self, name: str) -> None:
        return None

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())


def build_native(spec: DecoderSpec, weights: object, *, dtype: str = "float32", **options: object) -> Driver:
    """`build` for the native back end."""
    return build(spec, weights, backend="native", dtype=dtype, **options)  # type: ignore[arg-type]


def without_layers(vocab: int, hidden: int) -> DecoderSpec:
    """A model that is nothing but an embedding, a norm that adds no epsilon, and a head: one product."""
    return DecoderSpec("bare", vocab, hidden, (), 0.0, 4096)


def multiply(
    head: Tensor, rows: FloatArray, norm: FloatArray, *, num_rows: int, dtype: str = "float32", **options: object
) -> FloatArray:
    """Computes `rows / rms(rows) * norm @ head.T` for the first `num_rows`; head and rows are [vocab, hidden]."""
    weights = GivenWeights({"embed.weight": rows, "norm.weight": norm, "head.weight": head})
    program = build_native(without_layers(*head.shape), weights, dtype=dtype, num_blocks=8, **options)
    return program.run("a", list(range(num_rows)))


def exact_product(head: Tensor, rows: FloatArray, norm: FloatArray) -> npt.NDArray[np.float64]:
    """`multiply` in float64."""
    wide = rows.astype(np.float64)
    normed = wide / np.sqrt(np.square(wide).mean(1, keepdims=True)) * norm
    product: npt.NDArray[np.float64] = normed @ np.asarray(dequantized(head)).astype(np.float64).T
    return product


def relative_error(found: FloatArray, exact: npt.NDArray[np.floating]) -> float:
    """Length of the difference over the length of what is right."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
