"""Full-width evidence, by hand: families against transformers, and rule 6 on wide models.

python -m benchmarks.families            logits and 200 greedy tokens of every family, in real widths
python -m benchmarks.families --rule6    bits of a row in every arrangement, narrow to wide
python -m benchmarks.families --speed    prefill and decode times of the embedded model
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cloister.backends.spec import DecoderSpec
from cloister.models import locate
from tests.company import differing_arrangements
from tests.driving import Driver, RandomWeights, build, build_from, make_spec
from tests.model_factory import make_model
from tests.reference import compare

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
WINDOW = {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1}

# Widths of real models, with fewer layers and smaller vocabularies.
WIDE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "TinyLlama 1.1B", {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
                                 "num_key_value_heads": 4, "vocab_size": 32000}),
    ("llama", "Llama 2 7B, half width, MHA", {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16,
                                              "num_key_value_heads": 16, "vocab_size": 32000}),
    ("llama", "Llama 3.2 1B, tied, beyond the context", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "head_dim": 64, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    ("qwen2", "Qwen2.5 0.5B, tied", {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 32000, "tie_word_embeddings": True}),
    ("qwen2", "Qwen2.5 1.5B, beyond the window", {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 32000, **WINDOW}),
    ("qwen3", "Qwen3 0.6B, tied", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": True}),
    ("qwen3", "Qwen3 0.6B, MQA, biases", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 1,
        "head_dim": 128, "vocab_size": 32000, "attention_bias": True}),
]  # fmt: skip

RULE6 = {
    "narrow, hidden 256": make_spec(hidden=256, intermediate=688, heads=(8, 2), head_dim=32, vocab=4096),
    "hidden 896": make_spec(hidden=896, intermediate=4864, heads=(14, 2), head_dim=64, vocab=32000),
    "hidden 1024, qk norm, window": make_spec(
        hidden=1024, intermediate=3072, heads=(16, 8), head_dim=128, vocab=32000, window=100, qk_norm=True
    ),
    "wide, hidden 2048": make_spec(hidden=2048, intermediate=5632, heads=(32, 4), head_dim=64, vocab=32000),
}


def show_families(console: Console) -> None:
    table = Table("family", "variant", "max |difference|", "greedy tokens equal")
    for family, name, config in WIDE:
        with tempfile.TemporaryDirectory() as directory:
            path = make_model(Path(directory), family, **{**LAYERS, **config})
            prompt = np.random.default_rng(0).integers(0, config["vocab_size"], 400).tolist()
            found = compare(path, prompt)
        table.add_row(family, name, f"{found.difference:.1e}", f"{found.num_equal}/{found.num_tokens}")
    console.print(table)


def show_rule6(console: Console) -> None:
    table = Table("model", "dtype", "arrangements that differ")
    for name, spec in RULE6.items():
        for dtype in ("float32", "bfloat16"):
            make = cache(partial(_make, spec, RandomWeights(spec), dtype))
            tokens = np.random.default_rng(1).integers(0, spec.vocab_size, 300).tolist()
            found = differing_arrangements(make, tokens, vocab=spec.vocab_size, chunks=(1, 7, 33, 100), block_sizes=(1, 5, 256))
            table.add_row(name, dtype, ", ".join(found) or "none")
    console.print(table)


def _make(spec: DecoderSpec, weights: RandomWeights, dtype: str, block_size: int, num_threads: int) -> Driver:
    num_blocks = -(-8192 // block_size)
    return build(spec, weights, num_blocks=num_blocks, block_size=block_size, num_threads=num_threads, dtype=dtype)


def show_speed(console: Console) -> None:
    table = Table("step", *(f"{threads} thread(s): {what}, ms" for threads in (1, 2) for what in ("wall", "caller's CPU")))
    path = locate("cloister-5m")
    drivers = [build_from(path, num_blocks=4200, num_threads=threads) for threads in (1, 2)]
    for count in (512, 2048):
        table.add_row(f"prefill {count}", *_cells(_time(driver, {"prompt": _draw(count)}) for driver in drivers))
    for count, context in ((1, 128), (1, 1000), (16, 128), (16, 512), (16, 1000), (64, 128), (64, 500)):
        table.add_row(f"decode {count} at {context}", *_cells(_time_decode(driver, count, context) for driver in drivers))
    console.print(table)


def _draw(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(count).integers(0, 4096, count)]


def _time_decode(driver: Driver, count: int, context: int) -> tuple[float, float]:
    for seq in range(count):
        driver.run(seq, _draw(context - 1))
    return _time(driver, {seq: [1] for seq in range(count)})


def _time(driver: Driver, parts: Mapping[Any, list[int]], repeats: int = 15) -> tuple[float, float]:
    """Least wall time, and least CPU time of the calling thread, of a step that asks for the last logits of each sequence.

    The step is computed again and again at the same place; its sequences are freed in the end.
    """
    ends = np.cumsum([len(tokens) for tokens in parts.values()]) - 1
    batch = driver.plan(parts, logit_rows=ends.tolist())
    found = []
    for _ in range(repeats):
        wall, used = time.perf_counter(), time.thread_time()
        driver.program.forward(batch)
        found.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - used)))
    for seq in parts:
        driver.free(seq)
    return min(wall for wall, _ in found), min(used for _, used in found)


def _cells(times: Iterator[tuple[float, float]]) -> Iterator[str]:
    return (f"{value:.1f}" for pair in times for value in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule6", action="store_true", help="bits of a row in every arrangement")
    parser.add_argument("--speed", action="store_true", help="times of the embedded model")
    chosen = parser.parse_args()
    console = Console()
    show_rule6(console) if chosen.rule6 else show_speed(console) if chosen.speed else show_families(console)


if __name__ == "__main__":
    main()
