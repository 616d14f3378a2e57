"""Weights as torch takes them, read one at a time."""

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
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import InputRounding, dequantized, rounding_of
from cloister.backends.tensors import Tensor as AnyTensor
from cloister.backends.torch.layers import Norm
from cloister.backends.torch.linear import JoinedLinear, Linear, RoundedLinear
from cloister.backends.torch.schedule import Team

AnyLinear: TypeAlias = Linear | RoundedLinear | JoinedLinear


class WeightReader:
    """Reads tensors onto a device, one at a time."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, team: Team) -> None:
        self._weights, self._dtype, self._device, self._team = weights, dtype, device, team

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return to_torch(dequantized(self._weights.read(name))).to(self._device, dtype)

    def vector(self, name: str) -> Tensor:
        """A norm's weight or bias; norms are computed in float32."""
        return self.read(name, torch.float32)

    def matrix(self, name: str) -> Tensor:
        """A matrix [outputs, inputs] in the program's type, dequantised."""
        return self.read(f"{name}.weight", self._dtype)

    def norm(self, name: str, spec: DecoderSpec) -> Norm:
        """A norm of the residual stream."""
        bias = self.vector(f"{name}.bias") if spec.norm_bias else None
        return Norm(spec.norm, self.vector(f"{name}.weight"), bias, spec.norm_eps)

    def linear(self, *names: str, bias: bool, wide: bool = False) -> AnyLinear:
        """Projections of the same input, joined into one product as far as they take that input in the same form.

        Args:
            wide: the product is one of float32 whatever the program's type, where a rounded answer would choose otherwise.
        """
        tensors = {name: self._weights.read(f"{name}.weight") for name in names}
        parts = [
            self._join({name: tensors[name] for name in run}, bias, rounding, wide)
            for rounding, run in groupby(names, lambda name: rounding_of(tensors[name]))
        ]
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)

    def _join(
        self, tensors: Mapping[str, AnyTensor], bias: bool, rounding: InputRounding | None, wide: bool
    ) -> Linear | RoundedLinear:
        dtype = torch.float32 if wide or rounding else self._dtype
        weight = torch.cat([to_torch(dequantized(tensor)).to(self._device, dtype) for tensor in tensors.values()])
        offset = torch.cat([self.read(f"{name}.bias", dtype) for name in tensors]) if bias else None
        return RoundedLinear(weight, offset, self._team, rounding) if rounding else Linear(weight, offset, self._team)


def to_torch(array: npt.NDArray[Any]) -> Tensor:
    """Returns a tensor with its own copy of an array (torch has no name for the bfloat16 of numpy, and maps no file)."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(array).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
