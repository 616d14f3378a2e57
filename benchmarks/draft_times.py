"""How long a small model takes to draft: chains and trees of 4 and 8 tokens for 1, 4 and 16 sequences.

    python -m benchmarks.draft_times

cloister-draft behind 300 known tokens, as in a step of which nothing was accepted: the small model computes one known token
and then its own. The time of the one thread counts, and the quickest of the calls:
others use this machine too.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.drafting import BLOCK_SIZE, OpenedModel
from benchmarks.harness import MODEL, Bench, make_parser
from cloister.backends.base import KVLayout
from cloister.executor.drafters import DraftAsk, Drafter, DraftingPlace
from cloister.executor.drafters.draft_model import MAX_FOLLOWED, make_draft_model
from cloister.executor.drafters.long_spec import make_long_spec
from cloister.executor.drafters.spec_infer import make_spec_infer
from cloister.executor.state import BatchState
from cloister.models import locate
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence

DRAFTERS: Final[dict[str, Callable[[DraftingPlace], Drafter]]] = {
    "draft_model": make_draft_model, "spec_infer": make_spec_infer, "long_spec": make_long_spec,
}  # fmt: skip
KINDS: Final = {"greedy": (0.0, True), "seeded": (1.0, True), "no seed": (1.0, False)}
BATCHES, COUNTS, NUM_KNOWN, NUM_CALLS = (1, 4, 16), (4, 8), 300, 100
LONG, CONTEXTS = ("draft_model", "long_spec"), (1024, 4096, 16384)
PREDICTION: Final = (
    "a chain of four costs some 50 microseconds a token for one sequence, of which half is the small model; drawing apart, "
    "which needs whole distributions, costs some 40 microseconds a token more"
)


def main() -> int:
    """Measures, and says what held."""
    options = make_parser(__doc__).parse_args()
    bench = Bench("draft_times", "How long a small model takes to draft", PREDICTION)
    rows: list[tuple[object, ...]] = []
    found: dict[tuple[object, ...], float] = {}
    for name, make in DRAFTERS.items():
        for kind, (temperature, coupled) in KINDS.items():
            for num_drafts in COUNTS:
                times = []
                for batch in BATCHES:
                    times.append(measure(make, batch, num_drafts, temperature, coupled, 1))
                    found[name, kind, num_drafts, batch] = times[-1]
                rows.append((name, kind, num_drafts, *times))
    bench.print_rows(
        "Microseconds of a draft", ("drafter", "requests", "tokens", *(f"{batch} sequences" for batch in BATCHES)), rows
    )
    long_rows: list[tuple[object, ...]] = []
    for name in LONG:
        times = [measure(DRAFTERS[name], 1, 4, 0.0, True, 1, num_known) for num_known in CONTEXTS]
        found[name,] = times[-1] / times[0]
        long_rows.append((name, *times))
    headers = ("drafter", *(f"behind {num_known:,} tokens" for num_known in CONTEXTS))
    bench.print_rows("Microseconds of four greedy tokens for one sequence", headers, long_rows)
    bench.check("four tokens of long_spec behind 16,384 over behind 1,024", found["long_spec",], high=1.2)
    bench.check("four greedy tokens for one sequence, us", found["draft_model", "greedy", 4, 1], high=800)
    bench.check("eight tokens without a seed for 16 sequences, us", found["draft_model", "no seed", 8, 16], high=20_000)
    return bench.finish(options)


Maker = Callable[[DraftingPlace], Drafter]


def measure(
    make: Maker,
    num_seqs: int,
    num_drafts: int,
    temperature: float,
    coupled: bool,
    num_threads: int,
    num_known: int = NUM_KNOWN,
) -> float:
    """Returns the microseconds of the quickest draft."""
    opened = OpenedModel(locate(MODEL), 1)
    vocab_size, blocks_each = opened.vocab_size, -(-(num_known + num_drafts) // BLOCK_SIZE)
    batch = BatchState(vocab_size=vocab_size, max_model_len=2 * num_known)
    drafter = make(
        DraftingPlace(
            model_path=locate(MODEL),
            vocab_size=vocab_size,
            hidden_size=opened.model.spec.hidden_size,
            max_model_len=2 * num_known,
            max_num_seqs=num_seqs,
            block_size=BLOCK_SIZE,
            eos_token_ids=opened.model.info.eos_token_ids,
            files=None,
            open_model=lambda name: OpenedModel(locate(name), num_threads, 1 << 15),
            guesser=None,
            draws=batch.sampling_metadata,
        )
    )
    drafter.allocate(KVLayout(num_seqs * blocks_each, BLOCK_SIZE))
    tokens = np.random.default_rng(0).integers(16, vocab_size, (num_seqs, num_known)).tolist()
    for number in range(num_seqs):
        params = SamplingParams(temperature=temperature, seed=number if coupled else None)
        batch.arrive(
            NewSequence(seq_id=number, token_ids=tokens[number], num_prompt_tokens=num_known, sampling=params, seed=number)
        )
        batch[number].blocks = array("i", range(number * blocks_each, (number + 1) * blocks_each))
    parents = None if drafter.shape is None else drafter.shape[:num_drafts]
    asks = [DraftAsk(batch[number], num_drafts, parents, coupled) for number in range(num_seqs)]
    for _ in range(-(-num_seqs * num_known // MAX_FOLLOWED)):
        drafter.follow([(batch[number], num_known) for number in range(num_seqs)])
    times = []
    for _ in range(NUM_CALLS):
        since = time.thread_time()
        drafts = drafter.draft(asks)
        times.append(time.thread_time() - since)
    assert all(len(draft.token_ids) == num_drafts for draft in drafts)
    return 1e6 * min(times)


if __name__ == "__main__":
    raise SystemExit(main())
