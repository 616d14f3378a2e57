"""Overlaps a step on a device with reading the tokens of the last step and planning the next one (decisions/0016).

Uses one thread: it launches a step and waits for the result later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from cloister.types.step import StepPlan, StepResult


class LaunchingRunner(Protocol):
    """A runner that launches a step on a device and waits for it later."""

    def start(self, plan: StepPlan) -> Callable[[], StepResult]: ...


class StepAhead:
    """The step in progress on the device.

    Attributes:
        plan: plan of that step; None if there is none.
    """

    def __init__(self, runner: LaunchingRunner) -> None:
        self.plan: StepPlan | None = None
        self._runner = runner
        self._finish: Callable[[], StepResult] | None = None

    def start(self, plan: StepPlan) -> None:
        """Launches a step; the previous one must have been waited for."""
        self._finish = self._runner.start(plan)
        self.plan = plan

    def wait(self) -> StepResult:
        """Waits for the step and returns its result, or raises its exception."""
        finish, self.plan, self._finish = self._finish, None, None
        assert finish is not None
        return finish()

    def pause(self) -> None:
        """Waits for the step and keeps its result; the device is idle until the next one starts."""
        if self._finish is None:
            return
        done: Future[StepResult] = Future()
        try:
            done.set_result(self._finish())
        except Exception as error:  # raised by `wait`
            done.set_exception(error)
        self._finish = done.result

    def drop(self) -> None:
        """Waits for the step and discards its result."""
        self.pause()
        self.plan = self._finish = None
