"""Thirty everyday prompts, answered by several models with their own sampling defaults: which of them is worth talking to?

    python -m benchmarks.everyday                            # ask, and keep the verdicts on answers that stayed the same
    python -m benchmarks.everyday --judge                    # read each answer that has no verdict, and give one
    python -m benchmarks.everyday --table                    # print the table of docs/models.md
    python -m benchmarks.everyday --models smollm2-135m --temperature 0 --output /tmp/greedy    # other sampling

The prompts were written before any was answered. A person judges: good is an answer that one would be content with, right and
to the point; an answer that is partly wrong, rambles or breaks off is not.
"""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.harness import console, make_parser
from cloister import LLM
from cloister.cli.options import choose_sampling

MODELS: Final = "cloister-5m,smollm2-135m"
MAX_TOKENS: Final = 200
PROMPTS: Final = (
    "Hello! How are you?",
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "How many days are in a week?",
    "What is 7 plus 5?",
    "What is the largest planet in our solar system?",
    "Why is the sky blue?",
    "What is photosynthesis? Answer in one sentence.",
    "Give me three tips for sleeping better.",
    "Write a short thank-you note to a colleague who helped me move.",
    "Write a haiku about autumn.",
    "Tell me a joke.",
    "Suggest a name for a grey cat.",
    "What can I cook with eggs, tomatoes and cheese?",
    "How do I boil an egg?",
    "Translate to Spanish: Good morning, my friend.",
    "What is the opposite of hot?",
    "Correct the grammar: She don't like apples.",
    "Summarize in one sentence: The meeting was moved from Monday to Wednesday because the projector is broken, and lunch"
    " will be provided.",
    "Is the review positive or negative? Review: The food was cold and the waiter was rude.",
    "List five fruits.",
    "What is the difference between a cat and a dog?",
    "Explain gravity to a child.",
    "Write an email that asks my boss for a day off on Friday.",
    "What should I pack for a day at the beach?",
    "Write a Python function that adds two numbers.",
    "What does the SQL command SELECT do?",
    "What is machine learning?",
    "I feel sad today. What can I do?",
    "Give me a title for a story about a lost dog who finds its way home.",
)


def ask(
    model: str, given: Mapping[str, float | int | None], system: str | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the sampling of a model and its answer to each prompt, all in one batch (which changes no answer)."""
    with LLM(model, max_model_len=2048, kv_memory_mb=512) as llm:
        sampling = choose_sampling(llm.default_sampling, {**given, "max_tokens": MAX_TOKENS})
        before = [{"role": "system", "content": system}] if system is not None else []
        prompts = [llm.render([*before, {"role": "user", "content": prompt}]) for prompt in PROMPTS]
        completions = llm.generate(prompts, sampling)
    outputs = [completion.outputs[0] for completion in completions]
    answers = [{"text": output.text.strip(), "finish_reason": str(output.finish_reason)} for output in outputs]
    return msgspec.to_builtins(sampling), answers


def read_results(path: Path) -> dict[str, Any]:
    """Returns model -> {"sampling", "answers"} of an earlier run, {} if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def keep_verdicts(old: Mapping[str, Any], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answers with their prompts, and the verdicts on those that are what they were."""
    known = {(answer["prompt"], answer["text"]): answer["good"] for answer in old.get("answers", ())}
    rows = zip(PROMPTS, answers, strict=True)
    return [{"prompt": prompt, **answer, "good": known.get((prompt, answer["text"]))} for prompt, answer in rows]


def judge(results: Mapping[str, Any]) -> None:
    """Shows each answer that nobody judged, and asks."""
    for model, found in results.items():
        for answer in found["answers"]:
            if answer["good"] is None:
                console.print(f"[bold]{model}: {answer['prompt']}", highlight=False)
                console.print(answer["text"], markup=False, highlight=False)
                answer["good"] = input("good? [y/n] ").strip().lower().startswith("y")


def write_table(results: Mapping[str, Any], width: int = 220) -> Iterator[str]:
    """Yields the lines of a Markdown table: prompt, and each model's answer with its verdict."""
    models = list(results)
    yield f"| prompt | {' | '.join(models)} |"
    yield "|---|" + "---|" * len(models)
    for number, prompt in enumerate(PROMPTS):
        answers = [results[model]["answers"][number] for model in models]
        cells = [f"{_mark(answer['good'])} {_cell(answer['text'], width)}" for answer in answers]
        yield f"| {_cell(prompt, 200)} | {' | '.join(cells)} |"
    sums = [f"**{sum(bool(answer['good']) for answer in results[model]['answers'])} of {len(PROMPTS)}**" for model in models]
    yield f"| good | {' | '.join(sums)} |"


def _mark(good: bool | None) -> str:
    return {True: "**good**:", False: "bad:", None: "not judged:"}[good]


def _cell(text: str, width: int) -> str:
    short = textwrap.shorten(text.replace("|", "\\|"), width, placeholder=" ...")
    return short.replace("<", "&lt;").replace("*", "\\*").replace("`", "'")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default=MODELS, help="names, directories or GGUF files, with commas between them")
    parser.add_argument("--temperature", type=float, help="unset, as the model says; so are the next ones")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--system", help="system message; unset, that of the model's chat template")
    parser.add_argument("--judge", action=BooleanOptionalAction, default=False, help="ask for missing verdicts; ask no model")
    parser.add_argument("--table", action=BooleanOptionalAction, default=False, help="print the table; ask no model")
    options = parser.parse_args()
    path = options.output / "everyday.json"
    results = read_results(path)
    if options.table:
        print("\n".join(write_table(results)))
        return 0
    if options.judge:
        judge(results)
    else:
        given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty", "seed")}
        for model in options.models.split(","):
            sampling, answers = ask(model, given, options.system)
            results[model] = {"sampling": sampling, "answers": keep_verdicts(results.get(model, {}), answers)}
            console.print(f"{model}: {len(answers)} answers, sampling {sampling}", highlight=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
