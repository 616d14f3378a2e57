"""`cloister run`: one prompt, one answer, then out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from cloister.cli.console import print_error, print_json
from cloister.cli.conversation import Conversation
from cloister.cli.model_names import with_model
from cloister.cli.options import GivenSettings, with_settings
from cloister.cli.sampling import MaxTokens, Seed, Temperature, TopK, TopP, choose_sampling
from cloister.types.config import EngineConfig
from cloister.types.errors import InvalidRequestError
from cloister.types.request import FinishReason, SequenceOutput

WORDS = "[MODEL] PROMPT"
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@with_settings(EngineConfig)
def run(
    settings: GivenSettings,
    words: Annotated[
        list[str],
        typer.Argument(
            help="What to say to the model, `-` reads standard input; a model's name may stand before it.", metavar=WORDS
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
        raise typer.BadParameter("a raw prompt has no system message", param_hint="--system")
    if len(words) > 2:
        raise typer.BadParameter("put the prompt in quotes", param_hint=WORDS)
    settings, prompt = with_model(settings, words[0] if len(words) == 2 else None), words[-1]
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidRequestError("the prompt is empty; give some text, or `-` to read standard input")
    from cloister.llm import open_llm

    with open_llm(settings.flags, settings.config_file) as llm:
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        sampling = choose_sampling(llm.default_sampling, given)
        outputs = llm.stream(text, sampling) if raw else Conversation(llm, sampling, system).ask(text)
        raise typer.Exit(print_answer(outputs, as_json))


def print_answer(outputs: Iterable[SequenceOutput], as_json: bool) -> int:
    """Prints an answer as it comes, or as JSON when it is complete; returns the exit status."""
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
