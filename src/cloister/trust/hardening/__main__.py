"""The launcher: `python -P -m cloister.trust.hardening [--profile P] [--read PATH] ... MODULE [ARGUMENTS]`.

It re-executes itself with a measured environment, applies every measure before a library loads, and runs the module in the same
process. It is the last program that a sealed node executes.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from cloister.trust.hardening.applying import HARDENED_PROFILES, HardeningError, apply
from cloister.trust.hardening.launching import Launch
from cloister.trust.hardening.privileges import is_measured, measured, restart_command
from cloister.trust.hardening.starter import fork_starter
from cloister.trust.hardening.state import Sealed, remember

AGAIN = "--again"
COLD = 78
"""Exit status of a node with a missing measure (EX_CONFIG of sysexits.h)."""


def main(arguments: Sequence[str]) -> None:
    """Hardens this process and runs the module; returns when the module returns."""
    launch = read_arguments(arguments)
    if launch.profile in HARDENED_PROFILES and not is_measured(os.environ):
        _restart(arguments)
    if launch.profile in HARDENED_PROFILES:
        _close_inherited()
    _launch(launch)


def _launch(launch: Launch) -> None:
    try:
        starter = fork_starter(launch.profile, launch.starter, launch.roles) if launch.with_engine else None
        results = apply(launch.profile, launch.front)
    except HardeningError as error:
        sys.stderr.write(f"{error.message}\n")
        raise SystemExit(COLD) from None
    remember(Sealed(launch.profile, launch.front, results, starter))
    sys.argv = [launch.module, *launch.arguments]
    runpy.run_module(launch.module, run_name="__main__", alter_sys=True)


def read_arguments(arguments: Sequence[str]) -> Launch:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -P -m cloister.trust.hardening", description="Run a module with no way in.")
    parser.add_argument("--profile", default="private", help="privacy profile; open and team take no measures")
    parser.add_argument("--read", action="append", default=[], metavar="PATH", help="file or directory that may be read")
    parser.add_argument(
        "--write", action="append", default=[], metavar="DIR", help="directory that may be written to until closed"
    )
    parser.add_argument("--listen", action="append", default=[], type=int, metavar="PORT", help="TCP port that may be taken")
    parser.add_argument("--connect", action="append", default=[], type=int, metavar="PORT", help="TCP port that may be called")
    parser.add_argument("--with-engine", action="store_true", help="start engine processes for the module")
    parser.add_argument("--with-attester", action="store_true", help="and one that asks the processor for reports")
    parser.add_argument(AGAIN, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("module", help="run as python -m would")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    return Launch(
        profile=given.profile,
        read=tuple(given.read),
        write=tuple(given.write),
        listen=tuple(given.listen),
        connect=tuple(given.connect),
        with_engine=given.with_engine,
        with_attester=given.with_attester,
        module=given.module,
        arguments=tuple(given.arguments),
    )


def _close_inherited() -> None:
    """Closes inherited descriptors: rules for files and the network do not apply to open descriptors."""
    os.closerange(3, max(3, *map(int, os.listdir("/proc/self/fd"))) + 1)


def _restart(arguments: Sequence[str]) -> None:
    """Re-executes the launcher with only the listed environment variables."""
    if AGAIN in arguments:
        sys.stderr.write(
            "the environment does not stay as it was measured; start the interpreter directly, without a wrapper\n"
        )
        raise SystemExit(COLD)
    command = restart_command((AGAIN, *arguments))
    os.execve(command[0], command, measured(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
