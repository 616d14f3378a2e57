"""`cloister bench io`: read performance of a directory, or of memory, for a KV tier."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import make_progress, out, print_json, print_table

if TYPE_CHECKING:
    from cloister.bench.storage import StorageReport
    from cloister.engine.kv_tier_reads import ReadRate

_MEMORY = "host"


def io(
    where: Annotated[
        str, typer.Argument(help="The directory, or `host` for memory; `./host` is a directory.", metavar="DIRECTORY")
    ],
    size_mb: Annotated[int, typer.Option(help="MiB of the file that is written and read; it has no name.", min=8)] = 256,
    timeout_s: Annotated[
        float, typer.Option(help="Time for all of it; what was not measured by then is left out.", min=1.0)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure how fast a directory can be read: bandwidth and latency by call, block size and depth, and what suits a KV tier.

    Reads are in random order and in threads: through the page cache (pread), past it (direct, O_DIRECT; io_uring, in 8 parts
    each), and of a map (mmap). The page cache is empty unless the table says otherwise. A tier runs a shorter measurement
    when it starts.
    """
    from cloister.bench.storage import count_cells, measure_storage

    directory = None if where == _MEMORY else Path(where).expanduser()
    with make_progress() as progress:
        task = progress.add_task("measurements", total=count_cells(is_memory=directory is None))
        report = measure_storage(directory, size_mb * 2**20, timeout_s=timeout_s, on_progress=lambda: progress.advance(task))
    if as_json:
        print_json({"where": where, **asdict(report)})
    else:
        _print(where, report)


def _print(where: str, report: StorageReport) -> None:
    size = f"{report.num_bytes / 2**20:.0f} MiB"
    depths = sorted({rate.pattern.depth for rate in report.rates})
    headers = ("call", "block", *(f"GB/s, {depth} at once" for depth in depths), "ms P50", "ms P99")
    rows = _list_rows([*report.rates, *report.cached_rates], depths)
    print_table(f"Reads of a file of {size} in {where}", headers, rows)
    out.print("Times are of one read, at the least depth.", highlight=False)
    until = "" if where == _MEMORY else " until they are on the disk"
    out.print(f"Writes of 1 MiB: {report.write_bytes_s / 1e9:.2f} GB/s{until}", highlight=False)
    if report.left_out:
        out.print(f"Not on this system: {', '.join(report.left_out)}", highlight=False)
    if not report.is_complete:
        out.print("There was no time for everything; give a longer --timeout-s, or a smaller --size-mb", highlight=False)
    if report.recommended is not None:
        best = report.recommended
        out.print(
            f"Recommended: {best.engine}, reads of {_scale(best.block_bytes)}, {best.depth} at once",
            style="bold",
            highlight=False,
        )


def _list_rows(rates: list[ReadRate], depths: list[int]) -> list[tuple[str, ...]]:
    by_kind: dict[tuple[str, int], dict[int, ReadRate]] = {}
    for rate in rates:
        by_kind.setdefault((rate.pattern.engine, rate.pattern.block_bytes), {})[rate.pattern.depth] = rate
    rows = []
    for (engine, block_bytes), found in by_kind.items():
        speeds = (f"{found[depth].bytes_s / 1e9:.2f}" if depth in found else "-" for depth in depths)
        first = found[min(found)]
        rows.append((engine, _scale(block_bytes), *speeds, f"{1e3 * first.p50_s:.3f}", f"{1e3 * first.p99_s:.3f}"))
    return rows


def _scale(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"
