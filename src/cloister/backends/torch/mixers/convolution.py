"""The causal convolution over positions that mixers begin with: one filter for each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from cloister.backends.torch.reading import WeightReader


class CausalConvolution:
    """out[t] = bias + sum over j of filter[j] * in[t - kernel_size + 1 + j].

    Products and sums are rounded one by one, in the order of positions, so that a number's bits depend on nothing else.
    """

    def __init__(self, reader: WeightReader, name: str, *, bias: bool) -> None:
        self._filters = reader.read(f"{name}.weight", torch.float32).t().contiguous()
        self._bias = reader.vector(f"{name}.bias") if bias else None
        self.kernel_size, self.num_channels = self._filters.shape
        self.window_size = (self.kernel_size - 1) * self.num_channels

    def __call__(self, inputs: Tensor, window: Tensor) -> Tensor:
        """Returns [num_tokens, num_channels] for as many inputs.

        Args:
            window: [window_size], the inputs before these, oldest first; they are replaced by the last ones.
        """
        num_tokens = len(inputs)
        seen = torch.cat([window.view(self.kernel_size - 1, self.num_channels), inputs])
        out = seen[:num_tokens] * self._filters[0]
        for j in range(1, self.kernel_size):
            out.add_(seen[j : j + num_tokens] * self._filters[j])
        if self._bias is not None:
            out.add_(self._bias)
        window.copy_(seen[num_tokens:].reshape(-1))
        return out
