"""Tables keep their figures whole, however narrow a terminal is and whatever they are written to."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import harness
from cloister.cli import console
from cloister.cli.console import print_table

HEADERS = ("Replica", "PID", "Role", "State", "Running", "Waiting", "KV blocks", "Routed", "Moved here", "KV loads", "Slowness")
ROW = (0, 471_123, "prefill", "running", 12, 345, "31,123 / 32,768", "123,456", "12,345", "23,456", "0.98")


def show(width: int, *, is_terminal: bool) -> list[str]:
    file = io.StringIO()
    print_table("replicas", HEADERS, [ROW], Console(file=file, width=width, force_terminal=is_terminal, color_system=None))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 114, 160])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_figure_is_cut(width: int, is_terminal: bool) -> None:
    lines = show(width, is_terminal=is_terminal)
    for cell in ROW:
        for word in str(cell).split():
            assert any(word in line for line in lines), word
    if is_terminal:
        assert max(map(len, lines)) <= width
    else:
        assert "31,123 / 32,768" in "\n".join(lines)
        assert sum("Replica" in line for line in lines) == 1


def test_a_narrow_terminal_gets_several_tables_with_the_first_column_in_each() -> None:
    lines = show(80, is_terminal=True)
    assert sum("Replica" in line for line in lines) == 2
    assert sum("replicas" in line for line in lines) == 1
    assert sum("Replica" in line for line in show(140, is_terminal=True)) == 1


def test_figures_of_benchmarks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(harness, "console", Console(file=file, width=80))
    bench = harness.Bench("name", "title", "prediction")
    bench.print_rows("rows", [f"figure {i}" for i in range(14)], [[626.123 + i for i in range(14)]])
    bench.check("something that has a long name, so that there is little room for figures beside it", 626.1, high=1234.5)
    bench.finish(harness.make_parser("").parse_args(["--output", str(tmp_path)]))
    said = file.getvalue()
    assert all(f"{626.123 + i:,.4g}" in said for i in range(14))
    assert "626.1" in said
    assert "<= 1,234" in said


@pytest.mark.parametrize("is_terminal", [False, True])
def test_work_of_minutes_says_in_a_log_how_far_it_is(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now_s = io.StringIO(), 0.0
    monkeypatch.setattr(console, "err", Console(file=file, force_terminal=is_terminal))
    progress = console.make_progress()
    progress.get_time = lambda: now_s
    task = progress.add_task("seeds", total=1000)
    for now_s in (10.0, 29.0, 31.0, 45.0, 62.0):  # noqa: B007
        progress.advance(task, 7)
    progress.update(task, completed=40)
    assert file.getvalue().splitlines() == ([] if is_terminal else ["seeds: 21 of 1,000", "seeds: 35 of 1,000"])
