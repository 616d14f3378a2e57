"""Several residual streams, and inputs of each layer by token (`backends.spec.StreamsSpec`): what the kernels need of them
(cpp/streams.cpp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.base import Weights
from cloister.backends.native import _native
from cloister.backends.native.packing import PackedKind, PackedMatrix, Packer, packed_bytes
from cloister.backends.spec import StreamsSpec
from cloister.backends.tensors import Tensor

INPUT_TABLE: Final = "layer_inputs.embed.weight"
_OF_LAYER: Final = ("laurel_left", "laurel_right", "layer_input_gate", "layer_input_out")
_NUMBERS: Final[Mapping[np.dtype[Any], int]] = {
    np.dtype(np.float32): 0,
    np.dtype(ml_dtypes.bfloat16): 1,
    np.dtype(np.float16): 2,
}  # cpp/kernels.hpp, `NumberType`
_LANES: Final = 16  # kernels read whole vectors of norms


def stream_matrices(spec: StreamsSpec, num_layers: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields (packed name, canonical names of the tensors without `.weight`, one below the other)."""
    others = range(spec.num_streams - 1)
    if others:
        yield "streams_in", [f"streams_in.{number}" for number in others]
    yield from ((f"streams_out.{number}", [f"streams_out.{number}"]) for number in others)
    yield "layer_inputs.projection", ["layer_inputs.projection"]
    for number in range(num_layers):
        yield from ((f"layers.{number}.{name}", [f"layers.{number}.{name}"]) for name in _OF_LAYER)


def stream_vectors(spec: StreamsSpec, hidden: int, num_layers: int) -> Iterator[tuple[str, int]]:
    """Yields (canonical name, length) of what is kept in float32, as `model.vectors_of`."""
    padded, num_streams = -(-hidden // _LANES) * _LANES, spec.num_streams
    yield "layer_inputs.norm.weight", -(-spec.input_size // _LANES) * _LANES
    for prefix in (f"layers.{number}." for number in range(num_layers)):
        yield f"{prefix}altup.router.weight", num_streams * hidden
        yield f"{prefix}altup.predict.weight", num_streams**3
        yield f"{prefix}altup.correct.weight", num_streams**2
        yield from ((f"{prefix}{name}.weight", padded) for name in ("altup.norm", "laurel_norm", "layer_input_norm"))
        if spec.scaled:
            yield f"{prefix}altup.scale", padded


class InputTable:
    """The inputs of all layers by token: a mapped file whose rows a step reads, or packed codes where they come in few bits.

    Attributes:
        numbers: [num_rows, size] in one of the types that kernels read; None where there are codes.
        packed: codes; None where there are numbers.
    """

    def __init__(self, weights: Weights, packer: Packer) -> None:
        tensor = weights.read(INPUT_TABLE)
        self.numbers = _as_stored(tensor) if isinstance(tensor, np.ndarray) else None
        self.packed: PackedMatrix | None = None if isinstance(tensor, np.ndarray) else packer.join([tensor], [None])

    def bind(self) -> dict[str, Any]:
        """Returns the kernels' view, as arguments; it does not keep the arrays alive."""
        if self.packed is not None or self.numbers is None:
            packed = None if self.packed is None else self.packed.bind()
            return {"packed": packed, "numbers": None, "number_type": 0, "num_rows": 0}
        return {
            "packed": None,
            "numbers": self.numbers.reshape(-1).view(np.uint8),
            "number_type": _NUMBERS[self.numbers.dtype],
            "num_rows": len(self.numbers),
        }


def table_bytes(weights: Weights, dense: PackedKind) -> int:
    """Returns the bytes that the table takes in memory: none where a file of numbers is mapped."""
    form = weights.form(INPUT_TABLE)
    return 0 if form is None else packed_bytes([form], weights.shape(INPUT_TABLE)[0], dense, has_bias=False)


def _as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    array = np.asarray(tensor)
    return np.ascontiguousarray(array if array.dtype in _NUMBERS else array.astype(np.float32))


def bind_streams(
    program: _native.Program,
    spec: StreamsSpec,
    matrices: Mapping[str, PackedMatrix],
    vectors: Mapping[str, npt.NDArray[np.float32]],
    table: InputTable,
) -> None:
    """Gives a program what comes before its first layer and after its last; called before layers are added."""
    program.set_streams(
        num_streams=spec.num_streams,
        active=spec.active,
        input_size=spec.input_size,
        streams_in=matrices["streams_in"].bind() if spec.num_streams > 1 else None,
        streams_out=[matrices[f"streams_out.{number}"].bind() for number in range(spec.num_streams - 1)],
        projection=matrices["layer_inputs.projection"].bind(),
        projection_norm=vectors["layer_inputs.norm.weight"],
        **table.bind(),
    )


def bind_stream_layer(
    spec: StreamsSpec,
    hidden: int,
    prefix: str,
    matrices: Mapping[str, PackedMatrix],
    vectors: Mapping[str, npt.NDArray[np.float32]],
) -> _native.StreamLayer:
    """Returns what the layer whose names begin with `prefix` has for streams."""

    def norm(name: str) -> _native.Norm:
        return _native.Norm(weight=vectors[f"{prefix}{name}.weight"], bias=None)

    return _native.StreamLayer(
        num_streams=spec.num_streams,
        hidden=hidden,
        router=vectors[f"{prefix}altup.router.weight"],
        predict=vectors[f"{prefix}altup.predict.weight"],
        correct=vectors[f"{prefix}altup.correct.weight"],
        scale=vectors[f"{prefix}altup.scale"] if spec.scaled else None,
        router_norm=norm("altup.norm"),
        laurel_norm=norm("laurel_norm"),
        input_norm=norm("layer_input_norm"),
        laurel_left=matrices[f"{prefix}laurel_left"].bind(),
        laurel_right=matrices[f"{prefix}laurel_right"].bind(),
        input_gate=matrices[f"{prefix}layer_input_gate"].bind(),
        input_out=matrices[f"{prefix}layer_input_out"].bind(),
    )
