"""The roofline model (Williams, Waterman and Patterson 2009): attainable performance of operators on a chip. Pure.

An operator of I operations per byte runs at min(peak, I x bandwidth) at most: below the ridge point, peak / bandwidth, it is
memory bound, above it compute bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from cloister.backends.spec import DecoderSpec, kv_size
from cloister.bench.chips import Chip
from cloister.bench.roofline_operators import Numbers, Operator, Work, cut, list_operators
from cloister.models.decoder import tensor_shapes
from cloister.types.errors import ConfigError

Bound = Literal["compute", "memory", "link"]


@dataclass(frozen=True, slots=True)
class RoofedOperator:
    """An operator with its minimal time.

    Attributes:
        seconds: time of all its calls in a step, at the tightest limit.
        bound: the tightest limit.
    """

    operator: Operator
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class StepRoofline:
    """Every operator of one step on one chip.

    Attributes:
        rows: in the order in which they are computed.
        compute_s, memory_s, link_s: time of the whole step if only this resource counted. Units for products and for vectors
            work concurrently; memory transfers weights and KV only.
    """

    work: Work
    rows: tuple[RoofedOperator, ...]
    compute_s: float
    memory_s: float
    link_s: float

    @cached_property
    def seconds(self) -> float:
        """Minimal time with one operator after another, each reading and writing memory."""
        return sum(row.seconds for row in self.rows)

    @property
    def limit_s(self) -> float:
        """The lower bound of any program: activations stay on the chip, arithmetic and transfers overlap."""
        return max(self.compute_s, self.memory_s, self.link_s)

    @property
    def limit_bound(self) -> Bound:
        times: Mapping[Bound, float] = {"compute": self.compute_s, "memory": self.memory_s, "link": self.link_s}
        return max(times, key=lambda bound: times[bound])

    def total(self, field: str) -> float:
        """Returns the sum of a figure of `Operator` over all calls."""
        return float(sum(getattr(row.operator, field) * row.operator.count for row in self.rows))


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a chip, or on `num_chips` of them.

    Attributes:
        weights_bytes, kv_bytes: per chip; KV at the length of the decode step.
    """

    model: str
    chip: Chip
    numbers: Numbers
    num_chips: int
    steps: tuple[StepRoofline, ...]
    weights_bytes: float
    kv_bytes: float

    @property
    def fits(self) -> bool:
        """Whether weights and KV fit into the chip's memory, if its size is known."""
        return self.chip.memory_bytes is None or self.weights_bytes + self.kv_bytes <= self.chip.memory_bytes


def draw_roofline(
    spec: DecoderSpec,
    chip: Chip,
    *,
    model: str,
    prompt: int = 512,
    context: int = 512,
    num_seqs: int = 1,
    numbers: Numbers | None = None,
    num_chips: int = 1,
    square: bool = False,
) -> Roofline:
    """Returns prefill of `num_seqs` prompts, and the decode step of as many sequences with `context` keys each.

    Raises:
        ConfigError: the chip lacks a number format or a link, or the model does not divide over `num_chips`.
    """
    numbers = numbers or Numbers()
    if num_chips > 1 and chip.link_bytes_per_s is None:
        raise ConfigError(f"{chip.name} has no link to others in the table; leave --tp at 1", param="tp")
    works = (Work.prefill(prompt, num_seqs, square), Work.decode(context, num_seqs, square))
    steps = tuple(put_under_roof(work, list_operators(spec, work, numbers, num_chips), chip) for work in works)
    part = cut(spec, num_chips)
    return Roofline(
        model, chip, numbers, num_chips, steps, _weights_bytes(part, numbers), num_seqs * context * _token_bytes(part, numbers)
    )


def put_under_roof(work: Work, operators: Iterable[Operator], chip: Chip) -> StepRoofline:
    """Returns a step with the minimal time of each operator on a chip."""
    rows = tuple(_put(operator, chip) for operator in operators)
    compute_s = max(_compute_times(rows, chip).values())
    moved = sum((row.operator.weights_bytes + row.operator.kv_bytes) * row.operator.count for row in rows)
    sent = sum(row.operator.link_bytes * row.operator.count for row in rows)
    return StepRoofline(work, rows, compute_s, moved / chip.read_bytes_per_s, sent / (chip.link_bytes_per_s or float("inf")))


def compute_time(operator: Operator, chip: Chip) -> float:
    """Returns the seconds of arithmetic in one call."""
    peak = chip.product_peak(operator.bits) if operator.unit == "matrix" else chip.vector_peak
    return operator.num_flops / peak


def _compute_times(rows: Iterable[RoofedOperator], chip: Chip) -> Mapping[str, float]:
    """Seconds of each unit of a chip."""
    times: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        times[row.operator.unit] += compute_time(row.operator, chip) * row.operator.count
    return times


def _put(operator: Operator, chip: Chip) -> RoofedOperator:
    times: Mapping[Bound, float] = {
        "memory": operator.num_bytes / chip.read_bytes_per_s,
        "compute": compute_time(operator, chip),
        "link": operator.link_bytes / (chip.link_bytes_per_s or float("inf")),
    }
    bound = max(times, key=lambda bound: times[bound])
    return RoofedOperator(operator, times[bound] * operator.count, bound)


def _weights_bytes(spec: DecoderSpec, numbers: Numbers) -> float:
    """Bytes of all tensors; norms and biases are as wide as activations."""
    total = 0.0
    for name, shape in tensor_shapes(spec):
        at_end = name.startswith(("embed.", "head."))
        bits = numbers.activation_bits if len(shape) == 1 else numbers.head_bits if at_end else numbers.weights_bits
        total += prod(shape) * bits / 8
    return total


def _token_bytes(spec: DecoderSpec, numbers: Numbers) -> float:
    """Bytes of KV that one position takes in all layers."""
    return sum(kv_size(layer.attention) for layer in spec.layers if layer.attention is not None) * numbers.kv_bits / 8
