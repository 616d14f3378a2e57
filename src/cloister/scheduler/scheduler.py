"""The scheduler: adds and ends requests, plans steps (`scheduler.step_planner`) and commits their results. Pure: no I/O, no
clock, no arrays, no random source; it takes `now`.

`plan` may be called again before the previous plan was committed; commits are in the order of plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cloister.kv import DEVICE, BlockPool, CacheQuotas, KeptUsage, PrefixKeys, StepTime
from cloister.kv.tiers import KVTiers
from cloister.scheduler.admission import EngineLimits, count_beam_slots, find_refusal
from cloister.scheduler.beam_search import Beams, BeamSearches
from cloister.scheduler.budget import BudgetConfig, StepBudget
from cloister.scheduler.draft_allocator import DraftAllocator
from cloister.scheduler.image_encodings import ImageEncodings
from cloister.scheduler.kv_exports import KVExports
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.kv_restores import KVRestores
from cloister.scheduler.layerwise import LayerwisePrompts
from cloister.scheduler.planned_step import PlannedStep
from cloister.scheduler.policies import POLICIES, EngineView
from cloister.scheduler.prefix_leases import PrefixLeases
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status, table_of
from cloister.scheduler.speculation import Speculation
from cloister.scheduler.step_cost import StepCost
from cloister.scheduler.step_planner import StepPlanner
from cloister.types.events import Event, Progressed, Resumption
from cloister.types.layerwise import CellLayout
from cloister.types.request import FinishReason, Request
from cloister.types.scope import Scope
from cloister.types.step import EncodedImage, NewSequence, Sample, StepPlan, StepResult, Stop

_UNBOUNDED = 2**62
"""Capacity in positions if every layer has a window: the blocks of a request then do not grow with its length."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler.

    Attributes:
        max_model_len: prompt and output of one sequence, in tokens.
        max_num_seqs: maximum number of running sequences.
        eos_token_ids: ids that end an answer, unless a request ignores them.
        prefix_cache: keep and reuse the KV of full blocks.
        cache_scopes: number of scopes with their own share of the prefix cache; 0 for one shared cache.
        num_images_at_once: images that are encoded at once, beside the steps.
        max_prefill_only_len: longest prompt of a request that ends with its prompt; no effect if less than `max_model_len`.
        weighs_documents: the program can weigh documents by a temperature and a scale.
        places_documents: tokens of documents may have rotary positions other than their own (`Documents.positions`).
    """

    max_model_len: int
    max_num_seqs: int = 64
    policy: str = "fcfs"
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    cache_scopes: int = 0
    num_images_at_once: int = 1
    max_prefill_only_len: int = 0
    weighs_documents: bool = True
    places_documents: bool = True


class Scheduler:
    """Decides which positions of which sequences are computed next, and in which KV blocks.

    Args:
        config: its limits.
        pool: the KV blocks.
        keys: computes prefix keys; None switches the prefix cache off.
        speculation: decides how many tokens to draft; None disables drafts.
        cells: the program's memory layout for prompts computed layer by layer; None if it computes none so.

    Attributes:
        prefix_cache: the prefix cache, if there is one.
        requests: states of open requests, by id. Only the scheduler changes them, except for `grammar_deadline_s`, which the
            engine may set.
        waiting_for_grammar: requests waiting for a grammar, by id; `release` queues them.
        held_searches: beam searches that wait for the share of all searches, by id; `num_waiting` counts them.
        leases: cached blocks leased for other engines; None without a prefix cache.
        kv_loads, kv_exports: KV on its way to and from this engine.
        prefix_leases: prefixes that the front has leased here, including copies.
        kv_restores: KV restored from tiers; None without tiers (`use_tiers`).
        answers: complete answers of beam searches that were not collected yet, each as a new sequence with prompt and output.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        keys: PrefixKeys | None = None,
        speculation: Speculation | None = None,
        cells: CellLayout | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.cost = StepCost()
        self._policy = POLICIES.get(config.policy)()
        keys = keys if config.prefix_cache else None
        num_public = len(keys.public) if keys is not None else 0
        self._num_usable = [group.num_blocks - (0 if group.is_state else num_public) for group in pool.groups]
        quotas = None
        if keys is not None and config.cache_scopes:
            quotas = _plan_quotas(config, pool, num_public)
            for number, share in enumerate(quotas):  # a sequence that runs alone must fit beside full shares
                self._num_usable[number] -= share.total_blocks
        self._max_shared = _find_max_shared(quotas, pool)
        self._layerwise = None if cells is None else LayerwisePrompts(cells, pool, self._num_usable[0])
        self._requests = RequestTable(pool, self._policy, keys, quotas)
        self.prefix_cache = self._requests.prefix_cache
        self._draft_allocator = (
            DraftAllocator(speculation, self._requests, self._policy, self.cost, config.max_num_seqs)
            if speculation is not None
            else None
        )
        # Each sequence takes a state, and another one for a step.
        states = [group.num_blocks // 2 for group in pool.groups if group.is_state]
        self._max_num_seqs = min([config.max_num_seqs, *states])
        self._searches = BeamSearches(self._requests, count_beam_slots(self._max_num_seqs))
        self._encodings = ImageEncodings(config.num_images_at_once)
        self.kv_loads = KVLoads(self._requests)
        self.kv_exports = KVExports(self._requests)
        self.kv_restores: KVRestores | None = None
        self.prefix_leases = PrefixLeases(self._requests, self.kv_loads)
        self._planner = StepPlanner(
            config.max_num_seqs,
            self._requests,
            self._policy,
            self.kv_loads,
            self._searches,
            self._encodings,
            self._draft_allocator,
            self._layerwise,
        )
        self._policy.attach(
            EngineView(
                self.cost,
                self._max_num_seqs,
                min(self._count_usable(1), pool.num_total * pool.block_size),
                self._requests.running,
                self._requests.prefixes.count_cached,
                self._planner.would_fit,
            )
        )
        self._has_windows = any(group.window is not None for group in pool.groups)
        self._time = StepTime() if self.prefix_cache is None else self.prefix_cache.kept.time
        self.requests: Mapping[str, RequestState] = self._requests.request_states
        self.waiting_for_grammar: Mapping[str, RequestState] = self._requests.waiting_for_grammar
        self.held_searches: Mapping[str, RequestState] = self._requests.held_searches
        self.answers = self._requests.answers
        self.leases = self._requests.leases
        self._prefilled: list[SequenceRecord] = []  # sequences of this step whose first token another engine waits for
        self._steps: deque[PlannedStep] = deque()
        self._next_plan = 0

    @property
    def lacks_shares(self) -> bool:
        """Whether its prefix cache keeps nothing because there are too few blocks to give each scope a share."""
        return self._max_shared == 0

    @property
    def max_layerwise_positions(self) -> int:
        """Length of the longest prompt that fits into memory if it is computed layer by layer; 0 if none can be."""
        return 0 if self._layerwise is None else self._layerwise.max_positions

    def use_tiers(self, tiers: KVTiers) -> None:
        """Stores blocks that the prefix cache evicts in tiers. Call it before the first request; requires a prefix cache."""
        assert self.prefix_cache is not None
        self.prefix_cache.tiers = tiers
        tiers.use_time(self._time)
        self.kv_restores = self._planner.kv_restores = KVRestores(
            tiers, self._requests, self.prefix_cache, self.kv_loads, self.cost, self._max_shared
        )

    # State

    @property
    def num_running(self) -> int:
        return len(self._requests.running)

    @property
    def num_waiting(self) -> int:
        return self._requests.num_waiting + len(self.held_searches)

    @property
    def next_deadline_s(self) -> float | None:
        """When `plan` must be called again even without new input."""
        dues = [due for due in (self._requests.next_deadline_s, self.kv_loads.next_deadline_s) if due is not None]
        return min(dues, default=None)

    def take_events(self) -> list[Event]:
        """Returns the events since the last call, oldest first."""
        events, self._requests.events = self._requests.events, []
        return events

    def take_answers(self) -> list[NewSequence]:
        """Removes and returns `answers`."""
        answers = self.answers[:]
        self.answers.clear()
        return answers

    # Adding and ending requests

    def add(
        self,
        request: Request,
        now: float,
        *,
        seed: int = 0,
        refusal: str | None = None,
        grammar_deadline_s: float | None = None,
        resumption: Resumption | None = None,
        loads_kv: bool = False,
        hold_kv_s: float = 0.0,
        prefill_only: bool = False,
    ) -> None:
        """Adds a request. One that can never run ends immediately as REJECTED, with the reason and a limit that fits.

        Args:
            seed: seed of the sampling noise, if the request has none.
            refusal: why it can never run, if the caller knows.
            grammar_deadline_s: set if its grammar is still being compiled: `release` queues it, and the caller checks again by
                this time. None queues it immediately.
            resumption: its progress in an engine that was lost.
            loads_kv: it is queued when KV from another engine has been loaded (`kv_loads`).
            hold_kv_s, prefill_only: as in `Submit`.
        """
        seed = request.sampling.seed if request.sampling.seed is not None else seed
        state = self._requests.enlist(request, now, seed, resumption)
        state.hold_kv_s, state.prefill_only = hold_kv_s, prefill_only
        eos = () if request.sampling.ignore_eos else self.config.eos_token_ids
        state.stop_token_ids = tuple(dict.fromkeys((*eos, *request.sampling.stop_token_ids)))
        self._add_sequences(state, resumption)
        refusal = refusal or find_refusal(request, self._find_limits(state.sequences[0]))
        if refusal is None and state.beams is not None:
            refusal = state.beams.find_excess()
        if refusal is not None:
            self.kv_loads.cancel_prefetch(request.request_id, now)
            self._requests.end_request(state, FinishReason.REJECTED, now, error=refusal)
            return
        if grammar_deadline_s is not None:
            state.grammar_deadline_s = grammar_deadline_s
            self._requests.waiting_for_grammar[request.request_id] = state
        if loads_kv:
            self.kv_loads.begin(state, now)
        elif grammar_deadline_s is None:
            self._requests.wait_for_slots(state)

    def _add_sequences(self, state: RequestState, resumption: Resumption | None) -> None:
        """Adds the sequences that a new request starts with."""
        request = state.request
        max_tokens = 0 if request.pooling is not None else request.sampling.max_tokens
        max_output = self.config.max_model_len if max_tokens is None else max_tokens
        max_output = min(self.config.max_model_len - state.num_prompt_tokens, max_output)
        has_output = resumption is not None and any(resumption.token_ids)
        is_layerwise = not (has_output or state.prefill_only) and self._fits_only_layerwise(request)
        if is_layerwise:
            max_output = max_tokens or 0
        if request.sampling.beams is not None:
            state.beams = Beams(request.sampling.beams, state.stop_token_ids, max_output)
        if resumption is not None and has_output:
            self._requests.resume(state, resumption, max_output)
            return
        sequence = self._requests.make_sequence(state, 0, list(request.token_ids), max_output)
        sequence.is_layerwise = is_layerwise
        if state.beams is not None:
            state.beams.start({sequence.seq_id: 0.0})

    def _find_limits(self, sequence: SequenceRecord) -> EngineLimits:
        """Returns the limits for the request of a sequence, its first one."""
        beams = sequence.request_state.request.sampling.beams
        limits = EngineLimits(
            self.config.max_model_len,
            self._max_num_seqs,
            self._count_usable(1 if beams is None else beams.width),
            self.pool.block_size,
            self.config.budget.max_tokens,
            takes_documents=self.pool.has_full_attention_only,
            weighs_documents=self.config.weighs_documents,
            places_documents=self.config.places_documents,
        )
        if not sequence.is_layerwise or self._layerwise is None:
            return limits
        longest = self.config.max_prefill_only_len + int(sequence.max_output > 0)
        return replace(limits, max_model_len=longest, num_kv_tokens=self._layerwise.max_positions)

    def _fits_only_layerwise(self, request: Request) -> bool:
        """Whether a request ends with its prompt, which is too long for KV of all layers."""
        num_most = min(self.config.max_model_len - int(request.sampling.max_tokens != 0), self._count_usable(1))
        if self._layerwise is None or len(request.token_ids) <= num_most:
            return False
        ends_with_prompt = request.sampling.ends_with_prompt and not request.images and request.documents is None
        return ends_with_prompt and self.config.max_prefill_only_len > self.config.max_model_len

    def _count_usable(self, width: int) -> int:
        """Returns the maximum positions of a sequence, or of `width` beams together, while nothing else runs."""
        counts = [
            num_usable * self.pool.block_size
            for group, num_usable in enumerate(self._num_usable)
            if num_usable < self.pool.max_blocks(group, _UNBOUNDED, width)
        ]
        return min(counts, default=_UNBOUNDED)

    def release(self, state: RequestState) -> None:
        """Queues a request that waited for its grammar."""
        del self._requests.waiting_for_grammar[state.request.request_id]
        if not self.kv_loads.is_awaited(state.request.request_id):
            self._requests.wait_for_slots(state)

    def hold(self, request_id: str, hold_s: float, now: float) -> None:
        """Leases the cached blocks of an open request; 0 seconds end its lease."""
        state = self._requests.request_states.get(request_id)
        if hold_s <= 0.0:
            if self._requests.leases is not None:
                self._requests.leases.drop(request_id)
        elif state is not None:
            self._requests.hold(state, hold_s, now)

    def report_kept(self, scope: Scope) -> list[tuple[str, KeptUsage]]:
        """Returns the cache usage of a scope: (name, usage) of the device and of each tier."""
        if self.prefix_cache is None:
            return []
        roots, tiers = self._requests.prefixes.roots_of(scope), self.prefix_cache.tiers
        below = () if tiers is None else tiers.indexes
        return [(DEVICE, self.prefix_cache.kept.report(roots)), *((tier.name, tier.kept.report(roots)) for tier in below)]

    def forget(self, scope: Scope, now: float) -> None:
        """Drops the cache of a scope. Blocks in use by its requests and other engines become free when these end."""
        roots = self._requests.prefixes.roots_of(scope)
        self.prefix_leases.forget(roots)
        self._requests.forget(roots)
        self.kv_loads.forget(roots, now)

    def abort(self, request_id: str, now: float) -> None:
        """Aborts a request; does nothing if it has already ended."""
        state = self._requests.request_states.get(request_id)
        if state is not None:
            self._requests.end_request(state, FinishReason.ABORT, now)

    def fail(self, message: str, now: float) -> None:
        """Ends every request that a plan in flight names, and drops those plans, after a failed step."""
        steps, self._steps = list(self._steps), deque()
        for step in steps:
            self._land(step)
            self.kv_loads.fail(step, now)
            self._requests.departures.extend(step.plan.departures)
        for step in steps:
            for sequence in (*(part[0] for part in step.parts), *step.forked, *self._find_others(step)):
                if sequence.status is not Status.ENDED:
                    self._requests.end_request(sequence.request_state, FinishReason.ERROR, now, error=message)
                self._requests.release_blocks(sequence)
            self.pool.wipe_again(step.plan.wipes)

    def _find_others(self, step: PlannedStep) -> list[SequenceRecord]:
        """Returns the sequences that a plan introduces, or whose images it encodes, without computing positions of them."""
        named = {new.seq_id for new in step.plan.arrivals} | {seq_id for seq_id, _ in step.plan.encodes}
        others = [self._requests.sequences.get(seq_id) for seq_id in sorted(named - step.planned())]
        return [sequence for sequence in others if sequence is not None]

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """Fills one step, or returns None if there is nothing to do (never while blocks wait to be wiped)."""
        self._time.now_s = now
        self._requests.expire(now)
        if self.kv_loads.loading:
            self.kv_loads.expire(now)
        if self.held_searches or self._searches.admitted:
            self._searches.admit(self._policy.choose_search)
        budget = StepBudget(self.cost, self.config.budget)
        step = PlannedStep(StepPlan(plan_id=self._next_plan), budget, now, self._policy.level_slack)
        self._planner.fill(step)
        if self.kv_loads.loading:
            self.kv_loads.plan(step)
        plan = step.plan
        plan.wipes = self.pool.take_wipes()
        plan.departures, self._requests.departures = self._requests.departures, []
        if not (plan.sequences or plan.wipes or plan.loads or plan.departures or plan.arrivals or plan.encodes):
            return None
        self._next_plan += 1
        self._steps.append(step)
        return plan

    def commit(self, result: StepResult, stops: Mapping[int, Stop], now: float) -> list[Event]:
        """Commits the result of the oldest plan in flight, and returns every event since the last call.

        Args:
            stops: by seq_id, where output processing found the end of an answer.
        """
        step = self._steps.popleft()
        if step.plan.plan_id != result.plan_id:
            raise ValueError(f"plan {step.plan.plan_id} must be committed before plan {result.plan_id}")
        self._land(step)
        self._time.now_s = now
        size = step.budget.size
        if self._draft_allocator is not None and step.choices:
            size = self._draft_allocator.release_rejected(step, result)
        is_whole = not result.left_out  # else it was shorter than its size says
        block_size = self.pool.block_size
        for sequence, start, end, num_prefill in step.parts:
            if sequence.status is Status.RUNNING:
                num_decode = end - start - num_prefill
                if sequence.seq_id in result.left_out:
                    num_prefill, num_decode = (num_prefill - 1, num_decode) if num_prefill else (0, num_decode - 1)
                if num_prefill or num_decode:
                    self._policy.charge(sequence, num_prefill, num_decode)
                if sequence.seq_id in result.deferred:
                    end = self._defer(sequence)
                sequence.num_committed = end
                if end // block_size > sequence.num_kept and sequence.seq_id not in result.failures:
                    self._requests.prefixes.keep_blocks(sequence)
                    self._requests.prefixes.renew(sequence, now)
                    if self._has_windows:
                        table_of(sequence).release_behind_windows(end)
                if sequence.is_behind and not sequence.num_in_flight:
                    sequence.is_behind = False
                    sequence.num_planned = end
        for sequence in step.forked:
            if sequence.status is Status.RUNNING:
                if sequence.seq_id in result.deferred:
                    sequence.num_committed = self._defer(sequence)
                    sequence.num_kept = min(sequence.num_kept, sequence.num_committed // block_size)
                    if not sequence.num_in_flight:
                        sequence.is_behind, sequence.num_planned = False, sequence.num_committed
                # its blocks are those that its parent had before it was committed
                self._requests.prefixes.deduplicate(sequence, sequence.num_kept)
        for sample in result.samples:
            self._take_sample(sample, stops.get(sample.seq_id), now)
        if self._prefilled:
            self._hand_over(now)
        for seq_id, message in result.failures.items():
            reason = FinishReason.UNSUPPORTED if seq_id in result.unsupported else FinishReason.ERROR
            self._fail_sequence(seq_id, reason, message, now)
        if step.loads:
            self.kv_loads.commit(step, now)
        for sequence, *_ in step.parts:
            if sequence.status is not Status.RUNNING or not sequence.max_output:
                self._after_step(sequence, now)
        for sequence in step.forked:
            if self._has_windows and sequence.status is Status.RUNNING:  # it forked with all that its parent held in this step
                table_of(sequence).release_behind_windows(sequence.num_committed)
            self._requests.release_blocks(sequence)
        if step.parts and is_whole:
            elapsed_s = result.elapsed_s - (sum(result.draft_s.values()) if result.draft_s else 0.0)
            self.cost.learn(size, elapsed_s)
            if self._draft_allocator is not None:
                self._draft_allocator.learn(step, size, result, elapsed_s)
        return self.take_events()

    def _defer(self, sequence: SequenceRecord) -> int:
        """Notes that a step did not sample a sequence as it was planned to; returns how many of its positions count as
        computed."""
        sequence.num_pending -= 1
        sequence.is_behind = True
        return len(sequence.token_ids) - 1

    def owners_of(self, plan: StepPlan) -> list[bytes | None]:
        """Returns the owner of each sequence in a plan (`RequestState.owner`)."""
        found = (self._requests.sequences.get(part.seq_id) for part in plan.sequences)
        return [sequence.request_state.owner for sequence in found if sequence is not None]

    def note_encoded(self, image: EncodedImage, now: float) -> None:
        """Notes that an image is encoded, so that plans may reach it; or ends its request if that failed."""
        if image.error:
            self._fail_sequence(image.seq_id, FinishReason.ERROR, image.error, now)
        else:
            self._encodings.note(image.seq_id, image.offset)

    def _land(self, step: PlannedStep) -> None:
        """Counts a step as no longer in flight."""
        for sequence, *_ in step.parts:
            sequence.num_in_flight -= 1
            sequence.num_drafts = 0
        for sequence in step.forked:
            sequence.num_in_flight -= 1
        self.pool.release([source for source, _ in step.plan.copies])

    # Committing a step

    def _take_sample(self, sample: Sample, stop: Stop | None, now: float) -> None:
        sequence = self._requests.sequences.get(sample.seq_id)
        if sequence is None or sequence.status is Status.ENDED:
            return
        sequence.num_pending -= 1
        state = sequence.request_state
        if state.beams is not None:
            self._searches.collect(sequence, state.beams, sample, now)
            return
        num_left = sequence.max_output + state.num_prompt_tokens - len(sequence.token_ids)
        token_ids = sample.token_ids[: num_left if stop is None else min(num_left, stop.num_tokens)]
        sequence.token_ids += token_ids
        if sample.accepted and sequence.status is Status.RUNNING:
            self._requests.prefixes.keep_blocks(sequence)  # their tokens were unknown when the positions were committed
        first = state.first_token_s is None
        if first:
            state.first_token_s = now
        self._requests.events.append(
            Progressed(state.request.request_id, sequence.seq_id, sequence.index, now, len(token_ids), first)
        )
        if stop is not None:
            self._requests.end(sequence, FinishReason.STOP, now, stop_reason=stop.reason)
        elif len(token_ids) >= num_left:
            self._requests.end(sequence, FinishReason.LENGTH, now)
        if state.prefill_only:
            self._prefilled.append(sequence)

    def _hand_over(self, now: float) -> None:
        """Lets the requests go whose first token another engine waits for."""
        prefilled, self._prefilled = self._prefilled, []
        for sequence in prefilled:
            if sequence.status is not Status.ENDED:
                self._requests.hand_over(sequence.request_state, now)

    def _after_step(self, sequence: SequenceRecord, now: float) -> None:
        """Ends a request that needs only its prompt computed, or releases the blocks of a sequence that left while the step
        ran."""
        is_done = not sequence.max_output and sequence.num_committed >= len(sequence.token_ids)
        if sequence.status is Status.RUNNING and is_done:
            is_whole = sequence.request_state.request.pooling is not None  # the pooled vector is the answer
            self._requests.end_request(sequence.request_state, FinishReason.STOP if is_whole else FinishReason.LENGTH, now)
        self._requests.release_blocks(sequence)

    def _fail_sequence(self, seq_id: int, reason: FinishReason, message: str, now: float) -> None:
        sequence = self._requests.sequences.get(seq_id)
        if sequence is not None and sequence.status is not Status.ENDED:
            self._requests.end_request(sequence.request_state, reason, now, error=message)


def _plan_quotas(config: SchedulerConfig, pool: BlockPool, num_public: int) -> list[CacheQuotas]:
    """Returns the quotas of a scope in each group, beside blocks of public prefixes."""
    num_longest = -(-config.max_model_len // pool.block_size)
    return [
        CacheQuotas.plan(config.cache_scopes, group.num_blocks, 2 * config.max_num_seqs)
        if group.is_state
        else CacheQuotas.plan(config.cache_scopes, group.num_blocks - num_public, group.max_held or num_longest)
        for group in pool.groups
    ]


def _find_max_shared(quotas: list[CacheQuotas] | None, pool: BlockPool) -> int | None:
    """Returns the longest prefix, in entries, that the cache keeps for one scope; None: no limit."""
    if quotas is None:
        return None
    shares = (share.per_scope for share, group in zip(quotas, pool.groups, strict=True) if group.window is None)
    return min(shares, default=None)
