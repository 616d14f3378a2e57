"""Feed-forwards in torch: one for all tokens, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import TypeAlias

import torch
from torch import Tensor

from cloister.backends.spec import ClippedSwiGLU, MlpSpec, MoeSpec
from cloister.backends.torch.adapters import RowAdapters
from cloister.backends.torch.layers import ACTIVATIONS, on_whole_vectors
from cloister.backends.torch.linear import common_tiles, pad_rows
from cloister.backends.torch.reading import AnyLinear, WeightReader
from cloister.backends.torch.routing import choose_experts

Activate: TypeAlias = Callable[[Tensor], Tensor]


class Mlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))).

    Args:
        activations: by the names of specs.

    Attributes:
        linears: its products.
        num_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(
        self, spec: MlpSpec, reader: WeightReader, prefix: str, activations: Mapping[str, Activate] = ACTIVATIONS
    ) -> None:
        self._activate, self._is_gated, self._clipped = activations[spec.activation], spec.gated, spec.clipped
        self._gate_scale, self._output_scale, self._sparsity = spec.gate_scale, spec.output_scale, spec.sparsity
        self._prefix, self._names = prefix, ("gate", "up") if spec.gated else ("up",)
        self._into = reader.linear(*(f"{prefix}.{name}" for name in self._names), bias=spec.bias)
        self._down = reader.linear(f"{prefix}.down", bias=spec.bias)
        self.linears: tuple[AnyLinear, ...] = (self._into, self._down)
        self.num_operations = sum(linear.num_operations for linear in self.linears)

    def __call__(self, rows: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Returns [num_rows, hidden] for rows of the same shape; num_rows as `linear.pad_rows` gives."""
        inner = self._into(rows)
        if adapters is not None:
            adapters.add(self._prefix, self._names, rows, inner)
        inner = self._bend(inner)
        out = self._down(inner)
        if adapters is not None:
            adapters.add(self._prefix, ("down",), inner, out)
        return out if self._output_scale == 1.0 else out.mul_(self._output_scale)

    def _bend(self, inner: Tensor) -> Tensor:
        if not self._is_gated:
            return on_whole_vectors(self._activate, inner)
        gate, up = inner.chunk(2, dim=-1)
        gate = gate if self._gate_scale == 1.0 else gate * self._gate_scale
        gate = keep_largest(gate, self._sparsity) if self._sparsity else gate
        return self._activate(gate).mul_(up) if self._clipped is None else clipped_swiglu(gate, up, self._clipped)


def clipped_swiglu(gate: Tensor, up: Tensor, spec: ClippedSwiGLU) -> Tensor:
    """Returns what enters the last product of a feed-forward, [num_rows, intermediate] as both arguments."""
    gate = gate.clamp(max=spec.limit)
    opening = on_whole_vectors(torch.sigmoid, gate * spec.alpha)
    return gate.mul_(opening).mul_(up.clamp(-spec.limit, spec.limit).add_(1))


def keep_largest(gate: Tensor, sparsity: float) -> Tensor:
    """Returns gates [num_rows, intermediate] less a value below which about that part of a row lies, and 0 for that part."""
    gate = gate.contiguous()
    mean = gate.sum(-1, keepdim=True).div_(gate.shape[-1])
    deviation = torch.linalg.vector_norm(gate - mean, dim=-1, keepdim=True).div_(gate.shape[-1] ** 0.5)
    return torch.relu(gate - (mean + deviation * NormalDist().inv_cdf(sparsity)))


class Mixture:
    """A mixture of experts (`backends.spec.MoeSpec`), and beside it a feed-forward that all tokens share.

    An expert multiplies the rows that chose it in tiles of fixed size, and a row adds its experts up in the order of their
    numbers: its bits do not depend on what others chose (batch invariance).

    Attributes:
        linears, num_operations: as in `Mlp`; operations are those of one row.
    """

    def __init__(self, spec: MoeSpec, reader: WeightReader, prefix: str) -> None:
        self._spec = spec
        self._router = reader.linear(f"{prefix}.router", bias=spec.router_bias, wide=True)
        self._correction = reader.vector(f"{prefix}.router.e_score_correction_bias") if spec.correction_bias else None
        self._experts = [Mlp(spec.expert, reader, f"{prefix}.experts.{number}") for number in range(spec.num_experts)]
        self._shared = None if spec.shared is None else Mlp(spec.shared, reader, f"{prefix}.shared")
        self._shared_router = reader.linear(f"{prefix}.shared_router", bias=False, wide=True) if spec.shared_gate else None
        in_experts = tuple(linear for expert in self._experts for linear in expert.linears)
        self._tiles = common_tiles(*(linear.tiles for linear in in_experts))
        routers = (self._router,) if self._shared_router is None else (self._router, self._shared_router)
        self.linears: tuple[AnyLinear, ...] = (*routers, *in_experts, *(self._shared.linears if self._shared else ()))
        self.num_operations = (
            sum(router.num_operations for router in routers)
            + spec.num_chosen * self._experts[0].num_operations
            + (self._shared.num_operations if self._shared else 0)
        )

    def __call__(self, rows: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Returns [num_rows, hidden] for rows of the same shape; num_rows as `linear.pad_rows` gives. No adapter changes it."""
        scores, chosen = self.choose(rows)
        out = torch.zeros_like(rows)
        for number in sorted(set(chosen.flatten().tolist())):
            places, ranks = torch.nonzero(chosen == number, as_tuple=True)
            given, weights = rows.index_select(0, places), scores[places, ranks].unsqueeze(1)
            if self._spec.weigh_inputs:
                given.mul_(weights)
            found = self._experts[number](self._pad(given))[: len(places)]
            out.index_add_(0, places, found if self._spec.weigh_inputs else found.mul_(weights))
        return out if self._shared is None else out.add_(self._share(rows, self._shared))

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and the numbers of each row's experts (`routing.choose_experts`)."""
        return choose_experts(self._spec, self._router(rows), self._correction)

    def _share(self, rows: Tensor, shared: Mlp) -> Tensor:
        out = shared(rows)
        if self._shared_router is None:
            return out
        return out.mul_(on_whole_vectors(torch.sigmoid, self._shared_router(rows)))

    def _pad(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(pad_rows(len(rows), self._tiles), rows.shape[1])
        padded[: len(rows)] = rows
        return padded


def make_feed_forward(spec: MlpSpec | MoeSpec, reader: WeightReader, prefix: str) -> Mlp | Mixture:
    """Returns the feed-forward of the layer whose names begin with `prefix`."""
    return Mixture(spec, reader, prefix) if isinstance(spec, MoeSpec) else Mlp(spec, reader, prefix)
