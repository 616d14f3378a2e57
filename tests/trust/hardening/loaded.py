"""Prints what came into this process with its environment: variables, flags, libraries and modules, as JSON."""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    told = {
        "environment": dict(os.environ),
        "libraries": sorted(libraries),
        "customized": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "path": sys.path,
        "inspect": bool(sys.flags.inspect),
        "options": sorted(sys._xoptions),
        "hook": os.environ.get("PYTHONBREAKPOINT"),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
