"""Documents in a conversation: a chat template places them, and the text is cut where each begins and ends.

So each can be tokenized, and encoded, alone (`types.documents`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Final

from cloister.text.chat import ChatTemplate
from cloister.text.history import Message
from cloister.types.errors import InvalidRequestError

Render = Callable[..., str]
_NO_USER: Final = "documents stand before what the user says first; send a message of the user"


def render_in_pieces(
    template: ChatTemplate, render: Render, messages: Sequence[Message], documents: Sequence[Mapping[str, str]]
) -> list[str]:
    """Returns a conversation as texts to tokenize one by one: what precedes the documents, each document, and the rest.

    A template with the variable `documents` writes them as its model was trained; what it writes before each, such as its
    number, belongs to that document. Any other template gets them as the beginning of the user's first message.

    Args:
        render: `template.render`, with everything bound but messages and variables.
        documents: `text` of each, and perhaps a `title`.

    Raises:
        InvalidRequestError: the template refuses the messages, or none of them is the user's.
    """
    places = [(secrets.token_hex(16), secrets.token_hex(16)) for _ in documents]
    pieces = None
    if template.knows("documents"):
        text = render(messages, documents=[_fence(each, *ends) for each, ends in zip(documents, places, strict=True)])
        frames = [_learn_frame(render, messages, each.keys()) for each in documents]
        pieces = _cut(text, places, frames)
    if pieces is None:
        pieces = _cut(render(_put_first(messages, documents, places)), places, [("", "")] * len(documents))
    if pieces is None:
        raise InvalidRequestError("the model's chat template leaves out what the user says first", param="documents")
    anywhere = re.compile("|".join(place for ends in places for place in ends))
    return [anywhere.sub(template.mark, piece) + template.mark for piece in pieces]


def _fence(document: Mapping[str, str], start: str, end: str) -> dict[str, str]:
    return {name: f"{start}{value}{end}" for name, value in document.items()}


def _put_first(
    messages: Sequence[Message], documents: Sequence[Mapping[str, str]], places: Sequence[tuple[str, str]]
) -> list[Message]:
    """Puts documents before what the user says first."""
    number = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if number is None:
        raise InvalidRequestError(_NO_USER, param="documents")
    lines = ("".join(f"{document[name]}\n" for name in ("title", "text") if name in document) for document in documents)
    written = "".join(f"{start}{text}{end}" for text, (start, end) in zip(lines, places, strict=True))
    first = messages[number]
    return [*messages[:number], {**first, "content": f"{written}\n{first['content']}"}, *messages[number + 1 :]]


def _learn_frame(render: Render, messages: Sequence[Message], fields: Iterable[str]) -> tuple[str, str]:
    """Returns what the template writes before a document with these fields, and behind it.

    It is learned of two documents alike: both follow the same text, and what is left between them stands behind the first.

    Returns:
        a pattern of the text before, in which numbers may differ, and the text behind.
    """
    places = [(secrets.token_hex(16), secrets.token_hex(16)) for _ in range(2)]
    text = render(messages, documents=[_fence(dict.fromkeys(fields, ""), *ends) for ends in places])
    bounds = [(text.find(start), text.rfind(end) + len(end)) for start, end in places]
    before, between = text[: bounds[0][0]], text[bounds[0][1] : bounds[1][0]]
    ends = zip(*(re.sub(r"\d", "0", each)[::-1] for each in (before, between)), strict=False)
    tail = between[: len(between) - sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], ends))]
    return re.sub(r"\d+", r"\\d+", re.escape(between[len(tail) :])), tail


def _cut(text: str, places: Sequence[tuple[str, str]], frames: Sequence[tuple[str, str]]) -> list[str] | None:
    """Returns a text cut before the first document, between documents and behind the last.

    None: it does not have each of them once, in order.
    """
    bounds = [0]
    for (start, end), (head, _) in zip(places, frames, strict=True):
        place = text.find(start)
        found = re.search(f"(?:{head})\\Z", text[: max(place, 0)])
        if place < 0 or end not in text or found is None or found.start() < bounds[-1]:
            return None
        bounds.append(found.start())
    for (_, end), (following, _) in pairwise(places):
        if text.rfind(end) > text.find(following):
            return None
    last, tail = text.rfind(places[-1][1]) + len(places[-1][1]), frames[-1][1]
    bounds += [last + len(tail) if text.startswith(tail, last) else last, len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]
