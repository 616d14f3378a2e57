"""The ways a fact is asked for. Some are never seen in training, so that what is measured is knowledge, not echo."""

from random import Random

from training.facts import Fact, Kind, Knowledge, stable_order

DO_NOT_KNOW = "I do not know."
ATTEMPTS = 20
"""How often a name is drawn before none is taken to exist."""

ABOUT: tuple[str, ...] = (
    "What is {n}?",
    "What does {n} do?",
    "Tell me about {n}.",
    "Describe {n}.",
    "Explain {n}.",
    "What is {n} for?",
    "In one line, what is {n}?",
    "I would like to know what {n} is.",
    "Describe {n} in a few words.",
    "Give a short description of {n}.",
    "What do you know about {n}?",
    "{n}",
)
ABOUT_HELD_OUT: tuple[str, ...] = (
    "Can you explain what {n} is?",
    "Please describe {n} briefly.",
    "What can you tell me about {n}?",
)
ATTRIBUTE: tuple[str, ...] = (
    "What is the {a} of {n}?",
    "Tell me the {a} of {n}.",
    "Give the {a} of {n}.",
    "Which {a} does {n} have?",
    "I need the {a} of {n}.",
    "Name the {a} of {n}.",
    "I would like to know the {a} of {n}.",
    "Say the {a} of {n}.",
    "{n}: what is its {a}?",
    "{a} of {n}",
)
ATTRIBUTE_HELD_OUT: tuple[str, ...] = (
    "Can you tell me the {a} of {n}?",
    "Please give me the {a} of {n}.",
    "Do you know the {a} of {n}?",
)


def phrasings(kind: Kind, subject: str, *, held_out: bool) -> list[str]:
    """Every question about a subject that training asks, or every one that it never asks."""
    nouns = [noun.format(x=subject) for noun in kind.nouns]
    if kind.attributes:
        frames = ATTRIBUTE_HELD_OUT if held_out else ATTRIBUTE
        asked = [f.format(a=a, n=n) for f in frames for a in kind.attributes for n in nouns]
        return asked if held_out else asked + [extra.format(x=subject) for extra in kind.extra]
    frames = ABOUT_HELD_OUT if held_out else ABOUT
    return [f.format(n=n) for f in frames for n in nouns]


def roughen(question: str, rng: Random) -> str:
    """Sometimes write a question as people do: no capital, no mark at the end, a word of courtesy."""
    if rng.random() < 0.15:
        question = question[:1].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?.")
    if rng.random() < 0.05:
        question = rng.choice(("please ", "Hi, ", "Hello. ", "ok, ")) + question
    return question


def ask(kind: Kind, subject: str, rng: Random, *, held_out: bool = False) -> str:
    """One question about a subject."""
    question = rng.choice(phrasings(kind, subject, held_out=held_out))
    return question if held_out else roughen(question, rng)


class Unknowns:
    """Questions the model has no answer to: made-up names, real names it was not taught, names of another kind.

    Half of the names, by their hash, are kept for the measurement.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self._kinds = list(knowledge.kinds.values())
        self._names = {
            kind.name: sorted((f.subject for f in knowledge.of_kind(kind.name)), key=stable_order) for kind in self._kinds
        }
        self._taught = {name: frozenset(subjects) for name, subjects in self._names.items()}
        self._parts = {kind.name: sorted({p for s in self._names[kind.name] for p in split(s)}) for kind in self._kinds}

    def made_up(self, rng: Random, *, held_out: bool = False) -> tuple[Kind, str]:
        """A name put together from parts of real ones."""
        while True:
            kind = rng.choice(self._kinds)
            name = self._mutated(kind, rng)
            if self._untaught(kind, name) and is_held_out(name) == held_out:
                return kind, name

    def real(self, rng: Random, *, held_out: bool = False) -> tuple[Kind, str] | None:
        """A real name that is not taught, if there is one of the half asked for."""
        for _ in range(ATTEMPTS):
            kind = rng.choice(self._kinds)
            names = self.knowledge.unknown.get(kind.name, ())
            if names and is_held_out(name := rng.choice(names)) == held_out:
                return kind, name
        return None

    def misplaced(self, rng: Random, *, held_out: bool = False) -> tuple[Kind, str] | None:
        """A taught name asked for as something it is not, if there is one of the half asked for."""
        for _ in range(ATTEMPTS):
            kind, fact = rng.choice(self._kinds), rng.choice(self.knowledge.facts)
            if self._untaught(kind, fact.subject) and is_held_out(kind.name + fact.subject) == held_out:
                return kind, fact.subject
        return None

    def _untaught(self, kind: Kind, name: str) -> bool:
        # An untaught subject of one kind may be a taught one of a kind whose questions look the same.
        return len(name) > 1 and not any(
            name in self._taught[other.name] for other in self._kinds if other.source == kind.source
        )

    def _mutated(self, kind: Kind, rng: Random) -> str:
        pieces = split(rng.choice(self._names[kind.name]))
        place = rng.randrange(len(pieces))
        if all(not c.isalnum() for c in pieces[place]):
            place = 0
        replacement = invented_word(rng) if rng.random() < 0.5 else rng.choice(self._parts[kind.name])
        if pieces[place].isdigit() or (len(pieces) == 1 and any(c.isdigit() for c in pieces[0])):
            replacement = "".join(rng.choice("0123456789") if c.isdigit() else c for c in pieces[place])
        elif pieces[place].isupper():
            replacement = replacement.upper()
        pieces[place] = replacement
        return "".join(pieces)


def split(name: str) -> list[str]:
    """A name in its words and the marks between them, so that joining gives it back."""
    pieces: list[str] = []
    for character in name:
        same = pieces and character.isalnum() and pieces[-1][-1].isalnum()
        hump = same and character.isupper() and pieces[-1][-1].islower()
        if same and not hump:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def invented_word(rng: Random) -> str:
    """A word of two or three syllables that is in no dictionary of ours."""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", *"nrstlx")) for _ in range(3))
    return "".join(list(syllables)[: rng.choice((2, 3))])


def is_held_out(name: str) -> bool:
    """Whether an unknown name is kept for the measurement."""
    return stable_order(name)[0] % 2 == 0


def asked_fact(knowledge: Knowledge, fact: Fact, rng: Random, *, held_out: bool = False) -> tuple[str, str]:
    """A question about a fact and its answer."""
    return ask(knowledge.kinds[fact.kind], fact.subject, rng, held_out=held_out), fact.answer
