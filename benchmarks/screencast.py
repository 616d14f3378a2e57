"""Records the moving picture of the README: a question, its answer as it streams, then the board.

Drives the page of `cloister serve` in Chromium, takes screenshots and joins them to a GIF. Every frame is what the browser
showed, and the answer plays at the pace at which it came; pauses, such as the board's second between two readings, are cut to
0.4 s. While the board is shown, eight requests run. Needs selenium, chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
from PIL import Image, ImageChops

from benchmarks.board import serving
from tests.browser import Browser, browsing

ANSWER_TIMEOUT_S = 60
FRAME_S = 0.1
LONGEST_FRAME_S = 0.4
NUM_COLOURS = 64
SIZE = (960, 600)


class Recorder:
    """Frames, when each was taken and how long it is held."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._frames: list[Image.Image] = []
        self._taken_s: list[float] = []
        self._held_s: list[float] = []

    def take(self, hold_s: float = 0.0) -> None:
        """Takes a frame; one that looks like the last is dropped unless it is to be held."""
        time.sleep(FRAME_S)
        picture = Image.open(io.BytesIO(self._browser.driver.get_screenshot_as_png())).convert("RGB")
        if self._frames and not hold_s and ImageChops.difference(self._frames[-1], picture).getbbox() is None:
            return
        self._frames.append(picture)
        self._taken_s.append(time.monotonic())
        self._held_s.append(hold_s)

    def write(self, file: Path) -> None:
        """Writes the GIF."""
        gaps_s = [after - before for before, after in pairwise(self._taken_s)] + [0.0]
        shown_s = [held or min(gap, LONGEST_FRAME_S) for gap, held in zip(gaps_s, self._held_s, strict=True)]
        palette = _join(self._frames[len(self._frames) // 2], self._frames[-1]).quantize(NUM_COLOURS)
        first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self._frames)
        first.save(
            file, save_all=True, append_images=others, duration=[round(s * 1000) for s in shown_s], loop=0, optimize=True
        )


def _join(above: Image.Image, below: Image.Image) -> Image.Image:
    """Both in one picture, whose colours are those of either."""
    both = Image.new("RGB", (above.width, above.height + below.height))
    both.paste(above, (0, 0))
    both.paste(below, (0, above.height))
    return both


@contextmanager
def load(url: str) -> Iterator[None]:
    """Eight requests at once while the block runs."""
    stopped = threading.Event()

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 150}
        with httpx.Client(timeout=120) as client:
            while not stopped.is_set():
                client.post(f"{url}/v1/chat/completions", json=body)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def record(browser: Browser, url: str, question: str, file: Path) -> None:
    """Asks one question and looks at the board."""
    browser.resize(*SIZE)
    browser.open(url)
    browser.find("#message").click()
    recorder = Recorder(browser)
    recorder.take()
    for start in range(0, len(question), 4):
        browser.press(question[start : start + 4])
        recorder.take()
    browser.click("#send")
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    recorder.take()
    while browser.all("#stop") and time.monotonic() < deadline:
        recorder.take()
    recorder.take(hold_s=2.5)
    with load(url):
        browser.click("#go-board")
        for _ in range(60):
            recorder.take()
        recorder.take(hold_s=3.0)
    recorder.write(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m", help="what answers")
    parser.add_argument("--question", default="Give me three tips for sleeping better.")
    parser.add_argument("--output", type=Path, default=Path("docs/images/page.gif"))
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        browsing(Path(folder) / "chromium") as browser,
        serving(options.model) as url,
    ):
        record(browser, url, options.question, options.output)


if __name__ == "__main__":
    main()
