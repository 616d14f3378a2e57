"""`/v1/replicas/{index}/drain` and `/return`: an operator takes a replica out of service and back, without a lost request."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.state import ServerState, admission_of, json_response, state_of

router = APIRouter()


class DrainedReplica(msgspec.Struct, frozen=True):
    """A replica that gets no new requests.

    Attributes:
        num_requests: requests that it still has, because no other replica had room; it ends them.
    """

    replica: int
    num_requests: int


class ReturnedReplica(msgspec.Struct, frozen=True):
    replica: int


@router.post("/v1/replicas/{index:int}/drain")
async def drain(request: Request, index: int) -> Response:
    """Moves the requests of a replica to others while they run, and gives it no new ones."""
    state = _check_operator(request)
    return json_response(DrainedReplica(index, await state.engine.drain_replica(index)))


@router.post("/v1/replicas/{index:int}/return")
async def give_back(request: Request, index: int) -> Response:
    """Gives a replica requests again."""
    state = _check_operator(request)
    state.engine.return_replica(index)
    return json_response(ReturnedReplica(index))


def _check_operator(request: Request) -> ServerState:
    """Returns the server's state. Raises PolicyError if the requester is no operator."""
    state = state_of(request)
    state.reader.gate.check_operator(admission_of(request))
    return state
