"""Linear attention with the gated delta rule (`backends.spec.GatedDeltaNetSpec`), in its recurrent form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.spec import GatedDeltaNetSpec
from cloister.backends.torch.layers import ACTIVATIONS, on_whole_vectors, rms_norm
from cloister.backends.torch.mixers.convolution import CausalConvolution
from cloister.backends.torch.reading import AnyLinear, WeightReader

_LENGTH_EPS = 1e-6
"""Added to the squared length of a query or key before the root."""


class GatedDeltaNetMixer:
    """Mixes tokens (protocol `mixers.StateMixer`)."""

    def __init__(self, spec: GatedDeltaNetSpec, reader: WeightReader, prefix: str, eps: float) -> None:
        self._spec, self._eps = spec, eps
        self._in = reader.linear(*(f"{prefix}.{name}" for name in "qkvzba"), bias=False)
        self._convolve = CausalConvolution(reader, f"{prefix}.conv", bias=False)
        self._decay_rates = -torch.exp(reader.vector(f"{prefix}.A_log"))
        self._dt_bias = reader.vector(f"{prefix}.dt_bias")
        self._norm = reader.vector(f"{prefix}.norm.weight")
        self._out = reader.linear(f"{prefix}.out", bias=False)
        self._sections = (spec.conv_size, spec.value_size, spec.num_value_heads, spec.num_value_heads)
        self.linears: tuple[AnyLinear, ...] = (self._in, self._out)
        self.num_features, self.num_mixed = sum(self._sections), 2 * spec.value_size
        self.num_operations, self.num_output_operations = self._in.num_operations, self._out.num_operations

    def project(self, normed: Tensor) -> Tensor:
        """Returns q, k, v, z, b and a of each row."""
        return self._in(normed)

    def advance(self, features: Tensor, state: Tensor) -> Tensor:
        """Returns the outputs of the heads, before their norm, and z of each token."""
        spec, num_tokens = self._spec, len(features)
        inputs, gate, b, a = features.split_with_sizes(self._sections, dim=1)
        window, recurrent = state.split_with_sizes((self._convolve.window_size, spec.value_size * spec.key_head_dim))
        convolved = on_whole_vectors(ACTIVATIONS[spec.activation], self._convolve(inputs, window))
        queries_keys = convolved[:, : 2 * spec.key_size].reshape(num_tokens, 2, spec.num_key_heads, spec.key_head_dim)
        values = convolved[:, 2 * spec.key_size :].reshape(num_tokens, spec.num_key_heads, -1, spec.value_head_dim, 1)
        heads = (num_tokens, spec.num_key_heads, -1, 1, 1)
        betas = on_whole_vectors(torch.sigmoid, b.contiguous()).reshape(heads)
        steps = on_whole_vectors(F.softplus, a + self._dt_bias)
        decays = on_whole_vectors(torch.exp, steps * self._decay_rates).reshape(heads)
        states = recurrent.view(spec.num_key_heads, -1, spec.value_head_dim, spec.key_head_dim)
        products = torch.empty_like(states)
        mixed = features.new_empty(num_tokens, 2 * spec.value_size)
        for token in range(num_tokens):
            query, key = _of_length_one(queries_keys[token])[:, :, None, None]
            states.mul_(decays[token])
            missing = values[token] - torch.mul(states, key, out=products).sum(-1, keepdim=True)
            states.addcmul_(missing.mul_(betas[token]), key)
            mixed[token, : spec.value_size] = torch.mul(states, query, out=products).sum(-1).flatten()
        mixed[:, : spec.value_size].mul_(spec.key_head_dim**-0.5)
        mixed[:, spec.value_size :] = gate
        return mixed

    def finish(self, mixed: Tensor) -> Tensor:
        """Normalises each head, applies the gate, and projects."""
        out, gate = mixed.tensor_split(2, dim=1)
        normed = rms_norm(out.reshape(len(out), self._spec.num_value_heads, -1), self._norm, self._eps)
        return self._out(normed.flatten(1) * on_whole_vectors(F.silu, gate.contiguous()))


def _of_length_one(heads: Tensor) -> Tensor:
    """Divides one token's queries and keys [2, num_key_heads, key_head_dim] by their lengths.

    One token at a time: a sum's bits may depend on how many others are computed with it.
    """
    return heads / heads.square().sum(-1, keepdim=True).add_(_LENGTH_EPS).sqrt_()
