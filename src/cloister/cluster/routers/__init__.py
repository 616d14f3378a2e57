"""Routers, one file each. Importing this package registers them."""

from cloister.cluster.routers import capacity_random, conductor, least_load, least_work, prefix_aware, round_robin
from cloister.cluster.routers.base import ROUTERS, Router, RouterContext

__all__ = [
    "ROUTERS",
    "Router",
    "RouterContext",
    "capacity_random",
    "conductor",
    "least_load",
    "least_work",
    "prefix_aware",
    "round_robin",
]
