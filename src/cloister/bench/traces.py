"""Readers of request traces: arrival times, and lengths of prompts and answers.

Supported formats, detected by columns, plain or gzipped:

- CSV or JSONL with a header or keys for input and output lengths, or prompts (see COLUMNS);
- the Azure LLM inference traces (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; Patel et al., ISCA 2024);
- the Mooncake traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks; Qin et al.,
  FAST 2025), whose shared prefixes are kept;
- Vidur length tables (`num_prefill_tokens`, `num_decode_tokens`; Agrawal et al., MLSys 2024), which have no arrivals.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from cloister.types.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per entry of `hash_ids`."""

COLUMNS = {
    "input": ("input_length", "input_tokens", "input_toks", "prompt_tokens", "contexttokens", "num_prefill_tokens"),
    "output": (
        "output_length",
        "output_tokens",
        "output_toks",
        "completion_tokens",
        "generatedtokens",
        "num_decode_tokens",
        "max_tokens",
    ),
    "prompt": ("prompt",),
    "arrival_s": ("arrival_s", "arrived_at", "arrival_time_s"),
    "timestamp": ("timestamp",),
    "hash_ids": ("hash_ids",),
}
"""Accepted column names, case-insensitive. `timestamp` is milliseconds, or a date and time."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        arrival_s: seconds from the trace's first arrival; None if the trace has no times.
        num_input_tokens: 0 when `prompt` is given instead.
        hash_ids: ids of the prompt's blocks of `MOONCAKE_BLOCK_TOKENS`; equal ids are equal prefixes.
    """

    arrival_s: float | None
    num_input_tokens: int
    num_output_tokens: int
    prompt: str | None = None
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival."""

    name: str
    rows: tuple[TraceRow, ...]

    @property
    def has_arrivals(self) -> bool:
        return all(row.arrival_s is not None for row in self.rows)


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """Reads a trace, the first `num_requests` rows of it if given.

    Raises:
        ConfigError: there is no such file, or it is not a trace; the message says which line and column.
    """
    if not path.is_file():
        raise ConfigError(f"no trace file at {path}; give a CSV or JSONL file, plain or .gz")
    try:
        records = _read_jsonl(path) if ".jsonl" in path.name else _read_csv(path)
        rows = [_parse_row(record, line, path.name) for line, record in islice(records, num_requests)]
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8; give text, or gzip if its name ends in .gz") from None
    except (OSError, EOFError, csv.Error) as error:
        what = type(error).__name__
        raise ConfigError(f"cannot read {path} ({what}); give text, or gzip if its name ends in .gz") from None
    if not rows:
        raise ConfigError(f"{path} has no requests; a trace needs one row per request")
    return Trace(path.name.split(".")[0], tuple(_start_at_zero(rows)))


def _open_text(path: Path) -> io.TextIOWrapper:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _read_csv(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    with _open_text(path) as file:
        reader = csv.DictReader(file)
        for record in reader:
            yield reader.line_num, {str(key).strip().lower(): value for key, value in record.items()}


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    with _open_text(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except ValueError:
                raise ConfigError(f"line {line} of {path.name} is not JSON; put one object on a line") from None
            if not isinstance(record, dict):
                raise ConfigError(f"line {line} of {path.name} is not a JSON object; put one on a line")
            yield line, {key.lower(): value for key, value in record.items()}


def _parse_row(record: Mapping[str, object], line: int, name: str) -> TraceRow:
    prompt = _find(record, "prompt")
    num_input = _find(record, "input")
    num_output = _find(record, "output")
    if num_output is None or (num_input is None and prompt is None):
        raise ConfigError(
            f"line {line} of {name} lacks lengths: a trace needs a column for input tokens ({COLUMNS['input'][0]}, "
            f"{COLUMNS['input'][1]}, ...) or `prompt`, and one for output tokens ({COLUMNS['output'][0]}, ...)"
        )
    return TraceRow(
        arrival_s=_parse_arrival(record, line, name),
        num_input_tokens=0 if num_input is None else _parse_count(num_input, "input tokens", line, name),
        num_output_tokens=_parse_count(num_output, "output tokens", line, name),
        prompt=str(prompt) if isinstance(prompt, str) else None,
        hash_ids=_parse_hash_ids(_find(record, "hash_ids"), line, name),
    )


def _find(record: Mapping[str, object], column: str) -> object | None:
    return next((record[key] for key in COLUMNS[column] if record.get(key) is not None), None)


def _parse_count(value: object, what: str, line: int, name: str) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = -1
    if count < 0:
        raise ConfigError(f"{what} in line {line} of {name} must be a whole number of at least 0")
    return count


def _parse_arrival(record: Mapping[str, object], line: int, name: str) -> float | None:
    seconds, stamp = _find(record, "arrival_s"), _find(record, "timestamp")
    try:
        if seconds is not None:
            arrival_s = float(str(seconds))
        elif stamp is None:
            return None
        elif isinstance(stamp, (int, float)) or str(stamp).replace(".", "", 1).isdigit():
            arrival_s = float(stamp if isinstance(stamp, (int, float)) else str(stamp)) / 1000
        else:
            arrival_s = datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        arrival_s = math.nan
    if not math.isfinite(arrival_s):
        raise ConfigError(
            f"the arrival in line {line} of {name} is neither `arrival_s` in seconds nor `timestamp` in ms or as a date"
        )
    return arrival_s


def _parse_hash_ids(value: object | None, line: int, name: str) -> tuple[int, ...]:
    if isinstance(value, str):
        value = value.strip("[] ").replace(",", " ").split()
    if value is None:
        return ()
    if not isinstance(value, list) or not all(str(entry).isdigit() for entry in value):
        raise ConfigError(f"hash_ids in line {line} of {name} must be a list of whole numbers")
    return tuple(int(str(entry)) for entry in value)


def _start_at_zero(rows: list[TraceRow]) -> list[TraceRow]:
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    if len(times) < len(rows):
        return rows
    start_s = min(times)
    shifted = [replace(row, arrival_s=time_s - start_s) for row, time_s in zip(rows, times, strict=True)]
    return sorted(shifted, key=lambda row: row.arrival_s or 0.0)
