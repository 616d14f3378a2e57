"""Makes a folder that tests and measures the GPU path on a machine without a network: `python -m benchmarks.gpu.pack`.

The machine has Python, torch, Triton, numpy, safetensors and tokenizers, and a CUDA device. The folder brings the rest as
wheels, our own without the kernels for CPUs (which a GPU does not need, and which would need that Python's headers here), the
tests, the benchmark and `run.sh`. Copy it there and run `./run.sh`.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
THERE: Final = ("torch", "triton", "numpy")
"""What the machine has and the pack leaves out; transformers wants its own safetensors and tokenizers, so these come along."""
BESIDE: Final = ("pytest>=8.3", "transformers>=5.0")
"""What the run needs beside Cloister itself."""
UNUSED: Final = ("matplotlib",)
"""What only plots need, which a run without a display does not make: a third of all."""
MOST_BYTES: Final = 60 << 20
FILES: Final = (
    "benchmarks/__init__.py", "benchmarks/gpu/*.py", "benchmarks/peers/*.py", "tests/*.py", "tests/gpu/*.py",
    "tests/backends/conftest.py", "tests/backends/test_triton_*.py", "LICENSE",
)  # fmt: skip
PLATFORMS: Final = (*(f"manylinux_2_{minor}" for minor in range(39, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")
"""What wheels may be built for: glibc 2.39 (that of Ubuntu 24.04) or older."""


class PackError(Exception):
    """The folder cannot be made; the text says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the folder was made, 1 with a reason when not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-pack", help="folder to make; emptied first")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    options = parser.parse_args(arguments)
    try:
        make_pack(options.output, options.python)
    except PackError as error:
        print(f"no pack was made: {error}", file=sys.stderr)
        return 1
    print(f"made {options.output}: {folder_bytes(options.output) / 2**20:.1f} MiB. Copy it, then: ./run.sh")
    return 0


def make_pack(output: Path, python: str) -> None:
    """Fills a folder with everything but what the machine has.

    Args:
        python: major and minor version on that machine, such as "3.12".

    Raises:
        PackError: wheels could not be made or fetched, or there is too much.
    """
    if output.exists() and any(output.iterdir()) and not (output / "run.sh").exists():
        raise PackError(f"{output} is not empty and no pack; choose another folder")
    shutil.rmtree(output, ignore_errors=True)
    wheels = output / "wheels"
    wheels.mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "gpu" / "run.sh", output / "run.sh")
    _build_wheel(wheels)
    _fetch_wheels(wheels, python)
    for path in list_files():
        target = output / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (output / "tests" / "__init__.py").touch()  # else another package of that name on the machine would be found first
    (output / "pytest.ini").write_text(pytest_settings(), encoding="utf-8")
    if (size := folder_bytes(output)) > MOST_BYTES:
        raise PackError(f"it has {size / 2**20:.1f} MiB, more than {MOST_BYTES >> 20}; look at {wheels}")


def list_files() -> Iterator[Path]:
    """Yields the files of the repository that travel."""
    for pattern in FILES:
        found = sorted(ROOT.glob(pattern))
        if not found:
            raise PackError(f"there is no {pattern} in {ROOT}")
        yield from found


def list_requirements() -> list[str]:
    """Returns what Cloister needs at run time, and what the run needs beside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*(name for name in project["dependencies"] if not name.startswith(UNUSED)), *BESIDE]


def is_there(wheel: Path) -> bool:
    """Returns whether the machine has what a wheel brings."""
    name = wheel.name.split("-")[0].lower()
    return name in THERE or name.startswith("nvidia_")


def folder_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _build_wheel(wheels: Path) -> None:
    """Our wheel without compiled kernels: it fits every Python that we support."""
    _pip("wheel", "--no-deps", "--config-settings=wheel.cmake=false", "--wheel-dir", str(wheels), str(ROOT))
    if not list(wheels.glob("cloister-*-py3-none-any.whl")):
        raise PackError(f"pip made no wheel for every machine in {wheels}")


def _fetch_wheels(wheels: Path, python: str) -> None:
    machine = platform.machine()
    platforms = [part for tag in PLATFORMS for part in ("--platform", f"{tag}_{machine}")]
    versions = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    _pip("download", *versions, *platforms, "--dest", str(wheels), *list_requirements())
    for wheel in wheels.glob("*.whl"):
        if is_there(wheel):
            wheel.unlink()


def _pip(*arguments: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        raise PackError(run.stderr.strip()[-1500:])


def pytest_settings() -> str:
    """Returns pytest.ini: as in the repository, but that another torch may warn of what it likes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (
        "[pytest]",
        "addopts = --strict-markers --import-mode=importlib",
        "pythonpath = .",
        "markers =",
        *(f"    {marker}" for marker in project["tool"]["pytest"]["ini_options"]["markers"]),
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
