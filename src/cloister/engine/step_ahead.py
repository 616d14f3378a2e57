"""A step that runs while the engine's thread does something else: reads the last one's tokens, plans the next one.

For programs that compute on another device, where the processor is free meanwhile (decisions/0016).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cloister.types.step import StepPlan, StepResult


class StepAhead:
    """Runs plans on a thread of its own, one after the other. Called by the engine's thread.

    Waits here are as long as a step takes, as they are without this; the front watches over both (`engine.supervision`).

    Attributes:
        plan: that runs, or ran and was not taken; None otherwise.
    """

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self.plan: StepPlan | None = None
        self._run = run
        self._thread = ThreadPoolExecutor(1, "cloister-step")
        self._running: Future[StepResult] | None = None

    def start(self, plan: StepPlan) -> None:
        """Starts a step. The one before was taken."""
        self.plan, self._running = plan, self._thread.submit(self._run, plan)

    def take(self) -> StepResult:
        """Returns what the step brought, when it is done; raises what it raised."""
        running, self.plan, self._running = self._running, None, None
        assert running is not None
        return running.result()

    def pause(self) -> None:
        """Returns when no step runs: what must not happen during one may happen until the next is started."""
        if self._running is not None:
            wait([self._running])

    def drop(self) -> None:
        """Forgets the step, when it is done."""
        self.pause()
        self.plan = self._running = None
