"""Fetches the public models that benchmarks and tests judge by, and says where they lie and under which licence."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness import console
from benchmarks.models import CACHE, MODELS, ModelUnavailable, find_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {', '.join(MODELS)}; all of them if none is given")
    parser.add_argument("--folder", type=Path, default=CACHE, help="where models are kept")
    options = parser.parse_args()
    names, num_failed = options.names or list(MODELS), 0
    for number, name in enumerate(names, 1):
        title = MODELS[name].title if name in MODELS else name
        try:
            with console.status(f"{number} of {len(names)}: fetching and checking {title}"):
                path = find_model(name, options.folder)
        except ModelUnavailable as error:
            console.print(f"{title}: {error}", style="red", highlight=False, markup=False)
            num_failed += 1
            continue
        size_mb = path.stat().st_size / 1e6
        console.print(f"[bold]{title}[/], {size_mb:.0f} MB, {MODELS[name].licence}: {path}", highlight=False, soft_wrap=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
