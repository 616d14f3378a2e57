"""The virtual cluster keeps every promise under the faults of 1,600 seeds: about a minute of one processor.

1,000 of them are the same in every run. The others follow from the sources of the package, so that each change tries new ones,
and each run of one commit the same: a test's name has the seeds that it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import cloister
from cloister.cluster.virtual import fuzz

pytestmark = pytest.mark.usefixtures("no_log")

NUM_FIXED: Final = 1000
NUM_FRESH: Final = 600
NUM_SLOW: Final = 4000
CHUNK: Final = 100


def find_fresh(package: Path) -> int:
    """Returns the first of the seeds that follow from the sources of a package; all of them are above the fixed ones."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return CHUNK * (1_000 + int.from_bytes(digest.digest()[:4]) % 10_000_000)


def chunks(first: int, count: int) -> Iterator[range]:
    """Yields seeds in parts that are tests of their own."""
    yield from (range(start, start + CHUNK) for start in range(first, first + count, CHUNK))


FIXED: Final = [*chunks(0, NUM_FIXED)]
FRESH: Final = [*chunks(find_fresh(Path(cloister.__file__).parent), NUM_FRESH)]
SLOW: Final = [pytest.param(seeds, marks=pytest.mark.slow) for seeds in chunks(NUM_FIXED, NUM_SLOW)]


@pytest.mark.parametrize("seeds", [*FIXED, *FRESH, *SLOW], ids=str)
def test_every_seed_keeps_every_promise(seeds: range) -> None:
    found = {seed: fuzz.run_seed(seed).violations for seed in seeds}
    assert {seed: violations for seed, violations in found.items() if violations} == {}


def test_fresh_seeds_follow_from_the_sources(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("one = 1\n")
    first = find_fresh(tmp_path)
    assert first == find_fresh(tmp_path) >= NUM_FIXED + NUM_SLOW
    (tmp_path / "one.py").write_text("one = 2\n")
    assert find_fresh(tmp_path) != first
