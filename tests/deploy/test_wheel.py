"""The wheel is the same bytes wherever it is built. Kernels take minutes: benchmarks/reproducible_wheel.py builds those too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reproducible_wheel import CONDITIONS, Condition, build, compare, take_snapshot

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return take_snapshot(REPOSITORY, tmp_path_factory.mktemp("source") / "snapshot")


def test_a_wheel_without_kernels_is_the_same_bytes_under_another_path_umask_time_and_zone(
    snapshot: Path, tmp_path: Path
) -> None:
    far = next(condition for condition in CONDITIONS if condition.umask == 0o077)
    other = Condition("other", "other", far.umask, {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "7"}, age_s=far.age_s)
    wheels = [build(snapshot, tmp_path, condition, ["wheel.cmake=false"]) for condition in (Condition("plain"), other)]
    assert all(wheels)
    plain, changed = (wheel.read_bytes() for wheel in wheels if wheel)
    assert compare(plain, changed) == []
    assert plain == changed


def test_the_library_holds_no_path_of_the_machine_that_built_it() -> None:
    native = pytest.importorskip("cloister.backends.native._native", reason="this machine has no C++ compiler")
    library = Path(native.__file__).read_bytes()
    assert str(REPOSITORY).encode() not in library
    assert str(Path.home()).encode() + b"/" not in library
