"""Draws scenarios of a virtual cluster, each from a seed. Pure."""

from __future__ import annotations

import random
from typing import Final, TypeVar, get_args

import msgspec

from cloister.cluster.virtual.engine_shape import PoolKind
from cloister.cluster.virtual.grammars import GRAMMARS
from cloister.cluster.virtual.scenario import (
    FaultKind,
    InjectedFault,
    Job,
    LengthError,
    OperationKind,
    OperatorAction,
    Scenario,
    UpdateTrouble,
)
from cloister.engine.replica_snapshot import ROLES, Role

LENGTH_ERRORS: Final[tuple[LengthError, ...]] = get_args(LengthError)
OPERATION_KINDS: Final[tuple[OperationKind, ...]] = ("migrate", "drain", "flip")
"""Operations drawn for every cluster of several replicas."""
UPDATE_TROUBLES: Final[tuple[UpdateTrouble, ...]] = get_args(UpdateTrouble)
FAULT_KINDS: Final[tuple[FaultKind, ...]] = (
    "crash", "hang", "slow", "fail_step", "refuse_start", "network", "cut", "restart_router", "clock_jump",
)  # fmt: skip


SHAPED_SHARE: Final = 0.5
"""Share of the scenarios in which answers have grammars, letters that come often, stop strings of these, and least lengths."""
DRAFTED_SHARE: Final = 0.35
"""Share of the scenarios whose engines draft."""
ADAPTED_SHARE: Final = 0.25
"""Share of the scenarios with adapters."""
CANCELLED_SHARE: Final = 0.4
"""Share of the calls that load adapters which are cancelled."""
TIERED_SHARE: Final = 0.2
"""Share of the scenarios whose engines have KV tiers."""
MAX_JOBS: Final = 32
"""6% of the scenarios would have more, and a third of all requests."""
SEARCHED_SHARE: Final = 0.15
"""Share of the scenarios in which beams are searched for some of the answers."""
TIER_TEXTS: Final = ("Of what is kept for later use, this is part", "What was let go may come back, as the text")
IDLE_SHARE: Final = 0.2
"""Share of the scenarios in which engines are idle now and then."""
SCHEDULER_SHARE: Final = 0.5
"""Share of the scenarios whose engines may compute requests in another order than that of arrival."""
MOVED_SHARE: Final = 0.3
"""Share of the clusters of several replicas in which one long request moves again and again."""
MOVES_SPAN_S: Final = 0.8
SCALED_SHARE: Final = 0.25
"""Share of the clusters of several replicas in which replicas are added and removed as the load changes."""
STARTED_S: Final = 0.5
"""By then the engines have started."""
STANDBY_SHARE: Final = 0.15
"""Share of the clusters of several replicas in which one of them stands by."""
COPIED_SHARE: Final = 0.25
"""Share of the clusters of several replicas in which hot prefixes are copied; a quarter of it where KV moves anyway."""
UPDATED_SHARE: Final = 0.2
"""Share of the clusters of several replicas in which replicas get new engines."""
UPDATE_SPAN_S: Final = 4.0
"""In this time their requests come, each twice: about so long takes an update."""
IDLE_SLOWDOWN: Final = 4
"""How many times as slowly requests come there."""
SHARED_TEXT: Final = "Between two engines goes a text. "
"""How prompts begin in a scenario in which KV moves."""


_TimedItem = TypeVar("_TimedItem", Job, InjectedFault, OperatorAction)


def draw_scenario(seed: int, routers: tuple[str, ...] = ("least_load",), schedulers: tuple[str, ...] = ("fcfs",)) -> Scenario:
    """Draws a scenario, usually a small one: small ones find as many faults, and are easier to read."""
    error = random.Random(f"lengths {seed}").choice(LENGTH_ERRORS)
    drawn = first = msgspec.structs.replace(_draw_scenario(seed, routers), length_error=error)
    draw = random.Random(f"scheduler {seed}")
    if draw.random() < SCHEDULER_SHARE:
        drawn = msgspec.structs.replace(drawn, scheduler=draw.choice(schedulers))
    draw = random.Random(f"moves {seed}")
    if drawn.num_replicas > 1 and draw.random() < MOVED_SHARE:
        drawn = _move_one(drawn, draw)
    draw = random.Random(f"standby {seed}")
    if drawn.num_replicas > 1 and drawn.idle_timeout_s is None and draw.random() < STANDBY_SHARE:
        drawn = msgspec.structs.replace(drawn, num_standby=1)
    draw = random.Random(f"copies {seed}")
    if drawn.num_replicas > 1 and draw.random() < (COPIED_SHARE if not drawn.moves_kv else COPIED_SHARE / 4):
        drawn = _copy_prefixes(drawn, draw)
    draw = random.Random(f"scaling {seed}")
    if drawn.num_replicas > 1 and draw.random() < SCALED_SHARE:
        drawn = _scale(drawn, draw)
    draw = random.Random(f"updates {seed}")
    if drawn.num_replicas > 1 and draw.random() < UPDATED_SHARE:
        drawn = _update(drawn, draw)
    draw = random.Random(f"answers {seed}")
    if draw.random() < SHAPED_SHARE:
        jobs = tuple(_shape_answer(job, draw) for job in drawn.jobs)
        drawn = msgspec.structs.replace(drawn, jobs=jobs, helper_s=draw.choice((0.0, 0.02, 0.02, 0.6)))
    draw = random.Random(f"drafts {seed}")
    if draw.random() < DRAFTED_SHARE:
        drawn = msgspec.structs.replace(drawn, drafts=draw.choice(("chain", "tree")))
        if drawn.num_replicas > 1 and draw.random() < MOVED_SHARE:
            drawn = _move_in_bursts(drawn, draw)
    draw = random.Random(f"adapters {seed}")
    if draw.random() < ADAPTED_SHARE:
        drawn = _cancel_loads(_adapt(drawn, draw), random.Random(f"cancelled {seed}"))
    draw = random.Random(f"tiers {seed}")
    if draw.random() < TIERED_SHARE:
        drawn = _keep_in_tiers(drawn, draw)
    draw = random.Random(f"beams {seed}")
    if draw.random() < SEARCHED_SHARE:
        drawn = msgspec.structs.replace(drawn, jobs=tuple(_search_answer(job, draw) for job in drawn.jobs))
    return _keep_few(drawn, max(MAX_JOBS, len(first.jobs)), random.Random(f"few {seed}"))


def _cancel_loads(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario with some of its calls that load adapters cancelled, before or after they have."""
    operations = tuple(
        msgspec.structs.replace(each, cancelled_after_s=round(draw.uniform(0.0, draw.choice((0.02, 0.2))), 4))
        if each.kind == "load" and draw.random() < CANCELLED_SHARE
        else each
        for each in scenario.operations
    )
    return msgspec.structs.replace(scenario, operations=operations)


def _keep_few(scenario: Scenario, most: int, draw: random.Random) -> Scenario:
    """Returns a scenario with at most `most` of its jobs: some of the functions above multiply them."""
    if len(scenario.jobs) <= most:
        return scenario
    kept = sorted(draw.sample(range(len(scenario.jobs)), most))
    places = {number: place for place, number in enumerate(kept)}
    return msgspec.structs.replace(
        scenario,
        jobs=tuple(scenario.jobs[number] for number in kept),
        operations=tuple(
            msgspec.structs.replace(each, job=places.get(each.job, each.job % most)) for each in scenario.operations
        ),
    )


def _search_answer(job: Job, draw: random.Random) -> Job:
    """Returns a job whose answers are the best of a beam search, or the same job. A search allows no biases, penalties or stop
    strings."""
    if draw.random() < 0.4:
        return job
    width = draw.choice((1, 2, 3))
    return Job(
        at_s=job.at_s,
        prompt=job.prompt,
        max_tokens=draw.choice((1, 3, 8, 16)),
        n=min(job.n, width),
        tenant=job.tenant,
        num_stop_ids=draw.choice((0, 0, 2, 9)),
        kills_after=job.kills_after,
        ignores_eos=job.ignores_eos,
        priority=job.priority,
        timeout_s=job.timeout_s,
        cancel_after_s=job.cancel_after_s,
        adapter=job.adapter,
        beams=width,
        length_penalty=draw.choice((1.0, 0.0, -1.0, 2.0)),
    )


def _keep_in_tiers(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario whose prompts come again when the device may have let them go, and tiers may have them."""
    replace = msgspec.structs.replace
    texts = [f"{draw.choice(TIER_TEXTS)} {number}. {SHARED_TEXT}" for number in range(draw.choice((2, 4)))]
    span_s = draw.choice((0.5, 3.0))
    jobs = tuple(
        replace(job, prompt=draw.choice(texts) + job.prompt[:6], at_s=round(job.at_s + number * draw.random() * span_s, 4))
        for number, jobs in enumerate((scenario.jobs, scenario.jobs[:5], scenario.jobs[:5]))
        for job in jobs
    )
    drops = tuple(
        OperatorAction(at_s=round(draw.random() * 2 * span_s, 4), kind="forget", job=draw.randrange(len(jobs)))
        for _ in range(draw.choice((0, 0, 1)))
    )
    tiers = draw.choice(((40, 0), (0, 40), (8, 24), (6, 80)))
    damages, num_blocks = draw.choice((0.0, 0.1, 0.3)), draw.choice((14, 18, 24))
    pool: PoolKind = draw.choice(("none", "shared", "shared", "peer"))
    return replace(
        scenario,
        tiers=tiers,
        damages_tiers=damages,
        pool=pool if tiers[0] and scenario.num_replicas > 1 else "none",
        num_blocks=num_blocks,
        jobs=jobs,
        operations=scenario.operations + drops,
    )


def _move_in_bursts(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario whose requests move while they get several tokens in a step; some of them near their end."""
    moves = tuple(
        OperatorAction(
            at_s=round(max(job.at_s, STARTED_S) + draw.random() * MOVES_SPAN_S / 2, 4),
            kind="migrate",
            replica=draw.randrange(scenario.num_replicas),
            job=number,
        )
        for number, job in enumerate(scenario.jobs)
        for _ in range(draw.choice((0, 2, 4)))
    )
    return msgspec.structs.replace(scenario, operations=scenario.operations + moves)


def _shape_answer(job: Job, draw: random.Random) -> Job:
    """Returns a job whose answer has a form."""
    replace = msgspec.structs.replace
    job = replace(job, prompt_logprobs=draw.random() < 0.15)
    kind, letters = draw.choice(("plain", "grammar", "grammar", "letters", "letters")), draw.choice(("ab", "abc", "a b"))
    if kind == "grammar":
        return replace(
            job,
            grammar=draw.choice(tuple(GRAMMARS)),
            max_tokens=draw.choice((job.max_tokens, 40, 100)),
            stop=draw.choice(("", "", "ab", "b c", "5")),
            num_stop_ids=draw.choice((0, 0, 0, job.num_stop_ids)),
            ignores_eos=draw.random() < 0.3,
        )
    if kind == "letters":
        return replace(
            job,
            letters=letters,
            max_tokens=draw.choice((job.max_tokens, 40, 100)),
            stop=draw.choice(("", "bab", "aab", "baaab", "a b", "bbabba")),
            frequency_penalty=draw.choice((0.0, 0.0, 0.25, 1.0)),
            min_tokens=draw.choice((0, 0, 4, 15)),
            num_stop_ids=draw.choice((0, job.num_stop_ids)),
        )
    return replace(job, min_tokens=draw.choice((0, 6)))


def _adapt(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario whose requests have adapters, which come and go. Some requests begin alike and differ in theirs.

    A front is not killed where adapters change, as in `_update`.
    """
    replace = msgspec.structs.replace
    jobs = tuple(replace(job, adapter=draw.choice((0, 1, 1, 2))) for job in scenario.jobs)
    longest_s = max(job.at_s for job in jobs)
    if draw.random() < 0.4:
        shared = SHARED_TEXT * draw.choice((1, 2))
        jobs = tuple(
            replace(job, prompt=shared + job.prompt[:8], tenant=0, at_s=round(job.at_s + 0.2 * (job.adapter % 2), 4))
            for job in jobs
        )
    changes = tuple(
        OperatorAction(
            at_s=round(draw.random() * (longest_s + 0.5), 4),
            kind=draw.choice(("load", "unload")),
            adapter=draw.choice((1, 2)),
        )
        for _ in range(draw.choice((0, 0, 1, 2, 3)))
    )
    faults = tuple(fault for fault in scenario.faults if not (changes and fault.kind == "restart_router"))
    return replace(
        scenario,
        num_adapters=draw.choice((1, 2, 2, 2)),
        jobs=jobs,
        operations=scenario.operations + changes,
        faults=faults,
    )


def _copy_prefixes(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario in which many requests begin alike and replicas have room for copies of that. Some of them come late,
    when leases have ended, and some tenants drop what is cached."""
    shared = SHARED_TEXT * draw.choice((1, 2))
    span_s = draw.choice((0.5, 4.0))
    jobs = tuple(
        msgspec.structs.replace(job, prompt=shared + job.prompt, at_s=round(job.at_s + draw.random() * span_s, 4))
        for job in draw.choice((3, 4)) * scenario.jobs
    )
    drops = tuple(
        OperatorAction(at_s=round(draw.random() * (span_s + 1.0), 4), kind="forget", job=draw.randrange(len(jobs)))
        for _ in range(draw.choice((0, 1, 3)))
    )
    return msgspec.structs.replace(
        scenario,
        copies_prefixes=True,
        router=draw.choice(("prefix_aware", "prefix_aware", scenario.router)),  # others seldom leave one replica hot
        num_blocks=draw.choice((64, 160)),
        jobs=jobs,
        operations=scenario.operations + drops,
    )


def _scale(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario in which one replica is too few now and then: requests come in bursts, with a rest between."""
    rest_s = draw.choice((0.5, 2.0, 4.0))
    bursts = tuple(
        msgspec.structs.replace(
            job, at_s=round(number * rest_s + job.at_s * draw.random(), 4), max_tokens=draw.choice((job.max_tokens, 60))
        )
        for number in range(draw.choice((1, 2, 3)))
        for job in draw.choice((1, 2)) * scenario.jobs
    )
    return msgspec.structs.replace(
        scenario,
        min_replicas=draw.choice((1, 1, 1, 2)) if scenario.idle_timeout_s is None else 0,
        max_num_seqs=min(scenario.max_num_seqs, 4),
        max_waiting=max(scenario.max_waiting, 4),
        jobs=bursts,
        operations=tuple(
            msgspec.structs.replace(operation, at_s=round(operation.at_s + draw.random() * rest_s, 4))
            for operation in scenario.operations
        ),
    )


def _update(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario whose replicas get new engines while its requests come. Its front is not killed meanwhile: the engines
    of a real one end with it."""
    replace = msgspec.structs.replace
    updates = tuple(
        OperatorAction(
            at_s=round(draw.random() * UPDATE_SPAN_S / 2, 4),
            kind="update",
            replica=draw.randrange(scenario.num_replicas),
            weights=draw.choice((None, 1, 1, 1, 2)),
            trouble=draw.choice(("none", "none", "none", *UPDATE_TROUBLES)),
        )
        for _ in range(draw.choice((1, 1, 2)))
    )
    crashes = tuple(
        InjectedFault(at_s=0.0, kind="crash", replica=draw.randrange(scenario.num_replicas))
        for _ in range(draw.choice((0, 1, 1, 2)))
    )
    faults = (*scenario.faults, *crashes)
    return replace(
        scenario,
        jobs=tuple(_spread(job, draw) for job in 2 * scenario.jobs),
        faults=tuple(
            replace(fault, at_s=round(draw.random() * UPDATE_SPAN_S, 4)) for fault in faults if fault.kind != "restart_router"
        ),
        operations=scenario.operations + updates,
    )


def _spread(job: Job, draw: random.Random) -> Job:
    """Returns a job that comes during an update; some of them last long."""
    at_s = round(draw.random() * UPDATE_SPAN_S, 4)
    if draw.random() < 0.5:
        return msgspec.structs.replace(job, at_s=at_s)
    return msgspec.structs.replace(job, at_s=at_s, max_tokens=80, num_stop_ids=0, stop="", ignores_eos=True)


def _move_one(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario in which one request is long, and told to move again and again while it runs."""
    number = draw.randrange(len(scenario.jobs))
    jobs = list(scenario.jobs)
    job = jobs[number] = msgspec.structs.replace(jobs[number], max_tokens=80, num_stop_ids=0, stop="", ignores_eos=True)
    moves = tuple(
        OperatorAction(
            at_s=round(job.at_s + draw.random() * MOVES_SPAN_S, 4),
            kind="migrate",
            replica=draw.randrange(scenario.num_replicas),
            job=number,
        )
        for _ in range(12)
    )
    return msgspec.structs.replace(scenario, jobs=tuple(jobs), operations=scenario.operations + moves)


def _draw_scenario(seed: int, routers: tuple[str, ...]) -> Scenario:
    draw = random.Random(seed)
    if draw.random() < 0.01:
        return _draw_steady(seed, draw, routers)
    num_replicas = draw.choice((1, 2, 2, 3))
    span_s = draw.choice((0.05, 0.5, 2.0))
    drawn = Scenario(
        seed=seed,
        num_replicas=num_replicas,
        router=draw.choice(routers),
        num_blocks=draw.choice((10, 14, 24, 64)),
        max_num_seqs=draw.choice((2, 4, 8)),
        max_waiting=draw.choice((1, 4, 16)),
        stall_timeout_s=draw.choice((0.5, 2.0)),
        delay_s=draw.choice((0.0002, 0.002, 0.03)),
        clock_offsets_s=tuple(draw.choice((0.0, 0.0, -50.0, 1000.0)) for _ in range(num_replicas)),
        verify_replay=draw.choice((0.0, 0.0, 0.0, 0.5)),
        jobs=tuple(_draw_job(draw, span_s) for _ in range(draw.randint(1, 8))),
        faults=tuple(_draw_fault(draw, num_replicas, span_s) for _ in range(draw.choice((0, 1, 1, 2, 3, 4)))),
    )
    if num_replicas > 1:
        drawn = _draw_moves(draw, _move_kv(drawn, draw) if draw.random() < 0.5 else drawn, span_s)
    return _let_rest(drawn, draw) if draw.random() < IDLE_SHARE else drawn


def _let_rest(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario in which engines are idle between its requests, which come more slowly."""
    return msgspec.structs.replace(
        scenario,
        idle_timeout_s=draw.choice((0.05, 0.3)),
        jobs=tuple(_delay(job) for job in scenario.jobs),
        faults=tuple(_delay(fault) for fault in scenario.faults),
        operations=tuple(_delay(operation) for operation in scenario.operations),
    )


def _delay(item: _TimedItem) -> _TimedItem:
    return msgspec.structs.replace(item, at_s=round(IDLE_SLOWDOWN * item.at_s, 4))


def _move_kv(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a scenario in which KV moves: its prompts begin alike, are longer than some blocks, and come one after the other,
    so that one replica has what another one needs."""
    replace = msgspec.structs.replace
    return replace(
        scenario,
        moves_kv=draw.choice((0.5, 1.0)),
        damages_kv=draw.choice((0.0, 0.3)),
        jobs=tuple(
            replace(job, prompt=SHARED_TEXT + job.prompt, at_s=round(0.3 * job.at_s + 0.1 * number, 4))
            for number, job in enumerate(scenario.jobs)
        ),
    )


def _draw_moves(draw: random.Random, scenario: Scenario, span_s: float) -> Scenario:
    """Adds roles, and what moves requests."""
    num_replicas = scenario.num_replicas
    roles: tuple[Role, ...] = ()
    if draw.random() < 0.4:
        first: Role = draw.choice(("prefill", "decode"))
        others: tuple[Role, ...] = ("mixed", "decode" if first == "prefill" else "prefill")
        roles = (first, *(draw.choice(others) for _ in range(num_replicas - 1)))
    return msgspec.structs.replace(
        scenario,
        roles=roles,
        rebalance=draw.random() < 0.3,
        operations=tuple(_draw_operation(draw, scenario, span_s) for _ in range(draw.choice((0, 0, 1, 2, 4, 8)))),
    )


def _draw_operation(draw: random.Random, scenario: Scenario, span_s: float) -> OperatorAction:
    return OperatorAction(
        at_s=round(draw.random() * (span_s + 0.5), 4),
        kind=draw.choice(("migrate", "migrate", "migrate", *OPERATION_KINDS)),
        replica=draw.randrange(scenario.num_replicas),
        job=draw.randrange(len(scenario.jobs)),
        lasts_s=draw.choice((0.0, 0.2, 2.0)),
        role=draw.choice(ROLES),
    )


def _draw_steady(seed: int, draw: random.Random, routers: tuple[str, ...]) -> Scenario:
    """Draws a scenario of many requests, in which the speeds of replicas can be compared; one of them may become slow."""
    num_replicas, slow = draw.choice((2, 3)), draw.random() < 0.7
    jobs = tuple(
        Job(
            at_s=round(draw.random() * 16.0, 4),
            prompt="".join(draw.choice("abcdef ") for _ in range(draw.choice((1, 20, 100)))),
            max_tokens=draw.choice((20, 60)),
        )
        for _ in range(60)
    )
    fault = InjectedFault(
        at_s=round(1.0 + draw.random() * 2.0, 4), kind="slow", replica=draw.randrange(num_replicas), lasts_s=30.0, amount=4.0
    )
    router = draw.choice(routers)
    return Scenario(seed=seed, num_replicas=num_replicas, router=router, jobs=jobs, faults=(fault,) if slow else ())


def _draw_job(draw: random.Random, span_s: float) -> Job:
    shared = draw.choice(("", "", "You are a helpful assistant. ", "Once upon a time "))
    own = "".join(draw.choice("abcdef ") for _ in range(draw.choice((1, 6, 20))))
    is_drawn = draw.random() < 0.4
    return Job(
        at_s=round(draw.random() * span_s, 4),
        prompt=shared + own,
        max_tokens=draw.choice((1, 3, 8, 20, 32)),
        n=draw.choice((1, 1, 2, 4)),
        tenant=draw.choice((0, 0, 1)),
        temperature=draw.choice((0.7, 1.0)) if is_drawn else 0.0,
        seed=draw.getrandbits(31) if is_drawn else 0,
        stop=draw.choice(("", "", "", "a", "ab")),
        num_stop_ids=draw.choice((0, 20, 60)),
        kills_after=draw.choice((1, 2, 6)) if draw.random() < 0.1 else None,
        logprobs=draw.random() < 0.2,
        ignores_eos=draw.random() < 0.5,
        priority=draw.choice((0, 0, 1)),
        timeout_s=draw.choice((300.0, 300.0, 300.0, 2.0, 0.3)),
        cancel_after_s=round(draw.random() * 0.6, 4) if draw.random() < 0.2 else None,
    )


def _draw_fault(draw: random.Random, num_replicas: int, span_s: float) -> InjectedFault:
    kind = draw.choice(FAULT_KINDS)
    amounts = {"slow": (3.0, 30.0), "fail_step": (1.0, 1.0, 3.0), "refuse_start": (1.0, 2.0), "network": (0.0, 0.05, 0.3)}
    return InjectedFault(
        at_s=round(draw.random() * (span_s + 0.5), 4),
        kind=kind,
        replica=draw.randrange(num_replicas),
        lasts_s=draw.choice((0.05, 0.5, 2.0, 8.0) if kind != "hang" else (0.05, 0.5, 2.0, 1000.0)),
        amount=draw.choice(amounts.get(kind, (1.0,))),
        jitter_s=draw.choice((0.0, 0.01, 0.3)) if kind == "network" else 0.0,
        ways=draw.choice(("both", "both", "to_engine", "to_front")) if kind == "cut" else "both",
    )
