"""The parts of an answer, in the order in which the model writes them: text, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """More of what the person reads."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model says to itself first."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool, of which the name is known. Calls are numbered from 0; one ends before the next begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: a piece of a JSON object, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's arguments are complete: joined, they are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call came to nothing: its JSON is wrong, or ended in the middle.

    Attributes:
        raw: all that the model wrote for it, which is text then.
    """

    index: int
    raw: str


Part = Text | Reasoning | CallBegun | Arguments | CallEnded | CallBroken


@dataclass(slots=True)
class PartialToolCall:
    """A call as it grows."""

    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """A JSON object, once the call is complete."""
        return "".join(self.pieces)


@dataclass(slots=True)
class ParsedOutput:
    """Parts gathered into a whole answer.

    Attributes:
        calls: those that are complete, by their number; after a broken one there is a gap.
    """

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: dict[int, PartialToolCall] = field(default_factory=dict)

    def add(self, parts: Iterable[Part]) -> None:
        """Takes in what came next."""
        for part in parts:
            match part:
                case Text():
                    self.texts.append(part.text)
                case Reasoning():
                    self.reasonings.append(part.text)
                case CallBegun():
                    self.calls[part.index] = PartialToolCall(part.name)
                case Arguments():
                    self.calls[part.index].pieces.append(part.text)
                case CallBroken():
                    del self.calls[part.index]
                    self.texts.append(part.raw)
                case CallEnded():
                    pass

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)
