"""Mamba 2 (`backends.spec.Mamba2Spec`) in its recurrent form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.spec import Mamba2Spec
from cloister.backends.torch.layers import ACTIVATIONS, on_whole_vectors, rms_norm
from cloister.backends.torch.mixers.convolution import CausalConvolution
from cloister.backends.torch.reading import AnyLinear, WeightReader


class Mamba2Mixer:
    """Mixes tokens (protocol `mixers.StateMixer`)."""

    def __init__(self, spec: Mamba2Spec, reader: WeightReader, prefix: str, eps: float) -> None:
        self._spec, self._eps = spec, eps
        self._in = reader.linear(f"{prefix}.in", bias=spec.projection_bias)
        self._convolve = CausalConvolution(reader, f"{prefix}.conv", bias=spec.conv_bias)
        self._decay_rates = -torch.exp(reader.vector(f"{prefix}.A_log"))
        self._skip = reader.vector(f"{prefix}.D")[:, None]
        self._dt_bias = reader.vector(f"{prefix}.dt_bias")
        self._norm = reader.vector(f"{prefix}.norm.weight").view(spec.num_groups, -1) if spec.norm else None
        self._out = reader.linear(f"{prefix}.out", bias=spec.output_bias)
        self._sections = (spec.inner_size, spec.inner_size, *(spec.num_groups * spec.d_state,) * 2, spec.num_heads)
        self.linears: tuple[AnyLinear, ...] = (self._in, self._out)
        self.num_features, self.num_mixed = sum(self._sections), 2 * spec.inner_size
        self.num_operations, self.num_output_operations = self._in.num_operations, self._out.num_operations

    def project(self, normed: Tensor) -> Tensor:
        """Returns z, x, B, C and dt of each row."""
        spec = self._spec
        features = self._in(normed if spec.input_scale == 1.0 else normed * spec.input_scale)
        for part, scale in zip(features.split_with_sizes(self._sections, dim=1), spec.section_scales, strict=True):
            if scale != 1.0:
                part.mul_(scale)
        return features

    def advance(self, features: Tensor, state: Tensor) -> Tensor:
        """Returns y, before gate and norm, and z of each token."""
        spec, num_tokens = self._spec, len(features)
        gate, inputs, dt = features.split_with_sizes((spec.inner_size, spec.conv_size, spec.num_heads), dim=1)
        window, recurrent = state.split_with_sizes((self._convolve.window_size, spec.inner_size * spec.d_state))
        convolved = on_whole_vectors(ACTIVATIONS[spec.activation], self._convolve(inputs, window))
        x, b, c = convolved.split_with_sizes((spec.inner_size, *(spec.num_groups * spec.d_state,) * 2), dim=1)
        dt = on_whole_vectors(F.softplus, dt + self._dt_bias).clamp(*spec.time_step_limit)
        decays = on_whole_vectors(torch.exp, dt * self._decay_rates)
        x = x.reshape(num_tokens, spec.num_heads, spec.head_dim)
        grouped = (num_tokens, spec.num_groups, -1)
        steps = (x * dt[..., None]).view(*grouped, spec.head_dim, 1)
        decays = decays.reshape(*grouped, 1, 1)
        b, c = (part.reshape(*grouped, spec.d_state)[:, :, :, None] for part in (b, c))
        states = recurrent.view(spec.num_groups, -1, spec.head_dim, spec.d_state)
        products = torch.empty_like(states)
        mixed = features.new_empty(num_tokens, 2 * spec.inner_size)
        for token in range(num_tokens):
            states.mul_(decays[token]).addcmul_(steps[token], b[token])
            mixed[token, : spec.inner_size] = torch.mul(states, c[token], out=products).sum(-1).flatten()
        mixed[:, : spec.inner_size].add_((x * self._skip).flatten(1))
        mixed[:, spec.inner_size :] = gate
        return mixed

    def finish(self, mixed: Tensor) -> Tensor:
        """Applies gate and norm, and projects."""
        out, gate = mixed.tensor_split(2, dim=1)
        gate = on_whole_vectors(F.silu, gate.contiguous())
        if self._norm is None or self._spec.norm == "after_gate":
            out = out * gate
        if self._norm is not None:
            out = rms_norm(out.reshape(len(out), *self._norm.shape[:1], -1), self._norm, self._eps).flatten(1)
        if self._norm is not None and self._spec.norm == "before_gate":
            out = out * gate
        projected = self._out(out)
        return projected if self._spec.output_scale == 1.0 else projected.mul_(self._spec.output_scale)
