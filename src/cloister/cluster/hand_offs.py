"""Hand-offs: requests move from a prefill replica to a decode replica after their first token."""

from __future__ import annotations

from cloister.cluster.prompt_followers import PromptFollowers
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.request_moves import RequestMoves
from cloister.cluster.request_routing import RequestRouting
from cloister.engine.in_flight import InFlightRequest


class HandOffs:
    """Pending hand-offs of a replica set.

    Attributes:
        followers: replicas that load KV of prompts while these are computed.
    """

    def __init__(self, states: ReplicaStates, routing: RequestRouting, moves: RequestMoves) -> None:
        self.followers = PromptFollowers(states.clients)
        self._states, self._clients, self._routing, self._moves = states, states.clients, routing, moves
        self._handing_off: list[dict[str, None]] = [{} for _ in states.clients]  # in the order in which they came

    def add(self, request_id: str, index: int) -> None:
        """Notes that a request leaves its replica after the first token."""
        self._handing_off[index][request_id] = None

    def has(self, request_id: str, index: int) -> bool:
        """Whether a request leaves its replica after the first token."""
        return request_id in self._handing_off[index]

    def end(self, request_id: str, index: int) -> None:
        """Called when a request has ended at its replica."""
        self.followers.end(request_id)
        self._handing_off[index].pop(request_id, None)

    def note_move(self, request_id: str, source: int, target: int) -> None:
        """Called when a request has moved."""
        self._handing_off[source].pop(request_id, None)
        self.followers.end(request_id, target)

    def note_scheduled(self, index: int, request_id: str) -> None:
        """Chooses the decode replica of a scheduled request, which loads KV of the prompt while it is computed."""
        if request_id not in self._handing_off[index]:
            return
        found = self._clients[index].find(request_id)
        if found is None or found.sink is None or found.has_output or not self._states.moves_kv:
            return
        able = self.followers.count_in(self._states.candidates(found, excluding=index))
        if (target := self._routing.place_decode(found.request, able)) is not None:
            self.followers.begin(found, index, target)

    def advance(self, index: int) -> None:
        """Called after each message of a replica: moves requests with a first token to a decode replica."""
        for request_id in list(self._handing_off[index]):
            client = self._clients[index]
            found = client.find(request_id)
            if found is None or self._moves.places.get(request_id) != index:
                self._handing_off[index].pop(request_id, None)
            elif found.sink is None and found.is_prefilled:
                client.discard_prefilled(request_id)
            elif found.sink is not None and found.has_output:
                self._place_decode(index, found)

    def _place_decode(self, index: int, found: InFlightRequest) -> None:
        request_id = found.request.request_id
        able, target = self._states.candidates(found, excluding=index), self.followers.find(request_id)
        if target is None or all(snapshot.index != target for snapshot in able):
            target = self._routing.place_decode(found.request, able)
        if target is not None:
            self._moves.move_now(request_id, index, target)
        elif found.is_prefilled:  # it goes on where it is
            self._clients[index].detach_request(request_id)
            self._clients[index].adopt(found)
            self._handing_off[index].pop(request_id, None)
            self.followers.end(request_id)
