"""The initial file system: PID 1 and the kernel modules that it needs, as a cpio archive that is the same bytes every time."""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

MODULES = ("dm-mod", "dm-verity", "squashfs", "sha256-ssse3", "virtio_blk", "virtio_net", "virtio-rng", "configfs", "tsm")
GUEST_MODULES = ("sev-guest", "tdx-guest")
"""Modules that exist in the image for hardware that may not be there."""
_NEWC = "070701"


def read_modules(tree: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Returns name -> content of kernel modules with all that they depend on, in the order in which they can be loaded.

    Args:
        tree: a kernel's directory below lib/modules.

    Raises:
        KeyError: the kernel has no such module.
    """
    files = {_same(path.name.split(".ko")[0]): path for path in tree.rglob("*.ko*")}
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in found:
            return
        path = files[name]
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == ".xz" else content
        depends = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in filter(None, depends[1].decode().split(",") if depends else []):
            add(_same(other))
        found[name] = content

    for name in names:
        add(_same(name))
    return found


def make_cpio(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Returns a cpio archive ("newc", Documentation/driver-api/early-userspace/buffer-format.rst of Linux).

    Args:
        files: mode and content by name; directories end in nothing and have no content. They are written in the order given.
    """
    archive = bytearray()
    for number, (name, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], start=1):
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (number, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        archive += (_NEWC + "".join(f"{field:08X}" for field in fields)).encode() + name.encode() + b"\0"
        archive += bytes(-len(archive) % 4)
        archive += content
        archive += bytes(-len(archive) % 4)
    return bytes(archive + bytes(-len(archive) % 512))


def make_initrd(init: bytes, modules: Mapping[str, bytes]) -> bytes:
    """Returns the archive of PID 1 and the modules, which it loads in their order."""
    files = dict.fromkeys(("dev", "proc", "root", "modules"), (stat.S_IFDIR | 0o755, b""))
    files["init"] = (stat.S_IFREG | 0o755, init)
    for number, (name, content) in enumerate(modules.items()):
        files[f"modules/{number:02}-{name}.ko"] = (stat.S_IFREG | 0o644, content)
    return make_cpio(files)


def _same(name: str) -> str:
    return name.replace("-", "_")
