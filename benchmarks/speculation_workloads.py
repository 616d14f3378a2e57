"""What speculation is measured on, always the same prompts.

For cloister-5m, from speculation_prompts.json:

- docs: questions about the documentation in phrasings that training never used, with answers of 45 characters and more;
  greedy, and drawn at temperature 1 with a seed and without.
- text: pages of the documentation that training never saw, continued.
- code: Python, continued.
- edit: a text of twelve words stands in the conversation twice and is asked for with one word changed. Of 5 million weights one
  cannot ask for more, and texts are chosen that it repeats to the last word: what is measured is copying.
- random: tokens without sense, continued at temperature 1: nothing to learn, which is where drafts only cost.

A greedy continuation of so small a model soon repeats itself for ever, which any drafter foresees: text and code are drawn at
temperature 0.7 with a seed. Public models get passages of the documentation: to continue, to answer a question about, and to
repeat with one word changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cloister.quant.passages import HELD_OUT, read_passages
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.request import SamplingParams

PROMPTS: Final = Path(__file__).with_name("speculation_prompts.json")
NUM_PROMPTS: Final = 64
NUM_RANDOM_TOKENS: Final = 32
PASSAGE_CHARS: Final = 160
NUM_PUBLIC, PUBLIC_CHARS, PUBLIC_TOKENS = 16, 600, 48
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind and how they are answered.

    Attributes:
        prompts: token ids of each.
        seeded: whether each request brings a seed, its prompt's number.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float = 0.0
    seeded: bool = True
    ignore_eos: bool = False

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
        found = (
            Workload("docs", docs, 48),
            Workload("docs, T 1, seed", docs, 48, temperature=1.0),
            Workload("docs, T 1, no seed", docs, 48, temperature=1.0, seeded=False),
            Workload("text", tuple(map(self.plain, passages(NUM_PROMPTS))), 24, temperature=0.7, ignore_eos=True),
            Workload("code", tuple(map(self.plain, self._texts["code"])), 24, temperature=0.7, ignore_eos=True),
            Workload("edit", tuple(self.chat(editing(*edit)) for edit in self._texts["edit"]), 48),
            Workload("random", random_prompts(self._tokenizer.vocab_size), 24, temperature=1.0, ignore_eos=True),
        )
        return {workload.name: workload for workload in found}

    def public(self) -> dict[str, Workload]:
        """Returns the workloads of a model that was not made here: passages of the documentation in its own chat template."""
        text = read_passages(HELD_OUT)
        passages = [text[start : start + PUBLIC_CHARS] for start in range(0, NUM_PUBLIC * PUBLIC_CHARS, PUBLIC_CHARS)]
        asked = [f"{passage}\n\nWhat is this about? Answer in two sentences." for passage in passages]
        changed = [f"Repeat this text, but write CLOISTER for its first word:\n\n{passage[:240]}" for passage in passages]
        chats = {"question": asked, "repeat": changed}
        found = {
            name: Workload(name, tuple(self.chat([_said("user", text)]) for text in texts), PUBLIC_TOKENS, ignore_eos=True)
            for name, texts in chats.items()
        }
        plain = tuple(map(self.plain, passages))
        return {"text": Workload("text", plain, PUBLIC_TOKENS, temperature=0.7, ignore_eos=True), **found}

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
