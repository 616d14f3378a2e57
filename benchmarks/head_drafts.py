"""Heads of cloister-5m: how often they are right on questions that nobody trained with, and how long they take to draft.

    apt-get install sqlite3-doc python3.11-doc postgresql-doc-15
    python -m benchmarks.head_drafts --num-threads 1

Questions are asked in phrasings that training never uses (`training.questions`), about facts that it does ask for. The model
answers greedily; at each place of an answer, each head's ten best guesses meet the token that came so many places further. A
draft is timed as in a step: states that were seen, out come tokens; the quickest of the calls counts, as others use this
machine too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

import numpy as np

from benchmarks.drafting import BLOCK_SIZE, OpenedModel
from benchmarks.harness import MODEL, Bench, make_parser
from cloister.api import LLM
from cloister.backends.base import HIDDEN, FloatArray, KVLayout, Program
from cloister.backends.draft_heads import DraftHeads
from cloister.executor.drafters import DRAFTERS, NOTHING, DraftAsk, Drafter, DraftingPlace, VerifyFeedback, blockwise, medusa
from cloister.executor.drafters.guessing import guess_hidden, make_guesser
from cloister.executor.drafters.heads import HeadsCard, open_heads
from cloister.executor.state import BatchState
from cloister.models import locate
from cloister.train.hidden_states import batch_passages
from cloister.train.measuring import MISSED, NOTHING_THERE, RankArray, count_kept
from cloister.train.passages import Passage, answer, render_questions
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence
from training.corpus import DEBIAN_SOURCES
from training.facts import draw_knowledge
from training.questions import phrasings

KINDS: Final = ("medusa", "blockwise")
BATCHES, BUDGETS, NUM_CALLS, NUM_RANKS, TOKENS_AT_ONCE = (1, 4, 16), (4, 8, 16, 32), 300, 10, 1024
PREDICTION: Final = (
    "the first head of either kind is right on about half of the answers' places, each further one less; a draft takes about "
    "100 microseconds for one sequence, most of it the model's own head over four guesses"
)


def main() -> int:
    """Measures, and says what held."""
    parser = make_parser(__doc__)
    parser.add_argument("--questions", type=int, default=1500, help="questions that are answered")
    options = parser.parse_args()
    bench = Bench("head_drafts", "Heads of cloister-5m", PREDICTION)
    opened = OpenedModel(locate(MODEL), options.num_threads or 1)
    program = opened.build(KVLayout(-(-TOKENS_AT_ONCE // BLOCK_SIZE), BLOCK_SIZE))
    passages = answer_questions(options.questions, options.seed, options.num_threads)
    hidden = read_hidden(program, passages)
    batch = BatchState(vocab_size=opened.vocab_size, max_model_len=1024)
    for number in range(max(BATCHES)):
        params = SamplingParams(temperature=0.0)
        batch.arrive(NewSequence(seq_id=number, token_ids=[5, 6], num_prompt_tokens=1, sampling=params, seed=0))
    place = make_place(opened, program, batch)
    rows: list[tuple[object, ...]] = []
    for kind in KINDS:
        card, heads = read_heads(place, kind)
        ranks = measure(heads, program, hidden, passages)
        for head, whole in enumerate(ranks.T, 1):
            column = whole[whole != NOTHING_THERE]
            rows.append((kind, head, float((column == 0).mean()), float(((column >= 0) & (column < 5)).mean()), len(column)))
        parents = card.parents or list(range(-1, card.num_heads - 1))
        kept = [(kind, size, count_kept(ranks, parents[:size])) for size in (1, 2, 4, 8, 16, 32, 64) if size <= len(parents)]
        bench.print_rows(f"Tokens beside the model's own that {kind} keeps", ("kind", "drafts", "kept"), kept)
        bench.check(f"{kind}, tokens kept of four drafts", kept[2][2], low=0.5)
    bench.print_rows("Accuracy on answers", ("kind", "head", "best guess", "best five", "places"), rows)
    times: list[tuple[object, ...]] = []
    for kind in KINDS:
        drafter = DRAFTERS.get(kind)(place)
        for budget in BUDGETS if kind == "medusa" else BUDGETS[:1]:
            times.append((kind, budget, *(time_draft(drafter, batch, hidden, size, budget) for size in BATCHES)))
    bench.print_rows("Microseconds of a draft", ("kind", "drafts", *(f"{batch} sequences" for batch in BATCHES)), times)
    return bench.finish(options)


def answer_questions(count: int, seed: int, num_threads: int | None) -> list[Passage]:
    """Returns questions about facts drawn at random, in phrasings kept from training, with the model's greedy answers."""
    knowledge, rng = draw_knowledge(DEBIAN_SOURCES), Random(f"head drafts {seed}")
    questions = []
    for fact in rng.sample(knowledge.facts, count):
        questions.append(rng.choice(phrasings(knowledge.kinds[fact.kind], fact.subject, held_out=True)))
    with LLM(MODEL, num_threads=num_threads) as llm:
        return answer(llm, render_questions(llm, questions), 64, 0.0, seed, lambda _: None)


def read_hidden(program: Program, passages: Sequence[Passage]) -> FloatArray:
    """Returns the hidden state at every place of passages, one after another."""
    parts, some = [], list[Passage]()
    for passage in passages:
        if sum(len(one.token_ids) + BLOCK_SIZE for one in (*some, passage)) > TOKENS_AT_ONCE:
            parts.append(program.step(batch_passages(some, BLOCK_SIZE), HIDDEN).hidden)
            some = []
        some.append(passage)
    return np.concatenate([*parts, program.step(batch_passages(some, BLOCK_SIZE), HIDDEN).hidden])


def measure(heads: DraftHeads, program: Program, hidden: FloatArray, passages: Sequence[Passage]) -> RankArray:
    """Returns the rank that each head gave to what the model says, at every place of an answer that has a token behind it."""
    tables = []
    first = 0
    for passage in passages:
        end = first + len(passage.token_ids)
        own = hidden[first + passage.start : end]
        first = end
        said = program.project(own).argmax(1)  # behind each place; the last is what ends the answer
        ranks = np.full((len(own), heads.num_heads), NOTHING_THERE, np.int16)
        for head, guess in enumerate(guess_hidden(heads, own, heads.num_heads)):
            ahead = said[head + 1 :]
            if not len(ahead):
                break
            best = np.argsort(-program.project(guess[: len(ahead)]), axis=1, kind="stable")[:, :NUM_RANKS]
            hits = best == ahead[:, None]
            ranks[: len(ahead), head] = np.where(hits.any(1), hits.argmax(1), MISSED)
        tables.append(ranks[:-1])
    return np.concatenate(tables)


def make_place(opened: OpenedModel, program: Program, batch: BatchState) -> DraftingPlace:
    model = opened.model
    return DraftingPlace(
        model_path=model.path,
        vocab_size=model.spec.vocab_size,
        hidden_size=model.spec.hidden_size,
        max_model_len=1024,
        max_num_seqs=max(BATCHES),
        block_size=BLOCK_SIZE,
        eos_token_ids=(),
        files=None,
        open_model=lambda name: OpenedModel(locate(name), 1),
        guesser=partial(make_guesser, program=program),
        draws=batch.sampling_metadata,
        fingerprint=model.info.fingerprint,
    )


def read_heads(place: DraftingPlace, kind: str) -> tuple[HeadsCard, DraftHeads]:
    card, tensors = open_heads(place, kind)
    kinds = {"medusa": medusa, "blockwise": blockwise}
    return card, kinds[kind].read_heads(tensors, card.num_heads, card.hidden_size)


def time_draft(drafter: Drafter, batch: BatchState, hidden: FloatArray, num_seqs: int, num_drafts: int) -> float:
    """Returns the microseconds of the quickest draft, what it is shown before included."""
    asks = [DraftAsk(batch[number], num_drafts) for number in range(num_seqs)]
    rows, chosen = hidden[:num_seqs, None].copy(), np.zeros(1, np.int32)
    seen = [VerifyFeedback(batch[number], 1, NOTHING, (), chosen, rows[number]) for number in range(num_seqs)]
    times = []
    for _ in range(NUM_CALLS):
        since = time.perf_counter()
        drafter.observe(seen)
        drafts = drafter.draft(asks)
        times.append(time.perf_counter() - since)
    assert all(len(draft.token_ids) == num_drafts for draft in drafts)
    return 1e6 * min(times)


if __name__ == "__main__":
    raise SystemExit(main())
