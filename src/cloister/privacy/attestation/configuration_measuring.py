"""Measures a node's configuration from its files and settings (`configuration` says what one is)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from cloister.privacy.attestation.base import AttestationError
from cloister.privacy.attestation.configuration import configuration_digest
from cloister.privacy.attestation.evidence import MAX_CONFIGURATION_BYTES
from cloister.privacy.attestation.measuring import PACKAGE, list_files, measure_file

_SHARDS: Final = (".safetensors", ".bin")


def measure_configuration(settings: Mapping[str, str], model: Path, beside: Mapping[str, Path]) -> dict[str, str]:
    """Returns the configuration of a node.

    Args:
        settings: `describe_settings`.
        model: directory or GGUF file.
        beside: what is loaded beside the model, such as "lora NAME", and where it lies.

    Raises:
        AttestationError: a file cannot be read, or there are too many for a statement.
    """
    found = {**settings, "python": measure_file(Path(sys.executable).resolve()), **measure_package_files()}
    for what, path in {"model": model, **beside}.items():
        found |= {f"{what}/{name}": digest for name, digest in _fold_shards(list_files(path)).items()}
    if len(msgspec.json.encode(found)) > MAX_CONFIGURATION_BYTES:
        raise AttestationError(
            f"the model and what is loaded beside it have too many files to be stated ({len(found)} entries); move those "
            "that are not needed elsewhere"
        )
    return dict(sorted(found.items()))


def measure_package_files(root: Path = PACKAGE) -> dict[str, str]:
    """Returns two digests: of the native library, and of all other files of this package, data and embedded models too."""
    libraries: dict[str, str] = {}
    files: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            into = libraries if ".so" in path.suffixes else files
            into[path.relative_to(root).as_posix()] = measure_file(path)
    return {"package": configuration_digest(files), "native library": configuration_digest(libraries or _find_native())}


def _find_native() -> dict[str, str]:
    """Returns the kernels where an editable installation keeps them; nothing where none were compiled."""
    spec = importlib.util.find_spec("cloister.backends.native._native")
    return {} if spec is None or spec.origin is None else {Path(spec.origin).name: measure_file(Path(spec.origin))}


def _fold_shards(files: Mapping[str, str]) -> dict[str, str]:
    """Returns files with the checkpoints of one folder and format as one entry: large models have hundreds of shards."""
    found: dict[str, str] = {}
    shards: dict[str, dict[str, str]] = {}
    for name, digest in files.items():
        path = PurePosixPath(name)
        if path.suffix in _SHARDS:
            shards.setdefault(str(path.with_name(f"*{path.suffix}")), {})[name] = digest
        else:
            found[name] = digest
    return found | {name: configuration_digest(folded) for name, folded in shards.items()}
