"""Threads for arithmetic. Torch's own are not used: they cut a product differently for each number of threads (rule 6).

Work is cut into tasks of fixed shape, each computed by one thread; who computes which task changes no bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

Task = Callable[[], object]
WORTH_SHARING = 1.5e8
"""Operations below which two Python threads cost each other more (the interpreter's lock changes hands at every torch call)
than the second one saves; measured on two cores, where 3e7 made a step of 8 decodes take 13.8 ms instead of 7.3."""


class Team:
    """The calling thread and `num_threads - 1` helpers, which take tasks from one queue."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._helpers = ThreadPoolExecutor(num_threads - 1, "arithmetic", use_one_thread_per_operation)

    def run(self, tasks: Sequence[Task], num_operations: float) -> None:
        """Runs every task and returns when all are done. A helper that is late to wake finds nothing left to do.

        Args:
            num_operations: of all tasks together; few of them are not worth sharing.
        """
        if self._helpers is None or len(tasks) < 2 or num_operations < WORTH_SHARING:
            for task in tasks:
                task()
            return
        queue = deque(tasks)
        count = min(self.num_threads, len(tasks)) - 1
        futures = [self._helpers.submit(_drain, queue) for _ in range(count)]
        try:
            _drain(queue)
        finally:
            queue.clear()
            started = [future for future in futures if not future.cancel()]
            wait(started)
        for future in started:
            future.result()


def use_one_thread_per_operation() -> None:
    """Keeps torch and its libraries from splitting an operation; a tenth of a microsecond when nothing changes.

    OpenMP keeps the setting thread by thread, so every thread that computes must ask for it.
    """
    torch.set_num_threads(1)


def _drain(queue: deque[Task]) -> None:
    while True:
        try:
            task = queue.popleft()
        except IndexError:
            return
        task()
