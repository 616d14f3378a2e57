"""A conversation with a model in this process: what `run` and `chat` share."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from cloister.types.request import SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from cloister import LLM


class Conversation:
    """Messages so far, and the model that answers them.

    Args:
        system: a system message, or None.
    """

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._system)

    def ask(self, text: str) -> Generator[SequenceOutput]:
        """Yields the answer as it comes. Whatever came before the caller stopped reading belongs to the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        outputs = self._llm.stream_chat(messages, self._sampling)
        answer, is_answered = "", False
        try:
            for output in outputs:
                answer, is_answered = answer + output.text, True
                yield output
        finally:
            if is_answered:  # a question that could not be answered is forgotten, so that the next one can be
                self.messages = [*messages, {"role": "assistant", "content": answer}]
