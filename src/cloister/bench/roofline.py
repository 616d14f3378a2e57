"""The roofline model (Williams, Waterman and Patterson 2009): attainable performance of operators on a chip, as a table, as
Markdown and as JSON. Pure.

An operator of I operations per byte runs at min(peak, I x bandwidth) at most: below the ridge point, peak / bandwidth, it is
memory bound, above it compute bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
HEADERS = (
    "operator", "calls", "computation", "FLOP", "weights B", "activations B", "KV B", "FLOP/B", "bound", "at the roof", "share",
)  # fmt: skip
WIDEST = HEADERS.index("computation")
"""The column to omit on narrow terminals."""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


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


# The figures as a table, as Markdown and as JSON.


def list_rows(step: StepRoofline) -> list[tuple[str, ...]]:
    """Returns the table of one step under `HEADERS`: figures of all calls together, and a last row of sums."""
    rows = [_row(row, step) for row in step.rows]
    sums = (step.total(field) for field in ("num_flops", "weights_bytes", "activations_bytes", "kv_bytes"))
    total = ("all", "", "", *(scale(value) for value in sums), f"{step.total('num_flops') / step.total('num_bytes'):.2f}")
    return [*rows, (*total, "", scale_time(step.seconds), "100%")]


def describe_work(work: Work) -> str:
    """Returns a description of a step."""
    seqs = "1 sequence" if work.num_seqs == 1 else f"{work.num_seqs} sequences"
    if work.name == "prefill":
        return f"Prefill: {seqs} of {work.num_queries} tokens"
    return f"Decode: 1 token of {seqs}, {work.context} keys each"


def describe_roof(roofline: Roofline) -> list[str]:
    """Returns the lines above the tables: the model, the chip and its ridge points."""
    chip, numbers = roofline.chip, roofline.numbers
    widths = f"weights {numbers.weights_bits:g}, activations {numbers.activation_bits:g}, KV {numbers.kv_bits:g} bits"
    peaks = ", ".join(f"{form} {scale(peak)}FLOP/s" for form, peak in chip.peaks.items())
    bits = max(numbers.weights_bits, numbers.activation_bits)
    lines = [
        f"{roofline.model}: {widths}"
        + (f", embedding and head {numbers.head_bits:g}" * (numbers.head_bits != numbers.weights_bits)),
        f"{chip.name}: {peaks}; memory {scale(chip.read_bytes_per_s)}B/s ({chip.source})",
        f"ridge point {chip.ridge(bits):.1f} FLOP/B for products in {chip.product_format(bits)}",
    ]
    if roofline.num_chips > 1:
        lines.append(f"one of {roofline.num_chips} chips, tensor parallel; link {scale(chip.link_bytes_per_s or 0)}B/s one way")
    return lines


def describe_step(step: StepRoofline) -> str:
    """Returns the line below a table: the time of the step, and tokens per second."""
    tokens = step.work.num_tokens
    apart = f"{scale_time(step.seconds)} = {tokens / step.seconds:,.1f} tokens/s one operator after the other"
    limit = f"{scale_time(step.limit_s)} = {tokens / step.limit_s:,.1f} tokens/s fused and overlapped"
    return f"at the roof: {apart}; limit: {limit} ({step.limit_bound} bound)"


def describe_memory(roofline: Roofline) -> str:
    """Returns the memory of the model on a chip, and whether it fits."""
    taken = f"memory: weights {_gib(roofline.weights_bytes)}, KV {_gib(roofline.kv_bytes)}"
    if roofline.chip.memory_bytes is None:
        return taken
    return f"{taken} of {_gib(roofline.chip.memory_bytes)}" + ("" if roofline.fits else ": it does not fit")


def to_markdown(roofline: Roofline) -> str:
    """Returns the whole report as Markdown."""
    parts = ["\n".join(f"- {line}" for line in describe_roof(roofline))]
    for step in roofline.steps:
        parts += [f"### {describe_work(step.work)}", markdown_table(HEADERS, list_rows(step)), describe_step(step)]
    return "\n\n".join([*parts, describe_memory(roofline)]) + "\n"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [headers, [":--", *["--:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_json(roofline: Roofline) -> dict[str, object]:
    """Returns the whole report as plain JSON values, in operations, bytes and seconds."""
    chip, numbers = roofline.chip, roofline.numbers
    bits = max(numbers.weights_bits, numbers.activation_bits)
    return {
        "model": roofline.model,
        "chip": {
            "name": chip.name,
            "peaks": dict(chip.peaks),
            "read_bytes_per_s": chip.read_bytes_per_s,
            "memory_bytes": chip.memory_bytes,
            "link_bytes_per_s": chip.link_bytes_per_s,
            "source": chip.source,
        },
        "num_chips": roofline.num_chips,
        "weights_bits": numbers.weights_bits,
        "activation_bits": numbers.activation_bits,
        "kv_bits": numbers.kv_bits,
        "head_bits": numbers.head_bits,
        "product_format": chip.product_format(bits),
        "ridge_flops_per_byte": chip.ridge(bits),
        "weights_bytes": roofline.weights_bytes,
        "kv_bytes": roofline.kv_bytes,
        "fits": roofline.fits,
        "steps": [_step_json(step) for step in roofline.steps],
    }


def scale(value: float) -> str:
    """Returns a figure to three digits with its SI prefix: 1.53 G."""
    factor, prefix = next(((factor, prefix) for factor, prefix in _PREFIXES if value >= factor), (1.0, ""))
    return f"{value / factor:.3g} {prefix}" if value else "0 "


def scale_time(seconds: float) -> str:
    """Returns seconds as s, ms or us."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def _row(row: RoofedOperator, step: StepRoofline) -> tuple[str, ...]:
    operator, count = row.operator, row.operator.count
    sizes = (operator.num_flops, operator.weights_bytes, operator.activations_bytes, operator.kv_bytes)
    intensity = f"{operator.intensity:.2f}" if operator.num_flops else "-"
    share = f"{100 * row.seconds / step.seconds:.1f}%"
    figures = (scale(value * count) if value else "-" for value in sizes)
    return (operator.name, str(count), operator.shape, *figures, intensity, row.bound, scale_time(row.seconds), share)


def _step_json(step: StepRoofline) -> dict[str, object]:
    work, tokens = step.work, step.work.num_tokens
    return {
        "phase": work.name,
        "num_seqs": work.num_seqs,
        "num_queries": work.num_queries,
        "context": work.context,
        "operators": [_operator_json(row) for row in step.rows],
        "num_flops": step.total("num_flops"),
        "num_bytes": step.total("num_bytes"),
        "seconds": step.seconds,
        "tokens_per_s": tokens / step.seconds,
        "limit_s": step.limit_s,
        "limit_bound": step.limit_bound,
        "limit_tokens_per_s": tokens / step.limit_s,
    }


def _operator_json(row: RoofedOperator) -> dict[str, object]:
    operator, count = row.operator, row.operator.count
    return {
        "name": operator.name,
        "calls": count,
        "computation": operator.shape,
        "num_flops": operator.num_flops * count,
        "weights_bytes": operator.weights_bytes * count,
        "activations_bytes": operator.activations_bytes * count,
        "kv_bytes": operator.kv_bytes * count,
        "link_bytes": operator.link_bytes * count,
        "intensity": operator.intensity,
        "bound": row.bound,
        "seconds": row.seconds,
    }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
