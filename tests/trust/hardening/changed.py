"""Imports a module, is closed, and waits until somebody changed it on disk; prints what it can still get of it, as JSON.

Argument: the directory of modules `before` and `after`.
"""

import importlib
import json
import sys

from cloister.trust.hardening import close_this


def main(directory: str) -> None:
    sys.path.append(directory)
    module = importlib.import_module("before")
    close_this()
    print(json.dumps({"value": module.VALUE}), flush=True)
    sys.stdin.readline()
    told = {"value": module.VALUE}
    for name, attempt in {
        "reload": lambda: importlib.reload(module),
        "import": lambda: importlib.import_module("after"),
    }.items():
        try:
            told[name] = attempt().VALUE
        except ImportError as error:
            told[name] = type(error).__name__
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
