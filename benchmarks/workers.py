"""What it costs to keep content in workers: CPU of all processes of a node for the same requests, plain and sealed.

    python -m benchmarks.workers [REQUESTS]

CPU time and not wall time, so that a busy machine changes less. "plain" is `serve --profile private`: its front holds content
and stays. "sealed" is `serve --sealed`: front, key service, zygote, one worker for each request, HPKE and shape included.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cloister.client.residue_audit.node import SealedNode, ServeProgram
from cloister.trust.residue.processes import ProcessTree

TICKS = os.sysconf("SC_CLK_TCK")
LENGTHS = (1, 64)


def cpu_s(family: ProcessTree, server: ServeProgram) -> Mapping[str, float]:
    """Role -> CPU seconds so far, those of children that ended and were waited for included."""
    found: dict[str, float] = {}
    for process in family.alive():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        role = server.role(process)
        found[role] = found.get(role, 0.0) + sum(map(int, fields[11:15])) / TICKS
    return found


async def measure(server: ServeProgram, count: int, num_tokens: int) -> tuple[Mapping[str, float], float]:
    """Sends requests one after the other; returns CPU seconds by role and the least time of one."""
    least_s = float("inf")
    with ProcessTree(server.roots) as family:
        async with server.client() as client:
            body = {"prompt": "A node", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
            for _ in range(3):
                await client.post("/v1/completions", json=body)
            before = cpu_s(family, server)
            for _ in range(count):
                begun = time.perf_counter()
                reply = await client.post("/v1/completions", json=body)
                least_s = min(least_s, time.perf_counter() - begun)
                assert reply.status_code == 200
            await client.post("/v1/completions", json=body)  # the zygote waits for workers when it makes the next one
            after = cpu_s(family, server)
    return {role: after[role] - before.get(role, 0.0) for role in after}, least_s


def main(count: int) -> None:
    for name, kind in (("plain", ServeProgram), ("sealed", SealedNode)):
        server = kind("private", ["--model", "cloister-5m"])
        try:
            for num_tokens in LENGTHS:
                spent, least_s = asyncio.run(measure(server, count, num_tokens))
                whole = sum(spent.values())
                parts = ", ".join(f"{role} {1e3 * seconds / count:.1f}" for role, seconds in sorted(spent.items()))
                print(
                    f"{name}, {num_tokens} tokens: {1e3 * whole / count:.1f} ms of CPU a request ({parts}); "
                    f"quickest {1e3 * least_s:.1f} ms"
                )
        finally:
            server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
