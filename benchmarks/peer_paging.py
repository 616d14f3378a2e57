"""B9 (Aqua): a burst at one of two replicas, under `fcfs` and under `cfs`, whose preempted sequences are computed again, kept
in memory of their own, or also in memory that the other replica does not need.

    python -m benchmarks.peer_paging [--requests N] [--tokens N] [--answer N] [--real] [--model MODEL] [--kv-mb MB]

In virtual time first: the scheduler and the tiers are the server's, steps and reads take what they were measured to take with
SmolLM2-135M (docs/engine.md, decisions/0037), and storing takes no time.

Then, with `--real`, engine processes of one thread, two of each kind, of which the second has nothing to do. Kinds take turns,
and all must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.kv_tiers import TimedEngine, describe, running
from benchmarks.models import MODELS, find_model
from benchmarks.policies import BLOCK_SIZE, MAX_STEP_TOKENS, Figures
from benchmarks.replay import CountingRunner, StepCosts, VirtualTier, make_scheduler, replay
from cloister.bench.drive import Timed, make_requests
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.engine.kv_pool import KVPool
from cloister.engine.transports import ProcessTransport
from cloister.kv.lent_tier import LENT_SHARE
from cloister.launch.processes import ENGINE_ENTRY
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.types.config import EngineConfig
from cloister.types.events import Outputs, Preempted, Scheduled, Submit
from cloister.types.request import Request, SamplingParams

NUM_REPLICAS = 2
TIMEOUT_S = 600.0


class BurstEngine(TimedEngine):
    """Counts preemptions, and positions that a sequence had to compute again when it came back."""

    num_preemptions = 0
    num_again = 0

    def deliver(self, message: Outputs) -> None:
        """Takes a message of the engine."""
        for event in message.events:
            if isinstance(event, Preempted):
                self.num_preemptions += 1
            elif isinstance(event, Scheduled) and event.resumed:
                known = event.num_prompt_tokens + len(self.tokens.get(event.request_id, ()))
                self.num_again += known - event.num_cached_tokens
        super().deliver(message)


class Kind:
    """Two replicas with one setting; the first one gets the bursts."""

    def __init__(self, config: EngineConfig, pool: KVPool | None = None) -> None:
        self.engines = [
            BurstEngine(config, ProcessTransport(ENGINE_ENTRY, kv_pool=pool, replica=index)) for index in range(NUM_REPLICAS)
        ]
        self.first_s: list[float] = []
        self.whole_s: list[float] = []
        self.burst_s: list[float] = []
        self.busy_s: list[float] = []

    def measure_busy_s(self) -> float:
        """Returns the processor time of both engines so far, all threads."""
        ticks = 0
        for engine in self.engines:
            fields = Path(f"/proc/{engine.transport.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    async def answer(self, name: str, prompts: list[list[int]], num_output: int, within_s: float) -> list[tuple[int, ...]]:
        """Answers a burst; returns the tokens."""
        engine = self.engines[0]
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        busy_s = self.measure_busy_s()
        began_s, sent_s, ended_s = time.perf_counter(), dict[str, float](), dict[str, float]()
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(max(0.0, began_s + within_s * number / len(prompts) - time.perf_counter()))
            request = Request(request_id=f"{name}.{number}", token_ids=prompt, sampling=sampling, timeout_s=TIMEOUT_S)
            sent_s[request.request_id] = time.perf_counter()
            engine.transport.send(Submit(request, 0))
        while len(ended_s) < len(sent_s):
            if time.perf_counter() - began_s > TIMEOUT_S:
                raise TimeoutError("an engine does not answer")
            await asyncio.sleep(0.001)
            ended_s |= dict.fromkeys((engine.ended & sent_s.keys()) - ended_s.keys(), time.perf_counter())
        self.first_s += [engine.first_s[one] - sent_s[one] for one in sent_s]
        self.whole_s += [ended_s[one] - sent_s[one] for one in sent_s]
        self.burst_s.append(time.perf_counter() - began_s)
        self.busy_s.append(self.measure_busy_s() - busy_s)
        return [tuple(engine.tokens[one]) for one in sent_s]

    def report(self, name: str) -> None:
        """Prints the times, and what was stored and loaded."""
        first_s, whole_s, engine = sorted(self.first_s), sorted(self.whole_s), self.engines[0]
        p99 = int(0.99 * len(first_s))
        print(
            f"  {name:12} first token P50 {statistics.median(first_s):6.2f} s, P99 {first_s[p99]:6.2f} s; request mean"
            f" {statistics.fmean(whole_s):6.2f} s, P99 {whole_s[p99]:6.2f} s; bursts {statistics.fmean(self.burst_s):6.2f} s,"
            f" processor {statistics.fmean(self.busy_s):6.2f} s;"
            f" {engine.num_preemptions} preemptions, {engine.num_again} positions again; {describe(engine)}"
        )
        where = sorted({event.tier for event in engine.loads})
        if where:
            loads = ", ".join(f"{tier} {sum(event.tier == tier for event in engine.loads)}" for tier in where)
            print(f"               loads of {loads}")


def simulate(options: argparse.Namespace) -> None:
    """Prints the figures of the same burst in virtual time."""
    costs = StepCosts(options.step_ms / 1e3, options.token_ms / 1e3, 0.0, 0.0)
    block_bytes, byte_s = int(options.block_kib * 1024), 1 / (options.gb_s * 1e9)
    num_device = options.num_seqs * (-(-(options.tokens + options.answer) // BLOCK_SIZE) + 1)
    num_own = int(options.part_mb / options.kv_mb * num_device)
    lengths = options.tokens, options.answer
    gap_s = options.within / options.requests
    items = [WorkItem(i * gap_s, make_tokens((7, i), options.tokens, 2048), *lengths) for i in range(options.requests)]
    print(
        f"virtual time: {options.requests} prompts of {options.tokens} tokens, {options.answer} tokens each; {num_device}"
        f" blocks on the device, parts of {num_own}"
    )
    for name, policy, num_slots in (
        ("fcfs", "fcfs", 0),
        ("cfs, again", "cfs", 0),
        ("cfs, host", "cfs", num_own),
        ("cfs, peer", "cfs", num_own + int(LENT_SHARE * num_own)),
    ):
        budget = BudgetConfig(MAX_STEP_TOKENS, floor_s=0.045)
        config = SchedulerConfig(
            max_model_len=options.tokens + options.answer, max_num_seqs=options.num_seqs, policy=policy, budget=budget
        )
        scheduler, runner = make_scheduler(config, num_device, BLOCK_SIZE), CountingRunner()
        tier = VirtualTier(scheduler, runner, block_bytes, num_slots, byte_s) if num_slots else None
        timed = [msgspec.structs.replace(each.request, timeout_s=1e6) for each in make_requests(items)]
        requests = [Timed(item.arrival_s, request) for item, request in zip(items, timed, strict=True)]
        run = replay(scheduler, requests, costs, runner=runner, tier=tier)
        figures = Figures.of(run.recorder.records, run)
        print(
            f"  {name:12} first token mean {figures.ttft_mean_s:6.2f} s, P99 {figures.ttft_p99_s:6.2f} s; request mean"
            f" {figures.mean_s:6.2f} s, P99 {figures.p99_s:6.2f} s; burst {run.clock.now():6.2f} s; {figures.num_preemptions}"
            f" preemptions, {figures.again:.0%} computed again, {tier.num_loaded if tier else 0} loads"
        )


async def measure(options: argparse.Namespace) -> None:
    """Prints the figures."""
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    base = EngineConfig(
        model=model, num_threads=1, prefix_cache=True, max_model_len=options.tokens + options.answer,
        max_num_seqs=options.num_seqs, weights_cache="", kv_memory_mb=options.kv_mb,
    )  # fmt: skip
    cfs, size = replace(base, scheduler="cfs"), f"{options.part_mb}M"
    kinds = {
        "fcfs": Kind(base),
        "cfs, again": Kind(cfs),
        "cfs, host": Kind(replace(cfs, kv_tier=f"host:{size}")),
        "cfs, peer": Kind(replace(cfs, kv_tier=f"peer:{size}"), KVPool(int(options.part_mb * 2**20), NUM_REPLICAS)),
    }
    async with running([engine for kind in kinds.values() for engine in kind.engines]):
        ready = kinds["fcfs"].engines[0].transport.ready
        assert ready is not None
        draw, names = random.Random(1), list(kinds)
        for burst in range(options.bursts + 1):
            num, length = (options.requests, options.tokens) if burst else (4, 64)  # first a few, so that costs are known
            prompts = [[draw.randrange(10, ready.model.vocab_size) for _ in range(length)] for _ in range(num)]
            shift = burst % len(names)
            answers = [
                await kinds[name].answer(f"burst {burst}", prompts, options.answer, options.within)
                for name in names[shift:] + names[:shift]
            ]
            assert all(answer == answers[0] for answer in answers), "a tier or a policy changed an answer"
            if not burst:
                for kind in kinds.values():
                    kind.first_s, kind.whole_s, kind.burst_s, kind.busy_s = [], [], [], []
        print(
            f"{options.model}: {options.bursts} bursts of {options.requests} prompts of {options.tokens} tokens,"
            f" {options.answer} tokens each, within {options.within} s; {options.kv_mb} MiB of KV on the device,"
            f" {options.num_seqs} sequences at once, parts of {size}; all the same answers"
        )
        for name, kind in kinds.items():
            kind.report(name)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--bursts", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--answer", type=int, default=160)
    parser.add_argument("--within", type=float, default=0.5)
    parser.add_argument("--num-seqs", type=int, default=6)
    parser.add_argument("--kv-mb", type=float, default=3.0)
    parser.add_argument("--part-mb", type=float, default=6.0)
    parser.add_argument("--step-ms", type=float, default=12.0, help="of virtual time: a step")
    parser.add_argument("--token-ms", type=float, default=1.5, help="of virtual time: a token of a step")
    parser.add_argument("--block-kib", type=float, default=360.0, help="of virtual time: a block")
    parser.add_argument("--gb-s", type=float, default=0.2, help="of virtual time: loads")
    parser.add_argument("--real", action="store_true", help="engine processes too")
    options = parser.parse_args()
    simulate(options)
    if options.real:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
