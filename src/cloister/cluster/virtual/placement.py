"""Which replicas prefill, which decode and which do both, and how many threads each has: the candidates of a search
(DistServe, Zhong et al. 2024, OSDI, section 4). Pure: no clock, no I/O.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

import msgspec

from cloister.cluster.roles import assign_roles
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.kv_links import LinkCosts
from cloister.cluster.virtual.prediction import ClusterShape
from cloister.engine.replica_snapshot import Role
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError

MAX_BATCHED_TOKENS: Final = 1024
"""Tokens of a step, as of `serve` on a CPU."""
DEFAULTS: Final = EngineConfig()
SHOWN_ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "mixed")

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class StepProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of replicas with `num_threads` threads each (`benchmarks.cluster_costs`).

    Attributes:
        model: its name, with the format of its matrices after a colon; empty: not stated.
        num_blocks, block_size: KV blocks of a replica, and tokens of each.
        max_model_len: tokens of the longest request.
        max_num_seqs: answers that a replica computes at once.
        step_s, token_s, sample_s, key_s, read_s, arrival_s, load_s, curve: times of a step, as of `EngineShape`.
        serve_s, export_s, pull_s, receive_s: of the links between engines, as of `LinkCosts`.
        delay_s: from the end of a step until the front has its outputs.
        entry_s, entry_bytes: time and size of the KV of a block that moves to another replica.
    """

    num_threads: Count
    num_blocks: Count
    block_size: Count
    max_model_len: Count
    max_num_seqs: Count
    step_s: Seconds
    token_s: Seconds
    sample_s: Seconds
    key_s: Seconds
    read_s: Seconds
    delay_s: Seconds
    entry_s: Seconds
    entry_bytes: Annotated[float, msgspec.Meta(gt=0)]
    arrival_s: Seconds = 0.0
    load_s: Seconds = 0.0
    serve_s: Seconds = 0.0
    export_s: Seconds = 0.0
    pull_s: Seconds = 0.0
    receive_s: Seconds = 0.0
    curve: tuple[tuple[int, Seconds], ...] = ()
    model: str = ""

    def __post_init__(self) -> None:
        if any(after[0] <= before[0] for before, after in pairwise(self.curve)):
            raise ValueError("the tokens of `curve` must rise from point to point")


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """Replicas of equal size.

    Attributes:
        profile: of each.
        roles: of each.
    """

    profile: StepProfile
    roles: tuple[Role, ...]

    @property
    def words(self) -> str:
        """Such as `1 prefill, 2 decode`."""
        counts = Counter(self.roles)
        return ", ".join(f"{counts[role]} {role}" for role in SHOWN_ROLES if counts[role])

    def flags(self, router: str) -> str:
        """Returns the arguments of `cloister serve`; without a model if the profile names none."""
        counts = Counter(self.roles)
        name, _, quant = self.profile.model.partition(":")
        flags = [shlex.quote(name)] if name else []
        if quant:
            flags.append(f"--quant {quant}")
        flags += [f"--replicas {len(self.roles)}", f"--num-threads {self.profile.num_threads}"]
        if len(counts) > 1:
            flags += [f"--prefill {counts['prefill']}", f"--decode {counts['decode']}", "--kv-transfer shm"]
        if len(self.roles) > 1:
            flags.append(f"--router {router}")
        return " ".join(flags)

    def shape(self, router: str) -> ClusterShape:
        """Returns the virtual cluster."""
        own = self.profile
        engine = EngineShape(
            num_blocks=own.num_blocks,
            block_size=own.block_size,
            max_num_seqs=own.max_num_seqs,
            max_waiting=DEFAULTS.max_waiting,
            max_model_len=own.max_model_len,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            stall_floor_s=DEFAULTS.stall_floor_ms / 1e3,
            step_s=own.step_s,
            token_s=own.token_s,
            sample_s=own.sample_s,
            key_s=own.key_s,
            read_s=own.read_s,
            arrival_s=own.arrival_s,
            load_s=own.load_s,
            links=LinkCosts(own.serve_s, own.export_s, own.pull_s, own.receive_s),
            curve=own.curve,
        )
        moves_kv = len(set(self.roles)) > 1
        part_entries = max(1, int(MAX_STEP_BYTES / own.entry_bytes))
        return ClusterShape(
            engine, router, self.roles, own.delay_s, moves_kv=moves_kv, entry_s=own.entry_s, part_entries=part_entries
        )


def list_placements(profiles: Iterable[StepProfile], num_threads: int) -> list[ReplicaPlacement]:
    """Returns all placements on `num_threads` threads: of each profile as many replicas as fit, with all assignments of roles.

    Raises:
        ConfigError: there is no room for a replica of any profile.
    """
    found = [
        ReplicaPlacement(profile, tuple(roles))
        for profile in profiles
        for roles in _list_roles(num_threads // profile.num_threads)
    ]
    if not found:
        raise ConfigError(
            f"no replica fits on {num_threads} threads; raise --threads, or measure smaller replicas", param="threads"
        )
    return found


def _list_roles(num_replicas: int) -> list[list[Role]]:
    roles: list[list[Role]] = []
    for num_prefill in range(num_replicas + 1):
        for num_decode in range(num_replicas + 1 - num_prefill):
            is_served = num_prefill + num_decode < num_replicas or (num_prefill > 0) == (num_decode > 0)
            if is_served and num_replicas:
                roles.append(assign_roles(num_replicas, num_prefill, num_decode))
    return roles
