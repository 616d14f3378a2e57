"""The client of engines that Ray places."""

from __future__ import annotations

from cloister.cluster.backend.placer import RayPlacer
from cloister.cluster.replica_set import ReplicaSet


class PlacedReplicas(ReplicaSet):
    """Replicas that Ray places: it starts before them, and ends after them.

    Attributes:
        placer: places their hosts; set it before `start`.
    """

    placer: RayPlacer

    async def start(self) -> None:
        """Starts Ray, or joins it, and then all engines at once. Raises as `ReplicaSet.start`."""
        try:
            await self.placer.connect()
        except BaseException:
            await self.placer.close()
            raise
        await super().start()

    async def drain(self, timeout_s: float) -> None:
        """Drains all engines at once, and ends the hosts."""
        try:
            await super().drain(timeout_s)
        finally:
            await self.placer.close()
