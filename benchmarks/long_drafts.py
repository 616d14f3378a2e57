"""Drafts at the end of long contexts: a cache of constant size against one that grows.

    python -m benchmarks.long_drafts

The model has to make sense at 16,384 tokens, which cloister-5m as it is does not: it was trained on windows of 1,024 and fewer.
With a sliding window of 512 in every layer, as Mistral's config.json says it, it has the same weights and stays sane: this
measures its perplexity by position first. The small model is cloister-draft as it is. Both drafters continue the same texts,
of which they are given the last 1,024, 4,096, 8,192 or 16,384 tokens, so that nothing differs but what stands before. The
model's cache and positions are whole in each case. `draft_model` gets a copy of cloister-draft that says it has 32,768
positions, as it drafts nothing beyond those that a small model says it has.

Left out of LongSpec (Yang et al. 2025): a draft that attends to the model's own KV, and training it with shifted positions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.drafting import BLOCK_SIZE, Answer, Answering, OpenedModel
from benchmarks.harness import MODEL, Bench, make_parser, make_progress
from cloister.backends.base import LOGITS, FloatArray, ForwardBatch, KVLayout
from cloister.executor.drafters import Drafter, DraftingPlace
from cloister.executor.drafters.draft_files import open_draft
from cloister.executor.drafters.draft_model import make_draft_model
from cloister.executor.drafters.long_spec import CAPACITY, LongSpecDrafter
from cloister.models import locate
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.text import Tokenizer
from cloister.types.request import SamplingParams

DRAFT: Final = "cloister-draft"
WINDOW, MAX_POSITIONS = 512, 32768
CONTEXTS: Final = (1024, 4096, 8192, 16384)
NUM_TOKENS, NUM_DRAFTS, TEMPERATURE = 96, 4, 0.7
CAPACITIES: Final = (256, 512)
PREDICTION = (
    "with a cache that grows, acceptance falls where positions leave those that the small model was trained on; with one of "
    "constant size it is the same at 16,384 tokens as at 1,024, and so is its memory"
)


def main() -> int:
    """Measures, and says what held."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-texts", type=int, default=24)
    options = parser.parse_args()
    bench = Bench("long_drafts", "Drafts at the end of long contexts", PREDICTION)
    with tempfile.TemporaryDirectory() as folder:
        windowed = write_variant(Path(folder) / "windowed", MODEL, windowed=True)
        stretched = write_variant(Path(folder) / "stretched", MODEL, windowed=False)
        long_draft = write_variant(Path(folder) / "draft", DRAFT, windowed=False)
        tokens = Tokenizer(windowed).encode(read_passages(HELD_OUT), True)
        num_threads = options.num_threads or 1
        show_sanity(bench, {"as it is": stretched, f"windows of {WINDOW}": windowed}, tokens, num_threads)
        opened = OpenedModel(windowed, num_threads)
        arms: dict[str, Callable[[DraftingPlace], Drafter]] = {"draft_model": make_draft_model}
        for capacity in CAPACITIES:
            arms[f"long_spec, {capacity}"] = partial(make_long, capacity)
        files = {name: str(long_draft) if name == "draft_model" else DRAFT for name in arms}
        measure(bench, opened, arms, files, tokens, options)
    return bench.finish(options)


def make_long(capacity: int, place: DraftingPlace) -> Drafter:
    """Makes long_spec with a cache of that size."""
    return LongSpecDrafter(place, open_draft(place), capacity)


def write_variant(directory: Path, name: str, *, windowed: bool) -> Path:
    """Writes an embedded model with `MAX_POSITIONS` positions, and a window if it shall have one; the weights are links."""
    directory.mkdir()
    source = locate(name)
    for file in source.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_POSITIONS
    if windowed:
        del config["attention_bias"], config["mlp_bias"]  # Mistral has neither
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def show_sanity(bench: Bench, paths: Mapping[str, Path], tokens: Sequence[int], num_threads: int) -> None:
    """Shows the perplexity of held-out text by position."""
    edges = (0, 1024, 2048, 4096, 8192, 12288, 16384)
    rows: list[tuple[object, ...]] = []
    last = {}
    for name, path in paths.items():
        losses = token_losses(OpenedModel(path, num_threads), tokens[: edges[-1] + 1])
        found = [float(np.exp(losses[start:end].mean())) for start, end in pairwise(edges)]
        last[name] = found[-1]
        rows.append((name, *found))
    headers = [f"from {start:,}" for start in edges[:-1]]
    bench.print_rows("Perplexity of held-out text by position", (MODEL, *headers), rows)
    as_it_is, windowed = last.values()
    bench.check("perplexity behind 12,288: with windows over without", windowed / as_it_is, high=0.5)


def token_losses(opened: OpenedModel, tokens: Sequence[int]) -> FloatArray:
    """Returns minus the log-probability of each token but the first."""
    num_blocks, chunk = -(-len(tokens) // BLOCK_SIZE), 256
    program, losses = opened.build(KVLayout(num_blocks, BLOCK_SIZE)), []
    for start in range(0, len(tokens) - 1, chunk):
        size = min(chunk, len(tokens) - 1 - start)
        logits = program.step(
            ForwardBatch(
                token_ids=np.array(tokens[start : start + size], np.int32),
                positions=np.arange(start, start + size, dtype=np.int32),
                query_starts=np.array([0, size], np.int32),
                context_lens=np.array([start + size], np.int32),
                block_tables=np.arange(num_blocks, dtype=np.int32)[None],
                logit_rows=np.arange(size, dtype=np.int32),
            ),
            LOGITS,
        ).logits
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses.append(-logits[np.arange(size), tokens[start + 1 : start + 1 + size]])
    return np.concatenate(losses)


def measure(
    bench: Bench,
    opened: OpenedModel,
    arms: Mapping[str, Callable[[DraftingPlace], Drafter]],
    files: Mapping[str, str],
    tokens: Sequence[int],
    options: argparse.Namespace,
) -> None:
    """Continues the same texts with each drafter behind contexts of each length."""
    ends = np.linspace(max(CONTEXTS), len(tokens), options.num_texts).astype(int).tolist()
    max_len = max(CONTEXTS) + NUM_TOKENS + 2 * NUM_DRAFTS
    rows: list[tuple[object, ...]] = []
    memory: list[tuple[object, ...]] = []
    rates: dict[tuple[str, int], float] = {}
    for name, make in arms.items():
        answering = Answering(opened, make, max_len, files=files[name])
        assert answering.drafter is not None
        found: list[float] = []
        for context in CONTEXTS:
            answers = list(continue_texts(answering, [tokens[end - context : end] for end in ends], name, options))
            rates[name, context] = acceptance(answers)
            found.append(rates[name, context])
        rows.append((name, *found))
        kept = [kv_bytes(answering.drafter, context) / 1024 for context in CONTEXTS]
        memory.append((name, *kept))
    headers = [f"{context:,} tokens" for context in CONTEXTS]
    bench.print_rows("Accepted of each draft that was verified", ("drafter", *headers), rows)
    columns = [f"KiB at {context:,}" for context in CONTEXTS]
    bench.print_rows("KV of the small model for one sequence", ("drafter", *columns), memory)
    own = f"long_spec, {CAPACITY}"
    first, last = CONTEXTS[0], CONTEXTS[-1]
    bench.check("long_spec: acceptance at 16,384 over that at 1,024", rates[own, last] / rates[own, first], low=0.95)
    bench.check("acceptance at 16,384: long_spec over draft_model", rates[own, last] / rates["draft_model", last], low=1.1)


def continue_texts(
    answering: Answering, prompts: Sequence[Sequence[int]], name: str, options: argparse.Namespace
) -> Iterator[Answer]:
    """Yields the continuation of each prompt."""
    with make_progress() as progress:
        for number, prompt in enumerate(progress.track(prompts, description=f"{name}, {len(prompts[0]):,} tokens")):
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=TEMPERATURE, seed=options.seed + number)
            yield answering.answer(prompt, sampling, NUM_DRAFTS, options.seed + number, to_the_end=True)


def acceptance(answers: Sequence[Answer]) -> float:
    """Returns the share of verified drafts that was accepted."""
    samples = [sample for answer in answers for sample in answer.samples]
    return sum(len(sample.accepted) for sample in samples) / sum(sample.num_drafted for sample in samples)


def kv_bytes(drafter: Drafter, context: int) -> float:
    """Returns the bytes of draft KV for one sequence of that length (the place runs one)."""
    if drafter.kv_block_bytes:
        return drafter.kv_block_bytes * -(-context // BLOCK_SIZE)
    assert isinstance(drafter, LongSpecDrafter)
    return drafter.cache_bytes


if __name__ == "__main__":
    raise SystemExit(main())
