"""Builds the image of a node: kernel, initrd, command line, and a root that the command line names by its hash.

    python -m deploy.image.build --wheel WHEEL --lock LOCK --out DIR

The same inputs make the same bytes: nothing of a package is run, every time is SOURCE_DATE_EPOCH (0 without it), and names are
sorted. docs/image.md has what is needed, and what is in it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.image.debian import LOCK, Package, fetch, find_mirrors, lock, read_lock, unpack
from deploy.image.initrd import GUEST_MODULES, MODULES, make_initrd, read_modules

HERE = Path(__file__).parent
BLOCK_BYTES = 4096
SITE = "usr/local/lib/python3.11/dist-packages"
KERNEL_PACKAGE = "linux-image-"
COMMAND_LINE = "console=ttyS0 panic=-1 lockdown=confidentiality quiet cloister.verity="
KEPT = re.compile(
    r"usr/lib64/ld-linux-x86-64\.so\.2$|usr/bin/python3\.11$"
    r"|usr/lib/x86_64-linux-gnu/[^/]+\.so[^/]*$|usr/lib/x86_64-linux-gnu/ossl-modules/|usr/lib/python3\.11/|etc/python3\.11/"
)
DROPPED = re.compile(
    r"usr/lib/python3\.11/(ensurepip|idlelib|lib2to3|pydoc_data|test|tkinter|turtledemo|venv)/"
    r"|usr/lib/python3\.11/lib-dynload/(_curses|_curses_panel|_dbm|_gdbm|_tkinter|nis|readline)\."
)
"""Modules that need libraries that are not in the image, or that no server needs."""
FOLDERS = ("dev", "proc", "run", "sys", "tmp")
LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
TEXTS = {
    "etc/passwd": "root:x:0:0:root:/tmp:/nonexistent\n",
    "etc/group": "root:x:0:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
BUILD_FILES = ("direct_url.json", "INSTALLER", "RECORD", "REQUESTED")
"""What pip writes about an installation, of which the first has a path of the machine that builds."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, and builds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the package's wheel, for CPython 3.11")
    parser.add_argument("--lock", type=Path, help="its lock file (cloister release lock WHEEL)")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the image")
    parser.add_argument("--packages", type=Path, help="folder for Debian's packages; by default in the image's")
    parser.add_argument("--mirror", help="base address of Debian's archive, or of a snapshot of it; this machine's by default")
    parser.add_argument("--security-mirror", help="likewise, of Debian's security archive")
    parser.add_argument("--relock", action="store_true", help=f"only write the newest versions into {LOCK.name}")
    given = parser.parse_args(arguments)
    mirrors = [given.mirror, given.security_mirror] if given.mirror and given.security_mirror else find_mirrors()
    packages = (given.packages or given.out / "packages").resolve()
    if given.relock:
        write_lock(lock([one.name for one in read_lock()], packages, mirrors))
        return
    if given.wheel is None or given.lock is None:
        parser.error("an image needs --wheel and --lock")
    if (given.out / "root").exists():
        parser.error(f"{given.out / 'root'} exists; an image is built into a new folder")
    build(given.wheel, given.lock, given.out.resolve(), fetch(read_lock(), packages, mirrors))


def build(wheel: Path, lock_file: Path, out: Path, packages: Sequence[Path]) -> None:
    """Builds the image into `out`: vmlinuz, initrd, cmdline, root.img, SHA256SUMS, and the folder `root` that root.img has."""
    root, kernel = out / "root", out / "kernel"
    for package in packages:
        if package.name.startswith(KERNEL_PACKAGE):
            unpack(package, lambda name: kernel / name)
        else:
            unpack(package, lambda name: root / name if is_kept(name) else None)
    install(wheel, lock_file, root / SITE)
    furnish(root)
    (vmlinuz,) = (kernel / "boot").glob("vmlinuz-*")
    shutil.copyfile(vmlinuz, out / "vmlinuz")
    (tree,) = (kernel / "usr/lib/modules").iterdir()
    init = compile_init(out)
    (out / "initrd").write_bytes(make_initrd(init.read_bytes(), read_modules(tree, [*MODULES, *GUEST_MODULES])))
    verity = make_root(root, out / "root.img")
    (out / "cmdline").write_text(COMMAND_LINE + verity + "\n")
    shutil.rmtree(kernel)
    init.unlink()
    names = ("vmlinuz", "initrd", "cmdline", "root.img")
    sums = "".join(f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (out / "SHA256SUMS").write_text(sums)
    sys.stdout.write(sums)


def is_kept(name: str) -> bool:
    """Whether a node needs this file of a package: Python, its library, and the system's libraries."""
    return KEPT.match(name) is not None and DROPPED.match(name) is None


def install(wheel: Path, lock_file: Path, site: Path) -> None:
    """Installs the wheel and exactly the files that the lock file has digests of, without scripts and compiled Python."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps"]
    pip += ["--root-user-action=ignore", "--target", str(site), "--python-version", "3.11", "--only-binary", ":all:"]
    subprocess.run([*pip, "--require-hashes", "--requirement", str(lock_file)], check=True)
    subprocess.run([*pip, str(wheel)], check=True)
    shutil.rmtree(site / "bin", ignore_errors=True)
    for path in [*site.glob("*.dist-info/*")]:
        if path.name in BUILD_FILES:
            path.unlink()


def furnish(root: Path) -> None:
    """Makes the few files and folders that no package brings."""
    for name in FOLDERS:
        (root / name).mkdir()
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "usr/lib/cloister").mkdir()
    shutil.copyfile(HERE / "start.py", root / "usr/lib/cloister/start.py")
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def compile_init(out: Path) -> Path:
    """Compiles PID 1, without libraries."""
    flags = ["-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-static", "-s", "-Wl,--build-id=none"]
    subprocess.run(["gcc", *flags, "-o", out / "init", HERE / "init.c"], check=True)
    return out / "init"


def make_root(root: Path, image: Path) -> str:
    """Packs the root and appends its hash tree; returns what the kernel's command line has to say of it."""
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    date = os.environ.get("SOURCE_DATE_EPOCH", "0")  # mksquashfs takes it as a variable or as options, not both
    pack = ["mksquashfs", str(root), str(image), "-noappend", "-quiet", "-no-progress", "-all-root", "-no-xattrs"]
    pack += ["-comp", "zstd", "-mkfs-time", date, "-all-time", date]
    subprocess.run(pack, check=True, env=environment)
    size = image.stat().st_size
    os.truncate(image, size + -size % BLOCK_BYTES)
    size, salt = image.stat().st_size, hashlib.sha256(image.read_bytes()).hexdigest()
    blocks = size // BLOCK_BYTES
    verity = ["veritysetup", "format", "--no-superblock", "--salt", salt, "--data-blocks", str(blocks)]
    verity += ["--data-block-size", str(BLOCK_BYTES), "--hash-block-size", str(BLOCK_BYTES), "--hash", "sha256"]
    told = subprocess.run(
        [*verity, "--hash-offset", str(size), image, image], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"^Root hash:\s*([0-9a-f]{64})$", told, re.MULTILINE)
    if found is None:
        sys.exit("veritysetup printed no root hash; is this cryptsetup 2?")
    return f"{blocks}:{found[1]}:{salt}"


def write_lock(packages: Sequence[Package]) -> None:
    """Writes the lock file, and keeps what it says at its head."""
    head = [line for line in LOCK.read_text().splitlines() if line.startswith("#")]
    lines = [f"{one.name} {one.version} {one.sha256}" for one in packages]
    LOCK.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
