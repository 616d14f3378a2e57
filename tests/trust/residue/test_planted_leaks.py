"""Programs that keep a prompt, each in its own way: every one is found, and nothing in the one that keeps nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.models import locate
from cloister.text import Tokenizer
from cloister.trust.residue.finder import Finder
from cloister.trust.residue.needles import Mark, MarkMaker, of_bytes
from cloister.trust.residue.processes import ProcessTree
from cloister.trust.residue.scan import found_in, search_all, search_files

LEAKY = Path(__file__).with_name("leaky.py")
OVERWRITES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0"}
KEEPS_TCACHE = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.perturb=85"}

LEAKS = {
    "list of prompts": (OVERWRITES, "latin-1"),
    "lru_cache": (OVERWRITES, "latin-1"),
    "log file": (OVERWRITES, "utf-8"),
    "deleted file": (OVERWRITES, "utf-8"),
    "shared memory file": (OVERWRITES, "utf-16"),
    "freed chunk": ({}, "utf-8"),
    "chunk in tcache": (KEEPS_TCACHE, "utf-8"),
    "token ids as int64": (OVERWRITES, "int64"),
    "token ids as integers": (OVERWRITES, "list of python ints"),
    "thread-local": (OVERWRITES, "latin-1"),
    "K/V rows": (OVERWRITES, "K/V rows"),
    "logits": (OVERWRITES, "logits"),
    "child process": (OVERWRITES, "latin-1"),
}


def can_trace() -> bool:
    """Whether this process may read the memory of one that it started and that asked for no privacy, and its pages."""
    child = subprocess.Popen(["sleep", "5"])
    try:
        with open(f"/proc/{child.pid}/mem", "rb"), open(f"/proc/{child.pid}/pagemap", "rb"):
            return True
    except OSError:
        return False
    finally:
        child.kill()
        child.wait()


pytestmark = pytest.mark.skipif(not can_trace(), reason="memory of other processes may not be read here")


class Leaky:
    """A leaky program that was given a prompt."""

    def __init__(self, leak: str, environment: dict[str, str], mark: Mark, directory: Path) -> None:
        self.leak, self.mark = leak, mark
        self.ids = [token_id for run in mark.runs for token_id in run]
        kept = {name: value for name, value in os.environ.items() if name not in OVERWRITES}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(LEAKY), leak],
            env=kept | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
        )
        assert self.process.stdin is not None
        self.process.stdin.write("\t".join([mark.text, ",".join(map(str, self.ids)), f"{directory}\n"]).encode())
        self.process.stdin.flush()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"kept\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """leak -> kinds that were found of its prompt."""
    directory = tmp_path_factory.mktemp("node")
    maker, since_s = MarkMaker(Tokenizer(locate("cloister-5m"))), time.time() - 1
    named = [*LEAKS.items(), ("nothing", (OVERWRITES, ""))]
    programs = [
        Leaky(leak, environment, maker.make(number), directory) for number, (leak, (environment, _)) in enumerate(named)
    ]
    try:
        for program in programs:
            program.wait()
        needles = [needle for program in programs for needle in program.mark.needles()]
        for number, program in enumerate(programs):
            rows = array("f", [token_id * 1.618 for token_id in program.ids])
            needles.append(of_bytes("K/V rows", number, memoryview(rows).cast("B")[2:].tobytes()))
            needles.append(of_bytes("logits", number, rows[::-1].tobytes()))
        finder = Finder(needles)
        runs = [(program.mark.owner, run) for program in programs for run in program.mark.runs]
        with ProcessTree([program.process.pid for program in programs]) as family, family.frozen() as processes:
            searched = search_all(processes, finder, runs)
            searched.append(search_files(processes, finder, since_s=since_s, roots=["/dev/shm", directory]))
        assert not [gap for one in searched for gap in one.gaps]
        kinds: dict[str, set[str]] = {program.leak: set() for program in programs}
        for find in found_in(searched):
            kinds[programs[find.owner].leak].add(find.kind)
        yield kinds
    finally:
        for program in programs:
            with ProcessTree([program.process.pid]) as family:
                for process in family.alive():
                    os.kill(process.pid, 9)
            program.process.communicate()
            Path(f"/dev/shm/cloister-leak-{program.process.pid}").unlink(missing_ok=True)


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(leak: str, found: dict[str, set[str]]) -> None:
    assert LEAKS[leak][1] in found[leak]


def test_a_program_that_keeps_nothing_is_found_to_keep_nothing(found: dict[str, set[str]]) -> None:
    assert found["nothing"] == set()
