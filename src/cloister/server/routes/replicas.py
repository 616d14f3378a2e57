"""`/v1/replicas`: an operator sees the replicas, and takes one out of service and back, without a lost request."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloister.engine.replica_snapshot import ReplicaSnapshot, ReplicaState, Role, UpdateProgress
from cloister.policy.policy import Use
from cloister.server.errors import invalid
from cloister.server.parse import parse_body
from cloister.server.route_table import RouteTable
from cloister.server.schemas import Strict
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.server.weight_updates import check_weights

router = RouteTable()


class ReplicaReport(msgspec.Struct, frozen=True):
    """One replica.

    Attributes:
        replica: its index, from 0.
        pid: process id of its engine; null while none runs, on another machine, and where load is null.
        load: null under a profile that gives sums over many requests only.
    """

    replica: int
    role: Role
    state: ReplicaState
    pid: int | None
    load: ReplicaLoad | None


class ReplicaLoad(msgspec.Struct, frozen=True):
    """The load of a replica now, and what it did since the server started.

    Attributes:
        num_running, num_waiting: requests with and without a slot.
        num_used_blocks, num_total_blocks: KV blocks after its last step; 0 before the first one.
        num_routed: requests that it was given.
        num_migrated: requests among those that were moved to it while they ran.
        num_kv_loads: how often KV came to it from another replica; in several rounds for a request that ran.
        num_prefix_copies: copies of hot prefixes among those loads.
        slowness: how many times as long as those of the others its steps take.
        num_mismatches: answers that another replica computed differently.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_total_blocks: int
    num_routed: int
    num_migrated: int
    num_kv_loads: int
    num_prefix_copies: int
    slowness: float
    num_mismatches: int


class UpdateBody(Strict):
    """Attributes:
    model: the new weights: a name, a directory or a file, as the server's own machine has it.
    """

    model: str = Field(min_length=1, max_length=4096)


class UpdateReport(msgspec.Struct, frozen=True):
    """A rolling update, which runs or was the last one.

    Attributes:
        state: `failed`: it ended early, and replicas that were not updated keep their engines. `rolling_back`: it has failed,
            and replicas with other weights get those from before again.
        num_updated: replicas that have a new engine.
        error: why it failed; null otherwise.
    """

    state: Literal["running", "rolling_back", "done", "failed"]
    num_updated: int
    num_replicas: int
    error: str | None


class ReplicaList(msgspec.Struct, frozen=True):
    """Reply of /v1/replicas.

    Attributes:
        update: null if there was none.
    """

    data: list[ReplicaReport]
    update: UpdateReport | None = None
    object: Literal["list"] = "list"


class DrainedReplica(msgspec.Struct, frozen=True):
    """A replica that gets no new requests.

    Attributes:
        num_requests: requests that it still has, because no other replica had room; it finishes them.
    """

    replica: int
    num_requests: int


class ReturnedReplica(msgspec.Struct, frozen=True):
    replica: int


@router.get("/v1/replicas")
async def list_replicas(request: Request) -> Response:
    """Returns role, state and load of each replica."""
    state = _check_operator(request)
    has_load = not state.reader.gate.policy.counts_only
    reports = [_report(snapshot, has_load) for snapshot in state.engine.snapshots()]
    return json_response(ReplicaList(reports, _report_update(state.engine.update_progress)))


def _report_update(progress: UpdateProgress | None) -> UpdateReport | None:
    if progress is None:
        return None
    state: Literal["running", "rolling_back", "done", "failed"] = "failed" if progress.error else "done"
    if progress.is_running:
        state = "rolling_back" if progress.is_rolling_back else "running"
    return UpdateReport(state, progress.num_updated, progress.num_replicas, progress.error or None)


def _report(replica: ReplicaSnapshot, has_load: bool) -> ReplicaReport:
    load = ReplicaLoad(
        replica.num_requests - replica.num_waiting,
        replica.num_waiting,
        replica.num_used_blocks,
        replica.num_total_blocks,
        replica.num_routed,
        replica.num_migrated,
        replica.num_kv_loads,
        replica.num_prefix_copies,
        round(replica.slowness, 3),
        replica.num_mismatches,
    )
    return ReplicaReport(
        replica.index, replica.role, replica.state, replica.pid if has_load else None, load if has_load else None
    )


@router.post("/v1/replicas/{index:int}/drain")
async def drain(request: Request, index: int) -> Response:
    """Moves the requests of a replica to others while they run, and gives it no new ones. Refuses to drain the last healthy
    one.
    """
    state = _check_command(request)
    state.engine.check_drain(index)
    return json_response(DrainedReplica(index, await state.engine.drain_replica(index)))


@router.post("/v1/replicas/{index:int}/return")
async def give_back(request: Request, index: int) -> Response:
    """Gives a replica requests again."""
    state = _check_command(request)
    state.engine.return_replica(index)
    return json_response(ReturnedReplica(index))


@router.post("/v1/replicas/update")
async def update(request: Request) -> Response:
    """Begins to replace the engines of all replicas, one after another, while their requests go on."""
    state = _check_command(request)
    state.reader.gate.policy.check({"rolling-update": Use(True, "a request")})
    state.engine.update_replicas()
    return json_response(_report_update(state.engine.update_progress))


@router.post("/v1/replicas/update_weights")
async def update_weights(request: Request) -> Response:
    """Begins to replace the engines of all replicas by engines of other weights, while their requests go on."""
    state = _check_operator(request)
    state.reader.gate.policy.check({"rolling-update": Use(True, "a request")})
    body = await state.off_the_loop(parse_body, await request.body(), UpdateBody)
    await state.off_the_loop(check_weights, state.reader, body.model)
    state.engine.update_replicas(body.model)
    return json_response(_report_update(state.engine.update_progress))


def _check_command(request: Request) -> ServerState:
    """Returns the server's state.

    Raises:
        PolicyError: the requester is not an operator.
        InvalidRequestError: there is a body, which would do nothing.
    """
    state = _check_operator(request)
    if request.state.num_unread_bytes:
        raise invalid("This request takes no body and no fields; leave them out.", code="unknown_parameter")
    return state


def _check_operator(request: Request) -> ServerState:
    """Returns the server's state. Raises PolicyError if the requester is not an operator."""
    state = state_of(request)
    state.reader.gate.check_operator(admission_of(request))
    return state
