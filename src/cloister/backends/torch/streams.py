"""Several residual streams, and inputs of each layer by token (`backends.spec.StreamsSpec`), row by row."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cloister.backends.base import IntArray, Weights
from cloister.backends.spec import DecoderSpec, MlpSpec, StreamsSpec
from cloister.backends.tensors import GroupedTensor, dequantized, take_rows
from cloister.backends.tensors import Tensor as StoredTensor
from cloister.backends.torch.adapters import RowAdapters
from cloister.backends.torch.decoder import DecoderLayer
from cloister.backends.torch.layers import ACTIVATIONS, on_whole_vectors, rms_norm
from cloister.backends.torch.reading import WeightReader, to_torch

INPUT_TABLE = "layer_inputs.embed.weight"
"""Inputs of every layer by token; a file that holds numbers is mapped, codes are kept as such."""
_LEAST_SQUARE = 1e-5  # of a stream that is scaled to the size of another


def table_bytes(weights: Weights) -> int:
    """Returns the bytes that the table of layer inputs takes in memory: those of its codes."""
    form = weights.form(INPUT_TABLE)
    if not isinstance(form, GroupedTensor):
        return 0
    parts = (form.codes, form.scales, form.zeros, form.offsets)
    return weights.shape(INPUT_TABLE)[0] * sum(part[:1].nbytes for part in parts if part is not None)


class Streams:
    """What happens before the first layer and after the last.

    The embeddings of layer inputs stay where `weights` maps them, or in codes, and a step reads its rows.

    Attributes:
        linears: its products.
    """

    def __init__(self, spec: DecoderSpec, streams: StreamsSpec, weights: Weights, reader: WeightReader) -> None:
        self._spec, self._num_layers, self._eps = streams, len(spec.layers), spec.norm_eps
        self._embedding = weights.read(INPUT_TABLE)
        self._projection = reader.linear("layer_inputs.projection", bias=False)
        self._norm = reader.vector("layer_inputs.norm.weight")
        numbers = range(streams.num_streams - 1)
        self._into, self._out = (
            [reader.linear(f"{name}.{number}", bias=False) for number in numbers] for name in ("streams_in", "streams_out")
        )
        self.linears = (self._projection, *self._into, *self._out)

    def widen(self, embedded: Tensor) -> Tensor:
        """Returns the streams [num_rows, num_streams, hidden] of embeddings [num_rows, hidden]."""
        size = _mean_square(embedded).sqrt_()
        return torch.stack([embedded, *(_scaled_to(size, linear(embedded)) for linear in self._into)], dim=1)

    def read_inputs(self, embedded: Tensor, token_ids: IntArray) -> Tensor:
        """Returns the inputs of every layer [num_rows, num_layers, input_size].

        Args:
            token_ids: [num_tokens]; the other rows are padding.
        """
        size = self._spec.input_size
        projected = self._projection(embedded).mul_(embedded.shape[1] ** -0.5).view(len(embedded), self._num_layers, size)
        inputs = rms_norm(projected, self._norm, self._eps)
        rows = np.where(token_ids < self._spec.input_vocab, token_ids, 0)
        found = to_torch(_take(self._embedding, rows)).to(inputs.device).float().view(len(rows), self._num_layers, size)
        inputs[: len(rows)] += found * sqrt(size)
        return inputs.mul_(sqrt(0.5))

    def join(self, hidden: Tensor) -> Tensor:
        """Returns what the final norm reads, [num_rows, hidden], of the streams [num_rows, num_streams, hidden]."""
        total = hidden[:, 0].clone()
        size = _mean_square(total).sqrt_()
        for number, linear in enumerate(self._out, 1):
            total += _scaled_to(size, linear(hidden[:, number].contiguous()))
        return total.div_(self._spec.num_streams)


class StreamLayer(DecoderLayer):
    """One block of a decoder with several streams."""

    def __init__(self, spec: DecoderSpec, streams: StreamsSpec, number: int, reader: WeightReader) -> None:
        super().__init__(spec, number, reader)
        prefix, mlp = f"layers.{number}", spec.layers[number].mlp
        self._streams = streams
        self._activate = ACTIVATIONS[mlp.activation if isinstance(mlp, MlpSpec) else "gelu_tanh"]
        self._router = reader.linear(f"{prefix}.altup.router", bias=False, wide=True)
        self._router_norm = reader.norm(f"{prefix}.altup.norm", spec)
        self._scale = reader.vector(f"{prefix}.altup.scale") if streams.scaled else None
        self._predict = reader.linear(f"{prefix}.altup.predict", bias=False, wide=True)
        self._correct = reader.linear(f"{prefix}.altup.correct", bias=False, wide=True)
        self._laurel_left = reader.linear(f"{prefix}.laurel_left", bias=False)
        self._laurel_right = reader.linear(f"{prefix}.laurel_right", bias=False)
        self._laurel_norm = reader.norm(f"{prefix}.laurel_norm", spec)
        self._input_gate = reader.linear(f"{prefix}.layer_input_gate", bias=False)
        self._input_out = reader.linear(f"{prefix}.layer_input_out", bias=False)
        self._input_norm = reader.norm(f"{prefix}.layer_input_norm", spec)
        before = (self._router, self._predict)
        after = (self._correct, self._laurel_left, self._laurel_right, self._input_gate, self._input_out)
        self.linears = (*self.linears, *before, *after)
        self.project_operations += sum(linear.num_operations for linear in before)
        self.finish_operations += sum(linear.num_operations for linear in (self._router, *after))

    def project(
        self,
        hidden: Tensor,
        cos_sin: Tensor | None,
        queries: Tensor | None,
        slots: Tensor | None,
        adapters: RowAdapters | None = None,
        features: Tensor | None = None,
        index_features: Tensor | None = None,
    ) -> None:
        """Predicts the streams [num_rows, num_streams, hidden], in place, and does what any block does with the active one."""
        num_streams, active = self._streams.num_streams, self._streams.active
        weights = self._predict(self._route(hidden[:, active].contiguous())).view(-1, num_streams, num_streams, 1)
        hidden += torch.stack([_sum(hidden * weights[:, number]) for number in range(num_streams)], dim=1)
        super().project(hidden[:, active].contiguous(), cos_sin, queries, slots, adapters, features, index_features)

    def finish(
        self,
        hidden: Tensor,
        mixed: Tensor | None,
        adapters: RowAdapters | None = None,
        state_mixed: Tensor | None = None,
        layer_inputs: Tensor | None = None,
    ) -> None:
        """Corrects the streams by what the block makes of the active one, in place.

        Args:
            hidden: as `project` left it.
            layer_inputs: [num_rows, input_size].
        """
        predicted = hidden[:, self._streams.active].contiguous()
        rows = predicted.clone()
        self._add(rows, self._join(predicted, mixed, state_mixed, adapters))
        normed = predicted if self._attention_norm is None else self._attention_norm(predicted)
        rows += normed + self._laurel_norm(self._laurel_right(self._laurel_left(normed)))
        rows.div_(sqrt(2))
        self._add(rows, self._feed(rows, adapters))
        weights = self._correct(self._route(rows)).add_(1).unsqueeze(-1)
        hidden += (rows - predicted).unsqueeze(1) * weights
        if layer_inputs is not None:
            hidden[:, 1:] += self._embed_layer(hidden[:, self._streams.active], layer_inputs).unsqueeze(1)

    def _embed_layer(self, rows: Tensor, layer_inputs: Tensor) -> Tensor:
        """Returns what the token's own input of this layer adds, [num_rows, hidden]."""
        rows = rows.contiguous() if self._scale is None else rows * self._scale
        gates = on_whole_vectors(self._activate, self._input_gate(rows))
        return self._input_norm(self._input_out(gates * layer_inputs))

    def _route(self, rows: Tensor) -> Tensor:
        """Returns [num_rows, num_streams] of rows [num_rows, hidden]."""
        routed = self._router(self._router_norm(rows).mul_(1 / rows.shape[1]))
        return on_whole_vectors(torch.tanh, routed).contiguous()


def make_layer(spec: DecoderSpec, number: int, reader: WeightReader) -> DecoderLayer:
    """Returns a block of a decoder, with one residual stream or several."""
    if spec.streams is None:
        return DecoderLayer(spec, number, reader)
    return StreamLayer(spec, spec.streams, number, reader)


def _take(table: StoredTensor, rows: IntArray) -> npt.NDArray[Any]:
    numbers: npt.NDArray[Any] = table[rows] if isinstance(table, np.ndarray) else dequantized(take_rows(table, rows))
    return numbers


def _sum(streams: Tensor) -> Tensor:
    """Returns the sum over dimension 1, in the order of the streams."""
    total = streams[:, 0].clone()
    for number in range(1, streams.shape[1]):
        total += streams[:, number]
    return total


def _scaled_to(size: Tensor, rows: Tensor) -> Tensor:
    """Returns rows [num_rows, hidden] with the root mean squares [num_rows, 1]."""
    return rows * size / _mean_square(rows).clamp_(min=_LEAST_SQUARE).sqrt_()


def _mean_square(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return length.square_().div_(rows.shape[-1])
