"""Traffic shape: what sizes and times of sealed chunks tell of the topic of an answer, and what buckets tell of its length.

`record` lets a real server answer prompts of two topics and keeps sizes and times; `judge` sends recordings through the shapes
of the profiles on a virtual clock and asks two classifiers; `capture` times the sealed chunks of a real node, for `judge
--captured`; `leak` computes the bits of buckets for real lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import MODEL, Bench, console, make_parser
from benchmarks.traffic import live, recording
from benchmarks.traffic.captures import Capture, replay
from benchmarks.traffic.lengths import report_leak, report_sizes
from benchmarks.traffic.prompts import Prompt, draw_prompts
from cloister.models import locate
from cloister.trust.shape import shape_of

if TYPE_CHECKING:
    from benchmarks.traffic.classifiers import Score

CLASSIFIERS = ("trees", "network")


def main() -> int:
    parser = make_parser(__doc__, traces=())
    parser.add_argument("what", choices=("record", "capture", "judge", "leak"))
    parser.add_argument(
        "--kept",
        type=Path,
        default=Path("traffic.jsonl"),
        help="file of recordings; captures get the profile before the suffix",
    )
    parser.add_argument("--captured", action="store_true", help="judge: what was captured in real time, not what was recorded")
    parser.add_argument("--num-each", type=int, default=2200, help="record: answers of each class")
    parser.add_argument("--at-once", type=int, default=4, help="record: answers at once")
    parser.add_argument("--model", default=MODEL, help="record: name or directory; leak: its vocabulary too")
    parser.add_argument("--tokens", default="96,180", help="record: least and most tokens of an answer, drawn for each alike")
    parser.add_argument("--profiles", default="open,private,paranoid", help="judge: under which shapes")
    options = parser.parse_args()
    steps: dict[str, Callable[[argparse.Namespace], int]] = {"record": record, "capture": capture, "judge": judge, "leak": leak}
    return steps[options.what](options)


def record(options: argparse.Namespace) -> int:
    """Records answers."""
    prompts, lengths = draw_work(options)

    async def run() -> None:
        app, engine = await recording.open_app(options.num_threads, options.model)
        try:
            await recording.record(app, prompts[:8], lengths[:8], options.at_once)  # warms up
            recording.write(options.kept, await recording.record(app, prompts, lengths, options.at_once))
        finally:
            await engine.drain(1.0)

    asyncio.run(run())
    return 0


def capture(options: argparse.Namespace) -> int:
    """Captures answers in real time, under each profile."""
    prompts, lengths = draw_work(options)
    for profile in options.profiles.split(","):
        with live.run_node(profile, options.model, options.num_threads or 1) as address:
            shaped = shape_of(profile) is not None
            asyncio.run(live.capture(address, prompts[:8], lengths[:8], options.at_once, shaped=shaped))  # warms up
            found = asyncio.run(live.capture(address, prompts, lengths, options.at_once, shaped=shaped))
        live.write(captured_at(options, profile), found)
    return 0


def captured_at(options: argparse.Namespace, profile: str) -> Path:
    """Returns where captures under a profile are kept."""
    return Path(options.kept.with_suffix(f".{profile}{options.kept.suffix}"))


def draw_work(options: argparse.Namespace) -> tuple[list[Prompt], list[int]]:
    """Returns prompts and how many tokens each may get."""
    rng = random.Random(options.seed)
    least, most = map(int, options.tokens.split(","))
    prompts = draw_prompts(options.num_each, options.seed)
    return prompts, [rng.randint(least, most) for _ in prompts]


def judge(options: argparse.Namespace) -> int:
    """Asks the classifiers."""
    bench = Bench(
        "traffic_live" if options.captured else "traffic",
        "Two topics told apart by sizes and times of sealed chunks",
        "open: nearly always; private: by gaps and number alone, much less; paranoid: within a bucket not at all",
    )
    parts: dict[str, list[Capture]] = {}
    for profile in options.profiles.split(","):
        captures = live.read(captured_at(options, profile)) if options.captured else replay_all(options, profile)
        parts |= dict(split_buckets(profile, captures))
    rows, scores = [], score_all(options, parts)
    for (part, classifier), found in scores.items():
        counts = Counter(capture.label for capture in parts[part])
        rows.append((part, classifier, min(counts.values()), found.auc, found.low, found.high))
    bench.print_rows("Area under the ROC curve", ("chunks of", "classifier", "answers a class", "AUC", "low", "high"), rows)
    check(bench, scores)
    return bench.finish(options)


def score_all(options: argparse.Namespace, parts: Mapping[str, Sequence[Capture]]) -> dict[tuple[str, str], Score]:
    """Returns the score of each classifier on each part; as many are worked out at once as there are threads."""
    import torch

    from benchmarks.traffic.classifiers import score  # LightGBM: recording and capturing do without

    with ProcessPoolExecutor(options.num_threads or 2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {
            (part, classifier): pool.submit(score, classifier, captures, options.seed)
            for part, captures in parts.items()
            for classifier in CLASSIFIERS
        }
        for name, future in waiting.items():
            console.print(name, future.result(), style="dim", highlight=False)
        return {name: future.result() for name, future in waiting.items()}


def replay_all(options: argparse.Namespace, profile: str) -> list[Capture]:
    """Returns the recordings as they would pass under a profile, each at a moment of its own."""
    rng = random.Random(options.seed)
    return [replay(one, profile, 1000 + rng.random()) for one in recording.read(options.kept)]


def split_buckets(profile: str, captures: Sequence[Capture]) -> list[tuple[str, list[Capture]]]:
    """Returns the captures under a profile: all together and, where buckets are promised, each bucket with enough of them."""
    if profile != "paranoid":
        return [(profile, list(captures))]
    edges = Counter(len(capture.sizes) for capture in captures)
    large = [edge for edge, count in sorted(edges.items()) if count >= 400]
    within = [(f"{profile}, {edge} frames", [c for c in captures if len(c.sizes) == edge]) for edge in large]
    return [*within, *([(f"{profile}, all buckets", list(captures))] if len(edges) > 1 else [])]


def check(bench: Bench, scores: dict[tuple[str, str], Score]) -> None:
    """Judges the scores against what was promised."""
    opens = [found.auc for (part, _), found in scores.items() if part == "open"]
    if opens:
        bench.check("open: AUC of the better classifier", max(opens), low=0.9)
    for (part, classifier), found in scores.items():
        if part.startswith("paranoid") and part.endswith("frames"):
            bench.check(f"{part}: upper 95% bound, {classifier}", found.high, high=0.55)


def leak(options: argparse.Namespace) -> int:
    """Computes what buckets leak, and looks at vocabularies."""
    bench = Bench(
        "traffic_leak",
        "What the number of frames tells of the length of an answer",
        "edges a factor of four apart leave one to two bits of the eight or nine that an exact length tells",
    )
    report_leak(bench, options.traces)
    report_sizes(bench, [locate(name) for name in options.model.split(",")], event_bytes=231)
    return bench.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
