"""An engine that several clients share, none of which knows the others, as workers of a sealed node: a request that kills it is
found, and hardly another one ends because of it."""

from __future__ import annotations

import asyncio
from functools import partial

from cloister.engine import EngineClient, SealedWorkerTransport
from cloister.engine.in_flight import PERHAPS_POISONED
from cloister.engine.poison_requests import Standing, Suspect, judge
from cloister.engine.transports import Deliver
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import Ended, Event, FrontMessage, Outputs, Progressed, Ready, Scheduled, Submit
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput
from tests import virtual_time
from tests.engine.fake_transport import MODEL

STEP_S, RESTART_S = 0.05, 0.5
NUM_TOKENS = 20


class SharedEngine:
    """Computes a token of each of its requests in each step. One of them kills it in the second step that has it."""

    def __init__(self, killer: str, num_slots: int) -> None:
        self.killer, self.num_slots = killer, num_slots
        self.num_deaths = 0
        self.is_running = True
        self.channels: dict[str, Channel] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for channel in list(self.channels.values())[: self.num_slots]:
                channel.step()
            if any(channel.name == self.killer and channel.num_steps == 2 for channel in self.channels.values()):
                await self.die()

    async def die(self) -> None:
        self.num_deaths += 1
        self.is_running = False
        ended, self.channels = self.channels, {}
        for channel in ended.values():
            channel.has_ended.set()
        await asyncio.sleep(RESTART_S)
        self.is_running = True


class Channel(SealedWorkerTransport):
    """One client's way to it."""

    def __init__(self, engine: SharedEngine, name: str) -> None:
        super().__init__(Ready(MODEL, []))
        self.engine, self.name = engine, name

    async def open(self, config: EngineConfig) -> None:
        if not self.engine.is_running:
            raise EngineError("the engine does not run at present")
        self.has_ended = asyncio.Event()
        self.num_steps = self.num_before = 0

    def send(self, message: FrontMessage) -> None:
        if isinstance(message, Submit):
            self.num_before = len(message.resumption.token_ids[0]) if message.resumption is not None else 0
            self.engine.channels[self.name] = self

    async def run(self, deliver: Deliver) -> None:
        self.deliver = deliver
        await self.has_ended.wait()

    def step(self) -> None:
        """Its request gets a slot in the first step, and tokens in those after it."""
        self.num_steps += 1
        now_s = asyncio.get_running_loop().time()
        events: list[Event] = [Progressed(self.name, 1, 0, now_s, 1, self.num_steps == 2)]
        if self.num_steps == 1:
            self.deliver(Outputs([], [Scheduled(self.name, now_s, 0.0, 0, 4)]))
        elif self.name != self.engine.killer:
            reason = FinishReason.LENGTH if self.num_before + self.num_steps > NUM_TOKENS else None
            if reason is not None:
                del self.engine.channels[self.name]
                events.append(Ended(self.name, 1, 0, now_s, reason, 4, NUM_TOKENS, 0, 0.0, 0.5, last=True))
            output = SequenceOutput(request_id=self.name, index=0, token_ids=[self.num_steps], finish_reason=reason)
            self.deliver(Outputs([output], events))


async def answer_all(num: int, num_slots: int) -> tuple[int, dict[str, SequenceOutput]]:
    """Has a killer and `num` others begin at once; returns the deaths, and each one's last output."""
    engine = SharedEngine("killer", num_slots)
    computing = asyncio.create_task(engine.run())
    lasts: dict[str, SequenceOutput] = {}

    def note(name: str, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            lasts[name] = output

    clients = {}
    for name in [*(str(number) for number in range(num)), "killer"]:
        client = clients[name] = EngineClient(Channel(engine, name), EngineConfig(profile="private"))
        await client.start()
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        client.submit(Request(request_id=name, token_ids=[1, 2, 3, 4], sampling=sampling), partial(note, name))
    async with asyncio.timeout(120):
        while len(lasts) < len(clients):
            await asyncio.sleep(STEP_S)
    computing.cancel()
    for client in clients.values():
        await client.drain(0.0)
    return engine.num_deaths, lasts


def test_one_that_kills_the_engine_is_found_and_nine_of_ten_others_are_answered() -> None:
    num_rounds, num_others, num_ended = 10, 10, 0
    for _ in range(num_rounds):
        num_deaths, lasts = virtual_time.run(answer_all(num_others, num_slots=64))
        killer = lasts.pop("killer")
        assert (killer.finish_reason, killer.error, num_deaths) == (FinishReason.ERROR, PERHAPS_POISONED, 3)
        num_ended += sum(last.finish_reason is not FinishReason.LENGTH for last in lasts.values())
    # they are tried for 0.25 of 10 s: 2.5 of 100 should end, and more than 15 do once in 10^7 times
    assert num_ended <= 15


def test_one_that_waits_for_a_slot_behind_it_is_not_accused() -> None:
    """Its client cannot tell that the engine died of another one, but that it was not computed."""
    waiting, begun = Suspect(standing=Standing.CONFINED), Suspect(standing=Standing.CONFINED, has_slot=True)
    assert judge([begun], is_shared=True) is begun
    assert judge([waiting], is_shared=True) is None
    assert judge([waiting], is_shared=True) is waiting, "it may kill the engine that reads it"
