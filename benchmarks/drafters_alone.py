"""Drafters that need no training, each for itself: what a draft takes by length of context, and how much of it is accepted.

    python -m benchmarks.drafters_alone [--whole DIR]    # DIR: a datastore of the whole documentation, to be measured beside

`ngram`, `lookahead`, `recycling` and `rest` draft for cloister-5m, as many tokens as they are asked for, whether that pays or
not: nothing chooses how many (`benchmarks.speculation` measures what drafts bring in time). Tokens a step are what was
accepted and the one that every step brings. Times are those of the processor, not of the clock.

An edit that the model itself cannot make is measured with the answer given: pages that training never saw, of which one word
in 25 is changed, dropped or added; the drafter sees the prompt and the answer so far, as if a model had written it.

Predicted. An index that grows by what was added costs the same at any length of context: below 100 us a draft. Words of an edit
change every 25 words, about 45 tokens of this vocabulary, and after each change some tokens are needed to find the place again:
32 drafts bring 8 to 12 tokens a step. Answers to questions stand nowhere in the prompt, so n-grams bring next to nothing there,
and public text half a token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final
from unittest import mock

import numpy as np

from benchmarks.harness import MODEL, Bench, make_parser
from benchmarks.speculation_runs import Run, open_arms
from benchmarks.speculation_workloads import Prompts, Workload
from cloister.executor.drafters import Draft, DraftAsk, Drafter, VerifyFeedback, lookahead
from cloister.executor.drafters.datastore import Datastore
from cloister.executor.drafters.lookahead import LookaheadDrafter
from cloister.executor.drafters.ngram import NgramDrafter
from cloister.executor.drafters.recycling import RecyclingDrafter
from cloister.executor.drafters.rest import RestDrafter
from cloister.executor.state import BatchState, SequenceState
from cloister.executor.verification import follow_path
from cloister.models import locate
from cloister.models.generation import digest_tokenizer
from cloister.quant.passages import CALIBRATION, HELD_OUT, read_passages
from cloister.text import Tokenizer
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence

REST: Final = "rest"
NO_WINDOW: Final = "lookahead, no window"
"""What of it is due to the n-grams of the text itself."""
NEED_MODEL: Final = ("lookahead", "recycling")
"""They draft from what the model says of drafts that were not accepted."""
WORKLOADS: Final = ("docs", "text", "code", "edit", "random")
LENGTHS: Final = (200, 2_000, 16_000)
NUM_DRAFTS: Final = (4, 8, 16, 32)
NUM_TIMED: Final = 400
NUM_EDITS: Final = 40
EDIT_WORDS: Final = 150
CHANGED: Final = 0.04
"""Of the words of an edit."""
Makers = Mapping[str, Callable[[], Drafter]]
Texts = Sequence[tuple[list[int], list[int]]]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=48, help="of each workload")
    parser.add_argument("--whole", type=Path, help="a datastore of the whole documentation")
    options = parser.parse_args()
    bench = Bench("drafters_alone", "Drafters that need no training", "below 100 us a draft; edits 8 to 12 tokens a step")
    path = locate(MODEL)
    tokenizer = Tokenizer(path)
    stores = {REST: path / "drafters" / REST}
    if options.whole:
        stores[f"{REST}, whole"] = options.whole
    makers = list_makers(stores, digest_tokenizer(path))
    time_drafts(bench, makers, tokenizer)
    follow_edits(bench, {name: make for name, make in makers.items() if name not in NEED_MODEL}, tokenizer, options.seed)
    answer_prompts(bench, options, path, stores)
    return bench.finish(options)


def list_makers(stores: Mapping[str, Path], digest: str) -> Makers:
    """Returns what makes each drafter, for one sequence."""

    def look_up(place: Path) -> Callable[[], Drafter]:
        return lambda: RestDrafter(Datastore(place, digest, 4096))

    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(16),
        "lookahead": lambda: LookaheadDrafter(1),
        "recycling": lambda: RecyclingDrafter(1),
    }
    return makers | {name: look_up(place) for name, place in stores.items()}


# What a draft takes


def time_drafts(bench: Bench, makers: Makers, tokenizer: Tokenizer) -> None:
    """Measures a draft of up to 16 tokens, and the look at what the step said of it."""
    text = tokenizer.encode(read_passages(CALIBRATION), parse_special=False)
    rows = []
    for name, make in makers.items():
        for length in LENGTHS:
            first_s, later_s = _time(make(), text, length)
            cuts = np.percentile(np.array(later_s) * 1e6, [50, 99])
            rows.append((name, length, float(cuts[0]), float(cuts[1]), first_s * 1e6))
            bench.check(f"us a draft, {name} at {length}", float(cuts[0]), high=100)
    bench.print_rows("a draft and a look, us", ("drafter", "context", "median", "p99", "first one"), rows)


def _time(drafter: Drafter, text: Sequence[int], length: int) -> tuple[float, list[float]]:
    """Returns seconds of the first draft of a context, and of each later one while the text goes on."""
    state = _known(text[:length])
    rng = np.random.default_rng(length)
    took_s = []
    for number in range(NUM_TIMED):
        since_s = time.thread_time()
        (draft,) = drafter.draft([DraftAsk(state, 16)])
        took_s.append(time.thread_time() - since_s)
        top = rng.integers(0, 4096, (1 + len(draft.token_ids), max(1, drafter.num_top)), np.int32)
        state.tokens.append(text[length + number])
        seen = VerifyFeedback(state, len(state.tokens) - 2, draft, (), top[:, 0], top=top)
        since_s = time.thread_time()
        drafter.observe([seen])
        took_s[-1] += time.thread_time() - since_s
    return took_s[0], took_s[1:]


def _known(token_ids: Sequence[int]) -> SequenceState:
    batch = BatchState(vocab_size=1 << 20, max_model_len=1 << 20)
    batch.arrive(NewSequence(seq_id=0, token_ids=list(token_ids), num_prompt_tokens=1, sampling=SamplingParams(), seed=0))
    return batch[0]


# Answers that are given


def follow_edits(bench: Bench, makers: Makers, tokenizer: Tokenizer, seed: int) -> None:
    """Measures edits of pages by their answers."""
    edits = list(draw_edits(tokenizer, Random(seed)))
    rows = []
    for name, make in makers.items():
        for num_drafts in NUM_DRAFTS:
            tokens_a_step, drafts_a_step = follow_answers(make(), edits, num_drafts)
            rows.append((name, num_drafts, tokens_a_step, drafts_a_step))
            if (name, num_drafts) == ("ngram", NUM_DRAFTS[-1]):
                bench.check("tokens a step of edits, ngram", tokens_a_step, low=8)
    bench.print_rows("edits, answers given", ("drafter", "drafts at most", "tokens a step", "drafted a step"), rows)


def draw_edits(tokenizer: Tokenizer, random: Random) -> Iterator[tuple[list[int], list[int]]]:
    """Yields prompts that hold a text, and the text with some of its words changed."""
    words = read_passages(HELD_OUT).split(" ")
    for _ in range(NUM_EDITS):
        start = random.randrange(len(words) - EDIT_WORDS)
        text, edited = words[start : start + EDIT_WORDS], list[str]()
        for word in text:
            change = random.choice(("other", "none", "more")) if random.random() < CHANGED else ""
            other = random.choice(words)
            edited += {"": [word], "other": [other], "none": [], "more": [word, other]}[change]
        prompt = f"Edit this:\n\n{' '.join(text)}\n\nEdited:\n\n"
        yield tokenizer.encode(prompt, parse_special=False), tokenizer.encode(" ".join(edited), parse_special=False)


def follow_answers(drafter: Drafter, texts: Texts, num_drafts: int) -> tuple[float, float]:
    """Returns (tokens a step, drafts a step) where a model would answer prompts with these answers."""
    tokens, drafted = list[int](), list[int]()
    for prompt, answer in texts:
        state, left = _known([*prompt, answer[0]]), answer[1:]
        while left:
            (draft,) = drafter.draft([DraftAsk(state, num_drafts)])
            gained = 1 + _count_accepted(draft, left[:-1])
            tokens.append(gained)
            drafted.append(len(draft.token_ids))
            state.tokens.extend(left[:gained])
            left = left[gained:]
        drafter.forget(0)
    return statistics.fmean(tokens), statistics.fmean(drafted)


def _count_accepted(draft: Draft, future: list[int]) -> int:
    """Returns how many tokens of a draft are those that come."""
    depths = draft.depths
    chosen = [future[depth] if depth < len(future) else -1 for depth in depths]
    return len(follow_path(draft, chosen, frozenset()))


# Answers of the model


def answer_prompts(bench: Bench, options: argparse.Namespace, model: Path, stores: Mapping[str, Path]) -> None:
    """Measures what the model accepts, one sequence at a time."""
    workloads, rows = Prompts(model).all(), list[tuple[object, ...]]()
    plain: dict[str, object] = {}
    for name in ("none", "ngram", "lookahead", NO_WINDOW, "recycling", *stores):
        for num_drafts in NUM_DRAFTS if name != "none" else (0,):
            settings: dict[str, object] = {"num_threads": options.num_threads}
            settings |= {"draft_tokens": num_drafts} if num_drafts else {}
            settings |= {"datastore": str(stores[name])} if name in stores else {}
            with mock.patch.object(lookahead, "MAX_COLUMNS", 0 if name == NO_WINDOW else lookahead.MAX_COLUMNS):
                for kind, run in _answer(name.split(",")[0], model, settings, workloads, options.prompts):
                    if plain.setdefault(kind, run.answers) != run.answers:
                        raise RuntimeError(f"{name} with {num_drafts} drafts gave another answer to {kind}")
                    if num_drafts:
                        each = 1 / run.samples
                        rows.append((name, num_drafts, kind, 1 + run.accepted * each, run.drafted * each))
    headers = ("drafter", "drafts at most", "workload", "tokens a step", "drafted a step")
    bench.print_rows("answers of the model", headers, rows)
    bench.check_true("every answer is the one without drafts", True)


def _answer(
    drafter: str, model: Path, settings: Mapping[str, object], workloads: Mapping[str, Workload], num_prompts: int
) -> Iterator[tuple[str, Run]]:
    arms, missing = open_arms([drafter], model, "none", settings)
    if missing:
        raise RuntimeError(missing[drafter])
    for kind in WORKLOADS:
        yield kind, arms[drafter].answer(workloads[kind], range(min(num_prompts, len(workloads[kind].prompts))), 1)


if __name__ == "__main__":
    raise SystemExit(main())
