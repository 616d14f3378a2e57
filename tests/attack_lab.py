"""A real engine with the embedded model and real API keys, driven step by step, for who tries to learn what is not theirs."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloister.backends.native.program import NativeProgram
from cloister.engine.core import EngineCore
from cloister.engine.kv_pool import KVPool
from cloister.kv.tiers import KVTiers
from cloister.launch import build_engine
from cloister.policy import Credentials, Gate, Policy
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, KVLoaded, Submit
from cloister.types.request import FinishReason, Request, SamplingParams
from cloister.types.scope import Scope

MODEL = "cloister-5m"
_ids = itertools.count()


@dataclass(frozen=True)
class Answer:
    """What a client can measure of one request, and what the server says of it.

    Attributes:
        wall_s, cpu_s: time to the first and only token, of the clock and of the processor.
        num_cached: tokens that were not computed, as the server's `usage` says.
        num_loads: loads from KV tiers.
    """

    wall_s: float
    cpu_s: float
    num_cached: int
    num_loads: int = 0


class Lab:
    """One server with tenants `ann`, `bob`, and as many more as asked for; nothing runs but what a test sends. Close one with
    `tiers`.

    Args:
        pool: memory that replicas share, for tiers in it.
        beside: another replica of the same server, with the same keys.
        admission: which blocks full tiers store.
    """

    def __init__(
        self,
        profile: str,
        *,
        kv_memory_mb: int = 64,
        num_others: int = 0,
        prefix_cache: bool = True,
        tiers: str | None = None,
        pool: KVPool | None = None,
        beside: Lab | None = None,
        admission: str | None = None,
        **settings: Any,
    ) -> None:
        if beside is None:
            credentials = Credentials.empty()
            self.keys: dict[str, str] = {}
            for name in ("ann", "bob", *(f"other{i}" for i in range(num_others))):
                credentials, self.keys[name] = credentials.add(name)
            self.gate = Gate(Policy(profile), credentials, loopback=False)
            self.random = random.Random(1)
        else:
            self.keys, self.gate, self.random = beside.keys, beside.gate, beside.random
        config = EngineConfig(model=MODEL, profile=profile, prefix_cache=prefix_cache, kv_memory_mb=kv_memory_mb)
        self.core: EngineCore = build_engine(replace(config, **settings))
        self.tiers: KVTiers | None = None
        if tiers is not None:
            seat = None if pool is None else pool.take_seat()
            self.core.open_kv_tiers(
                tiers, None if pool is None or seat is None else (os.dup(pool.fd), seat), admission=admission
            )
            assert self.core._tiers is not None
            self.core._tiers.on_news(self.core.input_queue.wake)
            self.tiers = self.core._tiers.tiers

    def prompt(self, length: int) -> list[int]:
        """Draws a prompt that nobody sent before."""
        return [self.random.randrange(10, 2000) for _ in range(length)]

    def request(
        self,
        who: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 1,
        scope: Scope | None = None,
        salt: str | None = None,
    ) -> Request:
        """Makes what the front would send to the engine for the holder of a key, with a `cache_salt` if one is given."""
        admission = self.gate.admit(self.keys[who])
        if salt is not None:
            scope = admission.scope.narrow(salt)
        return Request(
            request_id=f"r{next(_ids)}",
            token_ids=list(token_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            scope=scope or admission.scope,
            tenant=admission.tenant,
            priority=admission.priority,
        )

    def ask(self, who: str, token_ids: Sequence[int], *, max_tokens: int = 1) -> Answer:
        """Sends one prompt and waits for the answer's end."""
        return self.answer(self.request(who, token_ids, max_tokens=max_tokens))

    def answer(self, request: Request) -> Answer:
        """Sends one request and waits for its end."""
        self.core.input_queue.put(Submit(request))
        wall_s, cpu_s, num_loads = time.perf_counter(), time.process_time(), 0
        while True:
            outputs = self.core.step()
            if outputs is None:
                assert self.core.waits_for_others, "the engine has nothing to do, and the request did not end"
                self.core.input_queue.wait(self.core.patience_s())
                continue
            for event in outputs.events:
                num_loads += isinstance(event, KVLoaded)
                if isinstance(event, Ended):
                    assert event.reason in (FinishReason.LENGTH, FinishReason.STOP), event.error
                    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
                    self.rest()
                    return Answer(wall_s, cpu_s, event.num_cached_tokens, num_loads)

    def order(self, requests: Sequence[Request]) -> list[str]:
        """Sends requests at once; returns their ids in the order of their ends."""
        for request in requests:
            self.core.input_queue.put(Submit(request))
        ended: list[str] = []
        while len(ended) < len(requests):
            outputs = self.core.step()
            assert outputs is not None
            ended += [event.request_id for event in outputs.events if isinstance(event, Ended)]
        self.rest()
        return ended

    def flood(self, who: str, num_tokens: int) -> None:
        """Sends prompts that nobody sent before."""
        for _ in range(num_tokens // 500):
            self.ask(who, self.prompt(500))

    def wait_for_tiers(self) -> None:
        """Waits until everything that was evicted is written."""
        assert self.tiers is not None
        deadline_s = time.monotonic() + 300
        while any(index._unwritten for index in self.tiers.indexes):
            assert time.monotonic() < deadline_s, "the tiers do not write"
            self.core.step()
            time.sleep(0.001)

    def close(self) -> None:
        """Ends the threads of the tiers."""
        if self.core._tiers is not None:
            self.core._tiers.close()

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV memory holds."""
        pool = self.core._scheduler.pool
        return pool.num_total * pool.block_size

    @property
    def program(self) -> NativeProgram:
        """What computes."""
        program = self.core._runner._program  # type: ignore[attr-defined]
        assert isinstance(program, NativeProgram)
        return program

    def dirty_blocks(self) -> int:
        """Counts free blocks that hold something, by their bytes in every layer."""
        pool, program = self.core._scheduler.pool, self.program
        free = [block for block in range(pool.num_total) if pool.is_free(block)]
        return sum(any(any(program.read_block(layer, block)) for layer in range(program.num_layers)) for block in free)

    def rest(self) -> None:
        """Lets the engine do what it still has to: wipes."""
        while self.core.step() is not None:
            pass


def auc(faster: Sequence[float], slower: Sequence[float]) -> float:
    """Returns how well a threshold tells two sets of times apart: 0.5 not at all, 1 always (Mann-Whitney)."""
    wins = sum((a < b) + (a == b) / 2 for a in faster for b in slower)
    return wins / (len(faster) * len(slower))
