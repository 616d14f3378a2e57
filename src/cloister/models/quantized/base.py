"""The protocol of quantized checkpoints: the tensors of a matrix under a method's own names, and the object that decodes
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import Activations, GroupedTensor, QuantizedTensor, Tensor
from cloister.models.safetensors import TensorEntry
from cloister.types.errors import ModelError

_SMALLEST_GROUP = 16


class Stored(Protocol):
    """A tensor on disk.

    Attributes:
        shape: of the tensor itself, whatever it is stored as.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def form(self) -> QuantizedTensor | None:
        """Returns a row [1, in] of the kind that `read` returns, not its values; None for numbers."""
        ...

    def read(self) -> Tensor: ...


class Scheme(Protocol):
    """How one method stores matrices."""

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        """Takes a matrix's parts out of `found`; None, and nothing taken, where the module is not quantised.

        Args:
            module: the family's name of the module in the checkpoint, such as "model.layers.0.mlp.up_proj".
            shape: [out, in] that config.json asks for.
            found: tensors of the checkpoint by name that nobody has taken yet.

        Raises:
            ModelError: a part is missing, or has another shape or type than it should.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that is put together from its parts when it is read (protocol `Stored`)."""

    shape: tuple[int, ...]
    form: Callable[[], QuantizedTensor | None]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class StackPlace:
    """Where the matrices of all experts of a layer lie, in one tensor of a checkpoint.

    Attributes:
        name: of the tensor, such as "model.layers.0.mlp.experts.down_proj"; parts beside it have names that begin so.
        shape: [experts, out, in] that config.json asks for.
        layouts: how the files may hold a matrix: True for [in, out], False for [out, in]; the first that fits counts.
    """

    name: str
    shape: tuple[int, int, int]
    layouts: tuple[bool, ...]

    def lay(self, num_out: int, num_in: int, transposed: bool) -> tuple[int, int, int]:
        """Returns the shape of a part that has so many numbers along outputs and inputs."""
        return (self.shape[0], num_in, num_out) if transposed else (self.shape[0], num_out, num_in)

    def take(self, found: dict[str, TensorEntry], dtypes: tuple[str, ...], num_in: int) -> tuple[TensorEntry, bool]:
        """Takes the tensor itself, which has `num_in` numbers along inputs, and says whether matrices lie as [in, out]."""
        shapes: list[tuple[int, ...]] = [self.lay(self.shape[1], num_in, transposed) for transposed in self.layouts]
        entry = take_part(found, self.name, dtypes, *shapes)
        return entry, self.layouts[shapes.index(entry.shape)]

    def one_number_each(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of a part with one number for all experts, or for each."""
        num_experts = self.shape[0]
        return (), (1,), (num_experts,), (num_experts, 1), (num_experts, 1, 1)


@dataclass(frozen=True, slots=True)
class StackedMatrices:
    """The matrices of all experts of a layer, each put together when it is read.

    Attributes:
        shape: [experts, out, in].
        read: returns some outputs of one expert's matrix.
    """

    shape: tuple[int, int, int]
    form: Callable[[], QuantizedTensor | None]
    read: Callable[[int, slice], Tensor]

    def take(self, expert: int, rows: slice) -> Stored:
        """Returns some outputs of one expert's matrix."""
        num_rows = len(range(*rows.indices(self.shape[1])))
        return StoredMatrix((num_rows, self.shape[2]), self.form, lambda: self.read(expert, rows))


@runtime_checkable
class StackScheme(Scheme, Protocol):
    """A method that stores the matrices of all experts of a layer together, too."""

    def take_stack(self, place: StackPlace, found: dict[str, TensorEntry]) -> StackedMatrices | None:
        """Takes a stack's parts out of `found`; None, and nothing taken, where it is not quantised.

        Raises:
            ModelError: a part is missing, or has another shape or type than it should.
        """
        ...


def take_part(
    found: dict[str, TensorEntry], stored: str, dtypes: Mapping[str, object] | tuple[str, ...], *shapes: tuple[int, ...]
) -> TensorEntry:
    """Takes one part of a quantised matrix out of `found`.

    Args:
        dtypes: types that it may have, as safetensors files call them.
        shapes: shapes that it may have; none given allows any.
    """
    if stored not in found:
        raise ModelError(f"the checkpoint lacks the tensor {stored!r} of a quantised matrix; download or copy it again")
    entry = found.pop(stored)
    if entry.dtype not in dtypes:
        raise ModelError(f"tensor {stored!r} has the type {entry.dtype}; supported are: {', '.join(dtypes)}")
    if shapes and entry.shape not in shapes:
        raise ModelError(f"tensor {stored!r} has the shape {entry.shape}, {' or '.join(map(str, shapes))} is expected")
    return entry


def cut_stack(entry: TensorEntry, expert: int, rows: slice, transposed: bool) -> npt.NDArray[Any]:
    """Returns some outputs of one expert's matrix, of a part of a stack."""
    matrix = entry.read()[expert]
    return np.ascontiguousarray((matrix.T if transposed else matrix)[rows])


class Parts:
    """The tensors of one module."""

    def __init__(self, module: str, found: dict[str, TensorEntry]) -> None:
        self.module, self._found = module, found

    def has(self, name: str) -> bool:
        return f"{self.module}.{name}" in self._found

    def dtype(self, name: str) -> str:
        """Returns a part's type as safetensors files call it; "" when there is no such part."""
        entry = self._found.get(f"{self.module}.{name}")
        return entry.dtype if entry is not None else ""

    def take(self, name: str, dtypes: Mapping[str, object] | tuple[str, ...], *shapes: tuple[int, ...]) -> TensorEntry:
        """Takes one part (`take_part`)."""
        return take_part(self._found, f"{self.module}.{name}", dtypes, *shapes)

    def drop(self, *names: str) -> None:
        """Takes parts that change nothing here, where they exist."""
        for name in names:
            self._found.pop(f"{self.module}.{name}", None)

    def drop_zero_bias(self) -> None:
        """Takes a bias of zeros, which some exporters write beside matrices that have none."""
        entry = self._found.get(f"{self.module}.bias")
        if entry is not None and not np.any(np.asarray(entry.read(), np.float32)):
            self.drop("bias")


def resolve_group_size(group_size: int, module: str, num_inputs: int) -> int:
    """Returns the inputs that share a scale, for a config's group size; -1 stands for all.

    Raises:
        ModelError: no kernel reads such groups.
    """
    size = num_inputs if group_size == -1 else group_size
    if size <= 0 or num_inputs % size or (size != num_inputs and size % _SMALLEST_GROUP):
        raise ModelError(
            f"{module} has groups of {size} of {num_inputs} inputs; supported are group sizes that divide the inputs and are a "
            f"multiple of {_SMALLEST_GROUP}, or -1",
            param="group_size",
        )
    return size


def form_row(
    num_in: int,
    bits: int,
    group_size: int,
    scales: TensorEntry,
    activations: Activations,
    *,
    has_zeros: bool,
    order: npt.NDArray[np.int32] | None = None,
    rotation: int = 0,
) -> GroupedTensor:
    """Returns a row of the kind that a matrix of groups is (`Stored.form`); scales that no float16 may hold count as wide."""
    shape = 1, num_in // group_size
    scale = 1.0 if scales.dtype == "F16" else 1 / 3
    return GroupedTensor(
        codes=np.zeros((1, num_in), np.uint8),
        scales=np.full(shape, scale, np.float32),
        zeros=np.zeros(shape, np.uint8) if has_zeros else None,
        offsets=None,
        bits=bits,
        group_size=group_size,
        activations=activations,
        order=order,
        rotation=rotation,
    )


def read_order(indexes: npt.NDArray[Any], group_size: int, module: str) -> npt.NDArray[np.int32] | None:
    """Returns the order that sorts inputs by their group, None when they lie in order already.

    Args:
        indexes: [in] the group of each input (g_idx).
    """
    if indexes.min() < 0 or np.any(np.bincount(indexes, minlength=len(indexes) // group_size) != group_size):
        raise ModelError(f"{module} has groups of unequal size in its g_idx; it was written wrongly, or is damaged")
    order = np.argsort(indexes, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(len(order))) else order


def unless_symmetric(zeros: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8] | None:
    """Returns None for zeros that all lie in the middle, where kernels need not read them."""
    return None if np.all(zeros == 2 ** (bits - 1)) else np.ascontiguousarray(zeros)


# Codes packed into 32-bit words, several to a word, the first in the lowest bits.


Codes = npt.NDArray[np.uint8]


def unpack_rows(words: npt.NDArray[Any], bits: int) -> Codes:
    """Returns codes [rows, columns * 32 / bits] of words [rows, columns]."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)  # bytes of a word lie in order already: safetensors are little-endian
    codes = np.empty((len(words), words.shape[1], 32 // bits), np.uint8)
    halves = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.shape[1], 4)
    codes[:, :, 0::2], codes[:, :, 1::2] = halves & 15, halves >> 4
    return codes.reshape(len(words), -1)


def pack_rows(codes: Codes, bits: int) -> npt.NDArray[np.int32]:
    """Returns words [rows, columns * bits / 32] of codes [rows, columns]; zeros fill the last word."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    joined = padded if bits == 8 else padded[:, 0::2] | (padded[:, 1::2] << 4)
    return np.ascontiguousarray(joined).view(np.int32)
