"""M9: what is lost when only the important tokens' KV of a prefix is read, as in IMPRESS (Chen et al., FAST 2025).

A question of 128 tokens stands behind a prefix of 768, whose KV was computed in full. Of each layer a share of the prefix's
blocks of 16 tokens is kept, the question is computed beside those alone, and is compared with all of them. Blocks are ranked by
the attention that the question pays them in each layer: by all heads (the best that a ranking by attention does), by the heads
of one KV head (IMPRESS reads the keys of a few heads and takes the others to agree), by all layers together, or without
attention: the first block and the newest. With all blocks nothing may be lost. The model is SmolLM2-135M in `transformers`, in
float32.

python -m benchmarks.kv_importance
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.harness import Bench, make_parser, make_progress
from benchmarks.models import open_checkpoint
from benchmarks.perplexity import read_text
from cloister.text import Tokenizer

NAME: Final = "smollm2"
PREFIX, QUESTION, BLOCK, STRIDE = 768, 128, 16, 1000
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 1.0)
HEADERS: Final = ("kept of the prefix", "ranked by", "KL, nats", "loss of perplexity, %", "same greedy token, %")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-windows", type=int, default=3)
    parser.set_defaults(num_threads=1)
    options = parser.parse_args()
    bench = Bench(
        "kv_importance",
        "Important blocks of a prefix",
        "half of the blocks, ranked by the attention of one KV head, lose less than 1% of perplexity",
    )
    rows = measure(options)
    bench.figures[NAME] = [dict(zip(HEADERS, row, strict=True)) for row in rows]
    bench.print_rows(NAME, HEADERS, rows)
    bench.check("KL with all, nats", max(row[2] for row in rows if row[0] == "100%"), high=1e-6)
    bench.check("loss with half, one KV head, %", next(row[3] for row in rows if row[:2] == ["50%", "one KV head"]), high=1)
    return bench.finish(options)


def measure(options: argparse.Namespace) -> list[list[Any]]:
    """Returns the rows of the table, each the mean of all windows."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.num_threads)
    path = open_checkpoint(NAME)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    tokens, found = Tokenizer(path).encode(read_text()), dict[tuple[str, str], list[tuple[float, float, float]]]()
    with make_progress() as progress, torch.inference_mode():
        for window in progress.track(range(options.num_windows), description="windows"):
            start = window * STRIDE
            for case, result in compare(model, torch.tensor([tokens[start : start + PREFIX + QUESTION]])):
                found.setdefault(case, []).append(result)
    rows: list[list[Any]] = []
    for (share, ranking), results in found.items():
        divergence, loss, same = np.mean(results, 0).tolist()
        rows.append([share, ranking, divergence, 100 * math.expm1(loss), 100 * same])
    return rows


def compare(model: Any, ids: Any) -> Iterator[tuple[tuple[str, str], tuple[float, float, float]]]:
    """Yields ((share, ranking), (KL, nats lost, part of the same greedy tokens)) of one text."""
    import torch
    from transformers import DynamicCache

    whole: Any = DynamicCache()
    model(ids[:, :PREFIX], past_key_values=whole, logits_to_keep=1)
    layers = [(layer.keys.clone(), layer.values.clone()) for layer in whole.layers]
    full = model(ids[:, PREFIX:], past_key_values=whole, output_attentions=True)
    truth, labels = torch.log_softmax(full.logits[0, :-1].double(), -1), ids[0, PREFIX + 1 :]
    places = torch.arange(len(labels))
    # Of each layer [heads, blocks].
    mass = [each[0, :, :, :PREFIX].sum(1).reshape(-1, PREFIX // BLOCK, BLOCK).sum(-1) for each in full.attentions]
    shared = model.config.num_attention_heads // model.config.num_key_value_heads
    rankings: dict[str, Callable[[int], list[list[int]]]] = {
        "all heads": lambda num: [each.sum(0).topk(num).indices.tolist() for each in mass],
        "one KV head": lambda num: [each[:shared].sum(0).topk(num).indices.tolist() for each in mass],
        "all layers alike": lambda num: [sum(each.sum(0) for each in mass).topk(num).indices.tolist()] * len(mass),
        "first and newest": lambda num: [[0, *range(PREFIX // BLOCK - num + 1, PREFIX // BLOCK)]] * len(mass),
    }
    for share in SHARES:
        for name, rank in rankings.items():
            rows = ask(model, ids[:, PREFIX:], layers, rank(round(share * PREFIX / BLOCK)))
            divergence = (truth.exp() * (truth - rows)).sum(-1).mean().item()
            lost = (truth[places, labels] - rows[places, labels]).mean().item()
            same = (truth.argmax(-1) == rows.argmax(-1)).double().mean().item()
            yield (f"{share:.0%}", name), (divergence, lost, same)


def ask(model: Any, question: Any, layers: Sequence[tuple[Any, Any]], kept: Sequence[Sequence[int]]) -> Any:
    """Returns log-probabilities [QUESTION - 1, vocab] of the question behind these blocks of each layer."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        tokens = torch.cat([torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in sorted(kept[number])])
        cache.update(keys[:, :, tokens], values[:, :, tokens], number)
    num_kept = len(kept[0]) * BLOCK
    mask = torch.zeros(1, 1, QUESTION, num_kept + QUESTION)
    mask[0, 0, :, num_kept:] = torch.triu(torch.full((QUESTION, QUESTION), float("-inf")), 1)
    positions = torch.arange(PREFIX, PREFIX + QUESTION)[None]
    logits = model(question, past_key_values=cache, position_ids=positions, attention_mask=mask).logits
    return torch.log_softmax(logits[0, :-1].double(), -1)


if __name__ == "__main__":
    sys.exit(main())
