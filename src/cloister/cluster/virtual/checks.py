"""Invariants of every run of a virtual cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from cloister.cluster.virtual.scenario import Job, OperatorAction, Scenario
from cloister.engine.poison_requests import NUM_SAFE_LOSSES
from cloister.engine.request_client import GRACE_S
from cloister.types.events import Arrived, Ended, Event, Migrated, Stepped
from cloister.types.request import FinishReason, Request, SequenceOutput, TokenLogprobs

RECOVERY_S: Final = 70.0
"""Virtual time in which a lost engine is noticed and replaced; one that hangs before its first step takes longest."""
MAX_DEATHS: Final = 5
"""Engines that a request may kill before it is identified: three, and one more if it kills late or beside cleared ones."""
_SLACK_S: Final = 1.0
_SLACK_OF_STEPS_S: Final = 0.1
_ROUNDING_S: Final = 1e-9
"""A deadline is enforced between steps."""
_TINY_S: Final = 1e-6
_RUN_S: Final = 600.0
_LOGPROB_ERROR: Final = 1e-4
GOOD_ENDS: Final = (FinishReason.LENGTH, FinishReason.STOP)
"""Finish reasons of complete answers."""


class SequenceAnswer(NamedTuple):
    """One sequence of an answer.

    Attributes:
        logprobs: of each token; None if they were not asked for.
        prompt_logprobs: of each token of the prompt but the first, of the first sequence.
    """

    token_ids: list[int]
    text: str
    end: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class JobAnswer:
    """What the client of one job saw.

    Attributes:
        token_ids, texts, ends: of each of its sequences; `ends` has every finish reason that came.
        logprobs: of the tokens of each of its sequences.
        prompt_logprobs: of the tokens of its prompt, as often as they came.
        refusal: why it was not accepted.
        has_left: the client left.
        is_cut: its front was killed.
    """

    job: Job
    request: Request
    token_ids: list[list[int]]
    texts: list[str]
    ends: list[list[FinishReason]]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[list[TokenLogprobs | None]]
    sent_s: float = 0.0
    ended_s: float | None = None
    refusal: str | None = None
    has_left: bool = False
    is_cut: bool = False

    @classmethod
    def to(cls, job: Job, request: Request) -> JobAnswer:
        """Returns the empty answer to a request."""
        token_ids: list[list[int]] = [[] for _ in range(job.n)]
        ends: list[list[FinishReason]] = [[] for _ in range(job.n)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(job.n)]
        return cls(job, request, token_ids, [""] * job.n, ends, logprobs, [])

    def take(self, output: SequenceOutput) -> None:
        """Records an output."""
        self.token_ids[output.index] += output.token_ids
        self.texts[output.index] += output.text
        self.logprobs[output.index] += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs.append(output.prompt_logprobs)
        if output.finish_reason is not None:
            self.ends[output.index].append(output.finish_reason)

    def as_given(self) -> list[SequenceAnswer]:
        """Returns each sequence as it came; one that did not end counts as cut."""
        has_logprobs, given = self.request.sampling.logprobs is not None, []
        for index, ends in enumerate(self.ends):
            end = next(iter(ends), FinishReason.LENGTH)
            prompt = next(iter(self.prompt_logprobs), None) if index == 0 else None
            logprobs = self.logprobs[index] if has_logprobs else None
            given.append(SequenceAnswer(self.token_ids[index], self.texts[index], end, logprobs, prompt))
        return given


class RunRecord(Protocol):
    """The data of a run that checks need.

    Attributes:
        events: all events of its fronts but those of steps.
        late_s: for how long its machines were suspended, and by how much more they may be late.
    """

    scenario: Scenario
    answers: list[JobAnswer]
    events: list[Event]
    late_s: float


def check_answer(answer: JobAnswer, alone: list[SequenceAnswer], run: RunRecord) -> list[str]:
    """Compares an answer with that of one engine alone."""
    name, wrong = answer.request.request_id, []
    if answer.refusal is not None:
        return [f"{name} was refused and answered"] if any(answer.ends) or any(answer.token_ids) else []
    for index, expected in enumerate(alone):
        token_ids, text, reason = expected[:3]
        ends, where = answer.ends[index], f"{name}[{index}]"
        if len(ends) > 1 or not (ends or answer.has_left or answer.is_cut):
            wrong.append(f"{where} ended {len(ends)} times")
        end = ends[0] if ends else None
        is_whole = end in GOOD_ENDS
        if is_whole and (answer.token_ids[index], answer.texts[index], end) != (token_ids, text, reason):
            wrong.append(f"{where} got another answer than from one engine alone")
        if not is_whole and answer.token_ids[index] != token_ids[: len(answer.token_ids[index])]:
            wrong.append(f"{where} got other tokens than from one engine alone, until it ended by {end}")
        if not match_logprobs(answer.logprobs[index], (expected.logprobs or [])[: len(answer.token_ids[index])]):
            wrong.append(f"{where} got other log-probabilities than from one engine alone")
        wrong += _check_end(where, end, reason, answer, run)
    if has_wrong_prompt(answer, alone[0].prompt_logprobs):
        wrong.append(f"{name} got other log-probabilities of its prompt than from one engine alone, or not once")
    return wrong


def has_wrong_prompt(answer: JobAnswer, expected: Sequence[TokenLogprobs | None] | None) -> bool:
    """Whether an answer's prompt log-probabilities are wrong, came twice, or are missing though it has tokens."""
    given = answer.prompt_logprobs
    if expected is None or not given:
        return bool(given) or (expected is not None and bool(answer.token_ids[0]))
    return len(given) > 1 or given[0][:1] != [None] or not match_logprobs(given[0][1:], expected[1:])


def match_logprobs(given: Sequence[TokenLogprobs | None], expected: Sequence[TokenLogprobs | None]) -> bool:
    """Whether log-probabilities are of the same tokens, and equal up to rounding."""
    if len(given) != len(expected):
        return False
    for one, other in zip(given, expected, strict=True):
        if one is None or other is None:
            return False
        ours, theirs = [(one.token_id, one.logprob), *one.top], [(other.token_id, other.logprob), *other.top]
        if [token_id for token_id, _ in ours] != [token_id for token_id, _ in theirs]:
            return False
        if any(abs(a - b) > _LOGPROB_ERROR for (_, a), (_, b) in zip(ours, theirs, strict=True)):
            return False
    return True


def _check_end(where: str, end: FinishReason | None, alone: FinishReason, answer: JobAnswer, run: RunRecord) -> list[str]:
    """Checks the finish reason of a sequence and its time."""
    assert answer.ended_s is not None
    took_s, limit_s = answer.ended_s - answer.sent_s, answer.job.timeout_s
    if end is FinishReason.TIMEOUT and took_s < limit_s - _ROUNDING_S:
        return [f"{where} timed out after {took_s:.3f} of {limit_s:.3f} s"]
    if end is FinishReason.TIMEOUT and limit_s > longest_trouble_s(run.scenario):
        return [f"{where} timed out, though nothing was wrong for long"]
    if took_s > limit_s + GRACE_S + run.late_s + _SLACK_S:
        return [f"{where} ended {took_s - limit_s:.1f} s after its deadline"]
    kills = any(job.kills_after is not None for job in run.scenario.jobs)
    is_undisturbed = not (run.scenario.faults or kills) and run.scenario.idle_timeout_s is None
    if is_undisturbed and took_s > limit_s + run.late_s + _SLACK_OF_STEPS_S + 4 * run.scenario.delay_s:
        return [f"{where} ended {took_s - limit_s:.3f} s after its deadline, though nothing was wrong"]
    if end is FinishReason.REJECTED and alone is not FinishReason.REJECTED:
        return [f"{where} was rejected, which one engine alone does not"]
    if end is FinishReason.ABORT:
        return [f"{where} was aborted, though its client waited"]
    if end is FinishReason.ERROR and answer.job.kills_after is None and not may_fail(run.scenario):
        return [f"{where} failed, though its engines were lost at most {NUM_SAFE_LOSSES} times"]
    return []


def may_fail(scenario: Scenario) -> bool:
    """Whether a request that kills no engine may end with an error: steps fail, or enough engines are lost for it to look as if
    it killed them."""
    kinds = Counter(fault.kind for fault in scenario.faults)
    num_losses = kinds["crash"] + kinds["hang"] + kinds["slow"] + kinds["cut"] + kinds["clock_jump"] + kinds["network"]
    num_killers = sum(job.kills_after is not None for job in scenario.jobs)
    return kinds["fail_step"] > 0 or num_losses > (0 if num_killers else NUM_SAFE_LOSSES)


def longest_trouble_s(scenario: Scenario) -> float:
    """Returns the maximum time in which a cluster recovers from all faults of a scenario and answers all requests."""
    num_killers = sum(job.kills_after is not None for job in scenario.jobs)
    num_updates = len(updates_of(scenario))
    lasting_s = sum(RECOVERY_S + (0.0 if fault.kind == "hang" else fault.lasts_s) for fault in scenario.faults)
    return 10.0 + RECOVERY_S * (num_killers + num_updates) + lasting_s


def updates_of(scenario: Scenario) -> list[OperatorAction]:
    """Returns the updates of a scenario."""
    return [operation for operation in scenario.operations if operation.kind == "update"]


def max_starts(scenario: Scenario) -> int | None:
    """Returns the maximum number of engine starts; None if engines may end because they are idle or seem lost.

    A request that kills engines may kill one more for each move, as two engines compute it during the move.
    """
    kinds = Counter(fault.kind for fault in scenario.faults)
    ends_engines = scenario.idle_timeout_s is not None or scenario.min_replicas is not None
    if ends_engines or updates_of(scenario) or kinds.keys() - {"crash", "fail_step", "refuse_start"}:
        return None
    killers = [number for number, job in enumerate(scenario.jobs) if job.kills_after is not None]
    num_emptied = sum(action.kind in ("flip", "drain") for action in scenario.operations)  # all that is there moves
    num_moves = num_emptied * len(killers) + sum(
        action.kind == "migrate" and action.job in killers for action in scenario.operations
    )
    num_refused = int(sum(fault.amount for fault in scenario.faults if fault.kind == "refuse_start"))
    num_deaths = MAX_DEATHS * len(killers) + num_moves
    return scenario.num_replicas + kinds["crash"] + kinds["fail_step"] + num_refused + num_deaths


def check_events(run: RunRecord) -> list[str]:
    """Checks that every request arrived once and each of its sequences ended once, and that tenants share nothing."""
    wrong: list[str] = []
    arrived: Counter[str] = Counter()
    ended: defaultdict[str, list[Ended]] = defaultdict(list)
    for event in run.events:
        if isinstance(event, Arrived):
            arrived[event.request_id] += 1
        elif isinstance(event, Ended):
            ended[event.request_id].append(event)
    known = {answer.request.request_id for answer in run.answers}
    unknown = {event.request_id for event in run.events if not isinstance(event, Stepped)} - known
    wrong += ["an event is of a request that no client sent"] if unknown else []
    for answer in run.answers:
        name = answer.request.request_id
        if answer.refusal is not None or answer.is_cut:
            continue
        if arrived[name] != 1:
            wrong.append(f"{name} arrived {arrived[name]} times")
        if sorted(event.index for event in ended[name]) != list(range(answer.job.n)):
            wrong.append(f"the events have {len(ended[name])} ends of {name}, which has {answer.job.n} sequences")
        wrong += [f"{name} has times that no one clock shows" for event in ended[name] if not _has_one_clock(event)]
        if [event.last for event in ended[name]].count(True) != 1:
            wrong.append(f"{name} has {[event.last for event in ended[name]].count(True)} last ends")
        if not run.scenario.faults:
            wrong += _check_sharing(answer, ended[name], run)
    return wrong


def _has_one_clock(event: Ended) -> bool:
    """Whether the times of an end are in order, and no further apart than a run lasts: they are of one clock."""
    first_s = event.arrival_s if event.first_token_s is None else event.first_token_s
    return -_TINY_S < first_s - event.arrival_s < _RUN_S and -_TINY_S < event.now_s - first_s < _RUN_S


def _check_sharing(answer: JobAnswer, ended: list[Ended], run: RunRecord) -> list[str]:
    """Checks that no more of a prompt came from the cache than other requests of its tenant can have left there."""
    has_moved = any(isinstance(e, Migrated) and e.request_id == answer.request.request_id for e in run.events)
    mine = [a for a in run.answers if a.job.tenant == answer.job.tenant and a.refusal is None]
    others = mine if has_moved else [a for a in mine if a is not answer]  # it may have come back to its own prompt
    longest = max((_count_common(answer.request.token_ids, other.request.token_ids) for other in others), default=0)
    found = max((event.num_cached_tokens for event in ended), default=0)
    if found <= longest:
        return []
    return [f"{answer.request.request_id} found {found} tokens in the cache, of which its tenant had sent {longest}"]


def _count_common(first: list[int], second: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
