"""Figures of a run: percentiles, throughput, goodput under a service-level objective, failures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cloister.bench.recorder import RequestRecord

PERCENTILES = (50, 90, 99)
_NUM_REWEIGHTINGS = 10
_FITS_PER_COLUMN = 3
_LEAST_GAIN = 1e-10
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of one latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Returns the spread of `values`, None of none."""
        if not values:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(values, PERCENTILES))
        return cls(float(np.mean(values)), p50, p90, p99, float(max(values)))


class Objective(Protocol):
    """A service-level objective, evaluated for each answered request."""

    @property
    def words(self) -> str:
        """Description of the objective."""
        ...

    def met_by(self, record: RequestRecord) -> bool: ...


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """Fixed limits. None is no limit. TBT is met if 99% of the request's gaps are within it."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    @property
    def words(self) -> str:
        limits = [("TTFT", self.ttft_s), ("P99 TBT", self.tbt_s)]
        return " and ".join(f"{name} <= {limit * 1e3:g} ms" for name, limit in limits if limit is not None)

    def met_by(self, record: RequestRecord) -> bool:
        gaps = record.gaps_s
        ttft_good = self.ttft_s is None or record.ttft_s <= self.ttft_s
        tbt_good = self.tbt_s is None or not gaps or float(np.percentile(gaps, 99)) <= self.tbt_s
        return ttft_good and tbt_good


@dataclass(frozen=True, slots=True)
class AloneModel:
    """Time of a request alone: `base_s + input_s * input tokens + output_s * output tokens`, each at least 0."""

    base_s: float
    input_s: float
    output_s: float

    @classmethod
    def fit(cls, records: Sequence[RequestRecord]) -> AloneModel:
        """Fits the model to requests that ran one at a time, by least squares without negative coefficients.

        Raises:
            ValueError: no request was answered.
        """
        rows = [(1.0, r.num_input_tokens, r.num_output_tokens, r.e2e_s) for r in records if r.ok]
        if not rows:
            raise ValueError("no request was answered")
        table = np.array(rows, dtype=np.float64)
        base_s, input_s, output_s = fit_costs(table[:, :3], table[:, 3])
        return cls(base_s, input_s, output_s)

    def predict(self, record: RequestRecord) -> float:
        """Returns the predicted seconds of the request alone."""
        return self.base_s + self.input_s * record.num_input_tokens + self.output_s * record.num_output_tokens


@dataclass(frozen=True, slots=True)
class AloneObjective:
    """The default: the whole answer within `factor` times the request's time alone."""

    alone: AloneModel
    factor: float = 1.5

    @property
    def words(self) -> str:
        return f"E2E <= {self.factor:g}x of its time alone"

    def met_by(self, record: RequestRecord) -> bool:
        return record.e2e_s <= self.factor * self.alone.predict(record)


SLO_SHARE = 0.9
"""Share of requests that must meet the objective for the run to meet it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Times in seconds; throughput per second of the run.

    Attributes:
        duration_s: from the first request due to the last answer.
        failures: kind -> count; failures count as requests, never as good ones.
        slo: description of the objective; without one the next three figures are None.
        goodput_rps: answered requests per second that met the objective.
    """

    name: str
    num_requests: int
    num_ok: int
    failures: dict[str, int]
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    tbt: Spread | None
    e2e: Spread | None
    slo: str | None = None
    slo_share: float | None = None
    slo_met: bool | None = None
    goodput_rps: float | None = None

    def to_json(self) -> dict[str, object]:
        """Returns the summary as plain JSON values."""
        return asdict(self)


def summarise(name: str, records: Sequence[RequestRecord], objective: Objective | None = None) -> Summary:
    """Computes the figures of a run.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("a run without requests has no figures")
    good = [r for r in records if r.ok]
    duration_s = max(max(r.end_s for r in records) - min(r.due_s for r in records), 1e-9)
    num_input, num_output = sum(r.num_input_tokens for r in good), sum(r.num_output_tokens for r in good)
    met = [r for r in good if objective.met_by(r)] if objective else []
    share = len(met) / len(records) if objective else None
    return Summary(
        name=name,
        num_requests=len(records),
        num_ok=len(good),
        failures=dict(Counter(r.failure for r in records if r.failure is not None)),
        duration_s=duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=sum(r.num_cached_tokens for r in good),
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
        ttft=Spread.of([r.ttft_s for r in good if r.deliveries]),
        tpot=Spread.of([r.tpot_s for r in good if r.tpot_s is not None]),
        tbt=Spread.of([gap for r in good for gap in r.gaps_s]),
        e2e=Spread.of([r.e2e_s for r in good]),
        slo=objective.words if objective else None,
        slo_share=share,
        slo_met=None if share is None else share >= SLO_SHARE,
        goodput_rps=len(met) / duration_s if objective else None,
    )


def list_figures(summary: Summary) -> list[tuple[str, str]]:
    """Returns (label, value with unit) rows for a table on a terminal."""
    rows = [
        ("requests answered", f"{summary.num_ok} of {summary.num_requests}"),
        *((f"failed: {kind}", str(count)) for kind, count in sorted(summary.failures.items())),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("requests", f"{summary.requests_per_s:.2f} /s"),
        ("output tokens", f"{summary.output_tokens_per_s:.1f} /s"),
        ("input + output tokens", f"{summary.total_tokens_per_s:.1f} /s"),
        ("input tokens from cache", _format_share(summary.num_cached_tokens, summary.num_input_tokens)),
    ]
    if summary.slo is not None and summary.slo_share is not None:
        verdict = "met" if summary.slo_met else f"missed, {SLO_SHARE:.0%} needed"
        rows.append((f"goodput ({summary.slo})", f"{summary.goodput_rps:.2f} /s"))
        rows.append(("requests within the SLO", f"{summary.slo_share:.1%} ({verdict})"))
    return rows


def list_spreads(summary: Summary) -> Mapping[str, Spread]:
    """Returns the available latencies of the run, by name."""
    named = {"TTFT": summary.ttft, "TPOT": summary.tpot, "TBT": summary.tbt, "E2E": summary.e2e}
    return {name: spread for name, spread in named.items() if spread is not None}


def fit_costs(features: npt.NDArray[np.float64], costs: npt.NDArray[np.float64]) -> list[float]:
    """Fits `costs` [num_rows] by non-negative multiples of the columns of `features` [num_rows, num_features].

    Least squares with the active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23): columns
    are used one by one, and no longer where their multiple would become negative.
    """
    sizes = np.linalg.norm(features, axis=0)
    table = features / np.where(sizes > 0, sizes, 1.0)
    found, used = np.zeros(len(sizes)), np.zeros(len(sizes), dtype=bool)
    for _ in range(_FITS_PER_COLUMN * len(sizes)):
        gains = np.where(used, -np.inf, table.T @ (costs - table @ found))
        if gains.max() <= _LEAST_GAIN * np.linalg.norm(costs):
            break
        used[gains.argmax()] = True
        while used.any():
            fitted = np.zeros(len(sizes))
            fitted[used] = np.linalg.lstsq(table[:, used], costs, rcond=None)[0]
            bad = used & (fitted <= 0)
            if not bad.any():
                found = fitted
                break
            way = (found[bad] / np.maximum(found[bad] - fitted[bad], _TINY)).min()  # as far as none becomes negative
            found += way * (fitted - found)
            used &= found > _LEAST_GAIN * np.abs(found).max()
            found[~used] = 0.0
    return [float(x) for x in found / np.where(sizes > 0, sizes, 1.0)]


def fit_relative_costs(features: npt.NDArray[np.float64], costs: npt.NDArray[np.float64]) -> list[float]:
    """Fits `costs` as `fit_costs` does, with errors relative to what is predicted: large costs do not outweigh others.

    Errors relative to the costs themselves would pull the fit to the smallest of costs that vary by chance. So it is repeated
    with the weights of the fit before (iteratively reweighted least squares for a variance that grows with the mean's square).
    """
    predicted = costs
    for _ in range(_NUM_REWEIGHTINGS):
        weights = 1 / np.maximum(predicted, costs.min())
        fitted = fit_costs(features * weights[:, None], costs * weights)
        predicted = features @ np.array(fitted)
    return fitted


def _format_share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else str(part)
