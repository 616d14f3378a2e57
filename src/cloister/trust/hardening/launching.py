"""The launcher's arguments, their consequences for each process of the node, and executing the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from cloister.trust.hardening.applying import HARDENED_PROFILES
from cloister.trust.hardening.measure import Needs
from cloister.trust.hardening.privileges import measured, restart_command
from cloister.trust.hardening.starter import Role

ENGINE: Final = "engine"
ENGINE_MODULE: Final = "cloister.engine.engine_process"
WORKER: Final = "worker"
WORKER_MODULE: Final = "cloister.private.workers.zygote"
SEALER: Final = "sealer"
KEY_SERVICE_MODULE: Final = "cloister.private.workers.key_service"
ATTESTER: Final = "attester"
ATTESTER_MODULE: Final = "cloister.trust.attestation.process"
REPORTS: Final = "/sys/kernel/config/tsm/report"
"""Directory of the kernel's report interface, in which each request creates a directory."""
ROLE_OF: Final = {ENGINE_MODULE: ENGINE, WORKER_MODULE: WORKER, KEY_SERVICE_MODULE: SEALER, ATTESTER_MODULE: ATTESTER}
HUB_SNAPSHOTS: Final = "snapshots"
"""In the hub's cache, models--OWNER--NAME/snapshots/COMMIT holds links to files in models--OWNER--NAME/blobs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a node to start.

    Attributes:
        read: paths that its processes read, in addition to the interpreter and its libraries.
        write: directories that the engine, or a module without one, writes to until it is locked down.
        listen, connect: TCP ports of the front.
        with_engine: the module starts engine processes.
        with_attester: and an attester process.
        module, arguments: module and arguments of the front.
    """

    profile: str
    module: str
    arguments: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    listen: tuple[int, ...] = ()
    connect: tuple[int, ...] = ()
    with_engine: bool = False
    with_attester: bool = False

    @property
    def front(self) -> Needs:
        """Needs of the process that runs the module: it has network access and, if there is an engine, no write access."""
        write = () if self.with_engine else self.write
        return Needs("front", read=self.read, write=write, listen=self.listen, connect=self.connect)

    @property
    def starter(self) -> Needs:
        """Needs of the process that forks others: all of theirs."""
        return Needs("starter", read=self.read, write=(*self.write, *self._reports), fork=True)

    @property
    def roles(self) -> Mapping[str, Role]:
        """Roles that the starter may create: only the front has network access."""
        return {
            ENGINE: Role(ENGINE_MODULE, Needs(ENGINE, read=self.read, write=self.write), "before it is ready"),
            WORKER: Role(WORKER_MODULE, Needs(WORKER, read=self.read, fork=True), "before its first request"),
            SEALER: Role(KEY_SERVICE_MODULE, Needs(SEALER), "before it makes keys"),
            ATTESTER: Role(ATTESTER_MODULE, Needs(ATTESTER, read=self.read, write=self._reports)),
        }

    @property
    def _reports(self) -> tuple[str, ...]:
        return (REPORTS,) if self.with_attester else ()

    def command_line(self) -> Iterator[str]:
        """Yields the equivalent arguments of the launcher."""
        yield from ("--profile", self.profile)
        for flag, values in (
            ("--read", self.read),
            ("--write", self.write),
            ("--listen", self.listen),
            ("--connect", self.connect),
        ):
            for value in values:
                yield from (flag, str(value))
        if self.with_engine:
            yield "--with-engine"
        if self.with_attester:
            yield "--with-attester"
        yield from (self.module, *self.arguments)


def execute(launch: Launch) -> NoReturn:
    """Replaces this process by the launcher, with a measured environment if the profile requires measures."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = restart_command(tuple(launch.command_line()))
    os.execve(command[0], command, measured(os.environ) if launch.profile in HARDENED_PROFILES else dict(os.environ))


def reading(models: Iterable[Path], files: Iterable[Path]) -> tuple[str, ...]:
    """Returns the paths to make readable for models, and for files that may be replaced while the node runs.

    Links are followed: a rule applies to the file, not to its name. A replaced file is a different one, so its directory is
    included.
    """
    paths: dict[str, None] = {}
    for model in models:
        model = model.expanduser()
        if HUB_SNAPSHOTS in model.parts:
            model = Path(*model.parts[: model.parts.index(HUB_SNAPSHOTS)])
        root = model.resolve()
        inside = [entry.resolve() for entry in root.iterdir()] if root.is_dir() else []
        paths[str(root)] = None
        paths.update(dict.fromkeys(str(entry) for entry in inside if not entry.is_relative_to(root)))
    for file in files:
        file = file.expanduser()
        paths.update(dict.fromkeys((str(file.parent.absolute()), str(file.resolve().parent))))
    return tuple(paths)
