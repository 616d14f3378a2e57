"""Divides the CPUs and the memory of machines among replicas. Pure."""

from __future__ import annotations


def choose_num_cpus(node_cpus: list[int], num_replicas: int) -> int | None:
    """Returns the most CPUs that each replica can have; None if there is no place for all. Pure.

    Args:
        node_cpus: CPUs of each machine.
    """
    fitting = (k for k in range(max(node_cpus, default=0), 0, -1) if sum(cpus // k for cpus in node_cpus) >= num_replicas)
    return next(fitting, None)


def share_memory(node_cpus: int, num_cpus: int, num_replicas: int) -> float:
    """Returns the share of a machine's memory for one replica: as many as find place there may come to run there. Pure."""
    return 1 / max(1, min(num_replicas, node_cpus // num_cpus))
