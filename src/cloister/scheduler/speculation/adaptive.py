"""Adaptive speculation: chooses draft length, tree size and drafter from measured acceptance and times. Pure.

A step with drafts yields 1 + sum(rates) expected tokens for each of its sequences and takes T(rows) + attention + drafting. The
objective is the geometric mean of the sequences' tokens per second (`allocation`): drafts of all sequences are sorted by their
gain minus their own cost, and the list is cut where that mean is largest, possibly before the first draft. Compare Leviathan et
al. 2023, section 3.4, who choose one length from one rate.

Exploration: each sequence saves 0.8% of its time, and a trial of drafts that are expected to lose may cost what it saved.
Without measurements of earlier requests, the prior is trusted only as far as the sequence can afford to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation.acceptance_rates import AcceptanceRates
from cloister.scheduler.speculation.allocation import Allocation, Proposal
from cloister.scheduler.speculation.decision import NO_DRAFTS, DraftDecision, DrafterLimits
from cloister.scheduler.speculation.draft_times import DraftTimes
from cloister.scheduler.speculation.sequence_stats import MAX_SAVED, TRIAL_SHARE, WATCHED, SequenceStats
from cloister.scheduler.speculation.step_times import AttentionCost, StepTimes
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.step import Sample
from cloister.types.threat import Requirement, ThreatProfile

SPECULATION_THREAT = ThreatProfile(
    row="adaptive tuning of the optimisations",
    threats=frozenset({Requirement.STATELESS, Requirement.NON_TARGETABLE}),
    residue="what the tuner learned",
    where=("host memory",),
    attack="infers from its own speed whether others' texts are predictable",
    mitigations=(
        "accepted counts are kept by sequence and end with it, unless a single user has the engine",
        "shared state is times of steps and drafters by size, which reveal nothing about accepted drafts",
    ),
)

FIRST_RATE: Final = 0.4
NEXT_RATE: Final = 0.75
"""Prior of a drafter without measurements: acceptance of its first draft, and of each further draft given the previous one."""
SHARED_DECAY: Final = 0.99
"""Decay of the counts of all sequences: about a hundred drafts are remembered."""
MARGIN: Final = 1.02
"""Minimum expected speedup of drafts, so that noise does not decide."""
COST_DECAY: Final = 0.8
"""Factor on the assumed cost of drafters and verification steps, applied each time a sequence cannot pay for a trial with the
most time that it may save."""
FIRST_DRAFT: Final = 0.5
"""Upper limit of the assumed time of a drafter's first calls, as a share of a step without drafts."""
FIRST_SIZE: Final = 2
"""Most drafts requested from a drafter before its time is measured."""
TRIAL_SIZE: Final = 4
"""Minimum number of drafts in a trial of another drafter, if the sequence can pay for them; else one."""
TRIAL_GAP: Final = 8
"""Minimum number of steps between two trials; more if decisions stay in force longer."""
NUM_PER_TRIAL: Final = 8
"""One in this many sequences is on trial at a time."""
DECISION_S: Final = (20e-6, 5e-6)
DECISION_SHARE: Final = 0.005
"""Measured time of a decision and of each sequence in it, and the share of time that decisions may take. It may double when
there is new information."""
MIN_STEPS: Final = 2
MAX_STEPS: Final = 32
"""Fewest and most steps for which a decision stays in force."""
SEQUENCES_PER_STEP: Final = 16
"""For each of this many further sequences, a decision stays in force one step longer."""
FIRST_STEPS: Final = 16
"""Number of first steps of an engine after each of which it may decide again: it begins with guesses."""
NUM_QUICK: Final = 4
"""Number of decisions in quick succession for a new sequence."""
PLAIN_EVERY: Final = 128
"""Interval of steps without drafts, which measure the current baseline."""
PLAIN_RETRY: Final = 2
"""The same until such a step was measured; all so far may have contained prompts."""
GROWTH: Final = 2
"""Largest ratio of a step's rows to the most rows measured so far."""
MAX_ROWS: Final = 256
"""Most drafts considered for one step, over all sequences; limits the time of a decision."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Limits of speculation.

    Attributes:
        shares_rates: acceptance of earlier requests is the prior of later ones; only if a single user has the engine.
    """

    shares_rates: bool = False


class AdaptiveSpeculation:
    """Learns gain and cost of drafts, and requests those that increase speed (protocol `Speculation`).

    Args:
        drafters: drafters by their names in plans.
    """

    def __init__(self, config: SpeculationConfig, drafters: Mapping[str, DrafterLimits]) -> None:
        self._drafters = dict(drafters)
        self._decisions = {
            name: [NO_DRAFTS, *(limits.choose(name, num) for num in range(1, limits.max_drafts + 1))]
            for name, limits in drafters.items()
        }
        self._priors = {
            name: [FIRST_RATE * NEXT_RATE**position for position in range(limits.max_drafts)]
            for name, limits in drafters.items()
        }
        self._shared: dict[str, AcceptanceRates] = {}
        if config.shares_rates:
            self._shared = {name: AcceptanceRates(prior, SHARED_DECAY) for name, prior in self._priors.items()}
        self._draft_times = {name: DraftTimes() for name in drafters}
        self._plain_times = StepTimes()
        self._times = StepTimes(self._plain_times)
        self._cost: StepCost | None = None
        self._is_first_call = False
        # The decision in force
        self._num_steps = 0
        self._last_decision = self._next_decision = 0
        self._news_interval = 1
        self._num_quick = 0
        self._num_sequences = 0
        self._num_asked = 0
        self._num_users: dict[str, int] = {}
        # What it was made with
        self._plain_s = 0.0
        self._rate = 0.0
        self._draft_row_s = 0.0
        # Trials, and steps without drafts
        self._turn = 0
        self._next_trial = 0
        self._idle_s = 0.0
        self._num_since_plain = PLAIN_EVERY

    # Decisions

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns a decision for each sequence (`Speculation.choose`); usually those in force."""
        self._num_steps += 1
        num = len(sequences)
        if self._num_steps < self._next_decision and num == self._num_sequences and self._num_asked <= num_left:
            decisions = []
            for sequence in sequences:
                stats = sequence.drafting
                if not isinstance(stats, SequenceStats):
                    break
                decisions.append(stats.decision)
            else:
                return decisions
        return self._decide(sequences, cost, size, num_left) if num else []

    def _decide(
        self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int
    ) -> list[DraftDecision]:
        num = len(sequences)
        all_stats = [self._stats(sequence) for sequence in sequences]
        self._cost, self._num_sequences = cost, num
        attention = AttentionCost(cost, size)
        self._plain_s = plain_s = self._plain_times.predict(num, attention) or cost.predict(size)
        since = self._num_steps - self._last_decision
        self._last_decision = self._num_steps
        for stats in all_stats:
            stats.accrue(plain_s / num * since, plain_s)
        self._num_since_plain += since
        is_known = self._plain_times.is_known(num)
        if plain_s <= 0.0 or self._num_since_plain >= (PLAIN_EVERY if is_known else PLAIN_RETRY):
            return self._skip_drafts(all_stats)
        floor = num / plain_s
        self._rate = max(self._rate, floor)
        most = max(2, MAX_ROWS // num)
        proposals = []
        for index, (sequence, stats) in enumerate(zip(sequences, all_stats, strict=True)):
            proposal = None if stats.trial else self._propose(stats, sequence, attention, most)
            if proposal is not None:
                proposal.index = index
                proposals.append(proposal)
        num_left = min(num_left, GROWTH * max(self._times.max_rows, self._plain_times.max_rows) - num)
        allocation = Allocation(num, plain_s, self._times, attention, self._draft_times)
        rate = allocation.fill(proposals, self._rate, num_left)
        is_worth = rate > MARGIN * floor
        self._rate = rate if is_worth else floor
        self._draft_row_s = allocation.draft_row_s
        self._plan_decisions(num, plain_s)
        self._num_asked = self._apply(all_stats, proposals if is_worth else [])
        self._try(sequences, all_stats, num_left, attention)
        self._idle_s = 0.0 if self._num_asked else self._idle_s + plain_s * since
        if self._idle_s * TRIAL_SHARE > MAX_SAVED * plain_s:
            self._idle_s = 0.0
            self._lower_costs(self._drafters)  # answers may be too short to save up for a trial
        return [stats.decision for stats in all_stats]

    def _plan_decisions(self, num: int, plain_s: float) -> None:
        """Sets when to decide again: so that decisions take a small share of the time, and sooner with new information."""
        first, each = DECISION_S
        least = MIN_STEPS + num // SEQUENCES_PER_STEP if self._num_steps > FIRST_STEPS else 1
        interval = min(int((first + each * num) / plain_s / DECISION_SHARE), MAX_STEPS)
        self._news_interval = max(least, interval // 2)
        self._next_decision = self._num_steps + max(least, interval)
        if self._num_quick:
            self._num_quick -= 1
            self._next_decision = self._num_steps + least

    def _propose(self, stats: SequenceStats, sequence: SequenceRecord, attention: AttentionCost, most: int) -> Proposal | None:
        """Returns the proposal of the most promising drafter for one sequence."""
        row_s = _row_s(sequence, attention)
        most = stats.bound(most, self._plain_s / self._num_sequences, self._draft_row_s)
        best: Proposal | None = None
        for name in self._drafters:
            max_drafts = min(most, sequence.max_drafts, self._max_drafts(name))
            if max_drafts > 0:
                proposal = self._value(stats, name, max_drafts, row_s)
                if best is None or proposal.value > best.value:
                    best = proposal
        return best

    def _max_drafts(self, name: str) -> int:
        """Returns how many drafts may be requested from a drafter."""
        most = self._drafters[name].max_drafts
        return most if self._draft_times[name].is_known else min(most, FIRST_SIZE)

    def _value(
        self, stats: SequenceStats, name: str, max_drafts: int, row_s: float, step_row_s: float | None = None
    ) -> Proposal:
        """Returns one drafter's proposal; its value is the expected gain of its drafts minus their cost, in tokens.

        Args:
            row_s: seconds of attention for each draft.
            step_row_s: seconds of a row, to value all drafts; None values the best number of drafts at the average cost of a
                row.
        """
        rates = stats.rates[name]
        call_s, in_row_s, each_s, sequence_s = self._draft_times[name].terms
        users = max(1, self._num_users.get(name, 1))
        price = self._rate
        draft = price * (each_s + in_row_s / users)
        row = price * ((self._draft_row_s if step_row_s is None else step_row_s) + row_s)
        accepted, proposed = rates.rates, rates.proposed
        value = -price * (sequence_s + call_s / users)
        for position in range(max_drafts):
            net = proposed[position] * (accepted[position] - row) - draft
            if net <= 0.0 and position and step_row_s is None:
                break
            value += net
        return Proposal(name, accepted, proposed, max_drafts, row_s, draft, value)

    def _apply(self, all_stats: list[SequenceStats], proposals: list[Proposal]) -> int:
        """Converts proposals to decisions; returns the number of requested drafts."""
        watched = [stats.decision.is_watched for stats in all_stats]
        num_asked = 0
        self._num_users = {}
        for stats, was_watched in zip(all_stats, watched, strict=True):
            stats.decision = NO_DRAFTS
            if stats.trial:
                num_asked += self._hold_trial(stats, is_watched=was_watched)
        for proposal in proposals:
            if proposal.num_drafts:
                name, index = proposal.drafter, proposal.index
                num_asked += self._ask(all_stats[index], name, proposal.num_drafts, is_watched=watched[index])
                self._num_users[name] = self._num_users.get(name, 0) + 1
        return num_asked

    def _ask(self, stats: SequenceStats, name: str, num_drafts: int, *, is_watched: bool) -> int:
        """Requests drafts, or lets the drafter observe this step and requests them in the next; returns the number
        requested."""
        stats.last_asked[name] = self._num_steps
        if self._drafters[name].watches and not is_watched:
            stats.decision = WATCHED
            self._next_decision = self._num_steps + 1
            return 0
        stats.decision = self._decisions[name][num_drafts]
        return num_drafts

    # Trials

    def _try(
        self, sequences: Sequence[SequenceRecord], all_stats: list[SequenceStats], num_left: int, attention: AttentionCost
    ) -> None:
        """Puts drafters on trial for some sequences that have saved enough."""
        if self._num_steps < self._next_trial:
            return
        num, num_asked = len(all_stats), self._num_asked
        for _ in range(-(-num // NUM_PER_TRIAL)):
            self._turn = (self._turn + 1) % num
            sequence, stats = sequences[self._turn], all_stats[self._turn]
            if not stats.trial and sequence.max_drafts > 0:
                self._num_asked += self._try_one(sequence, stats, num_left - self._num_asked, attention)
        if self._num_asked > num_asked or self._next_decision == self._num_steps + 1:
            self._next_trial = self._num_steps + max(TRIAL_GAP, 4 * self._news_interval)

    def _try_one(self, sequence: SequenceRecord, stats: SequenceStats, num_left: int, attention: AttentionCost) -> int:
        """Alternates between a trial of the least recently used drafter and a trial of more drafts of the current one; returns
        the number of additional drafts."""
        now, row_s, step_row_s = stats.decision, _row_s(sequence, attention), self._draft_row_s
        name = min((n for n in self._drafters if n != now.drafter), key=lambda n: stats.last_asked.get(n, -1), default="")
        stats.was_longer = bool(now.num_drafts) and not (name and stats.was_longer)
        name, least = (now.drafter, now.num_drafts) if stats.was_longer else (name, 0)
        most = min(sequence.max_drafts, self._max_drafts(name), num_left + now.num_drafts) if name else 0
        if most <= least:
            return 0
        value = self._value(stats, now.drafter, now.num_drafts, row_s, step_row_s).value if now.num_drafts else 0.0
        num_rows = self._num_sequences + self._num_asked
        before_s = self._times.predict(num_rows, attention) if self._num_asked else self._plain_s
        for size in (min(max(TRIAL_SIZE, 2 * least), most), least + 1):
            num_more = size - now.num_drafts
            if num_more > 0:  # includes the jump to another kernel's tile
                more_s = self._times.predict(num_rows + num_more, attention) - before_s
                step_row_s = max(self._draft_row_s, more_s / num_more)
            loss_s = max(0.0, value - self._value(stats, name, size, row_s, step_row_s).value) / self._rate
            if loss_s <= stats.saved_s:
                stats.saved_s -= loss_s
                stats.trial, stats.trial_size = name, size
                return self._hold_trial(stats, is_watched=now.is_watched) - now.num_drafts
        if stats.saved_s >= MAX_SAVED * self._plain_s:  # at that cost it will never be tried
            self._lower_costs((name,))
        return 0

    def _lower_costs(self, names: Iterable[str]) -> None:
        """Lowers the estimated cost of these drafters and of verification steps."""
        self._times.lower(COST_DECAY)
        for name in names:
            self._draft_times[name].lower(COST_DECAY)

    def _hold_trial(self, stats: SequenceStats, *, is_watched: bool) -> int:
        """Runs the trial of a sequence, or lets its drafter observe first; returns the number of requested drafts."""
        num_asked = self._ask(stats, stats.trial, stats.trial_size, is_watched=is_watched)
        if num_asked:
            stats.trial = ""
        self._next_decision = self._num_steps + 1
        return num_asked

    # Learning from steps

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None:
        """Records which drafts were accepted (`Speculation.learn`)."""
        stats = sequence.drafting
        if not isinstance(stats, SequenceStats) or choice.drafter not in stats.rates:
            return
        num_drafted, accepted = sample.num_drafted, sample.accepted
        stats.rates[choice.drafter].learn(choice.num_drafts, num_drafted, accepted)
        if self._shared:
            self._shared[choice.drafter].learn(choice.num_drafts, num_drafted, accepted)
        if accepted:
            stats.is_proven = True
        elif not stats.is_proven:
            stats.unproven_s += self._drafting_s(choice) + num_drafted * self._draft_row_s
        if len(accepted) == choice.num_drafts or (num_drafted and not accepted):
            self._next_decision = min(self._next_decision, self._last_decision + self._news_interval)

    def _drafting_s(self, choice: DraftDecision) -> float:
        """Returns one sequence's share of the time of its drafter's call."""
        call_s, in_row_s, each_s, sequence_s = self._draft_times[choice.drafter].terms
        users = max(1, self._num_users.get(choice.drafter, 1))
        return sequence_s + each_s * choice.num_drafts + (call_s + in_row_s * choice.num_drafts) / users

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Records the time of drafting (`Speculation.learn_cost`)."""
        for name, (num_sequences, num_drafts) in num_drafted.items():
            times = self._draft_times.get(name)
            if times is not None:
                self._is_first_call |= not times.is_known
                times.learn(num_sequences, num_drafts, draft_s.get(name, 0.0), FIRST_DRAFT * self._plain_s)

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        """Records the time of a step (`Speculation.learn_step`)."""
        if self._cost is not None and not self._is_first_call:  # reading weights and memory
            times = self._times if num_drafted else self._plain_times
            times.learn(size, elapsed_s, self._cost)
        self._is_first_call = False
        if not num_drafted:
            self._num_since_plain = 0

    # State of sequences

    def _stats(self, sequence: SequenceRecord) -> SequenceStats:
        stats = sequence.drafting
        if not isinstance(stats, SequenceStats):
            rates = {}
            for name, prior in self._priors.items():
                shared = self._shared.get(name)
                rates[name] = (
                    AcceptanceRates(prior) if shared is None else AcceptanceRates(shared.rates, proposed=shared.proposed)
                )
            sequence.drafting = stats = SequenceStats(rates, is_proven=bool(self._shared))
            self._num_quick = NUM_QUICK
        return stats

    def _skip_drafts(self, all_stats: list[SequenceStats]) -> list[DraftDecision]:
        """Disables drafts for one step; drafters that observed still do."""
        self._next_decision = self._num_steps + 1
        self._num_asked = 0
        self._num_since_plain = 0
        for stats in all_stats:
            stats.decision = WATCHED if stats.decision.is_watched else NO_DRAFTS
        return [stats.decision for stats in all_stats]


def _row_s(sequence: SequenceRecord, attention: AttentionCost) -> float:
    """Returns the attention cost of a draft above that of an average one."""
    return attention.key_s * (sequence.num_planned - attention.context)
