"""The inner half of `benchmarks.hardening`: a front that the launcher started, with one engine. Not run by itself.

Prints the engine's process when it is ready, then answers each line of its input with one request and prints the time it took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from cloister.engine import EngineClient, ProcessTransport
from cloister.launch import SEALED_ENGINE_ENTRY
from cloister.trust.hardening import sealed
from cloister.types.config import EngineConfig
from cloister.types.request import Request, SamplingParams


async def main(model: str, num_tokens: int) -> None:
    state = sealed()
    assert state is not None
    assert state.starter is not None
    starter = state.starter
    # one profile in every variant, so that nothing differs but the measures
    config = EngineConfig(model=model, profile="open", num_threads=1, kv_memory_mb=64, weights_cache="")
    engine = EngineClient(
        ProcessTransport(SEALED_ENGINE_ENTRY, spawn=lambda far: starter.start("engine", [], far.fileno())), config
    )
    await engine.start()
    print(json.dumps({"engine": engine.pid}), flush=True)
    loop = asyncio.get_running_loop()
    number = 0
    while await loop.run_in_executor(None, sys.stdin.readline):
        number += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        begun_s = time.perf_counter()
        count = 0
        async for output in engine.generate(Request(request_id=str(number), token_ids=[1, 2, 3, 4], sampling=sampling)):
            count += len(output.token_ids)
        print(json.dumps({"elapsed_s": time.perf_counter() - begun_s, "num_tokens": count}), flush=True)
    await engine.drain(0.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
