"""Builds the node's image twice, predicts what hardware would measure of it, and boots it in QEMU, whole and damaged.

    python -m benchmarks.node_image --wheel WHEEL --lock LOCK --work DIR --amd-firmware FILE --intel-firmware FILE

As root, on Debian 12, with what docs/image.md lists. Nothing here has SEV-SNP or TDX: QEMU emulates the processor (TCG, half an
hour of a shared machine at most), and the predictions are compared with sev-snp-measure where it is installed. Exit status: 0
everything is as it should be, 1 something is not; it says what.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from cloister.private.gateway import NODE_PATH
from cloister.private.nodes import EVIDENCE_PATH, KEYS_PATH
from cloister.trust.attestation import read_evidence, read_statement
from cloister.trust.sealing import (
    WHOLE,
    HttpRequest,
    RequestHead,
    decode_response,
    encode_request,
    open_response,
    parse_keys,
    seal_request,
)
from cloister.trust.shape import Unshaper

BOOT_DEADLINE_S = 420.0
BUILDS = {"first": {}, "far/away/second": {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "7"}}
"""Where the image is built, and with which environment; the second with umask 077 too."""
CPU, VCPUS = "EPYC-Milan", 2
SHELLS = ("sh", "bash", "dash", "busybox", "sshd", "ssh", "getty", "login", "su")
QEMU = "qemu-system-x86_64 -cpu max"
ENDED = ("machine ends", "Kernel panic")


def main() -> int:
    """Does all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("wheel", "lock", "work", "amd-firmware", "intel-firmware"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--qemu", default=QEMU, help="QEMU 8 or newer, with the processor")
    given = parser.parse_args()
    images = [build(given.work / "builds" / name, given, environment) for name, environment in BUILDS.items()]
    sums = [(image / "SHA256SUMS").read_text() for image in images]
    image = images[0]
    print(sums[0], end="")
    checks = {
        "two builds are the same bytes": sums[0] == sums[1],
        "no shell, no ssh in the root": not [path for path in (image / "root").rglob("*") if path.name in SHELLS],
    }
    launch = predict(image, given.amd_firmware, given.intel_firmware)
    checks["sev-snp-measure predicts the same"] = compare(image, given.amd_firmware, launch)
    release = make_release(image, given, launch)
    checks |= boot_whole(image, release, given.qemu)
    checks |= boot_damaged(image, given.qemu)
    for name, holds in checks.items():
        print(f"{'yes' if holds else 'NO ':4} {name}")
    return 0 if all(checks.values()) else 1


def build(folder: Path, given: argparse.Namespace, environment: dict[str, str]) -> Path:
    """Builds one image, from packages that both builds share; one that is there from an earlier run is taken as it is."""
    if (folder / "SHA256SUMS").exists():
        return folder
    command = [sys.executable, "-m", "deploy.image.build", "--wheel", str(given.wheel.resolve())]
    command += ["--lock", str(given.lock.resolve()), "--out", str(folder.resolve()), "--packages", str(given.work / "packages")]
    began = time.monotonic()
    umask = 0o077 if environment else 0o022
    subprocess.run(command, check=True, env={**os.environ, **environment}, umask=umask, stdout=subprocess.DEVNULL)
    print(f"built in {time.monotonic() - began:.0f} s, {sum(p.stat().st_size for p in folder.iterdir()) / 2**20:.0f} MiB")
    return folder


def predict(image: Path, amd: Path, intel: Path) -> str:
    """Returns the lines that `cloister release image` prints, for both kinds."""
    files = [
        f"--{name}={image / file}" for name, file in (("kernel", "vmlinuz"), ("initrd", "initrd"), ("command-line", "cmdline"))
    ]
    command = [sys.executable, "-m", "cloister.cli", "release", "image", *files]
    snp = [*command, f"--firmware={amd}", f"--vcpus={VCPUS}", f"--cpu={CPU}"]
    lines = "".join(
        subprocess.run(one, check=True, capture_output=True, text=True).stdout
        for one in (snp, [*command, f"--firmware={intel}", "--kind=tdx"])
    )
    print(lines, end="")
    return lines


def compare(image: Path, amd: Path, launch: str) -> bool:
    """Whether sev-snp-measure says the same."""
    if shutil.which("sev-snp-measure") is None:
        print("sev-snp-measure is not installed (pip install sev-snp-measure): not compared")
        return False
    command = ["sev-snp-measure", "--mode=snp", f"--vcpus={VCPUS}", f"--vcpu-type={CPU}", f"--ovmf={amd}"]
    command += [f"--kernel={image / 'vmlinuz'}", f"--initrd={image / 'initrd'}"]
    command += [f"--append={(image / 'cmdline').read_text().rstrip()}"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return f"sev-snp={told}" in launch.split()


def make_release(image: Path, given: argparse.Namespace, launch: str) -> Path:
    """Makes a release inside of the image's root, as a node finds it; returns its folder."""
    work: Path = given.work / "release"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copy(given.wheel, work)
    shutil.copy(given.lock, work / "lock.txt")
    (work / "launch").write_text(launch)
    key = [sys.executable, "-m", "cloister.cli", "log", "key", "release.example", "--role=release", f"--out={work / 'key'}"]
    subprocess.run(key, check=True, capture_output=True)
    model = "/usr/local/lib/python3.11/dist-packages/cloister/models/embedded/cloister-5m"
    make = f"/usr/bin/python3.11 -I -B -m cloister.cli release make --number 1 --wheel /tmp/{given.wheel.name}"
    make += f" --lock /tmp/lock.txt --model {model} --key /tmp/key --out /tmp --launch-file /tmp/launch"
    root = shlex.quote(str(image / "root"))
    inside = f"mount --bind {shlex.quote(str(work))} {root}/tmp && mount -t proc proc {root}/proc && exec chroot {root} {make}"
    told = subprocess.run(["unshare", "--mount", "sh", "-c", inside], check=True, capture_output=True, text=True)
    (work / "digest").write_text(told.stdout)
    return work


def boot_whole(image: Path, release: Path, qemu: str) -> dict[str, bool]:
    """Boots it with its release, and asks it something sealed."""
    files = {name: base64.b64encode((release / name).read_bytes()).decode() for name in ("release.json", "manifest.json")}
    with machine(image, image / "root.img", (image / "cmdline").read_text(), files, qemu) as (url, console):
        began = time.monotonic()
        healthy = await_health(url, console)
        print(f"healthy after {time.monotonic() - began:.0f} s of an emulated processor")
        if not healthy:
            print(console.read_text()[-3000:])
            return {"the node is healthy": False}
        statement = read_statement(read_evidence(httpx.get(url + EVIDENCE_PATH, timeout=60).content).statement)
        return {
            "the node is healthy": True,
            "it states the release that was made": statement.release == (release / "digest").read_text().strip(),
            "it answers a sealed request": ask(url),
        }


def boot_damaged(image: Path, qemu: str) -> dict[str, bool]:
    """Boots it with one bit flipped, in what is read first and in the hash tree, and with another root's hash."""
    line = (image / "cmdline").read_text()
    blocks = int(line.split("cloister.verity=")[1].split(":")[0])
    checks = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, offset in (("the root", 40), ("the hash tree", blocks * 4096 + 5)):
            copy = Path(scratch) / "root.img"
            shutil.copy(image / "root.img", copy)
            with copy.open("r+b") as file:
                file.seek(offset)
                (byte,) = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ 1]))
            checks[f"a flipped bit in {name} ends the machine"] = ends(image, copy, line, qemu)
        other = line.replace(line.split(":")[1], "0" * 64)
        checks["another root's hash ends the machine"] = ends(image, image / "root.img", other, qemu)
    return checks


def ends(image: Path, root: Path, line: str, qemu: str) -> bool:
    """Whether a machine comes to its end before it serves."""
    with machine(image, root, line, {}, qemu) as (url, console):
        healthy = await_health(url, console)
        said = [one for one in console.read_text().splitlines() if "verity" in one or "node:" in one or "panic" in one]
        print("\n".join(f"  {one[:150]}" for one in said if "command line" not in one.lower()))
        return not healthy and any(word in one for one in said for word in ENDED)


@contextmanager
def machine(image: Path, root: Path, line: str, files: dict[str, str], qemu: str) -> Iterator[tuple[str, Path]]:
    """Runs the image in QEMU; gives the node's address here, and the file of its console."""
    with tempfile.TemporaryDirectory() as scratch:
        disk, console = Path(scratch) / "disk", Path(scratch) / "console"
        document = json.dumps({"address": "10.0.2.15/24", "router": "10.0.2.2", "files": files}).encode()
        disk.write_bytes(document + bytes(-len(document) % 512))
        console.touch()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        command = [*shlex.split(qemu), "-machine", "q35", "-accel", "tcg,thread=multi", "-smp", str(VCPUS), "-m", "3G"]
        command += ["-no-reboot", "-nodefaults", "-display", "none", "-serial", f"file:{console}"]
        command += ["-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd"), "-append", line.strip()]
        for name, path in (("root", root), ("disk", disk)):
            command += [
                "-drive",
                f"file={path},format=raw,if=none,id={name},readonly=on",
                "-device",
                f"virtio-blk-pci,drive={name}",
            ]
        command += [
            "-netdev",
            f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:8000",
            "-device",
            "virtio-net-pci,netdev=net",
        ]
        process = subprocess.Popen(command)
        try:
            yield f"http://127.0.0.1:{port}", console
        finally:
            process.kill()
            process.wait(30)


def await_health(url: str, console: Path) -> bool:
    """Waits until the node is healthy, or the machine says its end."""
    deadline = time.monotonic() + BOOT_DEADLINE_S
    while time.monotonic() < deadline and not any(word in console.read_text(errors="replace") for word in ENDED):
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(2)
    return False


def ask(url: str, words: Sequence[str] = ("What", "is", "a", "transparency", "log?")) -> bool:
    """Seals a question to the node's key, and opens the answer."""
    body = {"model": "cloister-5m", "messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 24}
    head = RequestHead("POST", "https", "node", "/v1/chat/completions", ((b"content-type", b"application/json"),))
    keys = parse_keys(httpx.get(url + KEYS_PATH, timeout=60).content)
    sealed, exchange = seal_request(keys[0], encode_request(HttpRequest(head, json.dumps(body).encode())))
    began = time.monotonic()
    answer = httpx.post(url + NODE_PATH, content=sealed, headers={"content-type": WHOLE.request_type}, timeout=120)
    opened = decode_response(Unshaper(required=True).feed(open_response(exchange, answer.content)))
    text = json.loads(opened.content)["choices"][0]["message"]["content"]
    print(f"answered in {time.monotonic() - began:.0f} s: {text}")
    return opened.head.status == 200 and bool(text)


if __name__ == "__main__":
    sys.exit(main())
