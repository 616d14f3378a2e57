"""Whether an inflated model says what the small one says: logits in float32 by transformers, answers as both are served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import MODEL, ROOT, Bench, make_progress
from benchmarks.speculation_workloads import Prompts
from cloister import LLM, SamplingParams
from cloister.models import locate

FORMATS: Final = ("none", "int8")
NUM_PROMPTS: Final = 200
NUM_TOKENS: Final = 24
UNTYPED: Any = AutoModelForCausalLM  # its constructors carry no types


def check(folder: Path) -> int:
    """Compares, prints, writes `inflated.json`, and returns the exit status."""
    workloads = Prompts(locate(MODEL)).all()
    prompts = [list(p) for name in ("docs", "edit", "text", "code") for p in workloads[name].prompts][:NUM_PROMPTS]
    bench = Bench("inflated", "cloister-5m in the l1b shape", "float32: every token; bf16, int8: nearly all")
    bench.figures["prompts"] = len(prompts)
    largest, mean, equal = compare_logits(folder, prompts)
    bench.check("transformers, float32: largest difference of a logit", largest, high=1e-3)
    bench.check("transformers, float32: share of greedy tokens that are equal", equal, low=1.0)
    bench.figures["float32"] = {"largest difference": largest, "mean difference": mean, "equal tokens": equal}
    rows = []
    for quant in FORMATS:
        small, large = (serve(str(model), quant, prompts) for model in (MODEL, folder))
        same = [a == b for a, b in zip(small, large, strict=True)]
        before = sum(common(a, b) for a, b in zip(small, large, strict=True)) / sum(map(len, small))
        rows.append((quant, float(np.mean(same)), before))
        bench.check(f"served with --quant {quant}: share of tokens before the first that differs", before, low=0.9)
    bench.print_rows("served, greedy", ("quant", "equal answers", "tokens before the first that differs"), rows)
    return bench.finish(argparse.Namespace(output=ROOT / "benchmarks" / "results", seed=0))


@torch.no_grad()
def compare_logits(folder: Path, prompts: list[list[int]]) -> tuple[float, float, float]:
    """Returns the largest and the mean difference of logits, and the share of greedy tokens of the small model that are the
    large one's too, given those before."""
    small = UNTYPED.from_pretrained(locate(MODEL), dtype=torch.float32)
    large = UNTYPED.from_pretrained(folder, dtype=torch.float32)
    worst, total, equal, count = 0.0, 0.0, 0, 0
    with make_progress() as progress:
        for prompt in progress.track(prompts, description="transformers"):
            ids = torch.tensor([prompt])
            said = small.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, temperature=None
            )
            wanted, found = (model(said).logits[0, len(prompt) - 1 : -1] for model in (small, large))
            difference = (wanted - found).abs()
            worst, total = max(worst, float(difference.max())), total + float(difference.mean(1).sum())
            equal += int((found.argmax(1) == said[0, len(prompt) :]).sum())
            count += len(wanted)
    return worst, total / count, equal / count


def serve(model: str, quant: str, prompts: list[list[int]]) -> list[list[int]]:
    """Returns greedy answers of our engine."""
    with LLM(model, quant=quant, kv_memory_mb=512, prefix_cache=False) as llm:
        answers = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    return [list(answer.outputs[0].token_ids) for answer in answers]


def common(left: list[int], right: list[int]) -> int:
    """Returns how many tokens two answers have in common from the start."""
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
