"""Answer every row of a CSV file in one batch: `python examples/batch_csv.py [IN.csv [OUT.csv]]`.

The column `question` is asked; the same rows come out with a column `answer`. All rows run together, and a bar shows how far.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from cloister import LLM, SamplingParams

QUESTIONS = Path(__file__).parent / "data" / "questions.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", type=Path, default=QUESTIONS)
    parser.add_argument("target", nargs="?", type=Path, help="unset, standard output")
    parser.add_argument("--model", default="cloister-5m")
    chosen = parser.parse_args()
    with chosen.source.open(newline="", encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    with LLM(chosen.model) as llm:
        prompts = [llm.render([{"role": "user", "content": row["question"]}]) for row in rows]
        completions = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=80), on_progress=True)
    answered = [{**row, "answer": completion.text} for row, completion in zip(rows, completions, strict=True)]
    target = chosen.target.open("w", newline="", encoding="utf-8") if chosen.target is not None else sys.stdout
    with target:
        writer = csv.DictWriter(target, [*rows[0], "answer"])
        writer.writeheader()
        writer.writerows(answered)


if __name__ == "__main__":
    main()
