"""The modules of a decoder in torch, built from a spec and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cloister.backends.base import Weights
from cloister.backends.spec import LayerSpec
from cloister.backends.tensors import Activations, activations_of, dequantized
from cloister.backends.tensors import Tensor as AnyTensor
from cloister.backends.torch.layers import ACTIVATIONS, rms_norm, rotate
from cloister.backends.torch.linear import Linear
from cloister.backends.torch.rounded import JoinedLinear, RoundedLinear
from cloister.backends.torch.team import Team

AnyLinear: TypeAlias = Linear | RoundedLinear | JoinedLinear


class WeightReader:
    """Reads tensors onto a device, one at a time."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, team: Team) -> None:
        self._weights, self._dtype, self._device, self._team = weights, dtype, device, team

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return to_torch(dequantized(self._weights.read(name))).to(self._device, dtype)

    def norm(self, name: str) -> Tensor:
        """A norm's weight; norms are computed in float32."""
        return self.read(f"{name}.weight", torch.float32)

    def linear(self, *names: str, bias: bool) -> AnyLinear:
        """Projections of the same input, joined into one product as far as they take that input in the same form."""
        tensors = {name: self._weights.read(f"{name}.weight") for name in names}
        parts = [
            self._join({name: tensors[name] for name in run}, bias, activations)
            for activations, run in groupby(names, lambda name: activations_of(tensors[name]))
        ]
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)

    def _join(self, tensors: Mapping[str, AnyTensor], bias: bool, activations: Activations) -> Linear | RoundedLinear:
        dtype = torch.float32 if activations == "int8" else self._dtype
        weight = torch.cat([to_torch(dequantized(tensor)).to(self._device, dtype) for tensor in tensors.values()])
        offset = torch.cat([self.read(f"{name}.bias", dtype) for name in tensors]) if bias else None
        return (RoundedLinear if activations == "int8" else Linear)(weight, offset, self._team)


class Layer:
    """One block of the decoder, all but attention itself: what is computed row by row.

    Attributes:
        project_operations, finish_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(self, spec: LayerSpec, reader: WeightReader, prefix: str, norm_eps: float) -> None:
        attention, mlp = spec.attention, spec.mlp
        self.attention = attention
        self._eps = norm_eps
        self._activate = ACTIVATIONS[mlp.activation]
        self._attention_norm = reader.norm(f"{prefix}.attention_norm")
        self._mlp_norm = reader.norm(f"{prefix}.mlp_norm")
        self._qkv = reader.linear(*(f"{prefix}.{name}" for name in "qkv"), bias=attention.qkv_bias)
        self._o = reader.linear(f"{prefix}.o", bias=attention.output_bias)
        self._gate_up = reader.linear(f"{prefix}.gate", f"{prefix}.up", bias=mlp.bias)
        self._down = reader.linear(f"{prefix}.down", bias=mlp.bias)
        self._qk_norms = (reader.norm(f"{prefix}.q_norm"), reader.norm(f"{prefix}.k_norm")) if attention.qk_norm else None
        self.linears = (self._qkv, self._o, self._gate_up, self._down)
        self.project_operations = self._qkv.num_operations
        self.finish_operations = sum(linear.num_operations for linear in (self._o, self._gate_up, self._down))

    def project(self, hidden: Tensor, cos_sin: Tensor, queries: Tensor, keys_values: Tensor) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and keys and values [num_rows, 2, num_kv_heads, head_dim].

        Args:
            cos_sin: [2, num_rows, 1, head_dim / 2].
        """
        spec = self.attention
        normed = rms_norm(hidden, self._attention_norm, self._eps)
        heads = self._qkv(normed).view(hidden.shape[0], -1, spec.head_dim)
        query, key, value = heads.tensor_split((spec.num_heads, spec.num_heads + spec.num_kv_heads), dim=1)
        if self._qk_norms is not None:
            query = rms_norm(query, self._qk_norms[0], self._eps)
            key = rms_norm(key, self._qk_norms[1], self._eps)
        rotate(query, cos_sin, queries)
        queries.mul_(spec.scale)
        rotate(key, cos_sin, keys_values[:, 0])
        keys_values[:, 1] = value

    def finish(self, hidden: Tensor, mixed: Tensor) -> None:
        """Adds the outputs of attention [num_rows, num_heads * head_dim] and of the feed-forward to `hidden`, in place."""
        hidden.add_(self._o(mixed))
        normed = rms_norm(hidden, self._mlp_norm, self._eps)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        hidden.add_(self._down(self._activate(gate).mul_(up)))


def to_torch(array: npt.NDArray[Any]) -> Tensor:
    """Returns a tensor with its own copy of an array (torch has no name for the bfloat16 of numpy, and maps no file)."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(array).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
