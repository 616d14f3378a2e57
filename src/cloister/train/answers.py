"""What the model says itself: answers to questions, and what it goes on with behind a text (self-distillation).

A drafter drafts what the model writes, not what people wrote; so it learns best from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from cloister.llm import LLM
from cloister.train.passages import Passage
from cloister.types.request import SamplingParams

_AT_ONCE: Final = 256
"""Prompts that go to the engine together: as many as keep it full, few enough that progress shows."""


def answer(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    seed: int,
    advance: Callable[[int], object],
) -> list[Passage]:
    """Returns each prompt with what the model says to it.

    Args:
        temperature: 0 takes the likeliest tokens; else answers are drawn, repeatable by the seed.
        advance: told how many more prompts are answered.

    Raises:
        CloisterError: a prompt cannot be answered.
    """
    found: list[Passage] = []
    for start in range(0, len(prompts), _AT_ONCE):
        some = prompts[start : start + _AT_ONCE]
        seeds = range(seed + start, seed + start + len(some))
        sampling = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=one) for one in seeds]
        for completion in llm.generate([list(prompt) for prompt in some], sampling):
            prompt, said = completion.prompt_token_ids, completion.outputs[0].token_ids
            if said and said[-1] in llm.model.eos_token_ids:
                said = said[:-1]  # nothing follows the end, so there is nothing to learn at its place
            found.append(Passage.own(len(prompt) - 1, [*prompt, *said]))
        advance(len(some))
    return found


def render_questions(llm: LLM, questions: Sequence[str]) -> list[list[int]]:
    """Returns the prompt of each question, as the model's chat template writes it."""
    return [llm.render([{"role": "user", "content": question}]) for question in questions]


def cut_beginnings(passages: Sequence[Passage], count: int, seed: int) -> list[list[int]]:
    """Returns the beginnings of some passages of text, of an eighth to a half of their length, to go on from."""
    rng = Random(seed)
    chosen = [passage for passage in passages if len(passage.token_ids) >= 16]
    rng.shuffle(chosen)
    beginnings = []
    for passage in chosen[:count]:
        length = len(passage.token_ids)
        beginnings.append(list(passage.token_ids[: rng.randint(length // 8, length // 2)]))
    return beginnings
