"""The launcher: what an operator's environment brings in, what stops a start, and what changes on disk afterwards."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.trust.hardening import HardeningError, Missing, Needs, apply, probe
from cloister.trust.hardening.dumps import Swap
from cloister.trust.hardening.launching import Launch, reading
from cloister.trust.hardening.privileges import FIXED, KEPT, measured
from cloister.trust.hardening.seccomp import Rule, install
from tests.trust.hardening.launching import DEADLINE_S, capabilities, launcher, living, needs_measures

NOT_CONFIGURED = 78


def run_loaded(profile: str, environment: dict[str, str], flags: tuple[str, ...] = ()) -> dict[str, object]:
    program, *rest = launcher("loaded.py", profile=profile)
    done = subprocess.run(
        [program, *flags, *rest],
        env=environment,
        input="",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    told: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return told


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that loads a library and a module into every Python program."""
    directory = tmp_path_factory.mktemp("hostile")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (directory / "sitecustomize.py").write_text("")
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", str(directory / "evil.so")], check=True)
    return {
        "LD_PRELOAD": str(directory / "evil.so"),
        "PYTHONPATH": str(directory),
        "PYTHONINSPECT": "1",
        "PYTHONSTARTUP": str(directory / "sitecustomize.py"),
        "PYTHONBREAKPOINT": "os.system",
        "PYTHONVERBOSE": "1",
    }


@needs_measures
def test_nothing_of_a_hostile_environment_reaches_a_hardened_process(hostile: dict[str, str]) -> None:
    told = run_loaded("private", {**os.environ, **hostile})
    assert not [library for library in told["libraries"] if "evil" in library]  # type: ignore[attr-defined]
    assert not str(told["customized"]).startswith(hostile["PYTHONPATH"])  # Debian's interpreter has one of its own
    assert (told["inspect"], told["hook"]) == (False, None)
    assert set(told["environment"]) <= {*KEPT, *FIXED}  # type: ignore[call-overload]
    assert hostile["PYTHONPATH"] not in told["path"]  # type: ignore[operator]


def test_a_hostile_environment_does_reach_a_process_without_measures(hostile: dict[str, str]) -> None:
    told = run_loaded("open", {**os.environ, **hostile})
    assert [library for library in told["libraries"] if "evil" in library]  # type: ignore[attr-defined]
    assert str(told["customized"]).startswith(hostile["PYTHONPATH"])


@needs_measures
def test_options_of_the_interpreter_do_not_pass_either() -> None:
    flags = ("-s", "-B", "-X", "tracemalloc", "-X", "faulthandler")
    assert run_loaded("open", measured(os.environ), flags)["options"] == ["faulthandler", "tracemalloc"]
    assert run_loaded("private", measured(os.environ), flags)["options"] == []


def test_only_listed_variables_pass_and_fixed_ones_win() -> None:
    given = {"HOME": "/home/someone", "LD_AUDIT": "x", "LANG": "de_DE.UTF-8", "SECRET": "x"}
    assert measured(given) == {"HOME": "/home/someone", **FIXED}


def without_landlock() -> None:
    """Makes a kernel of this machine that has no Landlock, for the next program."""
    install([Rule("landlock_create_ruleset", error=errno.ENOSYS)])


@needs_measures
@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_missing_measure_stops_the_start_and_says_what_to_do(profile: str) -> None:
    command = launcher("victim.py", profile=profile)
    done = subprocess.run(
        command, input="\n", capture_output=True, text=True, timeout=DEADLINE_S, check=False, preexec_fn=without_landlock
    )
    assert (done.returncode, done.stdout) == (NOT_CONFIGURED, "")
    assert "landlock: the kernel has no Landlock" in done.stderr
    assert "What to do: run on Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK" in done.stderr


def test_the_doctor_says_what_this_machine_lacks() -> None:
    show = "print(json.dumps(dataclasses.asdict(doctor.check_hardening())))"
    code = f"import dataclasses, json; from cloister.cli import doctor; {show}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        preexec_fn=without_landlock,
    )
    check = json.loads(done.stdout)
    assert (check["good"], check["essential"]) == (False, False)
    assert "landlock: the kernel has no Landlock" in check["detail"]
    assert "CONFIG_SECURITY_LANDLOCK" in check["advice"]


@pytest.mark.parametrize("profile", ["open", "team"])
def test_open_and_team_start_without_measures_and_say_so(profile: str) -> None:
    results = apply(profile, Needs("front"))
    assert {str(result) for result in results} == {f"missing: not asked for by profile {profile}"}
    command = launcher("victim.py", profile=profile)
    done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Broken:
    name = "broken"
    stops = "nothing"

    def apply(self, needs: Needs) -> str:
        raise Missing("it is broken", "repair it")

    def probe(self) -> str:
        raise Missing("it is broken", "repair it")


def test_every_missing_measure_is_named_with_its_remedy() -> None:
    with pytest.raises(HardeningError, match=r"broken: it is broken\. What to do: repair it; broken: it is broken"):
        apply("private", Needs("front"), [Broken(), Broken()])
    assert [(result.applied, result.remedy) for result in probe([Broken()])] == [(False, "repair it")]


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _may_lock() -> bool:
    cap_ipc_lock = 14
    return bool(capabilities() >> cap_ipc_lock & 1) or resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY


SWAPS = "Filename Type Size Used Priority\n"
DISK = "/dev/sda2 partition 8388604 0 -2\n"
GROUP = "0::/system.slice/node.service\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"proc/swaps": SWAPS}, "the machine has none"),
        (
            {"proc/swaps": SWAPS + DISK, "sys/fs/cgroup/system.slice/node.service/memory.swap.max": "0\n"},
            "the cgroup may use none",
        ),
        ({"proc/swaps": SWAPS + DISK, "sys/fs/cgroup/system.slice/memory.swap.max": "0\n"}, "the cgroup may use none"),
    ],
)
def test_a_process_that_cannot_be_swapped_is_found(files: dict[str, str], found: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/self/cgroup": GROUP, **files})
    assert Swap(root).apply(Needs("front")) == found


@pytest.mark.parametrize(
    "files",
    [
        {"proc/swaps": SWAPS + DISK},
        {"proc/swaps": SWAPS + DISK, "sys/fs/cgroup/system.slice/node.service/memory.swap.max": "max\n"},
        {"proc/swaps": SWAPS + DISK, "sys/fs/cgroup/other/memory.swap.max": "0\n"},
        {},
    ],
)
def test_a_machine_that_can_swap_needs_locked_memory(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path, {"proc/self/cgroup": GROUP, **files})
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 20, 8 << 20))
    with pytest.raises(Missing, match="this machine can swap") as missing:
        Swap(root).probe()
    assert "swapoff -a" in missing.value.remedy


FORKED = """
import os, pathlib, resource, sys
from cloister.trust.hardening.measure import Needs
from cloister.trust.hardening.dumps import Swap
def locked_kb():
    return int(pathlib.Path("/proc/self/status").read_text().partition("VmLck:")[2].split()[0])
if sys.argv[2] == "limited":
    resource.setrlimit = lambda *_: None  # locking takes a capability here, and no limit
print(Swap(pathlib.Path(sys.argv[1])).apply(Needs("worker", fork=True)), flush=True)
assert locked_kb() > 1000
if os.fork() == 0:
    print(locked_kb(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(not _may_lock(), reason="locking memory takes IPC_LOCK or a limit of locked memory that is unlimited")
def test_what_a_process_with_locked_memory_forks_is_locked_too(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/self/cgroup": GROUP, "proc/swaps": SWAPS + DISK})
    limit = "limited" if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY else "unlimited"
    command = [sys.executable, "-c", FORKED, str(root), limit]
    told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.splitlines()
    assert told[0] == "the machine can swap; all memory is locked"
    assert int(told[1]) > 1000  # kB


@needs_measures
def test_code_that_is_changed_after_the_start_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text("VALUE = 'published'")
    (tmp_path / "after.py").write_text("VALUE = 'published'")
    with living(launcher("changed.py", tmp_path, options=("--read", str(tmp_path))), stripped=False) as (process, told):
        assert told == {"value": "published"}
        for name in ("before", "after"):
            (tmp_path / f"{name}.py").write_text("VALUE = 'changed'")
        output, _ = process.communicate("\n", timeout=DEADLINE_S)
    assert json.loads(output.splitlines()[0]) == {
        "value": "published",
        "reload": "ModuleNotFoundError",
        "import": "ModuleNotFoundError",
    }


@needs_measures
@pytest.mark.parametrize(("profile", "status"), [("private", NOT_CONFIGURED), ("open", 0)])
def test_a_process_that_is_traced_from_its_start_does_not_serve(profile: str, status: int) -> None:
    seize, libc = 0x4206, ctypes.CDLL(None, use_errno=True)
    process = subprocess.Popen(
        launcher("loaded.py", profile=profile), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert libc.ptrace(seize, process.pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, said
    assert ("traced by another process" in said) == (profile == "private")


@needs_measures
def test_a_descriptor_that_was_open_when_a_node_was_started_is_no_way_out() -> None:
    near, far = os.pipe()
    command = launcher("victim.py")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(far,))
    os.close(far)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        assert select.select([near], [], [], 0)[0], "the process still has it"
        assert os.read(near, 1) == b""
    finally:
        process.kill()
        process.communicate()
        os.close(near)


@needs_measures
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to make a library with")
@pytest.mark.parametrize(("profile", "after"), [("private", 1111), ("open", 2222)])
def test_a_library_that_is_written_into_while_it_runs_changes_nothing(profile: str, after: int, tmp_path: Path) -> None:
    source, library = tmp_path / "answer.c", tmp_path / "answer.so"
    source.write_text("int answer(void) { return 1111; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=DEADLINE_S)
    command = launcher("rewritten.py", library, profile=profile, options=("--read", str(tmp_path)))
    with living(command, stripped=False) as (process, told):
        assert told == {"answer": 1111}
        at = library.read_bytes().index((1111).to_bytes(4, "little"))
        with library.open("r+b") as file:
            file.seek(at)
            file.write((2222).to_bytes(4, "little"))
        output, _ = process.communicate("\n", timeout=DEADLINE_S)
    assert json.loads(output.splitlines()[0]) == {"answer": after}


def test_a_module_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    cache = tmp_path / "models--someone--model"
    blob = write_tree(cache, {"blobs/abc": "weights"}) / "blobs/abc"
    snapshot = cache / "snapshots/1234"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert reading([snapshot], []) == (str(cache),)


def test_a_file_that_may_be_replaced_is_read_in_its_directory(tmp_path: Path) -> None:
    link = write_tree(tmp_path, {"elsewhere/keys.toml": "", "etc/x": ""}) / "etc/keys.toml"
    link.symlink_to(tmp_path / "elsewhere/keys.toml")
    assert reading([], [link]) == (str(tmp_path / "etc"), str(tmp_path / "elsewhere"))


def test_the_command_line_says_what_a_launch_asks_for() -> None:
    launch = Launch(
        "private", "module", ("--flag", "value"), read=("/a",), write=("/b",), listen=(1,), connect=(2,), with_engine=True
    )
    line = ["--profile", "private", "--read", "/a", "--write", "/b", "--listen", "1", "--connect", "2", "--with-engine"]
    assert list(launch.command_line()) == [*line, "module", "--flag", "value"]


def test_help_says_what_the_launcher_takes() -> None:
    command = [sys.executable, "-P", "-m", "cloister.trust.hardening", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert "--with-engine" in done.stdout
    assert "--again" not in done.stdout
