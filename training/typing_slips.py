"""How questions look when they are typed in haste: slips of the keyboard, short forms, missing marks and capitals.

A question is a template in which ``{x}`` stands for the name asked for, so that none of this touches the name.
"""

import re
from collections.abc import Mapping
from random import Random

SUBJECT = "{x}"
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {
    key: "".join(row[max(0, at - 1) : at] + row[at + 1 : at + 2]) for row in ROWS for at, key in enumerate(row)
}  # fmt: skip
SHORTEST_WORD = 4
"""Shorter words are typed right: a slip in them would leave too little to go by."""


def misspell(word: str, rng: Random) -> str:
    """Returns a word of two letters or more with one slip: dropped, doubled, swapped with the next, or its key's neighbour."""
    at = rng.randrange(len(word) - 1)
    slip = rng.randrange(4)
    if slip == 0:
        return word[:at] + word[at + 1 :]
    if slip == 1:
        return word[:at] + word[at] + word[at:]
    if slip == 2:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    near = NEIGHBOURS.get(word[at].lower())
    return word[:at] + (rng.choice(near) if near else "") + word[at + 1 :]


def misspell_words(question: str, rng: Random, count: int) -> str:
    """Returns a question with a slip in so many of its words, or in fewer if it has not as many long enough."""
    words = [m for m in re.finditer(r"[A-Za-z]+", question) if len(m[0]) >= SHORTEST_WORD]
    for found in sorted(rng.sample(words, min(count, len(words))), key=lambda m: -m.start()):
        question = question[: found.start()] + misspell(found[0], rng) + question[found.end() :]
    return question


def shorten(question: str, forms: Mapping[str, tuple[str, ...]], rng: Random, share: float) -> str:
    """Returns a question with some of its words in a short form."""
    for word, shorts in forms.items():
        if rng.random() < share:
            whole_word = rf"\b{re.escape(word)}" + ("" if word.endswith(" ") else r"(?!\w)")
            question = re.sub(whole_word, rng.choice(shorts), question, count=1)
    return question


def mark(question: str, rng: Random) -> str:
    """Returns a question that perhaps lacks its marks, has more of them, or is in one case."""
    ending = rng.random()
    if ending < 0.35:
        question = question.rstrip("?.")
    elif ending < 0.4:
        question = question.rstrip("?.") + rng.choice(("??", "...", " ?", "?!", "!"))
    if rng.random() < 0.3:
        question = question.replace("'", "").replace(",", "") if rng.random() < 0.5 else question.replace(",", "")
    case = rng.random()
    if case < 0.5:
        return question[:1].upper() + question[1:]
    if case < 0.75:
        return question.lower()
    return question.upper().replace(SUBJECT.upper(), SUBJECT) if case > 0.99 else question
