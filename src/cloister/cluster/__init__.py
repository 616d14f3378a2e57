"""Several engines of one model behind one client: routers choose one for each request; a request survives its engine."""

from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.routers import ROUTERS
from cloister.engine.replica_snapshot import ReplicaSnapshot

__all__ = ["ROUTERS", "ReplicaSet", "ReplicaSnapshot"]
