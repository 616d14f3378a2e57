"""A runner without a model that believes nothing: it keeps what every KV slot holds and checks each plan against it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Literal

from cloister.types.documents import Documents
from cloister.types.step import Sample, StepPlan, StepResult

EMPTY = None
"""What a wiped slot holds."""
STATE: Literal["state"] = "state"
"""In place of a window: a group of layers with a state; a block of it holds all tokens that went into the state."""
SCRATCH = -2
"""In place of a token: memory of a prompt that is computed layer by layer, of the sequence whose id it holds."""
REJECTED = -1
"""In place of a token: the slot of a draft that was not accepted, of the sequence whose id it holds."""


class CheckedRunner:
    """Writes token ids into slots as a model would write KV, and fails the moment a sequence would read a wrong one.

    Sampled tokens are a hash of the whole history, so that equal histories continue equally.

    Args:
        step_s, token_s: what a step is said to take, and each token in it.
        windows: for each group of layers, how many positions a query sees; None: all of them; `STATE` where it has a state.
        late: draws which sequences get no token in a step, as if the masks of their grammars were late; None for none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        step_s: float = 0.01,
        token_s: float = 0.0,
        windows: Sequence[int | Literal["state"] | None] = (None,),
        late: random.Random | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.vocab_size = vocab_size
        self.step_s, self.token_s = step_s, token_s
        self.slots: list[list[tuple[int, int] | None]] = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.states: list[tuple[int, ...]] = [()] * num_blocks
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.indexes: dict[int, int] = {}
        self.documents: dict[int, Documents | None] = {}
        self.layerwise_ends: dict[int, int] = {}
        self.num_computed = self.num_layerwise = 0
        self.num_snapshots = 0
        self.late = late
        self.num_late = 0
        self.deferred: set[int] = set()
        self.left_out: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.departures:
            for held in (self.tokens, self.tables, self.indexes, self.documents, self.layerwise_ends):
                held.pop(seq_id, None)
        for new in plan.arrivals:
            assert new.seq_id not in self.tokens, "a sequence arrived twice"
            self.tokens[new.seq_id] = list(new.token_ids)
            self.tables[new.seq_id] = []
            self.indexes[new.seq_id] = new.index
            self.documents[new.seq_id] = new.documents
        for block in plan.wipes:
            self.slots[block] = [EMPTY] * self.block_size
            self.states[block] = ()
        for load in plan.loads:
            is_wiped = all(slot is EMPTY for slot in self.slots[load.block]) and not self.states[load.block]
            assert is_wiped, "KV is loaded into a block that was not wiped"
            self.slots[load.block], self.states[load.block] = pickle.loads(load.content)
        for source, target in plan.copies:
            is_wiped = all(slot is EMPTY for slot in self.slots[target]) and not self.states[target]
            assert is_wiped, "a copy goes to a block that was not wiped"
            self.slots[target] = list(self.slots[source])
            self.states[target] = self.states[source]
        self.deferred, self.left_out = set(), set()
        samples = [sample for part in plan.sequences for sample in self._compute(part, plan)]
        self._check_private(plan)
        self.num_late += len(self.deferred)
        return StepResult(
            plan_id=plan.plan_id,
            samples=samples,
            deferred=self.deferred,
            left_out=self.left_out,
            elapsed_s=self.step_s + self.token_s * plan.num_tokens,
        )

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return [pickle.dumps((self.slots[block], self.states[block])) for block in block_ids]

    def _compute(self, part, plan: StepPlan) -> list[Sample]:
        tokens, table = self.tokens[part.seq_id], self.tables[part.seq_id]
        table[part.table_start * len(self.windows) :] = part.new_block_ids
        if part.layerwise is not None:
            return self._compute_layerwise(part, tokens, table)
        for group, window in enumerate(self.windows):
            if window == STATE:
                continue
            for position in range(0 if window is None else max(0, part.start - window + 1), part.start):
                shift = self._shift(part.seq_id, position)
                if self._shift(part.seq_id, part.start) not in (0, shift) and position >= self._prefix_end(part.seq_id):
                    continue  # another document
                held = self.slots[self._block(table, position, group)][position % self.block_size]
                assert held == (position - shift, tokens[position]), "a sequence reads KV that is not its own"
        end = part.start + part.num_tokens - part.num_drafts
        if self.late is not None and (end > len(tokens) or (STATE in self.windows and part.num_samples and self._is_late())):
            return self._leave_out(part, plan, tokens, table, end)
        for position in range(part.start, end):
            self._write(part.seq_id, table, position, tokens[position])
        if STATE in self.windows:
            self._advance_state(part, tokens, table, end)
        self.num_computed += part.num_tokens
        if not part.num_samples:
            assert not part.num_drafts, "drafts behind a prompt that is not complete"
            return []
        assert end == len(tokens), "a sample in the middle of what is known"
        seq_ids = [part.seq_id, *self._fork(part.seq_id, plan)]
        if self.late is not None and STATE not in self.windows:
            self.deferred |= {seq_id for seq_id in seq_ids if self._is_late()}
        samples = [self._sample(seq_id) for seq_id in seq_ids if seq_id not in self.deferred]
        is_drafted = part.num_drafts and part.seq_id not in self.deferred
        return [self._verify(part, table, end), *samples[1:]] if is_drafted else samples

    def _fork(self, seq_id: int, plan: StepPlan) -> list[int]:
        """Returns the sequences that fork from one."""
        forks = [fork for fork in plan.forks if fork.parent_id == seq_id]
        for fork in forks:
            self.tokens[fork.child_id] = list(self.tokens[seq_id])
            self.tables[fork.child_id] = list(self.tables[seq_id])
            self.indexes[fork.child_id] = fork.index
            self.documents[fork.child_id] = self.documents[seq_id]
        return [fork.child_id for fork in forks]

    def _is_late(self) -> bool:
        return self.late is not None and self.late.random() < 0.3

    def _leave_out(self, part, plan: StepPlan, tokens: list[int], table: list[int], end: int) -> list[Sample]:
        """Computes all but the last position of a part."""
        self.left_out.add(part.seq_id)
        self.deferred |= {part.seq_id, *self._fork(part.seq_id, plan)}
        for position in range(part.start, end - 1):
            self._write(part.seq_id, table, position, tokens[position])
        if STATE in self.windows and end - 1 > part.start:
            self._advance_state(part, tokens, table, end - 1)
            group, size = self.windows.index(STATE), self.block_size
            snapshot = -1 if (end - 1) % size else table[((end - 1) // size - 1) * len(self.windows) + group]
            if snapshot >= 0:
                assert not self.states[snapshot], "a snapshot goes to a block that was not wiped"
                self.states[snapshot] = tuple(tokens[: end - 1])
        return []

    def _compute_layerwise(self, part, tokens: list[int], table: list[int]) -> list[Sample]:
        """Checks that parts follow each other in memory of their own; KV of all layers is there with the last."""
        how, size, end = part.layerwise, self.block_size, part.start + part.num_tokens
        assert part.start == self.layerwise_ends.get(part.seq_id, how.first), "a part of a prompt was left out, or done twice"
        assert how.first + how.num_positions == len(tokens)
        for position in range(how.first):
            assert self.slots[table[position // size]][position % size] == (position, tokens[position]), "a wrong hit"
        for block in table[how.num_kept :]:
            assert all(slot in (EMPTY, (part.seq_id, SCRATCH)) for slot in self.slots[block]), "scratch memory was not wiped"
            self.slots[block] = [(part.seq_id, SCRATCH)] * size
        self.layerwise_ends[part.seq_id] = end
        self.num_layerwise += part.num_tokens
        if end < len(tokens):
            assert not part.num_samples, "a sample before the last layer"
            return []
        for position in range(how.first, how.num_kept * size):
            self._write(part.seq_id, table, position, tokens[position])
        return [self._sample(part.seq_id)] if part.num_samples else []

    def _verify(self, part, table: list[int], end: int) -> Sample:
        """Accepts some of the drafts that were made, by the history's hash: the token that was sampled is the first one's."""
        tokens = self.tokens[part.seq_id]
        num_drafted = hash((tuple(tokens), 1)) % (part.num_drafts + 1)
        num_accepted = hash((tuple(tokens), 2)) % (num_drafted + 1)
        for _ in range(num_accepted):
            self._sample(part.seq_id)
        for place in range(num_drafted):
            is_accepted = place < num_accepted
            self._write(part.seq_id, table, end + place, tokens[end + place] if is_accepted else REJECTED)
        if STATE in self.windows:
            self.states[self._running_state(part, table)] = tuple(tokens[: end + num_accepted])
        return Sample(part.seq_id, tokens[end:], None, num_drafted, tuple(range(num_accepted)))

    def _advance_state(self, part, tokens: list[int], table: list[int], end: int) -> None:
        block, group, size = self._running_state(part, table), self.windows.index(STATE), self.block_size
        assert self.states[block] == tuple(tokens[: part.start]), "a sequence reads a state that is not its own"
        for entry in range(part.start // size, (end - 1) // size):
            snapshot = table[entry * len(self.windows) + group]
            if snapshot >= 0:
                assert not self.states[snapshot], "a snapshot goes to a block that was not wiped"
                self.states[snapshot] = tuple(tokens[: (entry + 1) * size])
                self.num_snapshots += 1
        self.states[block] = tuple(tokens[:end])

    def _running_state(self, part, table: list[int]) -> int:
        return self._block(table, part.start + part.num_tokens - 1, self.windows.index(STATE))

    def _write(self, seq_id: int, table: list[int], position: int, token: int) -> None:
        for group, window in enumerate(self.windows):
            if window == STATE:
                continue
            block, offset = self._block(table, position, group), position % self.block_size
            held, place = self.slots[block][offset], position - self._shift(seq_id, position)
            is_own = held is EMPTY or held == (place, token) or held == (seq_id, REJECTED)
            assert is_own, "a block was not wiped before it was given away"
            self.slots[block][offset] = (seq_id, REJECTED) if token == REJECTED else (place, token)

    def _shift(self, seq_id: int, position: int) -> int:
        documents = self.documents[seq_id]
        return 0 if documents is None else documents.shift(position)

    def _prefix_end(self, seq_id: int) -> int:
        documents = self.documents[seq_id]
        return 0 if documents is None else documents.starts[0]

    def _sample(self, seq_id: int) -> Sample:
        tokens = self.tokens[seq_id]
        token = hash((tuple(tokens), self.indexes[seq_id])) % self.vocab_size
        tokens.append(token)
        return Sample(seq_id, [token])

    def _block(self, table: list[int], position: int, group: int) -> int:
        block = table[position // self.block_size * len(self.windows) + group]
        assert block >= 0, "a query sees a position whose block was given back"
        return block

    def _check_private(self, plan: StepPlan) -> None:
        """Two sequences may hold one block only where both have the same tokens in it."""
        num_groups = len(self.windows)
        if self.windows[0] is not None:
            return  # tables name blocks behind the window that others have by now
        # With states a table may take kept blocks in place of its own at commit; it is sent again with its next step.
        named = {part.seq_id for part in plan.sequences} if STATE in self.windows else set(self.tables)
        for part in plan.sequences:
            if part.layerwise is not None:
                own = set(self.tables[part.seq_id][part.layerwise.first // self.block_size :])
                for other, table in self.tables.items():
                    assert other == part.seq_id or not own & set(table), "memory of a prompt is somebody else's too"
                continue
            block = self._block(self.tables[part.seq_id], part.start + part.num_tokens - 1, 0)
            for other, held in ((name, table) for name, table in self.tables.items() if name in named):
                # behind what it has computed lie blocks of drafts that were not accepted, which were given back
                table = held[::num_groups][: -(-(len(self.tokens[other]) - 1) // self.block_size)]
                if other != part.seq_id and block in table and other not in {f.child_id for f in plan.forks}:
                    first = table.index(block) * self.block_size
                    mine = self.tokens[part.seq_id][first : part.start + part.num_tokens]
                    assert self.tokens[other][first : first + len(mine)] == mine, "a shared block was written"
