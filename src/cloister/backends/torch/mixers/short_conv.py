"""The gated short convolution of LFM2 (`backends.spec.ShortConvSpec`)."""

from __future__ import annotations

from torch import Tensor

from cloister.backends.spec import ShortConvSpec
from cloister.backends.torch.mixers.convolution import CausalConvolution
from cloister.backends.torch.reading import AnyLinear, WeightReader


class ShortConvMixer:
    """Mixes tokens (protocol `mixers.StateMixer`)."""

    def __init__(self, spec: ShortConvSpec, reader: WeightReader, prefix: str) -> None:
        self._in = reader.linear(f"{prefix}.in", bias=spec.bias)
        self._convolve = CausalConvolution(reader, f"{prefix}.conv", bias=spec.bias)
        self._out = reader.linear(f"{prefix}.out", bias=spec.bias)
        self.linears: tuple[AnyLinear, ...] = (self._in, self._out)
        self.num_features, self.num_mixed = 3 * spec.size, spec.size
        self.num_operations, self.num_output_operations = self._in.num_operations, self._out.num_operations

    def project(self, normed: Tensor) -> Tensor:
        """Returns B, C and x of each row."""
        return self._in(normed)

    def advance(self, features: Tensor, state: Tensor) -> Tensor:
        """Returns C * conv(B * x)."""
        b, c, x = features.tensor_split(3, dim=1)
        return self._convolve(b * x, state).mul_(c)

    def finish(self, mixed: Tensor) -> Tensor:
        """Projects."""
        return self._out(mixed)
