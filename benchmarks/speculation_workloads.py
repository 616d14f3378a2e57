"""What speculation is measured on: five kinds of text, always the same prompts.

    python -m benchmarks.speculation_workloads           # how long the answers are, and how much of them repeats
    python -m benchmarks.speculation_workloads --draw    # writes speculation_prompts.json anew, from the documentation

- docs: questions about the documentation in phrasings that training never used, with answers of 45 characters and more, from
  every kind of fact that has such; greedy, and drawn at temperature 1 with a seed and without.
- text: pages of the documentation that training never saw, continued.
- code: Python, continued.
- edit: a text of twelve words stands in the conversation twice and is asked for with one word changed. Of 5 million weights one
  cannot ask for more, and texts are chosen that it repeats to the last word: what is measured is copying.
- random: tokens without sense, continued at temperature 1: nothing to learn, which is where drafts only cost.

A greedy continuation of so small a model soon repeats itself for ever, which any drafter foresees: text and code are drawn at
temperature 0.7 with a seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from benchmarks.harness import MODEL, Bench, make_parser
from cloister.models import locate
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.request import SamplingParams

PROMPTS: Final = Path(__file__).with_name("speculation_prompts.json")
NUM_PROMPTS: Final = 64
MIN_ANSWER_CHARS: Final = 45
EDIT_WORDS: Final = 12
NUM_RANDOM_TOKENS: Final = 32
PASSAGE_CHARS: Final = 160
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind and how they are answered.

    Attributes:
        prompts: token ids of each.
        seeded: whether each request brings a seed, its prompt's number.
        wanted: answers that a prompt shall have; empty where any will do.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float = 0.0
    seeded: bool = True
    ignore_eos: bool = False
    wanted: tuple[str, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether every engine has to give the same answers."""
        return self.seeded or self.temperature == 0

    def sampling(self, number: int) -> SamplingParams:
        """Returns how the prompt of this number is answered."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=number if self.seeded else None,
            ignore_eos=self.ignore_eos,
        )


class Prompts:
    """Prompts as the tokens of a model.

    Args:
        model: its directory; all models of the family have one tokenizer.
    """

    def __init__(self, model: Path) -> None:
        self._tokenizer, self._template = Tokenizer(model), ChatTemplate.load(model)
        self._texts: dict[str, Any] = json.loads(PROMPTS.read_text(encoding="utf-8"))

    def all(self) -> dict[str, Workload]:
        """Returns every workload by name."""
        docs = tuple(self.chat([_said("user", question)]) for question in self._texts["docs"])
        edits = self._texts["edit"]
        found = (
            Workload("docs", docs, 48),
            Workload("docs, T 1, seed", docs, 48, temperature=1.0),
            Workload("docs, T 1, no seed", docs, 48, temperature=1.0, seeded=False),
            Workload("text", tuple(map(self.plain, passages(NUM_PROMPTS))), 24, temperature=0.7, ignore_eos=True),
            Workload("code", tuple(map(self.plain, self._texts["code"])), 24, temperature=0.7, ignore_eos=True),
            Workload("edit", tuple(self.chat(editing(*edit)) for edit in edits), 48, wanted=tuple(after for _, after in edits)),
            Workload("random", random_prompts(self._tokenizer.vocab_size), 24, temperature=1.0, ignore_eos=True),
        )
        return {workload.name: workload for workload in found}

    def chat(self, messages: Chat) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(self._template.render([dict(message) for message in messages]), False))

    def plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, True))


def editing(before: str, after: str) -> Chat:
    """Returns a conversation that asks for a text again, changed in one word."""
    return [_said("user", f"Repeat after me: {before}"), _said("assistant", before), _said("user", f"Repeat after me: {after}")]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def passages(count: int) -> list[str]:
    """Returns beginnings of paragraphs that training never saw."""
    paragraphs = [text.replace("\n", " ").strip() for text in read_passages(HELD_OUT).split("\n\n")]
    return [text[:PASSAGE_CHARS].rsplit(" ", 1)[0] for text in paragraphs if 250 < len(text) < 600][:count]


def random_prompts(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns tokens without sense; the first ones of the vocabulary, which steer chats, are not among them."""
    drawn = np.random.default_rng(0).integers(16, vocab_size, size=(NUM_PROMPTS, NUM_RANDOM_TOKENS))
    return tuple(tuple(row) for row in drawn.tolist())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--draw", action="store_true", help="draw questions and edits anew; needs the documentation")
    options = parser.parse_args()
    if options.draw:
        draw(options)
    return describe(options)


def describe(options: argparse.Namespace) -> int:
    """Prints what the answers of the model are like."""
    from cloister import LLM

    bench = Bench("speculation_workloads", "Workloads of speculation", "edits repeated to the last word, no loops")
    with LLM(MODEL, kv_memory_mb=64, prefix_cache=False) as llm:
        for workload in Prompts(locate(MODEL)).all().values():
            prompts = [list(prompt) for prompt in workload.prompts]
            answers = llm.generate(prompts, [workload.sampling(number) for number in range(len(prompts))])
            tokens = [list(answer.outputs[0].token_ids) for answer in answers]
            exact = [answer.outputs[0].text == text for answer, text in zip(answers, workload.wanted, strict=False)]
            bench.figures[workload.name] = {
                "prompts": len(prompts),
                "prompt tokens": float(np.mean([len(prompt) for prompt in prompts])),
                "answer tokens": float(np.mean([len(answer) for answer in tokens])),
                "repeated in the answer": float(np.mean([repeated(answer) for answer in tokens])),
                "copied from the prompt": float(np.mean([copied(*both) for both in zip(tokens, prompts, strict=True)])),
                "as wanted": float(np.mean(exact)) if exact else "",
            }
    rows = [(name, *figures.values()) for name, figures in bench.figures.items()]
    headers = ("workload", *next(iter(bench.figures.values())))
    bench.print_rows("answers of the model (4-grams)", headers, rows)
    bench.check("share of edits that are as wanted", float(bench.figures["edit"]["as wanted"]), low=0.95)
    for name in ("text", "code", "random"):
        bench.check(f"share of {name} that repeats", float(bench.figures[name]["repeated in the answer"]), high=0.25)
    return bench.finish(options)


def grams(tokens: Sequence[int], size: int = 4) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(size)), strict=False))


def repeated(answer: Sequence[int]) -> float:
    """Returns the share of an answer's 4-grams that it had already."""
    found = grams(answer)
    return 1 - len(set(found)) / max(1, len(found))


def copied(answer: Sequence[int], prompt: Sequence[int]) -> float:
    """Returns the share of an answer's 4-grams that stand in its prompt."""
    found, there = grams(answer), set(grams(prompt))
    return sum(gram in there for gram in found) / max(1, len(found))


def draw(options: argparse.Namespace) -> None:
    """Writes the file of prompts; code stays as it is."""
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    texts["docs"] = draw_questions()
    texts["edit"] = draw_edits(Random(options.seed))
    PROMPTS.write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")


def draw_questions() -> list[str]:
    """Returns questions about facts with long answers, kinds in turn, in an order that is no one's choice."""
    from training.corpus import DEBIAN_SOURCES
    from training.facts import draw_knowledge, stable_order
    from training.questions import phrasings

    knowledge = draw_knowledge(DEBIAN_SOURCES)
    kinds: dict[str, list[str]] = {}
    for fact in sorted(knowledge.facts, key=lambda fact: stable_order(fact.subject)):
        if len(fact.answer) >= MIN_ANSWER_CHARS:
            asked = phrasings(knowledge.kinds[fact.kind], fact.subject, held_out=True)
            kinds.setdefault(fact.kind, []).append(asked[stable_order(fact.answer)[0] % len(asked)])
    in_turn = chain.from_iterable(zip_longest(*kinds.values()))
    return list(islice((question for question in in_turn if question), NUM_PROMPTS))


def draw_edits(random: Random) -> list[tuple[str, str]]:
    """Returns texts before and after a change that the model repeats to the last word."""
    from cloister import LLM
    from training.words import CITIES, NAMES, THINGS

    def word() -> str:
        return random.choice(THINGS + NAMES + CITIES)

    with LLM(MODEL, kv_memory_mb=64, prefix_cache=False) as llm:
        return list(islice(_repeated(llm.chat, word, random), NUM_PROMPTS))


def _repeated(ask: Callable[[Chat, SamplingParams], Any], word: Callable[[], str], random: Random) -> Iterator[tuple[str, str]]:
    while True:
        words = [word() for _ in range(EDIT_WORDS)]
        before = " ".join(words)
        words[random.randrange(1, EDIT_WORDS - 1)] = word()
        after = " ".join(words)
        answer = ask(editing(before, after), SamplingParams(max_tokens=48, temperature=0.0))
        if before != after and answer.outputs[0].text == after:
            yield before, after


if __name__ == "__main__":
    raise SystemExit(main())
