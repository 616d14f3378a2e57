"""Measures this process as digests: code, model, and the profile's rules.

Code is every loaded file: modules, the interpreter, and all files that the kernel mapped for it. Names are relative to Python's
directories, so that machines with the same installation have the same measurement.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from cloister.policy.document import to_data
from cloister.policy.verdict import Profile
from cloister.trust.attestation.base import AttestationError
from cloister.trust.attestation.configuration import configuration_digest
from cloister.trust.attestation.evidence import MAX_CONFIGURATION_BYTES

MAX_MANIFEST_BYTES: Final = 16 * 2**20
_MAPS: Final = Path("/proc/self/maps")
_PIECE_BYTES: Final = 2**20
PACKAGE: Final = Path(__file__).resolve().parents[2]
_FIELDS: Final = 6  # fields of a line of maps: addresses, permissions, offset, device, inode, path


def measure_profile(profile: str) -> str:
    """Returns the SHA-256 digest (hex) of all rulings of a profile."""
    ruled = json.dumps(to_data((), [Profile(profile)]), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(ruled.encode()).hexdigest()


def measure_model(path: Path) -> str:
    """Returns the SHA-256 digest (hex) of a GGUF file, or of all files of a model directory and its folders with their names.

    Raises:
        AttestationError: it cannot be read, or contains a special file or a link to a folder.
    """
    return hashlib.sha256(encode_manifest(list_files(path))).hexdigest()


def list_files(path: Path) -> dict[str, str]:
    """Returns name -> SHA-256 digest (hex) of a file, or of all files of a directory and its folders.

    Raises:
        AttestationError: see `measure_model`.
    """
    if path.is_file():
        return {path.name: measure_file(path)}
    files: dict[str, str] = {}
    for folder, subfolders, names in os.walk(path, onerror=_refuse_unread):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        if links:
            raise AttestationError(
                f"{Path(folder) / links[0]} is a link to a folder, which is not measured; copy the folder here"
            )
        for name in names:
            file = Path(folder) / name
            if not file.is_file():  # every reader of a pipe would get other data
                raise AttestationError(f"{file} is no file, so it cannot be measured; remove it")
            files[file.relative_to(path).as_posix()] = measure_file(file)
    return files


def _refuse_unread(error: OSError) -> None:
    raise AttestationError(f"cannot measure {error.filename}: {error.strerror}")


def measure_loaded(model: Path, beside: Mapping[str, Path]) -> str:
    """Returns the SHA-256 digest (hex) of a model with additional files; without these, the model's own.

    Anything that may replace the model or affect its answers changes the digest, so it cannot match a list that does not
    include it.

    Args:
        beside: kind of each file, such as "lora NAME", with its path.

    Raises:
        AttestationError: a file cannot be read.
    """
    own = measure_model(model)
    if not beside:
        return own
    named = {name: measure_model(path) for name, path in beside.items()}
    return hashlib.sha256(b"cloister model and more\0" + encode_manifest({"model": own, **named})).hexdigest()


def measure_file(path: Path) -> str:
    """Returns a file's SHA-256 digest (hex).

    Raises:
        AttestationError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise AttestationError(f"cannot measure {path}: {error.strerror}") from None
    return digest.hexdigest()


def measure_code() -> dict[str, str]:
    """Returns name -> SHA-256 digest (hex) of every file of code that this process loaded, and of the `.pth` files that Python
    runs when it starts.

    Raises:
        AttestationError: one of them can no longer be read.
    """
    startup = {path for root, name in _roots() if name == "site" for path in root.glob("*.pth")}
    paths = {*_modules(), *_mapped(), *startup, Path(sys.executable).resolve()}
    return dict(sorted((_name(path), measure_file(path)) for path in paths))


def measure_package() -> dict[str, str]:
    """Returns name -> SHA-256 digest (hex) of every source and library of this package, loaded or not.

    Raises:
        AttestationError: one of them cannot be read.
    """
    files = [path for path in PACKAGE.rglob("*") if _is_code(path)]
    return {_name(path): measure_file(path) for path in sorted(files)}


def measure_installed() -> dict[str, str]:
    """Returns name -> SHA-256 digest (hex) of every code file that a process of this installation could load.

    That is each source and library in Python's directories, and every system library in directories from which this process has
    mapped one: others may be loaded later, or by another process of a node.

    Raises:
        AttestationError: one of them cannot be read.
    """
    files = {path.resolve() for root, _ in _roots() for path in root.rglob("*") if _is_code(path) and path.is_file()}
    mapped = set(_mapped())
    paths = {*files, *_beside(mapped), *mapped, *_modules(), Path(sys.executable).resolve()}
    return dict(sorted((_name(path), measure_file(path)) for path in paths))


def encode_manifest(files: Mapping[str, str]) -> bytes:
    """Returns the canonical JSON of names and digests."""
    return msgspec.json.encode(dict(files), order="sorted")


def read_manifest(encoded: bytes) -> dict[str, str]:
    """Reads what `encode_manifest` wrote.

    Raises:
        AttestationError: it is not a manifest.
    """
    try:
        if len(encoded) <= MAX_MANIFEST_BYTES:
            return msgspec.json.decode(encoded, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise AttestationError("the release's manifest cannot be read; take it from the log again")


def find_foreign(measured: Mapping[str, str], manifest: Mapping[str, str]) -> list[str]:
    """Returns the names of loaded files that differ from the manifest."""
    return sorted(name for name, digest in measured.items() if manifest.get(name) != digest)


def _beside(mapped: Iterable[Path]) -> Iterable[Path]:
    """System libraries in the directories of mapped ones."""
    for folder in {path.parent for path in mapped}:
        if not any(folder.is_relative_to(root) for root, _ in _roots()):
            yield from (path.resolve() for path in folder.iterdir() if ".so" in path.suffixes and path.is_file())


def _is_code(path: Path) -> bool:
    return path.suffix in (".py", ".pth") or ".so" in path.suffixes


def _modules() -> Iterable[Path]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isfile(file):
            yield Path(file).resolve()


def _mapped() -> Iterable[Path]:
    """Files that are mapped as executable: libraries, and the loader."""
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=_FIELDS - 1)
        if len(fields) == _FIELDS and "x" in fields[1] and fields[5].startswith("/"):
            if fields[5].endswith(" (deleted)"):
                raise AttestationError(f"the file {fields[5]} was replaced since it was loaded; start again")
            yield Path(fields[5])


@functools.cache
def _roots() -> list[tuple[Path, str]]:
    """Code directories with the prefixes of their file names, deepest first: site-packages may be inside Python's."""
    site = {Path(__file__).resolve().parents[3], *(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib"))}
    library = {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib")}
    roots = [*((root, "site") for root in site), *((root, "python") for root in library)]
    return sorted(roots, key=lambda item: -len(item[0].parts))


def _name(path: Path) -> str:
    for root, name in _roots():
        if path.is_relative_to(root):
            return f"{name}/{path.relative_to(root)}"
    return str(path)


# Measures a node's configuration (`configuration`) from its files and settings.


_SHARDS: Final = (".safetensors", ".bin")


def measure_configuration(settings: Mapping[str, str], model: Path, beside: Mapping[str, Path]) -> dict[str, str]:
    """Returns the configuration of a node.

    Args:
        settings: `describe_settings`.
        model: directory or GGUF file.
        beside: files loaded in addition to the model, such as "lora NAME", with their paths.

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
    """Returns the kernels of an editable installation; empty if none were compiled."""
    spec = importlib.util.find_spec("cloister.backends.native._native")
    return {} if spec is None or spec.origin is None else {Path(spec.origin).name: measure_file(Path(spec.origin))}


def _fold_shards(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the files, with the checkpoints of one folder and format combined: large models have hundreds of shards."""
    found: dict[str, str] = {}
    shards: dict[str, dict[str, str]] = {}
    for name, digest in files.items():
        path = PurePosixPath(name)
        if path.suffix in _SHARDS:
            shards.setdefault(str(path.with_name(f"*{path.suffix}")), {})[name] = digest
        else:
            found[name] = digest
    return found | {name: configuration_digest(folded) for name, folded in shards.items()}
