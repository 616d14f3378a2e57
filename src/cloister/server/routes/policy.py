"""`/v1/policy`: the active privacy profile and its rules, for clients to read before they send anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.policy import Gate, Profile
from cloister.server.metrics import tells_tenants
from cloister.server.state import ServerState, json_response, state_of
from cloister.types.scope import ScopeKind

router = APIRouter()

_RECORDS: Final[Mapping[Profile, str]] = {
    Profile.OPEN: "Logs and metrics hold counts and times, no text.",
    Profile.TEAM: "Logs and metrics hold counts and times, no text.",
    Profile.PRIVATE: "Metrics hold sums over many requests and no more.",
    Profile.PARANOID: "Metrics hold sums over many requests and no more. Answers come whole, not as a stream.",
}


class PolicyReport(msgspec.Struct, frozen=True):
    """What a client may rely on.

    `summary` says in words what the profile means for what is sent, `api_key` whether the API asks for a key, `streaming`
    whether answers may be streamed, `keeping` whether the page may keep conversations on a device whose user wants it;
    `metrics` is `counts` when only sums over many requests are let out, `metrics_history` whether the figures of the last day
    are kept, and `tenants` whether an operator may see those of each tenant.
    """

    profile: str
    summary: str
    api_key: bool
    streaming: bool
    keeping: bool
    metrics: Literal["all", "counts"]
    metrics_history: bool
    tenants: bool
    object: Literal["policy"] = "policy"


@router.get("/v1/policy")
async def report_policy(request: Request) -> Response:
    """Returns the rules that this server is under."""
    state = state_of(request)
    kept = list(_kept(state))
    return json_response(describe_policy(state.reader.gate, kept))


def _kept(state: ServerState) -> Iterator[str]:
    if state.reader.responses is not None:
        yield "Responses stay in memory for an hour, unless a request sets store to false."
    if state.files is not None:
        yield "Files and batches stay on disk, sealed, until they are deleted or expire."


def describe_policy(gate: Gate, kept: Sequence[str] = ()) -> PolicyReport:
    """Returns what the gate holds people to.

    Args:
        kept: what is kept beyond a request, in sentences.
    """
    policy = gate.policy
    return PolicyReport(
        profile=policy.profile.value,
        summary=" ".join([_sharing(gate), _RECORDS[policy.profile], *kept]),
        api_key=gate.asks_for_keys,
        streaming=policy.allows("streaming"),
        keeping=policy.allows("page-storage"),
        metrics="counts" if policy.counts_only else "all",
        metrics_history=policy.allows("metrics-history"),
        tenants=tells_tenants(gate),
    )


def _sharing(gate: Gate) -> str:
    match gate.widest_scope:
        case ScopeKind.LOCAL:
            return "Everybody on this machine may share cached prompts."
        case ScopeKind.TENANT:
            return "Cached prompts may be shared inside one tenant, never between tenants."
        case _:
            return "Nothing that you send is reused for any other request."
