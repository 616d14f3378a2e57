"""Looks at the board under load in a real browser: axe-core's rules light and dark, desk and phone, and screenshots.

axe-core is no part of this package (MPL-2.0, used as it comes): `npm pack axe-core` brings it, --axe names its axe.min.js.
Needs selenium, chromium and chromedriver. Exits with 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from cloister.client.residue_audit.node import RunningProgram
from cloister.policy import Credentials, KeyQuota
from cloister.policy.keyfile import write_credentials
from tests.browser import Browser, browsing

VIEWS = {
    "board": ("light", 1280, 1240, False),
    "board-dark": ("dark", 1280, 1240, False),
    "board-phone": ("light", 390, 844, True),
    "board-phone-dark": ("dark", 390, 844, True),
}
"""Name -> colours, width, height, whether it is a phone."""
QUESTIONS = (
    "What does the PostgreSQL command VACUUM do?",
    "What does the PostgreSQL command EXPLAIN do?",
    "What is the Python module json?",
    "What does the Python function sorted do?",
)

console = Console()


@dataclass
class Load:
    """Requests from a few threads until it is stopped; each thread has one of the keys."""

    url: str
    keys: list[str]
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._ask, args=(seed, key)) for seed, key in enumerate(self.keys)]
        for thread in threads:
            thread.start()
        return threads

    def _ask(self, seed: int, key: str) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
            while not self.stopped.is_set():
                body = {
                    "model": "cloister-5m",
                    "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
                    "max_tokens": draw.choice((8, 40, 120, 0 if draw.random() < 0.1 else 200)),
                    "ignore_eos": True,
                }
                client.post("/v1/chat/completions", json=body)
                time.sleep(draw.random() * 2)


def make_keys(file: Path) -> list[str]:
    """Writes a file of keys, and returns them: an operator's, two of tenants, and one that may begin few requests."""
    credentials, operator = Credentials.empty().add("ops", tenant="operations", is_operator=True)
    credentials, ann = credentials.add("ann", tenant="lab")
    credentials, bob = credentials.add("bob", tenant="press-office")
    credentials, eve = credentials.add("eve", tenant="students", limits=KeyQuota(requests_per_minute=20))
    write_credentials(file, credentials)
    return [operator, ann, bob, eve]


@contextmanager
def serving(model: str, *flags: str) -> Iterator[str]:
    """Yields the address of a `cloister serve`."""
    program = RunningProgram.start(["serve", model, "--port", "0", "--no-log-requests", *flags])
    try:
        yield program.address
    finally:
        program.stop()


def check(browser: Browser, axe: str) -> list[str]:
    """Returns the rules that the page breaks, each with the elements that do."""
    browser.run(axe)
    script = "const done = arguments[0]; axe.run().then(({ violations }) => done(violations))"
    broken = browser.driver.execute_async_script(script)
    return [f"{rule['id']}: {', '.join(node['target'][0] for node in rule['nodes'][:5])}" for rule in broken]


def look(browser: Browser, url: str, options: argparse.Namespace, key: str) -> int:
    """Opens the board, waits for its lines, and returns how many rules are broken."""
    browser.open(url)
    browser.click("#open-settings")
    browser.find("#set-key").send_keys(key)
    browser.click("#settings [aria-label=Close]")
    browser.click("#go-board")
    browser.find(".card")
    time.sleep(options.seconds)
    num_broken = 0
    for name, (scheme, width, height, is_phone) in VIEWS.items():
        browser.resize(width, height, phone=is_phone)
        browser.prefer(prefers_color_scheme=scheme)
        time.sleep(1.5)
        browser.driver.save_screenshot(str(options.output / f"page-{name}.png"))
        broken = check(browser, options.axe.read_text()) if options.axe is not None else []
        console.print(f"{name}: {'not checked' if options.axe is None else broken or '0 violations'}")
        num_broken += len(broken)
    return num_broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core; unset, only screenshots")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the screenshots")
    parser.add_argument("--seconds", type=float, default=60, help="how long to watch before looking")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder) / "chromium") as browser:
        keys = make_keys(Path(folder) / "keys.json")
        with serving("cloister-5m", "--num-threads", "1", "--api-keys", str(Path(folder) / "keys.json")) as url:
            load = Load(url, keys)
            threads = load.run()
            try:
                return 1 if look(browser, url, options, keys[0]) else 0
            finally:
                load.stopped.set()
                for thread in threads:
                    thread.join()


if __name__ == "__main__":
    sys.exit(main())
