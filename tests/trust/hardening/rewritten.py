"""Loads a library, is closed, and waits until somebody wrote into its file; prints what its function returns, as JSON.

Argument: the library.
"""

import ctypes
import json
import sys

from cloister.trust.hardening import close_this


def main(path: str) -> None:
    library = ctypes.CDLL(path)
    close_this()
    print(json.dumps({"answer": library.answer()}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"answer": library.answer()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
