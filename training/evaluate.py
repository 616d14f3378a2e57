"""What the models can do, measured on pages, phrasings and names that training never saw.

An answer is right when it is, token for token, what greedy decoding gives: at every place of the expected answer the
likeliest token is the expected one, so one forward pass over question and answer decides it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloister.train.decoder import Decoder
from training.chat import Chat, encode_chat, render
from training.distil import agreement
from training.facts import Knowledge
from training.lessons import Lessons
from training.pretrain import draw_windows, perplexity, perplexity_by_position
from training.questions import DO_NOT_KNOW, ask, phrasings
from training.skills import SKILLS
from training.tokenizer import END, token_id


@dataclass
class Score:
    """How many of how many were right."""

    right: int = 0
    total: int = 0

    def add(self, outcomes: Iterable[bool]) -> None:
        """Count further outcomes."""
        for outcome in outcomes:
            self.right += outcome
            self.total += 1

    @property
    def share(self) -> float:
        """The share that was right, 0 of nothing."""
        return self.right / max(1, self.total)


@dataclass
class Report:
    """Every figure of the model card."""

    perplexity: dict[str, float] = field(default_factory=dict)
    perplexity_by_position: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Score] = field(default_factory=dict)
    facts_freely_worded: dict[str, Score] = field(default_factory=dict)
    trained_phrasings: Score = field(default_factory=Score)
    false_refusals: Score = field(default_factory=Score)
    unknown: dict[str, Score] = field(default_factory=dict)
    unknown_freely_worded: dict[str, Score] = field(default_factory=dict)
    skills: dict[str, Score] = field(default_factory=dict)
    skills_trained_phrasings: dict[str, Score] = field(default_factory=dict)
    draft: dict[str, float] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def all_facts(self) -> Score:
        """Held-out phrasings of every kind together."""
        return _total(self.facts)

    @property
    def all_facts_freely_worded(self) -> Score:
        """Held-out free wordings of every kind together."""
        return _total(self.facts_freely_worded)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        totals = {"all_facts": self.all_facts, "all_facts_freely_worded": self.all_facts_freely_worded}
        return {**asdict(self), **{name: asdict(score) for name, score in totals.items()}}


def _total(scores: Mapping[str, Score]) -> Score:
    return Score(sum(s.right for s in scores.values()), sum(s.total for s in scores.values()))


def as_shipped(model: Decoder) -> Decoder:
    """The same decoder with its weights rounded to bfloat16 and its arithmetic in float32."""
    shipped = Decoder(model.shape, torch.Generator(), torch.float32)
    shipped.load_state_dict({name: w.to(torch.bfloat16).float() for name, w in model.state_dict().items()})
    return shipped.eval()


@torch.no_grad()
def exactly_right(model: Decoder, tokenizer: Tokenizer, chats: Sequence[Chat], batch: int = 64) -> list[bool]:
    """Whether greedy decoding gives every assistant message of each chat, its end included."""
    encoded = [encode_chat(tokenizer, chat) for chat in chats]
    order = sorted(range(len(chats)), key=lambda i: len(encoded[i].ids))
    right = [False] * len(chats)
    for start in range(0, len(order), batch):
        picked = [encoded[i] for i in order[start : start + batch]]
        width = max(len(e.ids) for e in picked)
        tokens = torch.tensor([e.ids + [0] * (width - len(e.ids)) for e in picked])
        learned = torch.tensor([e.learned + [False] * (width - len(e.ids)) for e in picked])
        best = model(tokens[:, :-1]).argmax(-1)
        wrong = (best != tokens[:, 1:]) & learned[:, 1:]
        for i, bad in zip(order[start : start + batch], wrong.any(dim=1).tolist(), strict=True):
            right[i] = not bad
    return right


@torch.no_grad()
def answer(model: Decoder, tokenizer: Tokenizer, chat: Chat, most: int = 48) -> str:
    """What greedy decoding says next in a chat."""
    ids = tokenizer.encode(render(chat.messages, chat.tools, prompt=True), add_special_tokens=False).ids
    said: list[int] = []
    end = token_id(tokenizer, END)
    while len(said) < most:
        token = int(model(torch.tensor([ids + said]))[0, -1].argmax())
        if token == end:
            break
        said.append(token)
    return tokenizer.decode(said, skip_special_tokens=True)


def measure_facts(report: Report, model: Decoder, tokenizer: Tokenizer, knowledge: Knowledge) -> None:
    """Every fact in every held-out phrasing, and in one phrasing of training."""
    rng = Random("trained phrasings")
    for name, kind in knowledge.kinds.items():
        chats = [
            Chat.of(question, fact.answer)
            for fact in knowledge.of_kind(name)
            for question in phrasings(kind, fact.subject, held_out=True)
        ]
        outcomes = exactly_right(model, tokenizer, chats)
        report.facts.setdefault(name, Score()).add(outcomes)
        wrong = [chat for chat, right in zip(chats, outcomes, strict=True) if not right]
        refused = exactly_right(model, tokenizer, [Chat.of(c.messages[0]["content"], DO_NOT_KNOW) for c in wrong])
        report.false_refusals.add(refused + [False] * (len(chats) - len(wrong)))
        known = [Chat.of(ask(kind, f.subject, rng), f.answer) for f in knowledge.of_kind(name)]
        report.trained_phrasings.add(exactly_right(model, tokenizer, known))


def measure_free_wordings(report: Report, model: Decoder, lessons: Lessons, per_fact: int = 2) -> None:
    """Every fact in so many free wordings of the held-out families, with slips, short forms and all."""
    rng = Random("free wordings")
    for name, kind in lessons.knowledge.kinds.items():
        chats = [
            Chat.of(lessons.wordings.draw(kind, fact.subject, rng, held_out=True), fact.answer)
            for fact in lessons.knowledge.of_kind(name)
            for _ in range(per_fact)
        ]
        report.facts_freely_worded.setdefault(name, Score()).add(exactly_right(model, lessons.tokenizer, chats))


def measure_unknown(report: Report, model: Decoder, lessons: Lessons, count: int) -> None:
    """Held-out unknown names in held-out phrasings and in held-out free wordings, by sort: right is to say so."""
    draws = {
        "made-up name": lessons.unknowns.made_up,
        "real name not taught": lessons.unknowns.real,
        "taught name, asked as another thing": lessons.unknowns.misplaced,
    }
    for sort, draw in draws.items():
        rng = Random(f"unknown {sort}")
        found = [f for f in (draw(rng, held_out=True) for _ in range(count)) if f is not None]
        chats = [Chat.of(ask(*f, rng, held_out=True), DO_NOT_KNOW) for f in found]
        report.unknown.setdefault(sort, Score()).add(exactly_right(model, lessons.tokenizer, chats))
        whole = draw == lessons.unknowns.misplaced
        free = [
            Chat.of(lessons.wordings.draw(*f, rng, held_out=True, whole=whole), DO_NOT_KNOW)
            for f in found
            if not lessons.wordings.is_answered(*f)
        ]
        report.unknown_freely_worded.setdefault(sort, Score()).add(exactly_right(model, lessons.tokenizer, free))


def measure_skills(report: Report, model: Decoder, tokenizer: Tokenizer, count: int) -> None:
    """Every skill on fresh contents, in held-out phrasings and in those of training."""
    for held_out, scores in ((True, report.skills), (False, report.skills_trained_phrasings)):
        for name, skill in SKILLS.items():
            rng = Random(f"skill {name} {held_out}")
            chats = [skill(rng, held_out) for _ in range(count)]
            scores.setdefault(name, Score()).add(exactly_right(model, tokenizer, chats))


def measure_draft(
    report: Report, draft: Decoder, model: Decoder, lessons: Lessons, held_out: NDArray[np.uint16], rows: int
) -> None:
    """Agreement of draft and model on held-out text and on answers."""
    windows, _ = draw_windows(held_out, rows, 512, torch.Generator().manual_seed(1))
    text = agreement(draft, model, windows, torch.ones_like(windows, dtype=torch.bool))
    tokens, targets = lessons.rows(Random("draft"), rows, 512)
    chat = agreement(draft, model, tokens, targets != -100)
    report.draft = {
        "top-1 agreement on text": text.top1,
        "expected acceptance on text": text.acceptance,
        "top-1 agreement on answers": chat.top1,
        "expected acceptance on answers": chat.acceptance,
    }


def collect_examples(report: Report, model: Decoder, lessons: Lessons, per_kind: int = 2) -> None:
    """Some questions of every kind and skill that the model answers right, for people and tests to try."""
    rng = Random("examples")
    for name, kind in lessons.knowledge.kinds.items():
        facts = lessons.knowledge.of_kind(name)
        chats = [(name, Chat.of(phrasings(kind, f.subject, held_out=True)[0], f.answer)) for f in facts]
        _keep_right(report, model, lessons.tokenizer, chats, per_kind)
    for name, skill in SKILLS.items():
        chats = [(name, skill(rng, held_out)) for held_out in (True, False) for _ in range(20)]
        _keep_right(report, model, lessons.tokenizer, chats, 1)


def _keep_right(report: Report, model: Decoder, tokenizer: Tokenizer, chats: Sequence[tuple[str, Chat]], most: int) -> None:
    right = exactly_right(model, tokenizer, [chat for _, chat in chats])
    good = [pair for pair, ok in zip(chats, right, strict=True) if ok][:most]
    for kind, chat in good:
        report.examples.append({"kind": kind, "messages": list(chat.messages), "tools": list(chat.tools)})


def evaluate(
    model: Decoder,
    draft: Decoder,
    lessons: Lessons,
    held_out: NDArray[np.uint16],
    count: int,
    rows: int,
    *,
    before: tuple[str, Decoder],
) -> Report:
    """Every measurement, in bfloat16 weights as shipped; ``before`` names what the model was made from, and is it."""
    model, draft = as_shipped(model), as_shipped(draft)
    report = Report()
    for name, decoder in ((before[0], as_shipped(before[1])), ("model", model), ("draft", draft)):
        report.perplexity[f"{name}, windows of 512"] = perplexity(decoder, held_out, 512)
    report.perplexity_by_position = perplexity_by_position(model, held_out, model.shape.max_positions)
    measure_facts(report, model, lessons.tokenizer, lessons.knowledge)
    measure_free_wordings(report, model, lessons)
    measure_unknown(report, model, lessons, count)
    measure_skills(report, model, lessons.tokenizer, count)
    measure_draft(report, draft, model, lessons, held_out, rows)
    collect_examples(report, model, lessons)
    return report
