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
from training.wordings import Wordings, type_in_haste

FACT_SHARE = 0.62
UNKNOWN_SHARE = 0.17
SYSTEM_SHARE = 0.12
TWO_TURN_SHARE = 0.15
IDLE_TOOLS_SHARE = 0.015
REAL_SHARE = 0.25
MISPLACED_SHARE = 0.15
"""How many of the unknown names are real ones that are not taught, and taught ones of another kind; the others are made up."""
FREE_UNKNOWN_SHARE = 0.36
FREE_MISPLACED_SHARE = 0.32
"""The same where questions are freely worded: the more ways a fact is asked for, the more a name alone has to decide, and the
sooner the sort of thing that is asked for is passed over."""
FREE_SHARE = 0.8
"""How many of the questions are freely worded, where any are."""
TYPED_FREELY = ("small_talk", "decline")
"""Skills whose answer repeats nothing of the question, so that slips in it do no harm."""
PRACTISED = ("tool_call", "tool_result", "recall", "json")
"""Skills that come twice as often beside free wordings: those that suffered most from them."""
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Cloister 5M.",
    "Answer briefly.",
    "You are a concise assistant. Say so when you do not know.",
    "Be polite and short.",
)


class Lessons:
    """Draws chats; what it draws depends on the random source alone."""

    def __init__(self, knowledge: Knowledge, tokenizer: Tokenizer, *, free: bool = False) -> None:
        """Args: free: whether most questions are freely worded (`wordings.py`)."""
        self.knowledge = knowledge
        self.wordings = Wordings(knowledge)
        self.free = free
        self.unknown_share = FREE_UNKNOWN_SHARE if free else UNKNOWN_SHARE
        self.misplaced_share = FREE_MISPLACED_SHARE if free else MISPLACED_SHARE
        self.skills = (*SKILLS, *(PRACTISED if free else ()))
        self.unknowns = Unknowns(knowledge)
        self.tokenizer = tokenizer
        self._end = token_id(tokenizer, END_OF_TEXT)

    def unknown(self, rng: Random, *, held_out: bool = False) -> tuple[str, str]:
        """A question without an answer, and the reply to it."""
        sort = rng.random()
        found = None
        misplaced = REAL_SHARE <= sort < REAL_SHARE + self.misplaced_share
        if sort < REAL_SHARE:
            found = self.unknowns.real(rng, held_out=held_out)
        elif misplaced:
            found = self.unknowns.misplaced(rng, held_out=held_out)
        if found is None:
            found = self.unknowns.made_up(rng, held_out=held_out)
        if self.free and self.wordings.is_answered(*found):
            found = self.unknowns.made_up(rng, held_out=held_out)
        if self._words_freely(rng):
            return self.wordings.draw(*found, rng, held_out=held_out, whole=misplaced), DO_NOT_KNOW
        return ask(*found, rng, held_out=held_out), DO_NOT_KNOW

    def turn(self, rng: Random) -> tuple[str, str]:
        """One question and its answer."""
        if rng.random() < self.unknown_share / (FACT_SHARE + UNKNOWN_SHARE):
            return self.unknown(rng)
        fact = rng.choice(self.knowledge.facts)
        if self._words_freely(rng):
            return self.wordings.draw(self.knowledge.kinds[fact.kind], fact.subject, rng), fact.answer
        return asked_fact(self.knowledge, fact, rng)

    def _words_freely(self, rng: Random) -> bool:
        return self.free and rng.random() < FREE_SHARE

    def chat(self, rng: Random) -> Chat:
        """One chat to learn from."""
        if rng.random() < FACT_SHARE + UNKNOWN_SHARE:
            turns = self.turn(rng) + (self.turn(rng) if rng.random() < TWO_TURN_SHARE else ())
            chat = Chat.of(*turns)
            if rng.random() < IDLE_TOOLS_SHARE:
                chat = replace(chat, tools=some_tools(rng))
        else:
            skill = rng.choice(self.skills)
            chat = SKILLS[skill](rng, False)
            if skill in TYPED_FREELY and self._words_freely(rng):
                question, reply = (str(message["content"]) for message in chat.messages)
                chat = Chat.of(type_in_haste(question, rng), reply)
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
