"""Compares the log-likelihoods that lm-eval logged with those of the Python API: `python check.py OUTPUT_PATH`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cloister import LLM, SamplingParams
from cloister.types.request import TokenLogprobs

PROMPT = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)


def logged(folder: Path) -> Iterator[tuple[str, str, float, bool]]:
    """Yields (context, continuation, log-likelihood, whether greedy text is the continuation) of the latest run."""
    latest = max(folder.rglob("samples_modules_choice_*.jsonl"))
    for line in latest.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        for arguments, ((value, greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            yield arguments["arg_0"], arguments["arg_1"], float(value), greedy in (True, "True")


def score(entries: Sequence[TokenLogprobs | None], num_context: int) -> tuple[float, bool]:
    """Returns the sum over the continuation's tokens, and whether each of them is the most likely one."""
    known = [entry for entry in entries[num_context:] if entry is not None]
    return sum(entry.logprob for entry in known), all(entry.logprob == max(p for _, p in entry.top) for entry in known)


def main(folder: Path) -> int:
    samples = list(logged(folder))
    with LLM("cloister-5m") as llm:
        contexts = [llm.tokenizer.encode(context) for context, _, _, _ in samples]
        answers = llm.generate([llm.tokenizer.encode(context + answer) for context, answer, _, _ in samples], PROMPT)
    found = [score(answer.prompt_logprobs or (), len(context)) for answer, context in zip(answers, contexts, strict=True)]
    worst = max(abs(ours - value) for (ours, _), (_, _, value, _) in zip(found, samples, strict=True))
    num_greedy = sum(ours == greedy for (_, ours), (_, _, _, greedy) in zip(found, samples, strict=True))
    print(f"{len(samples)} log-likelihoods, largest difference {worst:.2g}; {num_greedy} agree on what is greedy")
    return int(worst > 1e-9 or num_greedy != len(samples))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
