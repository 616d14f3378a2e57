"""Runs `pip install` for the Makefile and says how far it is, as pip keeps what a compiler does to itself for a minute.

    python deploy/install.py [--log FILE] ARGUMENT...    # of `pip install`

All that pip says goes to the log; its end is shown if the installation failed.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

NUM_LAST_LINES = 40
COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\] Building CXX object .*?([^/]+)\.o\s*")
FETCHED = re.compile(r"Collecting ([\w.-]+)")


def describe(lines: Iterable[str]) -> Iterator[str]:
    """Yields what is fetched and what was compiled, in the words of pip and of ninja."""
    for line in lines:
        if found := COMPILED.fullmatch(line):
            yield f"compiled {found[1]} of {found[2]}: {found[3]}"
        elif found := FETCHED.match(line):
            yield f"installing {found[1]}"


def keep(lines: Iterable[str], log: TextIO) -> Iterator[str]:
    """Yields the lines and writes each to the log first."""
    for line in lines:
        log.write(line)
        yield line


def main() -> int:
    """Returns pip's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("build/install.log"))
    options, arguments = parser.parse_known_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-v", "install", *arguments]
    begin, end = ("\r\033[K  ", "") if sys.stdout.isatty() else ("  ", "\n")  # a terminal shows one line that changes
    with options.log.open("w+", encoding="utf-8", buffering=1) as log:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        ) as pip:
            assert pip.stdout is not None
            try:
                for shown in describe(keep(pip.stdout, log)):
                    print(f"{begin}{shown}", end=end, flush=True)
            except BaseException:
                pip.terminate()
                raise
        print("\r\033[K" if sys.stdout.isatty() else "", end="", flush=True)
        if pip.returncode:
            log.seek(0)
            last = "".join(log.readlines()[-NUM_LAST_LINES:])
            print(f"{last}pip failed; {options.log} has all that it said", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
