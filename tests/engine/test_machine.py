"""Limits come from the cgroup, not the host."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from cloister.engine.machine import cpu_seconds, freeze_gc_heap, pause_gc, read_machine, resident_bytes

GIB = 2**30
HOST = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 100 kB\nMemAvailable: {48 * 2**20} kB\n"}


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_cgroup_the_host_counts(tmp_path: Path) -> None:
    machine = read_machine(lay_out(tmp_path, HOST), num_affine_cpus=8)
    assert (machine.num_cpus, machine.memory_bytes, machine.available_bytes) == (8, 64 * GIB, 48 * GIB)
    assert machine.limited_by == "host"


def test_cgroup_2_limits_memory_and_cpus_at_every_level(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": str(4 * GIB),
        "sys/fs/cgroup/outer/memory.current": str(3 * GIB),
        "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/outer/cpu.max": "max 100000\n",
    }
    machine = read_machine(lay_out(tmp_path, HOST | files), num_affine_cpus=8)
    assert (machine.num_cpus, machine.memory_bytes, machine.available_bytes) == (2, 4 * GIB, 2 * GIB)
    assert machine.limited_by == "cgroup"


def test_a_limit_of_the_address_space_counts_and_what_is_mapped_already_with_it(tmp_path: Path) -> None:
    pages = GIB // os.sysconf("SC_PAGE_SIZE")
    files = HOST | {"proc/self/statm": f"{pages} 100 50 1 0 300 0\n"}
    machine = read_machine(lay_out(tmp_path, files), num_affine_cpus=8, address_space_bytes=3 * GIB)
    assert (machine.memory_bytes, machine.available_bytes) == (3 * GIB, 2 * GIB)
    assert machine.limited_by == "ulimit -v"


def test_a_model_that_the_address_space_cannot_hold_is_refused_with_the_figure_that_would() -> None:
    limited = 'ulimit -v 500000; exec "$0" -m cloister.cli run cloister-5m Hello --max-tokens 1'
    done = subprocess.run(["sh", "-c", limited, sys.executable], capture_output=True, text=True, timeout=300, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("error: weights")
    assert "give it" in line


def test_cgroup_1_limits_memory_and_cpus(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    }
    machine = read_machine(lay_out(tmp_path, HOST | files), num_affine_cpus=8)
    assert (machine.num_cpus, machine.memory_bytes, machine.available_bytes) == (3, 2 * GIB, GIB)


def test_a_container_that_sees_only_its_own_mount_is_read_there(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../outside/of/the/mount\n",
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": "0",
    }
    assert read_machine(lay_out(tmp_path, HOST | files), num_affine_cpus=1).memory_bytes == GIB


def test_less_than_one_cpu_is_one(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert read_machine(lay_out(tmp_path, HOST | files), num_affine_cpus=4).num_cpus == 1


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.num_cpus >= 1
    assert 0 < machine.available_bytes <= machine.memory_bytes


def test_a_process_is_as_old_as_since_it_was_started():
    command = "import time; time.sleep(0.3); from cloister.engine.machine import process_age_s; print(process_age_s())"
    begun = time.monotonic()
    printed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=300).stdout
    assert 0.25 < float(printed) <= time.monotonic() - begun + 0.05


def test_memory_in_use_is_that_of_the_process_and_none_of_one_that_is_gone():
    held = resident_bytes()
    block = bytearray(b"x" * 2**26)
    assert resident_bytes() - held > 2**26 * 0.9
    assert resident_bytes(os.getpid()) == pytest.approx(resident_bytes(), rel=0.05)
    assert len(block) == 2**26
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert resident_bytes(ended.pid) == 0


def test_processor_time_is_that_of_the_process_and_nothing_of_one_that_ended():
    before_s = cpu_seconds()
    deadline = time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    assert 0.05 < cpu_seconds() - before_s < 5
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert cpu_seconds(ended.pid) is None


def test_what_is_exempt_from_collection_is_in_use_and_may_be_freed_when_it_no_longer_is():
    class Loop:
        def __init__(self) -> None:
            self.me = self

    gc.disable()
    try:
        garbage, kept = weakref.ref(Loop()), Loop()
        freeze_gc_heap()
        assert garbage() is None
        gone = weakref.ref(kept)
        del kept
        freeze_gc_heap()
        assert gone() is not None
        freeze_gc_heap(thaw=True)
        assert gone() is None
    finally:
        gc.enable()


def test_nothing_is_searched_from_a_pause_to_a_freeze_which_need_not_search_either() -> None:
    class Node:
        own: Node

    node = Node()
    node.own, lives = node, weakref.ref(node)
    pause_gc()
    try:
        assert not gc.isenabled()
        del node
        freeze_gc_heap(searches=False)
        assert gc.isenabled()
        gc.collect()
        assert lives() is not None
        freeze_gc_heap(thaw=True)
        assert lives() is None
    finally:
        gc.enable()
        gc.unfreeze()
