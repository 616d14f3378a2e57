"""Has a thread before it closes itself, or before it takes its measures at all; prints what became of it, as JSON.

Argument: `before closing` or `before measures`.
"""

import json
import mmap
import os
import sys
import threading

from cloister.trust.hardening import HardeningError, Needs, apply, close
from cloister.trust.hardening.privileges import measured

NEEDS = Needs("worker")


def main(when: str) -> None:
    told: dict[str, str] = {}
    ready = threading.Event()

    def try_to_map_code() -> None:
        ready.wait()
        try:
            mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)
        except PermissionError as error:
            told["map code"] = type(error).__name__

    thread = threading.Thread(target=try_to_map_code)
    os.environ.clear()
    os.environ.update(measured({}))
    try:
        if when == "before measures":
            thread.start()
        results = apply("private", NEEDS)
        thread.start()
        close("private", results, NEEDS)
    except HardeningError as error:
        told["refused"] = error.message
    ready.set()
    if thread.ident is not None:
        thread.join()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
