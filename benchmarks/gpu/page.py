"""The page gpu.md from what was recorded, whole or cut short."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.gpu.records import Record


def write_page(records: Sequence[Record], *, is_real: bool) -> str:
    """Returns the page as Markdown.

    Args:
        records: of all stages, in the order of their measurement.
        is_real: whether a device computed; Triton's interpreter measures nothing.
    """
    return "\n".join(_lines(records, is_real)) + "\n"


def _lines(records: Sequence[Record], is_real: bool) -> Iterator[str]:
    yield "# Measured on a GPU"
    yield ""
    if not is_real:
        yield "**Triton's interpreter on a CPU: this shows that the stages work; no figure here means anything.**"
        yield ""
    for device in _of(records, "device"):
        versions = f"torch {device['torch']}, triton {device['triton']}, Python {device['python']}"
        yield f"{device['name']}, {device['multiprocessors']} multiprocessors; {versions}."
        yield "Written by `python -m benchmarks.gpu`; medians."
    for note in _of(records, "note"):
        yield ""
        yield f"**Note.** {note['text']}"
    for peaks in _of(records, "peaks"):
        yield ""
        yield f"Measured limits: {_describe_peaks(peaks)}."
    yield from _stages(_of(records, "stage"))
    yield from _tests(_of(records, "test"))
    yield from _answers(records)
    yield from _hybrids(_of(records, "hybrid"))
    yield from _kernels(_of(records, "kernel"))


def _of(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _describe_peaks(peaks: Record) -> str:
    products = [f"{peaks[name] / 1e12:,.1f} T/s in {name}" for name in ("bfloat16", "int8", "float8") if name in peaks]
    return ", ".join([f"{peaks['bytes'] / 1e9:,.0f} GB/s", *products])


def _stages(found: Sequence[Record]) -> Iterator[str]:
    if found:
        yield from _header("Stages", ("stage", "ended", "seconds"))
        yield from (_row((stage["name"], stage["ended"], f"{stage['seconds']:.0f}")) for stage in found)


def _tests(found: Sequence[Record]) -> Iterator[str]:
    if not found:
        return
    counts = Counter(test["outcome"] for test in found)
    yield from ("", "## Tests", "", ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + ".")
    for test in found:
        if test["outcome"] == "failed":
            yield from ("", f"`{test['name']}`:", "", "```", test["reason"], "```")


def _answers(records: Sequence[Record]) -> Iterator[str]:
    """One table for each shape: speeds, in brackets their share of the limit; batch invariance and idle time of ours."""
    found = [record for record in records if record["stage"].startswith("answers-")]
    shapes = dict.fromkeys(_shape(record) for record in found)
    for shape in shapes:
        own = [record for record in found if _shape(record) == shape]
        titles = list(dict.fromkeys(record["figure"] for record in _of(own, "answers")))
        columns = ("engine", *(f"{title}, tok/s" for title in titles), "answers changed by company", "device idle")
        yield from _header(f"Whole answers: {shape} (random weights)", columns)
        for engine, form in dict.fromkeys((record["engine"], record["form"]) for record in own):
            rows = [record for record in own if (record["engine"], record["form"]) == (engine, form)]
            rates = {record["figure"]: _rate(record) for record in _of(rows, "answers")}
            company = [f"{record['differ']} of {record['arrangements']}" for record in _of(rows, "company")]
            idle = [_percent(record["share"]) for record in _of(rows, "idle")]
            yield _row((f"{engine} {form}", *(rates.get(title, "") for title in titles), *(company or [""]), *(idle or [""])))
        for record in _of(own, "failed"):
            yield from ("", f"{record['engine']} {record['form']} failed: {record['reason']}")


def _shape(record: Record) -> str:
    """The stages of ours and of the others share a table."""
    return str(record["stage"]).removeprefix("answers-").removesuffix("-peers")


def _rate(record: Record) -> str:
    limit = "" if record["limit"] is None else f" ({_percent(record['rate'] / record['limit'])})"
    return f"{record['rate']:,.0f}{limit}"


def _hybrids(found: Sequence[Record]) -> Iterator[str]:
    """B4: never slower than the two in sequence; the paper reports 1.28x in the mean, 1.59x at most."""
    if not found:
        return
    columns = ("chunk + decodes x context", "in sequence us", "by multiprocessor us", "interleaved us", "best gain")
    yield from _header("Hybrid batches (B4)", columns)
    for record in found:
        times = [record["in_sequence_us"], record["fused_us"], record["interleaved_us"]]
        gain = f"{times[0] / min(times[1:]):.2f}"
        yield _row((record["problem"], *(f"{time:.1f}" for time in times), gain))
    gains = [record["in_sequence_us"] / record["fused_us"] for record in found]
    mean = math.exp(statistics.fmean(math.log(gain) for gain in gains))
    yield ""
    yield f"By multiprocessor, over the two in sequence: mean {mean:.2f}x, {min(gains):.2f}x to {max(gains):.2f}x."


def _kernels(found: Sequence[Record]) -> Iterator[str]:
    if not found:
        return
    yield from _header("Kernels", ("kernel", "problem", "us", "of the limit", "bound by", "torch us", "torch / ours"))
    for record in found:
        torch_us = record["torch_us"]
        compared = ("", "") if torch_us is None else (f"{torch_us:.1f}", f"{torch_us / record['us']:.2f}")
        share = _percent(record["share"])
        yield _row((record["table"], record["problem"], f"{record['us']:.1f}", share, record["bound"], *compared))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _header(title: str, columns: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", _row(columns), "|" + "---|" * len(columns))


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
