"""Questions as people put them: a frame of its family, words around it, and what haste does to it (`typing_slips.py`).

`questions.py` has the few wordings that every fact was first taught in; these are the many that carry it over to wordings of
others. Both keep their held-out ones apart.
"""

import re
from collections import defaultdict
from itertools import chain
from random import Random

from training.facts import Kind, Knowledge
from training.frames import (
    ABOUT,
    ABOUT_HELD_OUT,
    CLOSINGS,
    CLOSINGS_HELD_OUT,
    MANNERS,
    OPENINGS,
    OPENINGS_HELD_OUT,
    PLACES,
    SHORT_FORMS,
    Manner,
)
from training.questions import phrasings
from training.typing_slips import SUBJECT, mark, misspell, misspell_words, shorten

OPENING_SHARE = 0.25
CLOSING_SHARE = 0.12
OUTSIDE_SHARE = 0.35
"""How often `in Postgres` stands before or behind the question and not beside the name."""
LOWER_SHARE = 0.3
QUOTED_SHARE = 0.1
CALLED_SHARE = 0.2
APART_SHARE = 0.08
"""How often `math.cbrt` is written `cbrt from math`, and `wal.html` without its ending."""
SPACED_SHARE = 0.04
"""How often the underscores of a name are spaces."""
SLIP_SHARE = 0.25
NAME_SLIP_SHARE = 0.04
"""How often a long name has a slip in it. Seldom: a name that is not quite one it knows should as a rule be declined."""
SHORTENED_SHARES = (0.0, 0.0, 0.05, 0.2)

PLACED = ("{p}'s {x}", "{x} in {p}", "{p} {x}", "{x} ({p})", "{x} from {p}")
SORTED = ("the {s} {x}", "the {x} {s}", "{s} {x}", "{x} {s}")
BOTH = (
    "the {p} {s} {x}", "the {p} {x} {s}", "{p}'s {x} {s}", "{p}'s {s} {x}", "{p} {s} {x}", "the {s} {x} in {p}",
    "the {x} {s} of {p}", "{x} {s} in {p}", "{x}, the {p} {s}",
)  # fmt: skip
BEFORE = ("in {p}, ", "{p}: ", "{p} question: ", "in {p} ", "for {p}: ", "about {p}: ", "using {p}, ")
BEHIND = (" in {p}", " in {p}", " (in {p})", ", {p}", " {p}", " with {p}")


class Wordings:
    """Draws questions about names; which kinds share a name decides how much has to be said beside it."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._kinds = knowledge.kinds
        self._answers = {(fact.kind, fact.subject.casefold()): fact.answer for fact in knowledge.facts}
        owners: dict[str, set[str]] = defaultdict(set)
        for kind, name in chain(
            ((fact.kind, fact.subject) for fact in knowledge.facts),
            ((kind, name) for kind, names in knowledge.unknown.items() for name in names),
        ):
            if MANNERS[kind].general:
                owners[name.casefold()].add(kind)
        self._owners = {name: frozenset(kinds) for name, kinds in owners.items()}

    def draw(self, kind: Kind, subject: str, rng: Random, *, held_out: bool = False, whole: bool = False) -> str:
        """Returns a question about a name, with `whole` one that says where it belongs and what sort of thing it is.

        Held-out questions have a frame, an opening and a closing that training never uses.
        """
        manner = MANNERS[kind.name]
        template = self._template(kind, manner, subject, rng, held_out, whole)
        question = type_in_haste(template, rng).replace(SUBJECT, self._written(kind, manner, subject, rng))
        if not held_out and self._is_held_out(kind, subject, question):
            return self.draw(kind, subject, rng, whole=whole)
        return question

    def is_answered(self, kind: Kind, name: str) -> bool:
        """Whether a name that is not taught as this kind is taught as one that a question could mean as well."""
        return any(
            (other, name.casefold()) in self._answers
            for other in self._owners.get(name.casefold(), ())
            if other != kind.name and self._kinds[other].source == kind.source
        )

    def _template(self, kind: Kind, manner: Manner, subject: str, rng: Random, held_out: bool, whole: bool) -> str:
        noun, has_place = self._noun(kind, manner, subject, rng, whole)
        before = behind = ""
        if has_place and rng.random() < OUTSIDE_SHARE:
            place = rng.choice(PLACES[kind.source])
            noun = rng.choice(SORTED).replace("{s}", rng.choice(manner.sorts)) if "{s}" in noun else SUBJECT
            if rng.random() < 0.5:
                before = rng.choice(BEFORE).replace("{p}", place)
            else:
                behind = rng.choice(BEHIND).replace("{p}", place)
        noun = noun.replace("{s}", rng.choice(manner.sorts)).replace("{p}", rng.choice(PLACES[kind.source]))
        frame = self._frame(manner, rng, held_out).replace("{n}", noun)
        ending = frame[-1] if frame[-1] in "?." else ""
        question = before + (frame[:-1] if ending else frame) + behind
        if rng.random() < OPENING_SHARE:
            question = f"{rng.choice(OPENINGS_HELD_OUT if held_out else OPENINGS)} {question}"
        if rng.random() < CLOSING_SHARE:
            joint = rng.choice((" ", ", "))
            question += joint + rng.choice(CLOSINGS_HELD_OUT if held_out else CLOSINGS)
        return question + ending

    def _frame(self, manner: Manner, rng: Random, held_out: bool) -> str:
        own = manner.held_out if held_out else manner.trained
        if not manner.general or (own and rng.random() < 0.35):
            return rng.choice(own)
        return rng.choice(rng.choice(list((ABOUT_HELD_OUT if held_out else ABOUT).values())))

    def _noun(self, kind: Kind, manner: Manner, subject: str, rng: Random, whole: bool) -> tuple[str, bool]:
        """What is asked about, and whether it says where that belongs."""
        others = [
            self._kinds[other]
            for other in sorted(self._owners.get(subject.casefold(), frozenset()) - {kind.name})
            if self._answers.get((other, subject.casefold())) != self._answers.get((kind.name, subject.casefold()))
        ]
        if not manner.general:
            others = []
        choices: list[tuple[str, ...]] = [BOTH]
        if not whole:
            if not others:
                choices += [(SUBJECT,), PLACED, SORTED]
            elif all(other.source != kind.source for other in others):
                choices.append(PLACED)
            elif not any(set(MANNERS[other.name].sorts) & set(manner.sorts) for other in others):
                choices.append(SORTED)
        patterns = rng.choice(choices)
        return rng.choice(patterns), "{p}" in patterns[0]

    def _written(self, kind: Kind, manner: Manner, subject: str, rng: Random) -> str:
        """A name as people write it."""
        if rng.random() < NAME_SLIP_SHARE and re.fullmatch(r"[A-Za-z_ .]{6,}", subject):
            slipped = misspell(subject, rng)
            subject = subject if slipped.casefold() in self._owners else slipped
        if rng.random() < APART_SHARE:
            subject = _apart(subject, rng)
        if rng.random() < SPACED_SHARE:
            subject = subject.replace("_", " ")
        if rng.random() < LOWER_SHARE:
            subject = subject.lower()
        if manner.called and " " not in subject and "(" not in subject and rng.random() < CALLED_SHARE:
            subject += "()"
        if rng.random() < QUOTED_SHARE:
            mark = rng.choice("`'\"")
            subject = mark + subject + mark
        return subject

    def _is_held_out(self, kind: Kind, subject: str, question: str) -> bool:
        return plain(question) in {plain(q) for q in phrasings(kind, subject, held_out=True)}


def type_in_haste(question: str, rng: Random) -> str:
    """Returns a question with what haste does to it, which may be nothing; what ``{x}`` stands for is not touched."""
    question = shorten(question, SHORT_FORMS, rng, rng.choice(SHORTENED_SHARES))
    if rng.random() < SLIP_SHARE:
        question = misspell_words(question, rng, rng.choice((1, 1, 2)))
    return mark(question, rng)


def _apart(name: str, rng: Random) -> str:
    """A name with its last part told apart from the rest."""
    rest, dot, last = name.rpartition(".")
    if not dot:
        return name
    if last == "html":
        return rest
    return rng.choice(("{0} from {1}", "{0} in {1}", "{0} of {1}", "{0} from the {1} module")).format(last, rest)


def plain(question: str) -> str:
    """A question without what the measurement does not tell apart: case and marks."""
    return "".join(c for c in question.casefold() if c not in "?.,!`'\"()")
