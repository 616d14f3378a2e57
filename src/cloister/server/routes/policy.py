"""`/v1/policy`: the active privacy profile and its rules, for clients to read before they send anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.policy import Gate, Profile
from cloister.server.metrics import tells_tenants
from cloister.server.route_table import RouteTable
from cloister.server.state import ServerState, json_response, state_of
from cloister.types.scope import ScopeKind

router = RouteTable()

_RECORDS: Final[Mapping[Profile, str]] = {
    Profile.OPEN: "Logs and metrics hold counts and times, no text.",
    Profile.TEAM: "Logs and metrics hold counts and times, no text.",
    Profile.PRIVATE: "Metrics hold sums over many requests and no more.",
    Profile.PARANOID: "Metrics hold sums over many requests and no more. Answers come whole, not as a stream.",
}


class PolicyReport(msgspec.Struct, frozen=True):
    """The privacy rules of the server.

    `summary` describes the profile's effects on requests, `api_key` is whether the API requires a key, `streaming` whether
    answers may be streamed, `keeping` whether the page may store conversations on the device if its user wants it; `metrics` is
    `counts` if only sums over many requests are published, `metrics_history` whether metrics of the last day are kept, and
    `tenants` whether an operator may see those of each tenant.
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
    """Returns the privacy rules of this server."""
    state = state_of(request)
    kept = list(_kept(state))
    return json_response(describe_policy(state.reader.gate, kept))


def _kept(state: ServerState) -> Iterator[str]:
    if state.reader.responses is not None:
        yield "Responses stay in memory for an hour, unless a request sets store to false."
    if state.files is not None:
        yield "Files and batches stay on disk, sealed, until they are deleted or expire."


def describe_policy(gate: Gate, kept: Sequence[str] = ()) -> PolicyReport:
    """Returns the rules that the gate enforces.

    Args:
        kept: sentences on what is kept beyond a request.
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
