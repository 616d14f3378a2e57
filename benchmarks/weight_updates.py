"""Answers while replicas get other weights: `python -m benchmarks.weight_updates`.

One engine with the old and one with the new weights answer all requests first: greedy and seeded ones, a quarter with a grammar
and a quarter with an adapter. Then replicas answer them, several at once and again from the first one, until `cloister cluster
update --model` has ended and all were asked. Prints how many answers came whole and equal that of the one engine whose weights
their `system_fingerprint` names, and how many were lost. The new weights are the old ones with noise. With `--same` every
replica gets a new engine of the old weights. With `--on ray` they are on a Ray of three raylets on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from rich.table import Table
from safetensors.numpy import load_file, save_file

from benchmarks.cluster_demo import TIMEOUT_S, Answer, ask, ask_all, local_ray, serving
from benchmarks.cluster_faults import NUM_RAYLETS, make_bodies
from benchmarks.harness import console
from cloister.models import locate
from tests.adapter_factory import write_adapter

NOISE: Final = 0.1
UPDATE_TIMEOUT_S: Final = 300.0


def write_other_weights(path: Path, model: Path) -> Path:
    """Writes a model directory with noise in its weights."""
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("drafters"))
    draw, others = np.random.default_rng(0), {}
    for name, tensor in load_file(model / "model.safetensors").items():
        wide = tensor.astype(np.float32)
        others[name] = (wide * (1 + NOISE * draw.standard_normal(wide.shape, np.float32))).astype(tensor.dtype)
    save_file(others, path / "model.safetensors", {"format": "pt"})
    return path


async def run(given: argparse.Namespace, folder: Path) -> bool:
    """Runs everything, prints what was seen, and returns whether it was as it must be."""
    old = locate(given.model)
    new = write_other_weights(folder / "new", old)
    adapter = write_adapter(folder / "ann", old, size=0.05)
    flags = ("--served-model-name", given.model, "--num-threads", "1", "--kv-memory-mb", "64",
             "--request-timeout-s", "120", "--lora", f"ann={adapter}")  # fmt: skip
    bodies = make_bodies(given.requests, given.max_tokens, given.model)
    alone: dict[str, list[Answer | None]] = {}
    for path in (old, new):
        answers: list[Answer | None] = [None] * len(bodies)
        async with serving("--model", str(path), *flags) as (server, _):
            await ask_all(server.url, bodies, given.streams, answers)
        (plain,) = {name for answer in answers[:2] if answer for name in answer.fingerprints}
        alone[plain] = answers
    console.print(f"one engine alone: {', '.join(f'{len(seen)} answers of {name}' for name, seen in alone.items())}")
    with contextlib.ExitStack() as rays:
        where: tuple[str, ...] = ()
        if given.on == "ray":
            where = ("--on", "ray", "--ray-address", rays.enter_context(local_ray(NUM_RAYLETS)).address)
        replicas = ("--replicas", str(given.replicas), *where, *given.flags.split())
        async with serving("--model", str(old), *flags, *replicas) as (server, _):
            seen, took_s, error = await update_under_load(server.url, None if given.same else new, bodies, given)
            num_mismatches = round(server.metric("replica_mismatches_total"))
    console.print(f"answers that another replica computed differently: {num_mismatches}")
    return show(seen, alone, took_s, error) and not num_mismatches


async def update_under_load(
    url: str, new: Path | None, bodies: list[dict[str, Any]], given: argparse.Namespace
) -> tuple[list[Answer | None], float, str]:
    """Begins the update once a fifth of the answers have come; returns the answers, how long it took, and its error."""
    answers: list[Answer | None] = []
    updated = asyncio.Event()

    async def work(client: httpx.AsyncClient) -> None:
        while len(answers) < len(bodies) or not updated.is_set():
            number = len(answers)
            answers.append(None)
            answers[number] = await ask(client, url, bodies[number % len(bodies)])

    async def load() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(work(client) for _ in range(given.streams)))

    loading = asyncio.create_task(load())
    while sum(answer is not None for answer in answers) < len(bodies) // 5:
        await asyncio.sleep(0.02)
    begun_s = time.monotonic()
    command = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("cloister")), "cluster", "update", url, *(("--model", str(new)) if new else ()),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(command.communicate(), UPDATE_TIMEOUT_S)
    took_s = time.monotonic() - begun_s
    console.print(said.decode())
    updated.set()
    await loading
    return answers, took_s, said.decode() if command.returncode else ""


def show(seen: list[Answer | None], alone: dict[str, list[Answer | None]], took_s: float, error: str) -> bool:
    """Prints the counts; returns whether every request was answered as one of both engines answers it."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in alone}
    num_lost = 0
    for number, answer in enumerate(seen):
        if answer is None or answer.error is not None or answer.finish_reason is None or len(answer.fingerprints) != 1:
            num_lost += 1
            console.print(f"  request {number}: {'never sent' if answer is None else answer.error}")
            continue
        name = next(name for name in alone if next(iter(answer.fingerprints)).startswith(name))
        expected = alone[name][number % len(alone[name])] or Answer()
        counts[name]["answered"] += 1
        counts[name]["identical"] += (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
    table = Table("weights", "answered", "identical")
    for name, count in counts.items():
        table.add_row(name, str(count["answered"]), str(count["identical"]))
    console.print(table)
    gap_s = max(answer.longest_gap_s for answer in seen if answer is not None)
    console.print(
        f"{len(seen)} requests, {num_lost} lost, longest gap in a stream {gap_s:.2f} s, the update took {took_s:.1f} s"
    )
    return not (num_lost or error) and all(count["answered"] == count["identical"] for count in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--on", default="local", choices=("local", "ray"))
    parser.add_argument("--same", action="store_true", help="engines of the same weights")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--flags", default="", help="further flags of cloister serve")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if asyncio.run(run(given, Path(folder))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
