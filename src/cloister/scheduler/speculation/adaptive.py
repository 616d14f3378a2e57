"""As many drafts as pay: draft length, tree size and drafter from measured acceptance and measured time. Pure.

A step with drafts brings each of its sequences 1 + sum(gains) expected tokens and takes T(rows) + attention + drafting. What is
maximised is the geometric mean of the sequences' tokens per second (`allocation`): drafts of all sequences are lined up by what
they bring beyond their own cost, and the line is cut where that mean is best, or before the first one. Compare Leviathan et
al. 2023, section 3.4, who choose one length from one rate.

What would lose is tried from time to time: each sequence saves a hundredth of its time, and a trial may cost what it saved.
Where nothing is known of earlier requests, what a prior promises is believed only as far as a sequence can bear to lose it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.scheduler.budget import StepCost, StepSize
from cloister.scheduler.sequence import Sequence as Running
from cloister.scheduler.speculation.allocation import Allocation, Bid
from cloister.scheduler.speculation.decision import NO_DRAFTS, DraftDecision, DrafterLimits
from cloister.scheduler.speculation.draft_times import DraftTimes
from cloister.scheduler.speculation.rates import Rates
from cloister.scheduler.speculation.sequence_stats import MOST_SAVED, TRIAL_SHARE, WATCHED, SequenceStats
from cloister.scheduler.speculation.step_times import NUM_UNSURE, AttentionCost, StepTimes
from cloister.types.step import Sample
from cloister.types.threat import Requirement, ThreatProfile

SPECULATION_THREAT = ThreatProfile(
    row="adaptive tuning of the optimisations",
    threats=frozenset({Requirement.STATELESS, Requirement.NON_TARGETABLE}),
    residue="what the tuner learned",
    where=("host memory",),
    attack="infers from its own speed whether others' texts are easy to draft",
    mitigations=(
        "accepted counts are kept by sequence and end with it, except where one user has the engine alone",
        "what all share are times of steps and of drafters by their sizes, which say nothing of what was accepted",
    ),
)

FIRST_PLACE: Final = 0.4
FOLLOWING: Final = 0.75
"""What is expected of a drafter of which nothing is known: how often its first draft is accepted, and each further one where
the one before it is."""
SHARED_PAST: Final = 0.99
"""Weight that the counts of all sequences keep: about a hundred drafts are remembered."""
MARGIN: Final = 1.02
"""Drafts must be expected to bring this ratio, else noise would decide."""
DOUBTED: Final = 0.8
"""Of a drafter's cost, and of what few steps said, that is believed each time when a sequence cannot pay for a trial with all
that it saves."""
FIRST_DRAFT: Final = 0.5
"""Steps' time that a drafter's first calls are believed to take at most."""
TRIAL_SIZES: Final = (4, 1)
SLEEPER_MEMORY: Final = 3.0
"""Drafts that a sleeping drafter's past counts as once it is tried again."""
TRIAL_GAP: Final = 8
"""Steps between two that try something."""
NUM_PER_TRIAL: Final = 8
"""Of so many sequences one is on trial at a time."""
DECISION_S: Final = (20e-6, 5e-6)
"""What a decision takes, and each sequence of it; only says how often one is worth while."""
DECISION_SHARE: Final = 0.005
NEWS_SHARE: Final = 0.012
"""Of the time that may go into decisions, as a rule and where there is news."""
MOST_EVERY_STEP: Final = 16
"""So many sequences more let a decision stand a step longer."""
GROWTH: Final = 2
"""A step has so many times the rows at most that any one had which was timed."""
FIRST_QUICK: Final = 12
NUM_QUICK: Final = 4
"""Decisions in quick succession at the start, and when a sequence is new."""
LEAST_STEPS: Final = 2
MOST_STEPS: Final = 32
"""Steps that a decision stands at least and at most."""
NUM_FIRST_PLAIN: Final = 3
"""Steps without drafts before the first draft."""
PLAIN_EVERY: Final = 128
"""Steps after which one goes without drafts, to see what that takes now."""
PLAIN_EVERY_UNSURE: Final = 24
PATIENCE: Final = 8
"""Steps that are waited for one that does nothing but decode."""
NUM_MISSES: Final = 2
"""Drafts in a row without an accepted token after which a decision is made anew."""
FIRST_SIZE: Final = 2
"""Drafts that are asked for while nobody knows what the drafter takes."""
MOST_ROWS: Final = 256
"""Drafts that one step is considered for, over all sequences."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What bounds speculation.

    Attributes:
        shares_rates: what was accepted of one request is expected of the next one; only where one user has the engine alone.
    """

    shares_rates: bool = False


class AdaptiveSpeculation:
    """Learns what drafts bring and cost, and asks for those that pay (protocol `Speculation`).

    Args:
        drafters: by the names that plans know them by.
    """

    def __init__(self, config: SpeculationConfig, drafters: Mapping[str, DrafterLimits]) -> None:
        self._drafters = dict(drafters)
        self._choices = {
            name: [NO_DRAFTS, *(limits.choose(name, num) for num in range(1, limits.max_drafts + 1))]
            for name, limits in drafters.items()
        }
        self._priors = {
            name: [FIRST_PLACE * FOLLOWING**place for place in range(limits.max_drafts)] for name, limits in drafters.items()
        }
        self._shared: dict[str, Rates] = {}
        if config.shares_rates:
            self._shared = {name: Rates(prior, SHARED_PAST) for name, prior in self._priors.items()}
        self._draft_times = {name: DraftTimes() for name in drafters}
        self._times = StepTimes()
        self._depths: dict[str, int] = {}
        """Most drafts of one sequence in the step that is being taken in, by drafter."""
        self._cost: StepCost | None = None
        self._num_steps = 0
        self._next_decision = 0
        self._news_decision = 0
        self._interval = 1
        self._num_quick = FIRST_QUICK
        self._num_decided = 0
        self._next_trial = 0
        self._last_decision = 0
        self._num_last = 0
        self._num_asked = 0
        self._is_dirty = False
        self._rate = 0.0
        self._row_s = 0.0
        self._is_first_call = False
        self._idle_s = 0.0
        self._plain_s = 0.0
        self._share_s = 0.0
        self._turn = 0
        self._num_users: dict[str, int] = {}
        self._num_plain_tries = 0
        self._num_since_plain = 0

    # What a step drafts

    def choose(self, sequences: Sequence[Running], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns a choice for each sequence (`Speculation.choose`); most of the time those that stand."""
        self._num_steps += 1
        num = len(sequences)
        due = self._news_decision if self._is_dirty else self._next_decision
        if self._num_steps < due and num == self._num_last and self._num_asked <= num_left:
            choices = []
            for sequence in sequences:
                record = sequence.drafting
                if not isinstance(record, SequenceStats):
                    break
                choices.append(record.choice)
            else:
                return choices
        if not num:
            return []
        return self._decide(sequences, cost, size, num_left)

    def _decide(self, sequences: Sequence[Running], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        num = len(sequences)
        records = [self._record(sequence) for sequence in sequences]
        self._cost, self._is_dirty, self._num_last = cost, False, num
        attention = AttentionCost(cost, size)
        plain_s = self._times.plain_s(num, attention) or cost.predict(size)
        since = self._num_steps - self._last_decision
        self._last_decision = self._num_steps
        self._share_s = plain_s / num
        for record in records:
            record.go_on(self._share_s * since, plain_s)
        if plain_s <= 0.0 or self._wants_plain(num):
            return self._rest(records)
        self._num_since_plain += since
        floor = num / plain_s
        self._rate = max(self._rate, floor)
        bids = []
        most = max(2, MOST_ROWS // num)
        for place, (sequence, record) in enumerate(zip(sequences, records, strict=True)):
            bid = None if record.trial else self._bid(record, sequence, attention, most)
            if bid is not None:
                bid.place = place
                bids.append(bid)
        num_left = min(num_left, GROWTH * self._times.most_rows - num)
        allocation = Allocation(num, plain_s, self._times, attention, self._draft_times)
        rate = allocation.fill(bids, self._rate, num_left)
        is_worth = rate > MARGIN * floor
        self._rate = rate if is_worth else floor
        self._row_s = allocation.row_s
        self._plain_s = plain_s
        self._plan_decisions(num, plain_s)
        num_asked = self._apply(records, bids if is_worth else [])
        self._num_asked = num_asked
        self._num_asked += self._try(sequences, records, num_left - num_asked, attention)
        self._idle_s = 0.0 if self._num_asked else self._idle_s + plain_s * since
        if self._idle_s * TRIAL_SHARE > MOST_SAVED * plain_s:
            self._idle_s = 0.0
            self._doubt(self._drafters)  # answers may be too short to save for a trial
        return [record.choice for record in records]

    def _plan_decisions(self, num: int, plain_s: float) -> None:
        """Says when to decide again: as seldom as a small part of the time allows, and sooner where there is news."""
        first, each = DECISION_S
        steps = (first + each * num) / plain_s
        least = LEAST_STEPS + num // MOST_EVERY_STEP
        self._interval = max(least, min(int(steps / DECISION_SHARE), MOST_STEPS))
        self._next_decision = self._num_steps + self._interval
        self._news_decision = self._num_steps + max(least, min(int(steps / NEWS_SHARE), MOST_STEPS))
        if self._num_quick:
            self._num_quick -= 1
            self._num_decided += 1
            if self._num_decided < FIRST_QUICK:
                least = 1
            self._next_decision = self._news_decision = self._num_steps + least

    def _bid(self, record: SequenceStats, sequence: Running, attention: AttentionCost, most: int) -> Bid | None:
        """Returns what the drafter that promises most offers for one sequence."""
        row_s = _row_s(sequence, attention)
        most = record.bound(most, self._share_s, self._row_s)
        best: Bid | None = None
        for name in self._drafters:
            room = min(most, sequence.max_drafts, self._most(name))
            if room > 0:
                bid = self._offer(record, name, room, row_s)
                if best is None or bid.value > best.value:
                    best = bid
        return best

    def _most(self, name: str) -> int:
        """Returns how many drafts a drafter may be asked for."""
        most = self._drafters[name].max_drafts
        return most if self._draft_times[name].is_known else min(most, FIRST_SIZE)

    def _offer(self, record: SequenceStats, name: str, room: int, row_s: float, step_row_s: float | None = None) -> Bid:
        """Returns one drafter's offer, worth what its drafts bring beyond their cost, in tokens.

        Args:
            row_s: of attention, for each draft.
            step_row_s: what a row costs the step, to say what all drafts are worth; None to say what the best number of them
                is worth at the average price of a row.
        """
        rates = record.rates[name]
        call_s, in_row_s, each_s, sequence_s = self._draft_times[name].terms
        users = max(1, self._num_users.get(name, 1))
        price = self._rate
        draft = price * (each_s + in_row_s / users)
        row = price * ((self._row_s if step_row_s is None else step_row_s) + row_s)
        gains, found = rates.gains, rates.found
        value = -price * (sequence_s + call_s / users)
        for place in range(room):
            net = found[place] * (gains[place] - row) - draft
            if net <= 0.0 and place and step_row_s is None:
                break
            value += net
        return Bid(name, gains, found, room, row_s, draft, value)

    def _apply(self, records: list[SequenceStats], bids: list[Bid]) -> int:
        """Turns bids into choices; returns drafts that are asked for. A drafter that must watch is asked a step later."""
        watched = [record.choice.is_watched for record in records]
        num_asked = 0
        self._num_users = {}
        for record, was_watched in zip(records, watched, strict=True):
            record.choice = NO_DRAFTS
            if record.trial:
                num_asked += self._hold_trial(record, is_watched=was_watched)
        for bid in bids:
            if bid.num_drafts:
                record = records[bid.place]
                num_asked += self._ask(record, bid.drafter, bid.num_drafts, is_watched=watched[bid.place])
                self._num_users[bid.drafter] = self._num_users.get(bid.drafter, 0) + 1
        return num_asked

    def _ask(self, record: SequenceStats, name: str, num_drafts: int, *, is_watched: bool) -> int:
        """Asks a drafter, or lets it watch first; returns drafts that are asked for."""
        record.tried[name] = self._num_steps
        if self._drafters[name].watches and not is_watched:
            record.choice = WATCHED
            self._next_decision = self._news_decision = self._num_steps + 1
            return 0
        record.choice = self._choices[name][num_drafts]
        return num_drafts

    def _try(self, sequences: Sequence[Running], records: list[SequenceStats], num_left: int, attention: AttentionCost) -> int:
        """Puts drafters on trial for some sequences that saved enough for that; returns drafts that are asked for."""
        if self._num_steps < self._next_trial:
            return 0
        num, num_asked = len(records), 0
        for _ in range(-(-num // NUM_PER_TRIAL)):
            self._turn = (self._turn + 1) % num
            sequence, record = sequences[self._turn], records[self._turn]
            if not record.trial and sequence.max_drafts > 0:
                num_rows = num + self._num_asked + num_asked
                num_asked += self._try_one(sequence, record, num_left - num_asked, num_rows, attention)
        if num_asked or self._next_decision == self._num_steps + 1:
            self._next_trial = self._num_steps + max(TRIAL_GAP, 2 * self._interval)
        return num_asked

    def _try_one(self, sequence: Running, record: SequenceStats, num_left: int, num_rows: int, attention: AttentionCost) -> int:
        """Puts a drafter on trial that was not heard of for long, or more drafts of the one that is asked."""
        now, row_s = record.choice, _row_s(sequence, attention)
        name = min((n for n in self._drafters if n != now.drafter), key=lambda n: record.tried.get(n, -1), default="")
        record.is_for_more = bool(now.num_drafts) and not (name and record.is_for_more)
        if record.is_for_more:
            name = now.drafter
        most = min(sequence.max_drafts, self._most(name), num_left + now.num_drafts) if name else 0
        if most <= (now.num_drafts if record.is_for_more else 0):
            return 0
        lost = 0.0
        if now.num_drafts:
            lost = self._offer(record, now.drafter, now.num_drafts, row_s, self._row_s).value
        sizes = (3 * now.num_drafts, 2 * now.num_drafts, now.num_drafts + 1) if record.is_for_more else TRIAL_SIZES
        for size in sizes:
            size = min(size, most)
            step_row_s = self._step_row_s(num_rows, size - now.num_drafts, attention)
            value = self._offer(record, name, size, row_s, step_row_s).value
            loss_s = max(0.0, lost - value) / self._rate
            if loss_s <= record.saved_s:
                record.saved_s -= loss_s
                if not record.is_for_more:
                    record.rates[name].fade(SLEEPER_MEMORY)
                record.trial, record.trial_size = name, size
                return self._hold_trial(record, is_watched=now.is_watched) - now.num_drafts
        if record.saved_s >= MOST_SAVED * self._plain_s:  # it will never be tried at that price
            self._doubt((name,))
        return 0

    def _doubt(self, names: Iterable[str]) -> None:
        """Believes less of what drafting costs with these drafters, and steps that verify."""
        self._times.drafting.doubt(DOUBTED)
        for name in names:
            self._draft_times[name].doubt(DOUBTED)

    def _step_row_s(self, num_rows: int, num_more: int, attention: AttentionCost) -> float:
        """Returns what each row costs that makes a step of so many rows larger, where the step of kernels' tiles counts."""
        if num_more <= 0:
            return self._row_s
        times = self._times
        before_s = times.drafting_s(num_rows, attention) if num_rows > self._num_last else self._plain_s
        return max(self._row_s, (times.drafting_s(num_rows + num_more, attention) - before_s) / num_more)

    def _hold_trial(self, record: SequenceStats, *, is_watched: bool) -> int:
        """Holds the trial of a sequence, or lets its drafter watch first; returns drafts that are asked for."""
        name = record.trial
        num_asked = self._ask(record, name, record.trial_size, is_watched=is_watched)
        if num_asked:
            record.trial = ""
        self._next_decision = self._news_decision = self._num_steps + 1
        return num_asked

    # What a step says

    def learn(self, sequence: Running, choice: DraftDecision, sample: Sample) -> None:
        """Takes in which drafts were accepted (`Speculation.learn`)."""
        record = sequence.drafting
        if not isinstance(record, SequenceStats) or choice.drafter not in record.rates:
            return
        num_drafted, accepted = sample.num_drafted, sample.accepted
        self._depths[choice.drafter] = max(choice.num_drafts, self._depths.get(choice.drafter, 0))
        record.rates[choice.drafter].learn(choice.num_drafts, num_drafted, accepted)
        if self._shared:
            self._shared[choice.drafter].learn(choice.num_drafts, num_drafted, accepted)
        if accepted:
            record.is_proven = True
            record.num_misses = 0
            if len(accepted) == choice.num_drafts:
                self._is_dirty = True
            return
        if not record.is_proven:
            record.lost_s += self._drafting_s(choice) + num_drafted * self._row_s
        if num_drafted:
            record.num_misses += 1
            if record.num_misses == NUM_MISSES:
                record.num_misses, self._is_dirty = 0, True

    def _drafting_s(self, choice: DraftDecision) -> float:
        """Returns one sequence's part of what asking its drafter took."""
        call_s, in_row_s, each_s, sequence_s = self._draft_times[choice.drafter].terms
        users = max(1, self._num_users.get(choice.drafter, 1))
        return sequence_s + each_s * choice.num_drafts + (call_s + in_row_s * choice.num_drafts) / users

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Takes in what drafting took (`Speculation.learn_cost`)."""
        for name, (num_sequences, num_drafts) in num_drafted.items():
            if name in self._draft_times:
                self._is_first_call |= not self._draft_times[name].is_known
                depth = self._depths.get(name, num_drafts)
                self._draft_times[name].learn(
                    num_sequences, num_drafts, depth, draft_s.get(name, 0.0), FIRST_DRAFT * self._plain_s
                )
        self._depths.clear()

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        """Takes in what a step took (`Speculation.learn_step`)."""
        if self._cost is not None and not self._is_first_call:  # which reads weights, and takes memory
            self._times.learn(size, elapsed_s, self._cost, is_drafting=num_drafted > 0)
        self._is_first_call = False
        if not num_drafted:
            self._num_since_plain = 0

    # What is kept

    def _record(self, sequence: Running) -> SequenceStats:
        record = sequence.drafting
        if not isinstance(record, SequenceStats):
            sequence.drafting = record = SequenceStats(is_proven=bool(self._shared))
            self._num_quick = max(self._num_quick, NUM_QUICK)
            for name, prior in self._priors.items():
                shared = self._shared.get(name)
                record.rates[name] = Rates(prior) if shared is None else Rates(shared.gains, found=shared.found)
        return record

    def _wants_plain(self, num: int) -> bool:
        """True where too little is known of what steps take without drafts, which all is measured by."""
        plain = self._times.plain
        count = plain.count(num)
        if count < (1 if plain.num_visits >= NUM_FIRST_PLAIN else NUM_FIRST_PLAIN):
            self._num_plain_tries += 1
            return self._num_plain_tries % PATIENCE != 0
        return self._num_since_plain >= (PLAIN_EVERY if count >= NUM_UNSURE else PLAIN_EVERY_UNSURE)

    def _rest(self, records: list[SequenceStats]) -> list[DraftDecision]:
        """Lets everybody do without drafts for a step, and watch where they watched."""
        self._next_decision = self._news_decision = self._num_steps + 1
        self._num_asked = 0
        self._num_since_plain = 0
        for record in records:
            record.choice = WATCHED if record.choice.is_watched else NO_DRAFTS
        return [record.choice for record in records]


def _row_s(sequence: Running, attention: AttentionCost) -> float:
    """Returns what the attention of a draft costs beyond that of an average one."""
    return attention.key_s * (sequence.num_planned - attention.context)
