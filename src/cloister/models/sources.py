"""Where a module's tensors lie in a checkpoint, and how they are transformed when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.base import Weights
from cloister.backends.spec import GatedDeltaNetSpec, LayerSpec, MlpSpec, MoeSpec
from cloister.backends.tensors import QuantizedTensor, Tensor, take_rows
from cloister.models.config import ConfigFields
from cloister.models.quantized import Stored
from cloister.types.errors import ModelError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a module lies.

    Attributes:
        name: of the stored module; the first {} is the layer, the second the expert.
        parts: modules of the same layer whose outputs lie one after another in the stored one; () if it is alone.
        by_head: parts take turns head by head (GPT-NeoX).
        filters: matrices lie as [channels, 1, kernel_size] (a convolution with one filter for each channel).
        by_row: parts take turns row by row (gpt-oss).
        stacked: the stored tensor has one for each expert, along its first axis.
        is_tensor: `name` is the tensor's own, with nothing like ".weight" behind it.
        transposed: matrices lie as [in, out] (GPT-2's Conv1D).
        either_way: they may lie as [out, in] instead; those of a shape that fits both do (Qwen3-VL's experts: published files
            are transposed, and transformers 5 writes them otherwise).
        skip: rows before the first that counts (OPT's positions).
        added: what to add to every number (Gemma stores the weights of norms less one).
        instead: where other checkpoints have it: alone if `stacked`, else in a stack, as exporters differ.
    """

    name: str
    parts: tuple[str, ...] = ()
    by_head: bool = False
    filters: bool = False
    transposed: bool = False
    skip: int = 0
    added: float = 0.0
    by_row: bool = False
    stacked: bool = False
    is_tensor: bool = False
    either_way: bool = False
    instead: Source | None = None

    def name_of(self, name: str) -> str:
        """Returns what a checkpoint calls the tensor that holds the one of a canonical name."""
        found = self.name.format(*(part for part in name.split(".") if part.isdigit()))
        return found if self.is_tensor else f"{found}.{name.rpartition('.')[2]}"

    @property
    def is_plain(self) -> bool:
        """Whether the stored tensor is the tensor."""
        return self == Source(self.name, is_tensor=self.is_tensor)

    @property
    def keeps_rows(self) -> bool:
        """Whether the tensor is a run of rows of the stored one, which a quantised matrix can be cut into too."""
        return self == Source(self.name, self.parts)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where one tensor lies in a stored one.

    Attributes:
        shape: of the tensor.
        stored_shape: of the stored one, before it is transposed.
        start: its first row.
        num_heads: turns of each part, where they take turns; 0 otherwise.
        expert: whose tensor it is of a stack; None where the stored one is no stack.
    """

    source: Source
    shape: Shape
    stored_shape: Shape
    start: int
    num_heads: int
    expert: int | None = None

    def fitted_to(self, stored_shape: Shape) -> TensorSlice:
        """Returns where the tensor lies in a stored one of that shape, if the source has matrices either way."""
        *before, num_in, num_out = self.stored_shape
        plain = (*before, num_out, num_in)
        if not self.source.either_way or stored_shape != plain:
            return self
        return replace(self, source=replace(self.source, transposed=False), stored_shape=plain)

    def take_turns(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns this tensor's rows of a stored one whose parts take turns, [num_rows, ...]."""
        first, num_rows = self.start // self.num_heads, self.shape[0] // self.num_heads
        heads = rows.reshape(self.num_heads, -1, *rows.shape[1:])
        return heads[:, first : first + num_rows].reshape(-1, *rows.shape[1:])


def module_of(name: str) -> str:
    """Returns the module of a canonical tensor name without its numbers, such as "experts.up" (`backends.base`)."""
    return ".".join(part for part in name.split(".")[:-1] if part != "layers" and not part.isdigit())


def find_place(source: Source, name: str, shapes: Mapping[str, Shape], num_heads: int) -> TensorSlice:
    """Returns where a tensor lies.

    Args:
        name: its canonical name.
        shapes: of all tensors of the decoder, by canonical name.
        num_heads: of the layer that it is in.
    """
    prefix, _, last = name.rpartition(".")
    layer, _, module = prefix.rpartition(".")
    parts = source.parts or (module,)
    rows = [shapes[f"{layer}.{part}.{last}" if layer else name][0] for part in parts]
    part = parts.index(module) if source.parts else 0
    shape = shapes[name]
    whole = (sum(rows) + source.skip, *shape[1:])
    stored = whole[::-1] if source.transposed else whole
    if source.filters and len(whole) == 2:
        stored = (whole[0], 1, whole[1])
    turns = rows[0] if source.by_row else num_heads if source.by_head else 0
    start = source.skip + sum(rows[:part])
    if not source.stacked:
        return TensorSlice(source, shape, stored, start, turns)
    before, _, expert = layer.rpartition(".")  # "layers.0.experts", "3"
    stack = (shapes[f"{before.removesuffix('.experts')}.router.weight"][0], *stored)
    return TensorSlice(source, shape, stack, start, turns, int(expert))


def num_heads_of(layer: LayerSpec) -> int:
    """Returns the heads by which parts of a layer's stored tensors take turns; 0 where there are none."""
    if layer.attention is not None:
        return layer.attention.num_heads
    return layer.state.num_key_heads if isinstance(layer.state, GatedDeltaNetSpec) else 0


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor that is made of a stored one when it is read (protocol `quantized.Stored`); a run of rows stays mapped."""

    stored: Stored
    place: TensorSlice

    @property
    def shape(self) -> Shape:
        return self.place.shape

    def form(self) -> QuantizedTensor | None:
        return self.stored.form()

    def read(self) -> Tensor:
        tensor, start = self.stored.read(), self.place.start
        if isinstance(tensor, np.ndarray):
            return self._map(tensor)
        if not self.place.num_heads:
            return take_rows(tensor, slice(start, start + self.shape[0]))
        return take_rows(tensor, self.place.take_turns(np.arange(len(tensor.codes), dtype=np.int32)))

    def _map(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        place = self.place
        array = array if place.expert is None else array[place.expert]
        array = array.T if place.source.transposed else array
        array = array.reshape(len(array), -1) if array.ndim == 3 else array
        start, num_rows = place.start, place.shape[0]
        array = place.take_turns(array) if place.num_heads else array[start : start + num_rows]
        if place.source.added:
            array = array.astype(np.float32) + np.float32(place.source.added)
        return np.ascontiguousarray(array)


class StoredWeights(Weights):
    """Tensors of a checkpoint or a GGUF file by canonical name; nothing is in memory before it is read."""

    def __init__(self, entries: Mapping[str, Stored]) -> None:
        self._entries = dict(entries)

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def form(self, name: str) -> QuantizedTensor | None:
        return self._entries[name].form()

    def read(self, name: str) -> Tensor:
        return self._entries[name].read()


# Which layers are mixtures of experts, and what their tensors are called.


TRAINING_OF_EXPERTS = frozenset(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"))
"""Fields that only training reads."""

_MOST_EXPERTS = 65536


QWEN_EXPERTS: Mapping[str, Source] = {
    "router": Source("model.layers.{}.mlp.gate"),
    "experts.gate": Source("model.layers.{}.mlp.experts.{}.gate_proj"),
    "experts.up": Source("model.layers.{}.mlp.experts.{}.up_proj"),
    "experts.down": Source("model.layers.{}.mlp.experts.{}.down_proj"),
}


def take_counts(fields: ConfigFields) -> tuple[int, int]:
    """Returns (experts, experts that a token passes)."""
    num_experts, num_chosen = fields.take_size("num_experts"), fields.take_size("num_experts_per_tok")
    if num_experts > _MOST_EXPERTS:
        raise ModelError(f"a layer has {_MOST_EXPERTS} experts at most, not {num_experts}", param="num_experts")
    if num_chosen > num_experts:
        raise ModelError(
            f"num_experts_per_tok is {num_chosen}, but there are {num_experts} experts", param="num_experts_per_tok"
        )
    return num_experts, num_chosen


def take_moe(fields: ConfigFields, mlp: MlpSpec, shared: MlpSpec | None = None) -> MoeSpec:
    """Returns the mixture that Qwen's fields describe; `mlp` is the dense feed-forward, `shared` what all tokens pass."""
    num_experts, num_chosen = take_counts(fields)
    expert = replace(mlp, intermediate_size=fields.take_size("moe_intermediate_size"))
    renormalize = fields.take("norm_topk_prob", bool, False)
    return MoeSpec(num_experts, num_chosen, expert, renormalize, shared, shared_gate=shared is not None)


def place_mixtures(fields: ConfigFields, mlp: MlpSpec, moe: MoeSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    """Returns each layer's feed-forward: every `decoder_sparse_step`-th is a mixture, but for `mlp_only_layers` (Qwen)."""
    step, dense = fields.take_size("decoder_sparse_step", 1), fields.take_any("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise ModelError("mlp_only_layers must list numbers of layers", param="mlp_only_layers")
    return [moe if number not in dense and (number + 1) % step == 0 else mlp for number in range(num_layers)]
