"""Has decode replicas load the KV of prompts while prefill replicas compute them (decisions/0037)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cloister.engine.client import EngineClient
from cloister.engine.in_flight import InFlightRequest
from cloister.engine.replica_snapshot import ReplicaSnapshot

MAX_FOLLOWED: Final = 4
"""Maximum number of prompts of one replica that are followed at once, and that one replica follows: half of the capacity of
their links, so that loads of other requests need not wait."""


@dataclass(frozen=True, slots=True)
class _Follower:
    """Indexes of the replica that computes a prompt, and of the one that follows it."""

    source: int
    target: int


class PromptFollowers:
    """The followed prompts of a replica set, by request id. KV that a follower lacks is computed where the request
    continues."""

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas
        self._followers: dict[str, _Follower] = {}

    def __len__(self) -> int:
        return len(self._followers)

    def begin(self, found: InFlightRequest, source: int, target: int) -> None:
        """Has a replica load the KV of a prompt that another one has begun to compute."""
        self.end(found.request.request_id)
        endpoint = self._replicas[source].kv_endpoint
        followers = self._followers.values()
        num_most = max(sum(each.source == source for each in followers), sum(each.target == target for each in followers))
        if endpoint is not None and num_most < MAX_FOLLOWED:
            self._followers[found.request.request_id] = _Follower(source, target)
            self._replicas[target].prefetch(found, endpoint, follows=True)

    def find(self, request_id: str) -> int | None:
        """Returns the replica that follows a prompt; None if none does."""
        follower = self._followers.get(request_id)
        return None if follower is None else follower.target

    def count_in(self, replicas: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
        """Returns replicas with the requests that will be handed to them counted in, so that concurrent prompts do not all
        choose the same idle one."""
        targets = [follower.target for follower in self._followers.values()]
        return [replace(each, num_requests=each.num_requests + targets.count(each.index)) for each in replicas]

    def end(self, request_id: str, place: int | None = None) -> None:
        """Ends the follower of a request, unless the request continues there.

        Args:
            place: index of the replica that has the request from now on; None if it has ended.
        """
        follower = self._followers.pop(request_id, None)
        if follower is not None and follower.target != place:
            self._replicas[follower.target].cancel_prefetch(request_id)

    def lose(self, index: int) -> None:
        """Ends the followers at a replica and of its prompts: its engine has ended."""
        for request_id in [name for name, each in self._followers.items() if index in (each.source, each.target)]:
            self.end(request_id, index)
