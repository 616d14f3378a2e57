"""Builds the wheel several times under conditions that must not matter, and compares the bytes.

    python -m benchmarks.reproducible_wheel [--source DIR] [--keep DIR] [--only NAME ...]

Each build starts from a fresh copy of one snapshot of the source, in another directory, with its own user, umask, time zone,
language, number of processors and date. Exit status: 0 all wheels are one, 1 they differ (it says where), 2 a build failed.
As root, one build runs as another user (`nobody`), which needs setpriv; otherwise that condition is left out, and it says so.
Each build of the kernels takes some minutes; --against compares with a wheel that was kept.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_S = 3600.0
FILES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
NOBODY = 65534
EVERY_CPU = ("cmake.define.CLOISTER_ISA=all",)


@dataclass(frozen=True)
class Condition:
    """What one build has that the others have not.

    Attributes:
        name: of the build.
        directory: where the source lies, below the scratch directory.
        umask: of the build.
        environment: on top of a bare one.
        cpus: how many processors it may use; None is all of them.
        as_nobody: whether another user builds.
        age_s: how old every file claims to be.
    """

    name: str
    directory: str = "src"
    umask: int = 0o022
    environment: dict[str, str] = field(default_factory=dict)
    cpus: int | None = None
    as_nobody: bool = False
    age_s: int = 0


CONDITIONS = (
    Condition("plain"),
    Condition("umask 077, far away", directory="a/much/longer/way/to the source", umask=0o077, age_s=10_000_000),
    Condition("other time zone and language", directory="tz", environment={"TZ": "Pacific/Kiritimati", "LC_ALL": "C"}),
    Condition("one processor", directory="one", cpus=1, environment={"PYTHONHASHSEED": "7"}),
    Condition("another user", directory="nobody", umask=0o002, as_nobody=True, environment={"PYTHONHASHSEED": "1"}),
    Condition(
        "everything at once",
        directory="once/more/with everything",
        umask=0o077,
        environment={"TZ": "America/St_Johns", "LC_ALL": "C", "PYTHONHASHSEED": "3"},
        cpus=1,
        as_nobody=True,
        age_s=20_000_000,
    ),
)


def main() -> int:
    """Runs the builds and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="the repository")
    parser.add_argument("--keep", type=Path, help="a directory for the wheels")
    parser.add_argument("--against", type=Path, help="a wheel that was built before from the same source")
    parser.add_argument("--only", nargs="*", help="names of conditions")
    chosen = parser.parse_args()
    conditions = [one for one in CONDITIONS if not chosen.only or one.name in chosen.only]
    wheels = {chosen.against.name: chosen.against.read_bytes()} if chosen.against else {}
    with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
        os.chmod(scratch, 0o755)
        snapshot = take_snapshot(chosen.source, Path(scratch) / "snapshot")
        for condition in conditions:
            if condition.as_nobody and os.geteuid() != 0:
                print(f"{condition.name}: left out, only root can build as somebody else")
                continue
            start = time.monotonic()
            wheel = build(snapshot, Path(scratch), condition)
            if wheel is None:
                return 2
            wheels[condition.name] = wheel.read_bytes()
            print(f"{condition.name}: {digest(wheels[condition.name])} in {time.monotonic() - start:.0f} s", flush=True)
            if chosen.keep:
                chosen.keep.mkdir(parents=True, exist_ok=True)
                (chosen.keep / f"{condition.name.replace(' ', '-')}.whl").write_bytes(wheels[condition.name])
    (first, reference), *others = wheels.items()
    differing = [name for name, data in others if data != reference]
    for name in differing:
        print(f"{name} differs from {first}: {', '.join(compare(reference, wheels[name])) or 'in the archive itself'}")
    print("differ" if differing else f"all {len(wheels)} wheels are one: {digest(reference)}, {len(reference):,} bytes")
    return 1 if differing else 0


def take_snapshot(source: Path, snapshot: Path) -> Path:
    """Copies what a wheel is made of, and nothing that was built before."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(source / "src", snapshot / "src", ignore=ignored)
    for name in FILES:
        shutil.copy(source / name, snapshot / name)
    return snapshot


def build(snapshot: Path, scratch: Path, condition: Condition, settings: Sequence[str] = ()) -> Path | None:
    """Builds the wheel of a fresh copy; None if that failed, having said why.

    Args:
        snapshot: `take_snapshot`'s.
        scratch: an empty directory, or one with builds of other conditions.
        condition: what this build has.
        settings: of scikit-build-core, as `name=value`; none compile every instruction set, as for a wheel that is published.
    """
    place = scratch / condition.directory
    shutil.copytree(snapshot, place)
    for path in (place, *place.rglob("*")):
        path.chmod((0o777 if path.is_dir() or os.access(path, os.X_OK) else 0o666) & ~condition.umask)
        os.utime(path, (time.time() - condition.age_s,) * 2)
    home, out = scratch / f"{condition.directory}-home", scratch / f"{condition.directory}-out"
    for directory in (home, out):
        directory.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-build-isolation",
        "--no-deps",
    ]
    command += ["--no-cache-dir", "--wheel-dir", str(out), str(place)]
    command += [f"--config-settings={setting}" for setting in settings or EVERY_CPU]
    if condition.as_nobody:
        for directory in (place, home, out):
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(directory)], check=True)
        # It may read what root may, for the interpreter can lie below root's home; access(2) honours that with this bit only.
        caps = ("--securebits=+no_setuid_fixup", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *caps, *command]
    if condition.cpus is not None:
        some = sorted(os.sched_getaffinity(0))[: condition.cpus]
        command = ["taskset", "--cpu-list", ",".join(map(str, some)), *command]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "HOME": str(home), "TMPDIR": str(home)}
    done = subprocess.run(
        command,
        cwd=home,
        env={**environment, **condition.environment},
        umask=condition.umask,
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(f"{condition.name}: the build failed\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return None
    (wheel,) = out.glob("*.whl")
    shutil.rmtree(place)
    if not settings and not any("/_native." in name for name in zipfile.ZipFile(wheel).namelist()):
        print(f"{condition.name}: the kernels were not compiled, so there is nothing to compare")
        return None
    return wheel


def compare(one: bytes, other: bytes) -> list[str]:
    """Names of the members that differ, with what differs in them."""
    differences: list[str] = []
    with _open(one) as first, _open(other) as second:
        names = [first.namelist(), second.namelist()]
        if names[0] != names[1]:
            differences.append("names or their order")
        for name in sorted(set(names[0]) & set(names[1])):
            a, b = first.getinfo(name), second.getinfo(name)
            parts = [
                part for part in ("date_time", "external_attr", "CRC", "create_system") if getattr(a, part) != getattr(b, part)
            ]
            if parts:
                differences.append(f"{name} ({', '.join(parts)})")
    return differences


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _open(data: bytes) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(data))


if __name__ == "__main__":
    sys.exit(main())
