"""The chats a tuning step learns from: facts, things it does not know, skills, in a fixed proportion."""

from dataclasses import replace
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import Chat, encode_chat
from training.facts import Knowledge
from training.questions import DO_NOT_KNOW, Unknowns, ask, asked_fact
from training.skills import SKILLS, some_tools
from training.tokenizer import END_OF_TEXT, token_id

FACT_SHARE = 0.62
UNKNOWN_SHARE = 0.17
SYSTEM_SHARE = 0.12
TWO_TURN_SHARE = 0.15
IDLE_TOOLS_SHARE = 0.015
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Cloister 5M.",
    "Answer briefly.",
    "You are a concise assistant. Say so when you do not know.",
    "Be polite and short.",
)


class Lessons:
    """Draws chats; what it draws depends on the random source alone."""

    def __init__(self, knowledge: Knowledge, tokenizer: Tokenizer) -> None:
        self.knowledge = knowledge
        self.unknowns = Unknowns(knowledge)
        self.tokenizer = tokenizer
        self._end = token_id(tokenizer, END_OF_TEXT)

    def unknown(self, rng: Random, *, held_out: bool = False) -> tuple[str, str]:
        """A question without an answer, and the reply to it."""
        sort = rng.random()
        found = None
        if sort < 0.25:
            found = self.unknowns.real(rng, held_out=held_out)
        elif sort < 0.4:
            found = self.unknowns.misplaced(rng, held_out=held_out)
        if found is None:
            found = self.unknowns.made_up(rng, held_out=held_out)
        return ask(*found, rng, held_out=held_out), DO_NOT_KNOW

    def turn(self, rng: Random) -> tuple[str, str]:
        """One question and its answer."""
        if rng.random() < UNKNOWN_SHARE / (FACT_SHARE + UNKNOWN_SHARE):
            return self.unknown(rng)
        return asked_fact(self.knowledge, rng.choice(self.knowledge.facts), rng)

    def chat(self, rng: Random) -> Chat:
        """One chat to learn from."""
        if rng.random() < FACT_SHARE + UNKNOWN_SHARE:
            turns = self.turn(rng) + (self.turn(rng) if rng.random() < TWO_TURN_SHARE else ())
            chat = Chat.of(*turns)
            if rng.random() < IDLE_TOOLS_SHARE:
                chat = replace(chat, tools=some_tools(rng))
        else:
            chat = SKILLS[rng.choice(list(SKILLS))](rng, False)
        if rng.random() < SYSTEM_SHARE:
            return replace(chat, messages=({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}, *chat.messages))
        return chat

    def rows(self, rng: Random, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, ``[count, length]`` each: every row whole chats, one after the other.

        Targets are -100 where the assistant does not speak. A chat longer than a row is drawn anew.
        """
        tokens = torch.full((count, length + 1), self._end)
        counted = torch.zeros((count, length + 1), dtype=torch.bool)
        for row in range(count):
            place = 0
            while True:
                encoded = encode_chat(self.tokenizer, self.chat(rng))
                size = len(encoded.ids)
                if place + size > length + 1:
                    if place == 0:
                        continue
                    break
                tokens[row, place : place + size] = torch.tensor(encoded.ids)
                counted[row, place : place + size] = torch.tensor(encoded.learned)
                place += size + 1
        return tokens[:, :-1], torch.where(counted, tokens, -100)[:, 1:]
