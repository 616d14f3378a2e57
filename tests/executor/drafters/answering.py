"""Decoding with a drafter where the answer is known beforehand: the walk of a runner without its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.executor.drafters import Draft, Drafter, DrafterContext, DraftRequest
from cloister.executor.state import BatchState, SequenceState
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence

VOCAB = 300


class Sequences:
    """Sequences as a runner holds them."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self._batch = BatchState(vocab_size=vocab_size, max_model_len=1 << 20)

    def arrive(self, token_ids: Sequence[int], seq_id: int = 0) -> SequenceState:
        self._batch.arrive(
            NewSequence(
                seq_id=seq_id, token_ids=list(token_ids), num_prompt_tokens=len(token_ids), sampling=SamplingParams(), seed=0
            )
        )
        return self._batch[seq_id]

    def depart(self, seq_id: int = 0) -> None:
        self._batch.depart(seq_id)


def known(token_ids: Sequence[int], seq_id: int = 0, vocab_size: int = VOCAB) -> SequenceState:
    """A sequence that knows these tokens."""
    return Sequences(vocab_size).arrive(token_ids, seq_id)


def ask_for(state: SequenceState, num_drafts: int, drafter: Drafter, parents: tuple[int, ...] | None = None) -> Draft:
    """Asks for one draft, and looks whether it is one: a tree of at most so many tokens, whose siblings differ."""
    (draft,) = drafter.draft([DraftRequest(state, num_drafts, parents)])
    assert len(draft.token_ids) <= num_drafts
    tree = parents_of(draft)
    assert len(tree) == len(draft.token_ids)
    assert all(-1 <= parent < place for place, parent in enumerate(tree))
    assert len(set(zip(tree, draft.token_ids, strict=True))) == len(tree)
    assert draft.probs is None
    return draft


def parents_of(draft: Draft) -> list[int]:
    return list(range(-1, len(draft.token_ids) - 1)) if draft.parents is None else draft.parents


def walk(draft: Draft, future: Sequence[int]) -> list[int]:
    """Returns the accepted places of a draft, if the model goes on with `future`."""
    children = {key: place for place, key in enumerate(zip(parents_of(draft), draft.token_ids, strict=True))}
    path, place = list[int](), -1
    for token in future:
        if (place, token) not in children:
            break
        place = children[place, token]
        path.append(place)
    return path


@dataclass(frozen=True)
class Outcome:
    """What drafting came to: how many of the drafted tokens were accepted, in how many steps."""

    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.num_accepted / self.num_steps


def answer_with(drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], num_drafts: int) -> Outcome:
    """Decodes an answer of which the prompt's step brought the first token, without telling the drafter anything."""
    sequences = Sequences(1 << 17)
    state = sequences.arrive(prompt)
    num_steps = num_drafted = num_accepted = 0
    left = list(answer)
    state.append(left.pop(0))
    while left:
        draft = ask_for(state, num_drafts, drafter)
        path = walk(draft, left[:-1])
        num_steps, num_drafted, num_accepted = num_steps + 1, num_drafted + len(draft.token_ids), num_accepted + len(path)
        for _ in range(len(path) + 1):
            state.append(left.pop(0))
    sequences.depart()
    drafter.forget(state.seq_id)
    return Outcome(num_steps, num_drafted, num_accepted)


def context_for(
    model_path: Path, *, files: str | None = None, vocab_size: int = VOCAB, max_num_seqs: int = 4
) -> DrafterContext:
    """A context without what these drafters never use."""

    def refuse(*_: object) -> None:
        raise AssertionError("no model is asked for anything here")

    return DrafterContext(
        model_path=model_path,
        vocab_size=vocab_size,
        hidden_size=8,
        max_model_len=1 << 20,
        max_num_seqs=max_num_seqs,
        block_size=16,
        eos_token_ids=(1,),
        files=files,
        open_model=refuse,  # type: ignore[arg-type]
        open_mtp=refuse,  # type: ignore[arg-type]
        head_runner=None,
        sampling_metadata=refuse,  # type: ignore[arg-type]
    )
