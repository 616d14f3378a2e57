"""`cloister chat`: talk to a model in the terminal."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import err, print_error, print_line
from cloister.cli.options import GivenSettings, MaxTokens, Seed, Temperature, TopK, TopP, choose_sampling, with_settings
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError
from cloister.types.request import SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from cloister import LLM


# A conversation with a model in this process, shared by `run` and `chat`.


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
        """Drops everything but the system message."""
        self.messages = list(self._system)

    def ask(self, text: str) -> Generator[SequenceOutput]:
        """Yields the answer in pieces. If the caller stops reading, the conversation keeps the pieces so far."""
        messages = [*self.messages, {"role": "user", "content": text}]
        outputs = self._llm.stream_chat(messages, self._sampling)
        answer, is_answered = "", False
        try:
            for output in outputs:
                answer, is_answered = answer + output.text, True
                yield output
        finally:
            if is_answered:  # drop a question that could not be answered, so that the next one can be
                self.messages = [*messages, {"role": "assistant", "content": answer}]


HELP = "/reset forgets what was said, /help shows this, Ctrl-C stops an answer, /exit or Ctrl-D leaves"


@with_settings(EngineConfig)
def chat(
    settings: GivenSettings,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Talk to a model, several turns. Ctrl-C stops an answer, /exit or Ctrl-D leaves."""
    from cloister.api import open_llm

    with open_llm(settings.flags, settings.config_file) as llm:
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        talk(Conversation(llm, choose_sampling(llm.default_sampling, given), system), llm.model.name)


def talk(conversation: Conversation, name: str) -> None:
    """Reads lines and answers them until the input ends or the user exits."""
    err.print(f"[bold]{name}[/]. {HELP}.", highlight=False)
    while (line := read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/reset":
                conversation.reset()
                err.print("Forgotten.", style="dim")
            case "/exit" | "/quit" | "/bye":
                return
            case "/help":
                err.print(f"{HELP}.", highlight=False)
            case command if command.startswith("/"):
                print_error(f"there is no such command; {HELP}")
            case text:
                answer(conversation, text)


def read_line() -> str | None:
    """Returns the next line that was typed, or None at the end of the input. Ctrl-C on an empty line does nothing."""
    try:
        return input("> ")
    except KeyboardInterrupt:
        err.print("(Ctrl-D leaves)", style="dim")
        return ""
    except EOFError:
        err.print()
        return None


def answer(conversation: Conversation, text: str) -> None:
    """Prints one answer in pieces; Ctrl-C stops it and keeps the pieces so far."""
    outputs = conversation.ask(text)
    try:
        with closing(outputs):
            for output in outputs:
                print_line(output.text, end="")
                if output.error is not None:
                    print_error(output.error)
    except CloisterError as error:
        print_error(error.message)
    except KeyboardInterrupt:
        err.print(" (stopped)", style="dim", end="")
    print(flush=True)
