"""What the clients did, as JSON and as a table of a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.clients.catalogue import CLIENTS
from benchmarks.harness import ROOT

RESULTS: Final = ROOT / "benchmarks" / "results" / "clients.json"
PAGE: Final = ROOT / "docs" / "compatibility.md"
BEGIN: Final = "<!-- clients: written by `python -m benchmarks.clients` -->\n"
END: Final = "<!-- end of clients -->\n"


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Returns name -> {"version", "model", "date", "checks"}, {} if no run left any."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write_results(results: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Writes them in the order of the catalogue."""
    ordered = {name: results[name] for name in CLIENTS if name in results}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a Markdown table: client, version, which checks passed, which failed and why."""
    yield "| client | version | passed | failed |"
    yield "|---|---|---|---|"
    for name, client in CLIENTS.items():
        if name not in results:
            continue
        found = results[name]
        passed = [check["check"] for check in found["checks"] if check["result"] == "ok"]
        failed = [f"{check['check']}: {check['seen']}" for check in found["checks"] if check["result"] != "ok"]
        cells = (f"`{name}`: {client.title}", found["version"], "; ".join(passed), "; ".join(failed))
        yield f"| {' | '.join(_escape(cell) for cell in cells)} |"


def fill_page(page: str, results: Mapping[str, Any]) -> str:
    """Returns the page with the table between its two marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + "\n".join(["", *write_table(results), "", ""]) + END + after


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
