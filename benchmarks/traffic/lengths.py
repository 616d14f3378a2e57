"""What stays to be seen under the shapes: bits of the bucket for lengths of real traces, and sizes of events of one token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench
from benchmarks.traffic.leak import count_bits, count_waste
from cloister.bench.traces import read_trace
from cloister.text import Tokenizer
from cloister.trust.shape import find_edge, shape_of
from cloister.trust.shape.frames import capacity

OTHER_EVENTS = 3
"""Beside one event a token, a stream has frames for its head, its reason to end, and `[DONE]`."""
SOURCES = {
    "Azure 2023, conversation": "azure_llm_2023_conv.csv.gz",
    "Azure 2023, code": "azure_llm_2023_code.csv.gz",
    "Mooncake, conversation": "mooncake_fast25_conversation.jsonl.gz",
    "Mooncake, synthetic": "mooncake_fast25_synthetic.jsonl.gz",
    "arXiv summarization (Vidur)": "vidur_arxiv_summarization_lengths.csv.gz",
}


def report_leak(bench: Bench, folder: Path) -> None:
    """Prints, for each trace, what an observer learns of the length of one answer: exactly seen, and through buckets."""
    rows = []
    for name, file in SOURCES.items():
        frames = [row.num_output_tokens + OTHER_EVENTS for row in read_trace(folder / file).rows]
        shares = [np.mean([find_edge(n) == edge for n in frames]) for edge in (64, 256, 1024, 4096)]
        exact, shown = count_bits(frames, lambda n: n), count_bits(frames)
        rows.append((name, len(frames), exact, shown, count_waste(frames), *(f"{share:.1%}" for share in shares)))
    headers = ("lengths of", "answers", "exact, bits", "bucket, bits", "frames sent / needed", "64", "256", "1,024", "4,096")
    bench.print_rows("What the length of one answer tells", headers, rows)


def report_sizes(bench: Bench, models: list[Path], event_bytes: int) -> None:
    """Prints how long the texts of a vocabulary's tokens are in JSON, and whether each event fits into one frame.

    Args:
        event_bytes: of an event without its text.
    """
    shape = shape_of("private")
    assert shape is not None
    room = capacity(shape.frame_bytes, first=False)
    rows = []
    for path in models:
        texts = list(_token_texts(Tokenizer(path)))
        lengths = [len(json.dumps(text, ensure_ascii=False).encode()) - 2 for text in texts]
        steps = [float(np.percentile(lengths, q)) for q in (50, 99, 99.9, 100)]
        rows.append((path.name, len(texts), *steps, sum(event_bytes + n > room for n in lengths)))
    headers = ("vocabulary", "tokens", "P50, bytes", "P99", "P99.9", "longest", f"events over {room}")
    bench.print_rows("Texts of tokens in an event", headers, rows)


def _token_texts(tokenizer: Tokenizer) -> Iterator[str]:
    for token_id in range(tokenizer.vocab_size):
        if text := tokenizer.decode([token_id]):
            yield text
