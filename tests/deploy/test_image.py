"""The image of a node: what its second disk may say, what its initial file system is, and that everything in it is pinned."""

from __future__ import annotations

import base64
import io
import json
import lzma
import re
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from deploy.image import build, start
from deploy.image.debian import LOCK, Package, fetch, read_lock, unpack
from deploy.image.initrd import make_cpio, make_initrd, read_modules

FOLDER = LOCK.parent
NODE = {"address": "10.0.0.5/24", "router": "10.0.0.1"}


def read(**changes: object) -> start.Configuration:
    return start.read_configuration(json.dumps({**NODE, **changes}).encode() + bytes(4096))


def test_a_disk_says_where_the_node_is_and_who_vouches():
    given = read(attester="sev-snp", capacity=3)
    assert (str(given.address), str(given.router)) == ("10.0.0.5/24", "10.0.0.1")
    command = start.make_command(given, ["--release", "/run/cloister"])
    assert command[command.index("--host") + 1] == "10.0.0.5"
    assert command[command.index("--attester") + 1] == "sev-snp"
    assert command[command.index("--node-capacity") + 1] == "3"
    assert {"--sealed", "--release"} <= set(command)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "/run/other"},
        {"profile": "open"},
        {"attester": "none"},
        {"attester": ["sev-snp"]},
        {"capacity": 0},
        {"capacity": True},
        {"capacity": 10**9},
        {"address": "10.0.0.5 --profile open"},
        {"address": None},
        {"router": "gateway.example"},
        {"files": {"../etc/passwd": ""}},
        {"files": {"adapter.safetensors": ""}},
        {"files": {"checkpoint": 1}},
        {"files": ["checkpoint"]},
    ],
    ids=str,
)
def test_a_disk_that_says_anything_else_is_refused(changes):
    with pytest.raises(start.ConfigurationError):
        read(**changes)


@pytest.mark.parametrize("data", [b"", bytes(512), b"\xff" * 512, b"[]", b"[" * 100_000, b"{} {}"])
def test_a_disk_without_a_document_is_refused(data):
    with pytest.raises(start.ConfigurationError):
        start.read_configuration(data)


def test_files_of_a_disk_are_the_nodes_alone_and_become_options(tmp_path: Path):
    files = {name: base64.b64encode(name.encode()).decode() for name in start.FILES}
    options = start.write_files(files, tmp_path / "run")
    assert (tmp_path / "run/amd/vcek").read_bytes() == b"amd/vcek"
    assert options[options.index("--amd-certificates") + 1] == str(tmp_path / "run/amd")
    assert options[options.index("--log-checkpoint") + 1] == str(tmp_path / "run/checkpoint")
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}


def test_a_file_that_is_not_base64_is_refused(tmp_path: Path):
    with pytest.raises(start.ConfigurationError, match="checkpoint"):
        start.write_files({"checkpoint": "cloister epoch\n"}, tmp_path)


def test_what_goes_out_of_date_is_written_anew_and_nothing_else(tmp_path: Path):
    def disk(checkpoint: bytes, secret: bytes) -> bytes:
        files = {"checkpoint": checkpoint, "gateway.secret": secret}
        encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
        return json.dumps({**NODE, "files": encoded}).encode() + bytes(512)

    start.write_files(start.read_configuration(disk(b"old", b"secret")).files, tmp_path)
    assert start.refresh(disk(b"old", b"another"), tmp_path) == []
    assert start.refresh(disk(b"new", b"another"), tmp_path) == ["checkpoint"]
    assert (tmp_path / "checkpoint").read_bytes() == b"new"
    assert (tmp_path / "gateway.secret").read_bytes() == b"secret"


def test_a_file_that_the_node_was_not_started_with_does_not_appear_later(tmp_path: Path):
    files = {"checkpoint": base64.b64encode(b"new").decode()}
    assert start.refresh(json.dumps({**NODE, "files": files}).encode(), tmp_path) == []
    assert not (tmp_path / "checkpoint").exists()


def test_a_disk_can_make_its_node_a_member_of_the_cloud(tmp_path: Path):
    given = read(files={"member.key": base64.b64encode(b"key").decode()})
    command = start.make_command(given, start.write_files(given.files, tmp_path))
    assert command[command.index("--member-key") + 1] == str(tmp_path / "member.key")
    assert (tmp_path / "member.key").read_bytes() == b"key"


def test_every_option_that_a_disk_can_bring_is_one_of_serve():
    from cloister.types.config import ServerConfig, setting_names

    known = set(setting_names(ServerConfig))
    assert {option.replace("-", "_") for option, _ in start.FILES.values() if option} <= known


def test_the_network_is_set_up_with_the_calls_of_the_kernel():
    calls: list[tuple[int, bytes]] = []
    start.set_up_network(read(), lambda request, data: calls.append((request, data)))
    address = next(data for request, data in calls if request == 0x8916)
    assert address[:4] == b"eth0"
    assert address[20:24] == bytes([10, 0, 0, 5])
    route = next(data for request, data in calls if request == 0x890B)
    assert len(route) == 120  # struct rtentry
    assert route[28:32] == bytes([10, 0, 0, 1])
    assert struct.unpack_from("<H", route, 56) == (3,)


def test_the_initial_file_system_is_what_the_kernel_reads(tmp_path: Path):
    archive = make_initrd(b"#!", {"dm_mod": b"first", "dm_verity": b"second"})
    found = dict(read_cpio(archive))
    assert found["init"] == (stat.S_IFREG | 0o755, b"#!")
    assert [name for name in found if name.startswith("modules/")] == ["modules/00-dm_mod.ko", "modules/01-dm_verity.ko"]
    assert make_initrd(b"#!", {"dm_mod": b"first", "dm_verity": b"second"}) == archive
    assert make_cpio({})[:6] == b"070701"


def test_modules_come_after_those_that_they_depend_on(tmp_path: Path):
    def write(name: str, depends: str, packed: bool) -> None:
        content = b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0name=" + name.encode()
        (tmp_path / (name + (".ko.xz" if packed else ".ko"))).write_bytes(lzma.compress(content) if packed else content)

    write("dm-verity", "dm-bufio,reed_solomon,dm-mod", packed=True)
    write("dm-bufio", "dm-mod", packed=False)
    write("dm-mod", "", packed=True)
    write("reed_solomon", "", packed=False)
    assert [*read_modules(tmp_path, ["dm_verity"])] == ["dm_mod", "dm_bufio", "reed_solomon", "dm_verity"]


def test_packages_are_pinned_and_no_host_is_written_down():
    packages = read_lock()
    assert all(re.fullmatch("[0-9a-f]{64}", one.sha256) and one.version for one in packages)
    assert [one.name for one in packages] == sorted(one.name for one in packages)
    assert not [one for one in packages if re.match(r"(bash|dash|busybox|openssh|systemd|coreutils)", one.name)]
    assert not [path for path in FOLDER.iterdir() if path.is_file() and "://" in path.read_text()]


def make_package(folder: Path, files: dict[str, bytes]) -> Path:
    root = folder / "tree"
    for name, content in {
        **files,
        "DEBIAN/control": b"Package: p\nVersion: 1\nArchitecture: all\nMaintainer: m\nDescription: d\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    path = folder / "p_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, path], check=True, capture_output=True)
    return path


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_of_a_package_only_what_a_node_needs_is_unpacked(tmp_path: Path):
    files = {"lib/x86_64-linux-gnu/libz.so.1": b"z", "bin/sh": b"#", "usr/share/doc/p/readme": b"r", "usr/bin/python3.11": b"p"}
    files |= {"usr/lib/python3.11/os.py": b"o", "usr/lib/python3.11/test/big.py": b"t", "usr/sbin/sshd": b"s"}
    package = make_package(tmp_path, files)
    root = tmp_path / "root"
    unpack(package, lambda name: root / name if build.is_kept(name) else None)
    kept = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert kept == ["usr/bin/python3.11", "usr/lib/python3.11/os.py", "usr/lib/x86_64-linux-gnu/libz.so.1"]


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get is not installed")
def test_a_package_with_another_digest_is_refused(tmp_path: Path):
    (tmp_path / "p_1_all.deb").write_bytes(b"altered")
    with pytest.raises(SystemExit):
        fetch([Package("p", "1", "00" * 32)], tmp_path, [f"file:{tmp_path}/no", f"file:{tmp_path}/no"])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_the_first_program_compiles_without_a_warning_and_runs_only_as_the_first(tmp_path: Path):
    program = build.compile_init(tmp_path)
    assert subprocess.run([program], timeout=300).returncode == 1


def read_cpio(archive: bytes) -> list[tuple[str, tuple[int, bytes]]]:
    """An independent reader of what the kernel's documentation describes."""
    stream, found = io.BytesIO(archive), []
    while True:
        head = stream.read(110).decode()
        fields = [int(head[6 + 8 * n : 14 + 8 * n], 16) for n in range(13)]
        name = stream.read(fields[11]).rstrip(b"\0").decode()
        stream.seek(-stream.tell() % 4, 1)
        content = stream.read(fields[6])
        stream.seek(-stream.tell() % 4, 1)
        if name == "TRAILER!!!":
            return found
        found.append((name, (fields[1], content)))
