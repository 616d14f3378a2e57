"""Which of 50 prompts was asked, told by how many drafts were accepted (Wei et al. 2024, When Speculation Spills Secrets).

    python -m benchmarks.traffic.speculation capture --kept DIR   # a sealed node on a socket, for each drafter and shape
    python -m benchmarks.traffic.speculation judge --kept DIR     # forests over what was captured

Each of 50 prompts is sent many times; each answer has 24 tokens, at temperature 0 unless another one is given. What passes
between node and gateway is timed and measured by the receiver. The model is the embedded one inside larger matrices
(`benchmarks.inflated`), so that a step takes long enough to be seen in a gap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import MODEL, Bench, console, make_parser, make_progress
from benchmarks.inflated import write_inflated
from benchmarks.inflated_drafters import write_drafters
from benchmarks.speculation_workloads import Prompts
from benchmarks.traffic import live
from benchmarks.traffic.captures import Capture
from benchmarks.traffic.leak import count_bits
from cloister import LLM, SamplingParams
from cloister.trust.shape import shape_of

NUM_PROMPTS: Final = 50
NUM_TOKENS: Final = 24
NUM_DRAFTS: Final = 4
"""A step drafts as many, as in the attacks of the literature: whether that pays is not asked here."""
LARGE: Final[Mapping[str, Any]] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One way to serve.

    Attributes:
        drafter: by name, or none.
        is_silent: drafts are verified under the shape that `private` has where none are, which the server itself never does.
    """

    profile: str
    drafter: str
    temperature: float
    is_silent: bool = False

    @property
    def name(self) -> str:
        return f"{self.profile}{', silent' if self.is_silent else ''}, {self.drafter}, T {self.temperature:g}"

    def drafting(self, options: argparse.Namespace) -> dict[str, object]:
        """Returns the settings that the node gets."""
        if self.drafter == "none":
            return {}
        files = {"rest": {"datastore": options.datastore}, "draft_model": {"draft_model": options.draft_model}}
        return {
            "speculate": self.drafter,
            "draft_tokens": NUM_DRAFTS,
            **files.get(self.drafter, {}),
            **({"silent": True} if self.is_silent else {}),
        }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("capture", "judge"))
    parser.add_argument("--kept", type=Path, required=True, help="directory of captures and of the model")
    parser.add_argument("--drafters", default="none,ngram,draft_model,rest", help="with commas between")
    parser.add_argument("--shapes", default="open,silent,private", help="with commas between; silent: see Part")
    parser.add_argument("--temperatures", default="0", help="with commas between")
    parser.add_argument("--num-each", type=int, default=10, help="capture: answers to each prompt")
    parser.add_argument("--at-once", type=int, default=8, help="capture: answers at once")
    parser.add_argument("--datastore", help="capture: directory of a datastore, for rest")
    parser.add_argument("--draft-model", default="cloister-draft", help="capture: for draft_model")
    options = parser.parse_args()
    return capture(options) if options.what == "capture" else judge(options)


def parts_of(options: argparse.Namespace) -> list[Part]:
    """Returns the ways to serve that the options name."""
    found: list[Part] = []
    for temperature in map(float, options.temperatures.split(",")):
        for shape in options.shapes.split(","):
            for drafter in options.drafters.split(","):
                if shape == "open" or drafter != "none":
                    profile = "private" if shape == "silent" else shape
                    found.append(Part(profile, drafter, temperature, is_silent=shape == "silent"))
    return found


def kept_at(options: argparse.Namespace, part: Part) -> Path:
    return Path(options.kept) / f"{part.name.replace(', ', '-').replace(' ', '')}.jsonl"


def capture(options: argparse.Namespace) -> int:
    """Captures answers for each part that is not there yet."""
    model = write_inflated(options.kept / "model", large=LARGE)
    if not (model / "drafters").exists():
        write_drafters(model)
    prompts = choose_prompts(model)
    for part in parts_of(options):
        if (target := kept_at(options, part)).exists():
            continue
        drafting = part.drafting(options)
        shaped = shape_of(part.profile) is not None
        with live.run_node(part.profile, str(model), options.num_threads or 2, "none", drafting) as address:
            began_s = time.monotonic()
            found = asyncio.run(_ask_all(address, part, prompts, options, shaped=shaped))
            console.print(f"{part.name}: {time.monotonic() - began_s:.0f} s", style="dim", highlight=False)
        live.write(target, found)
    return 0


def choose_prompts(model: Path) -> list[tuple[int, ...]]:
    """Returns questions, and then beginnings of paragraphs, whose likeliest answers all differ: equal ones nobody can tell."""
    workloads = Prompts(model).all()
    candidates = [*workloads["docs"].prompts, *workloads["text"].prompts]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0)
    chosen: dict[str, tuple[int, ...]] = {}
    with LLM(MODEL, speculate="none", kv_memory_mb=64) as llm:
        for prompt, answer in zip(candidates, llm.generate([list(prompt) for prompt in candidates], sampling), strict=True):
            chosen.setdefault(answer.outputs[0].text, prompt)
    return list(chosen.values())[:NUM_PROMPTS]


async def _ask_all(
    address: str, part: Part, prompts: Sequence[tuple[int, ...]], options: argparse.Namespace, *, shaped: bool
) -> list[Capture]:
    node = await live.meet(address, shaped=shaped)
    asked = [label for label in range(len(prompts)) for _ in range(options.num_each)]
    random.Random(options.seed).shuffle(asked)
    places = asyncio.Semaphore(options.at_once)
    captures: list[Capture] = []
    with make_progress() as progress:
        task = progress.add_task(part.name, total=len(asked))

        async def one(label: int) -> None:
            async with places, asyncio.timeout(live.ANSWER_TIMEOUT_S):
                times_s, sizes = await live.ask(node, _body(prompts[label], part.temperature))
            captures.append(Capture(label, str(label), times_s, sizes))
            progress.advance(task)

        for label in asked[: options.at_once]:  # warms up
            await one(label)
        captures.clear()
        await asyncio.gather(*(one(label) for label in asked))
    return captures


def _body(prompt: tuple[int, ...], temperature: float) -> bytes:
    wish = {
        "prompt": list(prompt),
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "temperature": temperature,
        "stream": True,
    }
    return json.dumps(wish).encode()


def judge(options: argparse.Namespace) -> int:
    """Asks the forests."""
    from benchmarks.traffic.fingerprint import VIEWS, Share, find_prompts  # scikit-learn: capturing does without

    bench = Bench(
        "traffic_speculation",
        "Which of 50 prompts was asked, by accepted drafts",
        "open: most of them; private: at chance, 2%; a shape that is silent between steps would tell",
    )
    shares: dict[tuple[str, str], Share] = {}
    chance = 1.0
    rows: list[tuple[object, ...]] = []
    frames: list[tuple[object, ...]] = []
    for part in parts_of(options):
        if not kept_at(options, part).exists():
            continue
        captures = live.read(kept_at(options, part))
        chance = 1 / len({one.label for one in captures})
        for view in VIEWS if part.profile == "open" or part.is_silent else VIEWS[:1]:
            share = find_prompts(captures, view, options.seed, options.num_threads or 2)
            shares[part.name, view] = share
            rows.append((part.name, view, share.total, share.share, *share.bounds))
            console.print(*rows[-1], style="dim", highlight=False)
        edges = Counter(len(one.sizes) for one in captures)
        common = ", ".join(f"{count} of {size}" for size, count in edges.most_common(3))
        lasted = sorted(one.times_s[-1] for one in captures)
        frames.append((part.name, common, count_bits([len(one.sizes) for one in captures], int), lasted[len(lasted) // 2]))
    bench.figures["chance"] = chance
    bench.print_rows("Prompts found", ("shape, drafter", "seen", "answers", "share", "low", "high"), rows)
    bench.print_rows("Chunks of an answer", ("shape, drafter", "commonest", "bits of their number", "median s"), frames)
    for (name, view), share in shares.items():
        if name.startswith("private") and "silent" not in name:
            bench.check(f"{name}: lower 95% bound", share.bounds[0], high=chance)
            bench.check(f"{name}: upper 95% bound", share.bounds[1], high=2 * chance)
        elif name.startswith("open") and name.endswith("T 0") and "none" not in name and view == VIEWS[0]:
            bench.check(f"{name}: share found, {view}", share.share, low=0.9)
    return bench.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
