"""What privacy costs: time to first token and throughput of the four profiles, side by side, in turns, on one machine.

All are sealed nodes, up at once and idle but for the one that is measured. Prompts are random tokens, so no two share a prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Bench, make_parser, make_progress
from benchmarks.traffic import live
from cloister.trust.shape import shape_of

PROFILES = ("open", "team", "private", "paranoid")
STREAM: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(slots=True)
class Figures:
    """What one profile did, round by round."""

    first_token_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: seconds to its first token (None where it came whole) and to its end, and its tokens."""

    first_s: float | None
    whole_s: float
    num_tokens: int


Ask = Callable[[dict[str, object]], Awaitable[Answer]]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="cloister-5m", help="name or directory")
    parser.add_argument("--quant", default="none", help="number format")
    parser.add_argument("--rounds", type=int, default=5, help="of each profile, in turns")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt that is alone")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--at-once", type=int, default=16, help="answers at once for throughput; prompts of 128 to 512 tokens")
    options = parser.parse_args()
    label = Path(options.model).name
    bench = Bench(
        f"profiles_{label}_sealed",
        f"Profiles side by side: {label}, {options.quant}, sealed",
        "without shared prefixes the profiles differ by less than a tenth: what they refuse is reuse, and there is none here",
    )
    figures = measure(options)
    report(bench, figures)
    return bench.finish(options)


def measure(options: argparse.Namespace) -> dict[str, Figures]:
    """Returns the figures of every profile; rounds go through the profiles in another order each time."""
    figures = {profile: Figures() for profile in PROFILES}
    with ExitStack() as stack, make_progress() as progress:
        urls = {
            profile: stack.enter_context(live.run_node(profile, options.model, options.num_threads, options.quant))
            for profile in PROFILES
        }
        task = progress.add_task("measure", total=(options.rounds + 1) * len(PROFILES))
        for number in range(options.rounds + 1):  # the first one warms up
            for profile in PROFILES[number % 4 :] + PROFILES[: number % 4]:
                run = asyncio.run(reach_and_measure(options, urls[profile], profile, options.seed * 1000 + number))
                if number:
                    figures[profile].first_token_s += run.first_token_s
                    figures[profile].alone_s += run.alone_s
                    figures[profile].tokens_per_s += run.tokens_per_s
                progress.advance(task)
    return figures


async def reach_and_measure(options: argparse.Namespace, url: str, profile: str, seed: int) -> Figures:
    """Takes one round with a node whose key was fetched anew."""
    node = await live.meet(url, shaped=shape_of(profile) is not None)
    return await measure_round(options, lambda body: ask_sealed(node, body), seed)


async def measure_round(options: argparse.Namespace, ask: Ask, seed: int) -> Figures:
    """Takes one round: three answers one after the other, then many at once."""
    rng, run = random.Random(seed), Figures()
    for _ in range(3):
        answer = await ask(make_body(draw_prompt(rng, options.prompt), options.tokens))
        run.alone_s.append(answer.whole_s)
        run.first_token_s += [] if answer.first_s is None else [answer.first_s]
    sizes = [128 + round(384 * i / max(1, options.at_once - 1)) for i in range(options.at_once)]
    answers = await asyncio.gather(*(ask(make_body(draw_prompt(rng, n), options.tokens)) for n in sizes))
    run.tokens_per_s.append(sum(answer.num_tokens for answer in answers) / max(answer.whole_s for answer in answers))
    return run


def draw_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Returns random token ids that every vocabulary here has."""
    return [rng.randrange(300, 2000) for _ in range(num_tokens)]


def make_body(prompt: list[int], num_tokens: int) -> dict[str, object]:
    """Returns a request that gets `num_tokens` tokens."""
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}


async def ask_sealed(node: live.Node, body: dict[str, object]) -> Answer:
    """The answer is over for its reader when it is complete; what pads it comes after that and is read all the same."""
    began_s = time.perf_counter()
    sealed, exchange = live.seal(node, json.dumps(body | STREAM).encode())
    reader, first_s, ended_s, said = live.Reader(exchange, shaped=node.shaped), None, 0.0, b""
    async for _, chunk in live.post(node, sealed):
        said += (new := reader.feed(chunk))
        first_s = time.perf_counter() - began_s if first_s is None and new else first_s
        ended_s = time.perf_counter() - began_s if new else ended_s
    rest = reader.close()[len(said) :]
    ended_s = time.perf_counter() - began_s if rest else ended_s
    return Answer(first_s, ended_s, max(_count_tokens(line) for line in (said + rest).decode().splitlines()))


def _count_tokens(line: str) -> int:
    return int(json.loads(line[5:])["usage"]["completion_tokens"]) if '"completion_tokens"' in line else 0


def report(bench: Bench, figures: dict[str, Figures]) -> None:
    """Prints medians with the smallest and the largest, and judges `private` against `open`."""
    base = figures["open"]
    rows = []
    for profile, found in figures.items():
        ttft = _spread([s * 1e3 for s in found.first_token_s])
        whole = _spread([s * 1e3 for s in found.alone_s])
        rate = _spread(found.tokens_per_s)
        share = statistics.median(found.tokens_per_s) / statistics.median(base.tokens_per_s)
        rows.append((profile, ttft, whole, rate, share))
    headers = ("profile", "first token, ms", "whole answer alone, ms", "all at once, tokens/s", "over open")
    bench.print_rows("Median (smallest to largest)", headers, rows)
    private = figures["private"]
    throughput = statistics.median(private.tokens_per_s) / statistics.median(base.tokens_per_s)
    first = statistics.median(base.first_token_s) / statistics.median(private.first_token_s)
    bench.check("throughput of private over open", throughput, low=0.9)
    bench.check("1 / time to first token, private over open", first, low=0.9)


def _spread(values: list[float]) -> str:
    if not values:
        return "comes whole"
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})"


if __name__ == "__main__":
    raise SystemExit(main())
