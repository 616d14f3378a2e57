"""What happens in a virtual cluster: its replicas, the requests and the faults. Drawn from a seed (`drawing`), or read from a
file."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cloister.cluster.virtual.drafts import DraftKind
from cloister.cluster.virtual.engine_shape import PoolKind
from cloister.engine.replica_snapshot import Role

FaultKind = Literal["crash", "hang", "slow", "fail_step", "refuse_start", "network", "cut", "restart_router", "clock_jump"]
LengthError = Literal["none", "noise", "zero", "hundredfold", "either"]
OperationKind = Literal["migrate", "drain", "flip", "update", "forget", "load", "unload"]
UpdateTrouble = Literal["none", "start", "front", "step"]
NUM_ADAPTERS: Final = 2
"""Adapters that there are."""


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request of a client.

    Attributes:
        at_s: when it is sent.
        prompt: its bytes are the prompt's tokens.
        tenant: whose it is; nothing is shared between two.
        temperature: 0, or with `seed`.
        stop: text that ends the answer; empty for none.
        num_stop_ids: number of the 257 token ids that end the answer too.
        kills_after: number of its steps after which the engine dies; None: it harms no engine.
        cancel_after_s: the client leaves after this time; None: it stays.
        grammar: what the answer must match, by its name in `virtual.grammars`; empty for none.
        letters: they come far more often than others (`SamplingParams.logit_bias`).
        frequency_penalty: of `SamplingParams`.
        min_tokens: nothing ends the answer before.
        prompt_logprobs: log-probabilities of the prompt are asked for.
        adapter: number of its adapter; 0 for none.
        beams: width of the beam search for its answers (`BeamSearch`); 0: they are sampled.
        length_penalty: of that search.
    """

    at_s: float
    prompt: str
    max_tokens: int = 8
    n: int = 1
    tenant: int = 0
    temperature: float = 0.0
    seed: int = 0
    stop: str = ""
    num_stop_ids: int = 0
    kills_after: int | None = None
    logprobs: bool = False
    ignores_eos: bool = True
    priority: int = 0
    timeout_s: float = 300.0
    cancel_after_s: float | None = None
    grammar: str = ""
    letters: str = ""
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    prompt_logprobs: bool = False
    adapter: int = 0
    beams: int = 0
    length_penalty: float = 1.0


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something that goes wrong.

    Attributes:
        kind: `crash`: the engine's process ends. `hang`: it makes no step for `lasts_s`. `slow`: its steps take `amount` times
            as long for `lasts_s`. `fail_step`: `amount` of its next steps raise. `refuse_start`: `amount` of its next processes
            do not start. `network`: a share of `amount` of all datagrams is lost, and one of them repeated, and each is up to
            `jitter_s` late. `cut`: no datagram arrives, in the direction of `ways`. `restart_router`: the front is killed,
            and another one starts. `clock_jump`: all machines are suspended for `lasts_s`.
        replica: whose; the last two kinds concern all.
    """

    at_s: float
    kind: FaultKind
    replica: int = 0
    lasts_s: float = 1.0
    amount: float = 1.0
    jitter_s: float = 0.0
    ways: Literal["both", "to_engine", "to_front"] = "both"


class OperatorAction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something that an operator or a controller does.

    Attributes:
        kind: `migrate`: the request of `job` goes to `replica`. `drain`: `replica` is drained, and returned after `lasts_s`.
            `flip`: the role of `replica` becomes `role`. `update`: all replicas get new engines. `forget`: the tenant of `job`
            drops what is cached of it. `load`, `unload`: all replicas get an adapter, or give it up.
        weights: of these (`EngineShape.weights`); None: the same as before.
        adapter: its number.
        cancelled_after_s: the call that loads it is cancelled then; None: never.
        trouble: what is wrong with new engines: that of `replica` does not start or cannot make a step, or none fits the front.
    """

    at_s: float
    kind: OperationKind
    replica: int = 0
    job: int = 0
    lasts_s: float = 0.5
    role: Role = "mixed"
    weights: int | None = None
    adapter: int = 1
    cancelled_after_s: float | None = None
    trouble: UpdateTrouble = "none"


class Scenario(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A run of a virtual cluster.

    Attributes:
        seed: of all that is drawn while it runs, such as which datagram is lost.
        scheduler: in which order engines compute requests.
        roles: of each replica; empty if all are mixed.
        rebalance: load is levelled all the time.
        copies_prefixes: hot prefixes are copied to other replicas.
        num_standby: number of standby replicas.
        min_replicas: minimum number of running replicas under scaling; None: all run.
        moves_kv: share of requests that are told to load KV from another replica, or to leave theirs for it.
        damages_kv: share of the datagrams with KV in which a bit changes.
        num_blocks: KV blocks of each replica; few of them make requests wait and be preempted.
        verify_replay: share of the answers that another replica computes again.
        clock_offsets_s: by how much the clocks of the replicas' machines are ahead of the front's.
        length_error: what predicted lengths of answers are multiplied by: for each request something near 1 (`noise`, a
            standard deviation of 0.3), 0, 100, or one of both.
        idle_timeout_s: engines end after this time without requests; None: they stay.
        drafts: what their drafters make: nothing, chains or trees.
        helper_s: a thread beside the steps takes up to this time for a grammar, and a tenth of it for a mask.
        num_adapters: number of adapters loaded at the start.
        tiers: slots of each replica's KV tiers in memory and on disk; 0 for none.
        damages_tiers: share of what is torn, late or lost there, or cannot be written.
        pool: the tier in memory is one that all engines share (`shared`), or in which they also lend each other slots (`peer`).
    """

    seed: int
    num_replicas: int = 2
    router: str = "least_load"
    scheduler: str = "fcfs"
    roles: tuple[Role, ...] = ()
    rebalance: bool = False
    copies_prefixes: bool = False
    num_standby: int = 0
    min_replicas: int | None = None
    num_blocks: int = 64
    max_num_seqs: int = 8
    max_waiting: int = 16
    stall_timeout_s: float = 2.0
    delay_s: float = 0.001
    moves_kv: float = 0.0
    damages_kv: float = 0.0
    clock_offsets_s: tuple[float, ...] = ()
    verify_replay: float = 0.0
    length_error: LengthError = "none"
    idle_timeout_s: float | None = None
    drafts: DraftKind = "none"
    helper_s: float = 0.0
    num_adapters: int = 0
    tiers: tuple[int, int] = (0, 0)
    damages_tiers: float = 0.0
    pool: PoolKind = "none"
    jobs: tuple[Job, ...] = ()
    faults: tuple[InjectedFault, ...] = ()
    operations: tuple[OperatorAction, ...] = ()
