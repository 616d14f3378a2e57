"""What happens to a sealed unit of several machines: requests, faults and attacks. Drawn from a seed, or read from a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

from cloister.cluster.virtual.scenario import Job
from cloister.trust.sealing import NODE_KEY_LIFE_S

UnitFaultKind = Literal[
    "crash", "hang", "fail_step", "refuse_start", "end_machine", "lose_machine", "cut_path", "reset", "hold", "change",
    "repeat", "stranger", "clock", "suspend",
]  # fmt: skip
UNIT_FAULT_KINDS: Final[tuple[UnitFaultKind, ...]] = get_args(UnitFaultKind)
MOST_CLOCK_S: Final = 45.0
"""By so much a machine's clock is wrong at most."""
READY_S: Final = 8.0
"""By then the machines of a unit have found each other, if nothing is wrong."""
LONG_SHARE: Final = 0.02
"""Share of the scenarios that last until a member that was started again is used."""
LONG_S: Final = NODE_KEY_LIFE_S + 1500.0


class UnitFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something that goes wrong, or that an attacker does.

    Attributes:
        kind: `crash`: the process of an engine ends. `hang`: it makes no step for `lasts_s`. `fail_step`: `amount` of its next
            steps raise. `refuse_start`: `amount` of its next processes do not start. `end_machine`: the node's processes are
            killed, and started again after `lasts_s`, with new keys. `lose_machine`: the same without power, so that nobody is
            told. `cut_path`: nothing passes between the leader and the machine for `lasts_s`, in the direction of `ways`. Of an
            attacker between these two: `reset`: a share of `amount` of their connections ends. `hold`: nothing passes on such a
            share for `lasts_s`, but both ends answer. `change`: a bit of what passes next on such a share. `repeat`: all
            connections to the machine are made again, with what was said over them. `stranger`: `amount` connections to its
            unit port, which prove nothing and end after `lasts_s`. `clock`: the machine's clock is off by `amount` seconds from
            now on. `suspend`: all machines are suspended for `lasts_s`.
        machine: 0 is the leader; what lies between the leader and a machine is that of a member.
        engine: of the machine.
    """

    at_s: float
    kind: UnitFaultKind
    machine: int = 0
    engine: int = 0
    lasts_s: float = 1.0
    amount: float = 1.0
    ways: Literal["both", "to_member", "to_leader"] = "both"


class UnitScenario(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag="unit"):
    """A run of a sealed unit of several machines.

    Attributes:
        seed: of all that is drawn while it runs, such as which engine a worker draws.
        num_members: machines besides the leader.
        num_engines: of each machine.
        num_blocks, max_num_seqs, max_waiting, stall_timeout_s: of each engine.
        delay_s: of a packet between two machines.
        judging_s: a machine takes up to this time to verify evidence.
        clock_offsets_s: by how much the clocks of the machines are wrong, the leader's first.
        holds_requests: an attacker holds each request for as long as it is opened: it was sealed under the oldest statement
            whose key has not ended.
    """

    seed: int
    num_members: int = 1
    num_engines: int = 2
    num_blocks: int = 64
    max_num_seqs: int = 8
    max_waiting: int = 16
    stall_timeout_s: float = 2.0
    delay_s: float = 0.001
    judging_s: float = 0.01
    clock_offsets_s: tuple[float, ...] = ()
    holds_requests: bool = False
    jobs: tuple[Job, ...] = ()
    faults: tuple[UnitFault, ...] = ()


def draw_unit_scenario(seed: int) -> UnitScenario:
    """Draws a scenario: mostly small ones, because they find as much, and a person has to read them."""
    draw = random.Random(f"unit {seed}")
    num_members, num_engines = draw.choice((1, 1, 2, 2, 3)), draw.choice((1, 2, 2))
    span_s = draw.choice((0.5, 2.0, 2.0, 20.0))
    jobs = [_draw_job(draw, span_s) for _ in range(draw.randint(1, 6))]
    faults = [_draw_fault(draw, num_members, num_engines, span_s, jobs) for _ in range(draw.choice((0, 1, 1, 2, 3, 4, 6)))]
    if draw.random() < LONG_SHARE:
        faults.append(UnitFault(at_s=READY_S + 1.0, kind="end_machine", machine=1, lasts_s=draw.choice((1.0, 20.0))))
        jobs += [
            msgspec.structs.replace(_draw_job(draw, 1.0), at_s=round(draw.random() * LONG_S, 4))
            for _ in range(draw.randint(2, 8))
        ]
    return UnitScenario(
        seed=seed,
        num_members=num_members,
        num_engines=num_engines,
        num_blocks=draw.choice((24, 24, 64)),
        max_num_seqs=draw.choice((2, 4, 8)),
        max_waiting=draw.choice((4, 16)),
        stall_timeout_s=draw.choice((0.5, 2.0)),
        delay_s=draw.choice((0.0002, 0.002, 0.03)),
        judging_s=draw.choice((0.0, 0.01, 0.3)),
        clock_offsets_s=tuple(draw.choice((0.0, 0.0, -MOST_CLOCK_S, MOST_CLOCK_S)) for _ in range(num_members + 1)),
        jobs=tuple(jobs),
        faults=tuple(faults),
    )


def _draw_job(draw: random.Random, span_s: float) -> Job:
    is_drawn, leaves = draw.random() < 0.4, draw.random() < 0.1
    return Job(
        at_s=round(READY_S + draw.random() * span_s, 4),
        prompt="".join(draw.choice("abcdef ") for _ in range(draw.choice((1, 6, 30)))),
        max_tokens=150 if leaves else draw.choice((1, 8, 40, 90, 150)),
        n=draw.choice((1, 1, 2)),
        temperature=draw.choice((0.7, 1.0)) if is_drawn else 0.0,
        seed=draw.getrandbits(31) if is_drawn else 0,
        stop=draw.choice(("", "", "", "ab")),
        num_stop_ids=0 if leaves else draw.choice((0, 0, 3)),
        kills_after=draw.choice((1, 2, 6)) if draw.random() < 0.06 else None,
        timeout_s=draw.choice((300.0, 300.0, 300.0, 300.0, 20.0, 2.0)),
        cancel_after_s=round(draw.random(), 4) if leaves else None,
    )


def _draw_fault(draw: random.Random, num_members: int, num_engines: int, span_s: float, jobs: Sequence[Job]) -> UnitFault:
    """Draws a fault; most of them come while a request is answered."""
    kind = draw.choice((*UNIT_FAULT_KINDS, "crash", "crash", "reset", "reset", "cut_path", "end_machine"))
    is_of_member = kind in ("cut_path", "reset", "hold", "change", "repeat", "stranger") or draw.random() < 0.5
    amounts = {
        "fail_step": (1.0, 3.0),
        "refuse_start": (1.0, 2.0),
        "stranger": (1.0, 40.0),
        "clock": (-MOST_CLOCK_S, 0.0, MOST_CLOCK_S),
        "reset": (0.5, 1.0),
        "hold": (0.5, 1.0),
        "change": (0.5, 1.0),
    }
    struck = draw.choice(jobs)
    begun_s, lasts_s = draw.choice(
        (
            (struck.at_s, 0.005 * struck.max_tokens),
            (struck.at_s, 0.012 * struck.max_tokens),
            (READY_S, span_s + 0.5),
            (0.0, READY_S),
        )
    )
    return UnitFault(
        at_s=round(begun_s + draw.random() * lasts_s, 4),
        kind=kind,
        machine=draw.randint(1, num_members) if is_of_member else 0,
        engine=draw.randrange(num_engines),
        lasts_s=draw.choice((0.05, 2.0, 8.0, 40.0) if kind != "hang" else (0.05, 2.0, 1000.0)),
        amount=draw.choice(amounts.get(kind, (1.0,))),
        ways=draw.choice(("both", "both", "to_member", "to_leader")) if kind == "cut_path" else "both",
    )
