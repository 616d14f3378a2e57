"""Finds the request that kills its engines, so that no other request ends with an error because of it. Pure.

1. When an engine dies, the requests that it worked on are *suspects*. They are resumed at once, because most engines die of
   something else, and are cleared after a few steps.
2. If the next engine dies while it works on suspects, those are *confined*: once there is an engine again, they are tried one
   after another, and it gets nothing else until each of them has been cleared.
3. A confined request that has its engine to itself when it dies is the culprit.

So three deaths find a culprit, four if cleared requests ran beside it, and a request that lost two engines never ends for that.
One that kills late is cleared first and accused again later, even beside suspects that were not cleared, which may have started
after it. The end of a connection to an engine of another machine does not count as a death: a cut network accuses nobody.

The worker of a sealed request knows no other one, so it cannot see that its request has the engine to itself. Each worker
therefore waits for a random time before its confined request is tried, so that of the requests that shared two deaths hardly
two are tried at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PROBATION_STEPS: Final = 4
"""A suspect is cleared after this many steps that brought it tokens."""
PROBATION_GROWTH: Final = 4
"""Each time that a request was cleared and is accused again, it needs this many times as many steps: some kill late."""
TRIAL_SPREAD_S: Final = 10.0
"""Longest wait before the trial of a request whose client does not know what else the engine has: many times what most
take. Where a prompt alone takes seconds, trials overlap, and a request may be accused of what another one did."""
NUM_SAFE_LOSSES: Final = 2
"""A request never ends with an error because its engine died this often or less."""


class Standing(IntEnum):
    """Whether a request may have killed its engine."""

    CLEARED = 0
    SUSPECT = 1
    CONFINED = 2


@dataclass(slots=True, eq=False)
class Suspect:
    """A request, as far as deaths of engines are concerned.

    Attributes:
        prepares: its engine works on it before it has a slot: a grammar is compiled, or an image encoded.
        has_slot: its engine computes it.
        num_steps: steps since it was resumed that brought it tokens.
        num_all_steps: all steps that were counted for it.
        num_pardons: how often it was cleared.
        num_trials: how often its engine died while it was confined.
        num_idle_losses: engines that it lost since its last step.
    """

    prepares: bool = False
    has_slot: bool = False
    standing: Standing = Standing.CLEARED
    num_steps: int = 0
    num_all_steps: int = 0
    num_pardons: int = 0
    num_trials: int = 0
    num_idle_losses: int = 0

    def note_step(self) -> None:
        """Counts a step that brought tokens; enough of them clear it. Not needed while it is cleared and lost no engine."""
        self.has_slot = True
        self.num_idle_losses = 0
        self.num_steps += 1
        self.num_all_steps += 1
        if self.standing is not Standing.CLEARED and self.num_steps >= PROBATION_STEPS * PROBATION_GROWTH**self.num_pardons:
            self.standing = Standing.CLEARED
            self.num_pardons += 1
            self.num_trials = 0

    @property
    def was_accused(self) -> bool:
        """Whether it is accused, or was: one that kills late is cleared sooner than requests that started after it."""
        return self.standing is not Standing.CLEARED or self.num_pardons > 0

    @property
    def is_begun(self) -> bool:
        """Whether its engine works on it."""
        return self.has_slot or self.prepares


def judge(lost: Sequence[Suspect], *, is_shared: bool = False) -> Suspect | None:
    """Accuses requests of an engine that has died, and returns the culprit if it is known.

    Args:
        lost: all requests that the engine had, as far as this client knows.
        is_shared: it may have had others: one that it had not begun, as it waited behind them, gets another trial.
    """
    is_alone = len(lost) == 1 and lost[0].standing is Standing.CONFINED
    if is_alone and (not is_shared or lost[0].is_begun or lost[0].num_trials):
        return lost[0]
    begun = [suspect for suspect in lost if suspect.is_begun]
    is_known = any(suspect.standing is not Standing.CLEARED for suspect in begun)
    accused = [suspect for suspect in begun if suspect.was_accused] if is_known else begun or list(lost)
    for suspect in lost:
        suspect.num_idle_losses += 1
        if suspect in accused:
            _accuse(suspect)
        elif suspect.num_idle_losses > 1:  # it never got far: perhaps the engine died while reading it
            suspect.standing = max(suspect.standing, Standing.SUSPECT)
        suspect.num_steps, suspect.has_slot = 0, False
    return None


def _accuse(suspect: Suspect) -> None:
    suspect.num_trials += suspect.standing is Standing.CONFINED
    suspect.standing = Standing.SUSPECT if suspect.standing is Standing.CLEARED else Standing.CONFINED


def choose_due(held: Sequence[Suspect], sent: Sequence[Suspect]) -> list[Suspect]:
    """Returns which requests an engine gets now: all, unless some are confined.

    Args:
        held: requests that wait for the engine.
        sent: requests that it has.
    """
    if any(suspect.standing is Standing.CONFINED for suspect in sent):
        return []
    confined = [suspect for suspect in held if suspect.standing is Standing.CONFINED]
    # first a request that died in company, as it now has the engine to itself; then those that have taken the fewest steps
    return [min(confined, key=lambda s: (-s.num_trials, s.num_all_steps))] if confined else list(held)
