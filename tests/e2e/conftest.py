from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import Browser, browsing


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The one browser of the session."""
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    """The browser as a visitor on a desktop has it who prefers nothing."""
    window.resize(1280, 800)
    window.prefer(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    return window
