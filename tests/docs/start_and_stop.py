"""Stands in for `cloister serve` in the blocks of the documentation: starts it at a free port, waits until it serves, ends it.

    python start_and_stop.py PROGRAM serve ...

With `EXPLAIN` in the environment it resolves the settings and starts nothing, which takes a fifth of the time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

TIMEOUT_S = 300


def main() -> int:
    program, *arguments = sys.argv[1:]
    if os.environ.get("EXPLAIN"):
        return subprocess.run([program, *arguments, "--explain"], stdout=subprocess.DEVNULL, timeout=TIMEOUT_S).returncode
    deadline = time.monotonic() + TIMEOUT_S
    with subprocess.Popen([program, *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Serving on ") or time.monotonic() > deadline:
                break
        process.send_signal(signal.SIGTERM)
        return process.wait(TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
