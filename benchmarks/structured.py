"""What structured output costs: compile times of 24 schemas, masks of every token, and the time per token beside free text.

Time per token: the same prompts, lengths and seeds with a schema and without, in turns, on one engine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, make_parser
from cloister import LLM, SamplingParams
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler, check_grammar
from cloister.types.request import Grammar, GrammarKind

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("structured_schemas.json").read_text(encoding="utf-8"))
LONG = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
            "next": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
        },
        "required": ["name", "age", "tags", "next"],
        "additionalProperties": False,
    },
}
"""A schema that no answer here fills: every answer has the same number of tokens, with it and without."""
WALKS = 5
WALK_TOKENS = 200


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="cloister-5m", help="name, directory or GGUF file")
    parser.add_argument("--quant", default="none", help="number format")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind")
    parser.add_argument("--batches", default="1,4,16", help="sequences at once")
    options = parser.parse_args()
    label = Path(options.model).name
    bench = Bench(
        f"structured_{label}",
        f"Structured output: {label}, {options.quant}",
        "compiling below 5 ms and masks below 0.1 ms in the median; time per token at most 1.05 of free text",
    )
    settings = {"model": options.model, "quant": options.quant, "kv_memory_mb": 512, "prefix_cache": False}
    if options.num_threads is not None:
        settings["num_threads"] = options.num_threads
    with LLM(**settings) as llm:
        compiled, masks = measure_masks(llm.tokenizer, llm.model.vocab_size, llm.model.eos_token_ids, options.seed)
        bench.print_rows(
            "compiling",
            ("schemas", "median ms", "worst ms"),
            [(len(SCHEMAS), statistics.median(compiled) * 1e3, max(compiled) * 1e3)],
        )
        cuts = np.percentile(np.array(masks) * 1e6, [50, 90, 99, 100])
        bench.print_rows("a mask, us", ("masks", "p50", "p90", "p99", "worst"), [(len(masks), *map(float, cuts))])
        rows = [measure_ratio(llm, int(num), options.tokens, options.rounds) for num in options.batches.split(",")]
    columns = ("sequences", "free ms", "schema ms", "ratio", "ratio of CPU time", "greedy ratio", "greedy ratio of CPU time")
    bench.print_rows("time per token (one step of all sequences)", columns, rows)
    bench.figures |= {
        "compile_ms": [seconds * 1e3 for seconds in compiled],
        "mask_us": dict(zip(("p50", "p90", "p99", "worst"), map(float, cuts), strict=True)),
        "ratios": {str(row[0]): row[3] for row in rows},
    }
    for num, _, _, ratio, cpu_ratio, *_ in rows:
        bench.check(f"time per token beside free text, {num} at once", ratio, high=1.05)
        bench.check(f"CPU time beside free text, {num} at once", cpu_ratio, high=1.05)
    return bench.finish(options)


def measure_masks(tokenizer: Tokenizer, vocab_size: int, eos: tuple[int, ...], seed: int) -> tuple[list[float], list[float]]:
    """Returns seconds of each compile (with the first mask), and of each later mask with the step to it, on random walks."""
    compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=eos)
    mask = np.zeros(compiler.num_words, np.uint32)
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT)).fill(mask)  # reads the vocabulary
    rng = np.random.default_rng(seed)
    compiled, masks = [], []
    for schema in SCHEMAS.values():
        grammar = check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "schema")
        seconds, first = timed(partial(compiler.compile, grammar))
        seconds_mask, _ = timed(partial(first.fill, mask))
        compiled.append(seconds + seconds_mask)
        for _ in range(WALKS):
            masks += walk(first.copy(), mask, rng)
    return compiled, masks


def walk(matcher: Any, mask: Any, rng: np.random.Generator) -> list[float]:
    """Follows a grammar by tokens drawn evenly among those that may follow; returns seconds of each step and mask."""
    matcher.fill(mask)
    found = []
    for _ in range(WALK_TOKENS):
        token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
        seconds, _ = timed(partial(matcher.accept, [token]))
        if matcher.is_complete:
            break
        more, _ = timed(partial(matcher.fill, mask))
        found.append(seconds + more)
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def measure_ratio(llm: LLM, num_sequences: int, num_tokens: int, num_rounds: int) -> tuple[int | float, ...]:
    """Returns sequences, ms per token free and with a schema, and the ratios of both kinds of time (medians of pairs).

    CPU time counts the helper that works out masks too, and is less disturbed by other programs.
    """
    grammar = check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(LONG)), "schema")
    ratios: list[float] = []
    shown: tuple[float, float] | None = None
    for temperature in (1.0, 0.0):
        free, held = [], []
        for _ in range(num_rounds):
            free.append(measure_answers(llm, None, num_sequences, num_tokens, temperature))
            held.append(measure_answers(llm, grammar, num_sequences, num_tokens, temperature))
        for kind in range(2):
            ratios.append(statistics.median(b[kind] / a[kind] for a, b in zip(free, held, strict=True)))
        shown = shown or (
            statistics.median(times[0] for times in free) * 1e3,
            statistics.median(times[0] for times in held) * 1e3,
        )
    assert shown is not None
    return num_sequences, *shown, *ratios


def measure_answers(
    llm: LLM, grammar: Grammar | None, num_sequences: int, num_tokens: int, temperature: float
) -> tuple[float, float]:
    """Returns seconds per token, the prompt's step left out, and seconds of CPU time per token."""
    sampling = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i, temperature=temperature, grammar=grammar)
        for i in range(num_sequences)
    ]
    started = time.process_time()
    answers = llm.generate(["A list of people as JSON: "] * num_sequences, sampling)
    cpu_s = time.process_time() - started
    assert all(len(answer.outputs[0].token_ids) == num_tokens for answer in answers)
    first = max(answer.first_token_s or 0.0 for answer in answers)
    last = max(answer.last_token_s or 0.0 for answer in answers)
    return (last - first) / (num_tokens - 1), cpu_s / num_tokens


if __name__ == "__main__":
    raise SystemExit(main())
