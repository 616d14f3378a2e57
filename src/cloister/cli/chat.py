"""`cloister chat`: talk to a model in the terminal."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from cloister.cli.console import err, out, print_error
from cloister.cli.conversation import Conversation
from cloister.cli.options import GivenSettings, with_settings
from cloister.cli.sampling import MaxTokens, Seed, Temperature, TopK, TopP, choose_sampling
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError

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
    from cloister.llm import open_llm

    with open_llm(settings.flags, settings.config_file) as llm:
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        talk(Conversation(llm, choose_sampling(llm.default_sampling, given), system), llm.model.name)


def talk(conversation: Conversation, name: str) -> None:
    """Reads lines and answers them until the input ends or somebody leaves."""
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
    """Prints one answer as it comes; Ctrl-C stops it and keeps what came."""
    outputs = conversation.ask(text)
    try:
        with closing(outputs):
            for output in outputs:
                out.print(output.text, end="", markup=False, highlight=False, soft_wrap=True)
                if output.error is not None:
                    print_error(output.error)
    except CloisterError as error:
        print_error(error.message)
    except KeyboardInterrupt:
        err.print(" (stopped)", style="dim", end="")
    print(flush=True)
