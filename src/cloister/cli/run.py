"""`cloister run`: answers one prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, cast

import typer

from cloister.cli.chat import Conversation
from cloister.cli.console import print_error, print_json
from cloister.cli.options import (
    GivenSettings,
    MaxTokens,
    Seed,
    Temperature,
    TopK,
    TopP,
    choose_model,
    choose_sampling,
    complete_model,
    with_settings,
)
from cloister.types.config import EngineConfig
from cloister.types.errors import InvalidRequestError, ModelError
from cloister.types.request import FinishReason, SequenceOutput

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@with_settings(EngineConfig, model=None)
def run(
    settings: GivenSettings,
    words: Annotated[
        list[str],
        typer.Argument(
            help="The model, unless it is the default one, and the prompt; `-` reads standard input.",
            metavar="[MODEL] PROMPT",
            autocompletion=complete_model,
        ),
    ],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer and its figures as JSON.")] = False,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Answer one prompt on standard output. Exits with 0 after an answer, with 1 after an error."""
    if raw and system is not None:
        raise typer.BadParameter("a raw prompt has no system message; leave it out, or leave --raw out", param_hint="--system")
    model, prompt = split_words(words)
    flags = settings.flags | {"model": choose_model(model, cast("str | None", settings.flags.get("model")))}
    text = read_prompt() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidRequestError("the prompt is empty; give some text, or `-` to read standard input")
    from cloister.api import open_llm

    try:
        llm = open_llm(flags, settings.config_file)
    except ModelError as error:
        if model is None or error.param != "model":
            raise
        raise ModelError(f"{error.message}; put a prompt of several words into quotes", param="model") from None
    with llm:
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        sampling = choose_sampling(llm.default_sampling, given)
        outputs = llm.stream(text, sampling) if raw else Conversation(llm, sampling, system).ask(text)
        raise typer.Exit(print_answer(outputs, as_json))


def split_words(words: Sequence[str]) -> tuple[str | None, str]:
    """Returns the model, if one is named, and the prompt.

    Raises:
        typer.BadParameter: there are more words, or only a model.
    """
    if len(words) > 2:
        raise typer.BadParameter("run takes [MODEL] PROMPT and no more; put a prompt of several words into quotes")
    if len(words) == 2:
        return words[0], words[1]
    if complete_model(words[0]) == words[:1]:
        raise typer.BadParameter(
            f"what to say to {words[0]} is missing; give a prompt, or talk to it: cloister chat {words[0]}"
        )
    return None, words[0]


def read_prompt() -> str:
    """Returns the content of standard input.

    Raises:
        InvalidRequestError: the input is not UTF-8.
    """
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales Python decodes invalid bytes as lone surrogates
        return text
    except UnicodeError:
        raise InvalidRequestError("standard input is not valid UTF-8; give the prompt as UTF-8 text") from None


def print_answer(outputs: Iterable[SequenceOutput], as_json: bool) -> int:
    """Prints an answer in pieces, or as JSON when it is complete; returns the exit status."""
    text, last = "", None
    for output in outputs:
        text, last = text + output.text, output
        if not as_json:
            print(output.text, end="", flush=True)
    if not as_json:
        print()
    reason = last.finish_reason if last is not None else None
    if last is not None and as_json:
        print_json(describe_answer(text, last))
    if reason in ANSWERED:
        return 0
    print_error((last.error if last is not None else None) or "the engine gave no answer; try again")
    return 1


def describe_answer(text: str, last: SequenceOutput) -> dict[str, object]:
    """Returns an answer and its figures as JSON values; `last` is the answer's last output."""
    return {
        "text": text,
        "finish_reason": last.finish_reason,
        "usage": {
            "prompt_tokens": last.num_prompt_tokens,
            "completion_tokens": last.num_output_tokens,
            "cached_tokens": last.num_cached_tokens,
        },
    }
