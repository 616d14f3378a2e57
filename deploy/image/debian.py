"""Debian packages of the image: pinned by version and SHA-256, fetched with apt, unpacked without running anything of them."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
RELEASE = "bookworm"
LOCK = Path(__file__).parent / "packages.lock"
APT_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Package:
    """One Debian package; `sha256` is of its file, in hex."""

    name: str
    version: str
    sha256: str


def read_lock(path: Path = LOCK) -> list[Package]:
    """Reads `NAME VERSION SHA256` lines; those that begin with # say something."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [Package(*line) for line in lines]


def fetch(packages: Sequence[Package], folder: Path, mirrors: Sequence[str]) -> list[Path]:
    """Fetches the files of packages, and returns them in the same order.

    Args:
        packages: which, with the digests that they must have.
        folder: where they go, and apt's own state with them; what is there already is used.
        mirrors: base addresses of Debian's archive and of its security archive.

    Raises:
        SystemExit: apt cannot fetch one, or one has another digest.
    """
    options = _prepare(folder, mirrors)
    missing = [one for one in packages if _find(folder, one) is None]
    if missing:
        _apt(folder, [*options, "download", *(f"{one.name}={one.version}" for one in missing)])
    found = []
    for one in packages:
        path = _find(folder, one)
        if path is None:
            sys.exit(f"the package {one.name} {one.version} with the digest of {LOCK.name} cannot be had from these mirrors")
        found.append(path)
    return found


def lock(names: Iterable[str], folder: Path, mirrors: Sequence[str]) -> list[Package]:
    """Returns the newest versions that the mirrors have, kernel packages from the backports."""
    options = _prepare(folder, mirrors)
    packages = []
    for name in names:
        text = _apt(folder, [*options, "show", "--no-all-versions", name], "apt-cache")
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and not line.startswith(" "))
        packages.append(Package(name, fields["Version"], fields["SHA256"]))
    return packages


def unpack(package: Path, place: Callable[[str], Path | None]) -> None:
    """Unpacks the files of a package that `place` has a path for; names are relative, below usr/ where Debian means that."""
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        for member in members:
            path = place(_usr(member.name))
            if path is None or not (member.isfile() or member.issym() or member.islnk()):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                path.symlink_to(member.linkname)
                continue
            file = archive.extractfile(member)
            assert file is not None
            path.write_bytes(file.read())
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def find_mirrors() -> list[str]:
    """Returns where this machine's apt has Debian's archive and its security archive from."""
    wanted = {f"{RELEASE}": "", f"{RELEASE}-security": ""}
    text = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI) $(ORIGIN)"], capture_output=True, text=True, check=True
    ).stdout
    for line in text.splitlines():
        codename, uri, origin = line.split(maxsplit=2)
        if origin == "Debian" and codename in wanted:
            wanted[codename] = uri.rstrip("/")
    if not all(wanted.values()):
        sys.exit(f"this machine's apt does not know {' and '.join(wanted)}; give --mirror and --security-mirror")
    return list(wanted.values())


def _usr(name: str) -> str:
    name = name.removeprefix("./")
    return f"usr/{name}" if name.split("/")[0] in {"bin", "sbin", "lib", "lib64"} else name


def _find(folder: Path, package: Package) -> Path | None:
    for path in folder.glob(f"{package.name}_*.deb"):
        if hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256:
            return path
    return None


def _prepare(folder: Path, mirrors: Sequence[str]) -> list[str]:
    """Makes an apt of its own, which knows these mirrors and nothing of this machine's packages; returns its options."""
    archive, security = mirrors
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    signed = f"deb [signed-by={KEYRING} check-valid-until=no]"  # a snapshot's lists have ended, and digests decide
    sources = [f"{signed} {archive} {suite} main" for suite in (RELEASE, f"{RELEASE}-backports")]
    listed = "\n".join([*sources, f"{signed} {security} {RELEASE}-security main", ""])
    sources_list = folder / "sources.list"
    settings = {"Etc::SourceList": sources_list, "Etc::SourceParts": "/nonexistent", "State::Lists": folder / "lists"}
    settings |= {"Cache": folder, "State::status": "/dev/null"}
    options = [f"-oDir::{name}={value}" for name, value in settings.items()]
    if not sources_list.exists() or sources_list.read_text() != listed:
        sources_list.write_text(listed)
        _apt(folder, [*options, "update"])
    return options


def _apt(folder: Path, arguments: Sequence[str], program: str = "apt-get") -> str:
    done = subprocess.run(
        [program, "-qq", "-oAPT::Sandbox::User=root", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=APT_DEADLINE_S,
    )
    if done.returncode:
        sys.exit(f"{program} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout
