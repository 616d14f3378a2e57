"""Where engines hang: stacks as `faulthandler` writes them, and how often the same one came (ByteRobust, SOSP 2025: stacks are
clustered, and machines of one cluster are replaced together). Pure.

A stack is code locations. It has no arguments and no variables, so nothing that a user sent.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

StackTrace = tuple[str, ...]
"""Code locations, innermost first, such as "engine/core.py:190 step". Empty if none could be read."""

NUM_SHOWN: Final = 6
"""Innermost locations that a line of the log shows."""
MAX_CLUSTERS: Final = 64
_LOOP: Final = re.compile(r"/core\.py:\d+ (run|step)$")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$')


def read_step_stack(text: str) -> StackTrace:
    """Returns the stack of the thread that runs an engine's steps, from the output of `faulthandler` for all threads."""
    threads = [_read_thread(part) for part in text.split("\n\n")]
    return next((stack for stack in threads if any(_LOOP.search(location) for location in stack)), ())


def _read_thread(text: str) -> StackTrace:
    frames = (_FRAME.match(line) for line in text.splitlines())
    return tuple(f"{'/'.join(PurePath(found[1]).parts[-2:])}:{found[2]} {found[3]}" for found in frames if found)


class StackClusters:
    """Equal stacks of engines that hung, over replicas and over time."""

    def __init__(self) -> None:
        self._clusters: OrderedDict[StackTrace, list[int]] = OrderedDict()
        self._num_hangs = 0

    def add(self, stack: StackTrace, replica: int) -> str:
        """Counts a stack; returns one line about it and those like it."""
        self._num_hangs += 1
        replicas = self._clusters.setdefault(stack, [])
        replicas.append(replica)
        self._clusters.move_to_end(stack)
        if len(self._clusters) > MAX_CLUSTERS:
            self._clusters.popitem(last=False)
        if not stack:
            return "it is unknown where it hangs: its process does not answer, like one that is stopped or frozen"
        where = f"it hangs at {' < '.join(stack[:NUM_SHOWN])}"
        if len(replicas) == 1:
            return f"{where}; no engine has hung there before"
        who = ", ".join(str(index) for index in sorted(set(replicas)))
        return f"{where}; {len(replicas)} of {self._num_hangs} hangs were there, of replica {who}"


def find_same(stack: StackTrace, stalled: Mapping[int, StackTrace]) -> list[int]:
    """Returns which stalled replicas hang at the place where one of them hung, so that waiting for them is pointless.

    Args:
        stack: of the one that hung; an unknown one is like no other.
        stalled: stacks of replicas whose requests wait without a step.
    """
    return [index for index, other in stalled.items() if stack and other == stack]
