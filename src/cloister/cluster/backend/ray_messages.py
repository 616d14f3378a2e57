"""Messages between a front and the driver process of Ray, as lines of JSON."""

from __future__ import annotations

import msgspec


class RaySettings(msgspec.Struct, frozen=True):
    """To a driver, first: what it is to ask Ray for.

    Attributes:
        address: of a running cluster; None starts one on this machine, on loopback.
        folder: of a Ray that it starts, which it removes at its end; empty if it joins one.
        num_cpus: of each replica; None divides those of the cluster.
        num_gpus: of each replica.
        front: the front's certificate, PEM.
    """

    num_replicas: int
    address: str | None
    folder: str
    num_cpus: int | None
    num_gpus: int
    front: str


class StartHost(msgspec.Struct, frozen=True, tag=True):
    """To a driver: a host is wanted in the place of this replica."""

    host: int
    index: int


class KillHost(msgspec.Struct, frozen=True, tag=True):
    """To a driver: end this host."""

    host: int


class Connected(msgspec.Struct, frozen=True, tag=True):
    """From a driver: Ray is there, and has reserved a place for each replica."""

    num_nodes: int
    takes_commands: bool


class HostStarted(msgspec.Struct, frozen=True, tag=True):
    """From a driver: a host listens."""

    host: int
    address: str
    port: int
    certificate: str
    num_threads: int
    memory_share: float


class HostEnded(msgspec.Struct, frozen=True, tag=True):
    """From a driver: a host has ended, or could not start."""

    host: int
    how: str


class RayFailed(msgspec.Struct, frozen=True, tag=True):
    """From a driver: Ray cannot be used; sent once before it exits."""

    message: str


DriverCommand = StartHost | KillHost
DriverReport = Connected | HostStarted | HostEnded | RayFailed
