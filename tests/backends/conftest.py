"""What the back ends' tests share."""

import pytest

from cloister.backends.torch import schedule
from tests.device import use_interpreter

use_interpreter()


@pytest.fixture(autouse=True)
def share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a team share work of any size, so that small models show what threads do."""
    monkeypatch.setattr(schedule, "WORTH_SHARING", 0.0)
