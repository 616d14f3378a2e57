"""A step that a device computes while the engine reads the tokens of the last one and plans the next (decisions/0016).

One thread does all of it: a step is launched, and its result is waited for later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from cloister.types.step import StepPlan, StepResult


class LaunchingRunner(Protocol):
    """A runner that returns as soon as a device has work, and waits for it later."""

    def start(self, plan: StepPlan) -> Callable[[], StepResult]: ...


class StepAhead:
    """The step that is on the device.

    Attributes:
        plan: of that step; None where there is none.
    """

    def __init__(self, runner: LaunchingRunner) -> None:
        self.plan: StepPlan | None = None
        self._runner = runner
        self._finish: Callable[[], StepResult] | None = None

    def start(self, plan: StepPlan) -> None:
        """Launches a step. The one before was waited for."""
        self._finish = self._runner.start(plan)
        self.plan = plan

    def wait(self) -> StepResult:
        """Waits for the step and returns what it brought; raises what it raised."""
        finish, self.plan, self._finish = self._finish, None, None
        assert finish is not None
        return finish()

    def pause(self) -> None:
        """Waits for the step, and keeps what it brought: until the next one starts the device is idle."""
        if self._finish is None:
            return
        done: Future[StepResult] = Future()
        try:
            done.set_result(self._finish())
        except Exception as error:  # raised by `wait`
            done.set_exception(error)
        self._finish = done.result

    def drop(self) -> None:
        """Waits for the step, and forgets it."""
        self.pause()
        self.plan = self._finish = None
