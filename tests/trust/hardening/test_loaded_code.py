"""A process that the starter makes again runs the code that the first one of its role ran, whatever is on the disk by then."""

from __future__ import annotations

import compileall
import importlib.util
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.trust.hardening.loaded_code import RECORD_BYTES, ChangedCodeError, CodeOfRole, LoadedCode
from tests.trust.hardening.launching import HERE

ROLE = """
import socket, sys
import before
try:
    import late
    what = late.VALUE
except ImportError:
    what = "nothing"
from cloister.trust.hardening.code import Imports
from cloister.trust.hardening.measure import Needs
Imports().apply(Needs("engine"))
socket.socket(fileno=int(sys.argv[-1])).send(f"{before.VALUE} and {what}".encode())
"""


class Node:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "role.py").write_text(ROLE)
        self.write("before", "first")
        command = [sys.executable, str(HERE / "changed_engine.py"), str(directory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
        )

    def write(self, module: str, value: str) -> None:
        (self.directory / f"{module}.py").write_text(f"VALUE = {value!r}\n")

    def start_engine(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> str:
        """Returns what it wrote to standard error."""
        return self._process.communicate(timeout=300)[1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        yield node
    finally:
        node._process.kill()
        node._process.communicate()


def test_an_engine_that_is_made_again_does_not_run_a_module_that_was_changed(node: Node) -> None:
    assert node.start_engine() == "first and nothing"
    assert node.start_engine() == "first and nothing"
    node.write("before", "second, which is longer")
    assert node.start_engine() == "it ended"
    assert "before.py was changed since this node was started; start the node again" in node.end()


def test_an_engine_that_is_made_again_does_not_run_a_module_that_is_new(node: Node) -> None:
    assert node.start_engine() == "first and nothing"
    node.write("late", "new")
    assert node.start_engine() == "first and nothing"
    assert "late.py is new since this node was started" in node.end()


def test_compiled_code_that_was_put_in_place_of_a_source_is_not_run(node: Node) -> None:
    assert node.start_engine() == "first and nothing"
    source = node.directory / "before.py"
    was = source.stat()
    node.write("before", "other")  # as long, and with the same time, so that it looks like the compiled form of the source
    os.utime(source, ns=(was.st_atime_ns, was.st_mtime_ns))
    compileall.compile_file(str(source), force=True, quiet=1)
    assert Path(importlib.util.cache_from_source(str(source))).exists()
    node.write("before", "first")
    os.utime(source, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert node.start_engine() == "first and nothing"


def test_compiled_code_without_a_source_is_not_run(node: Node) -> None:
    assert node.start_engine() == "first and nothing"
    other = node.directory / "other.py"
    other.write_text("VALUE = 'other'\n")
    package = node.directory / "before"  # a package comes before a module of its name
    package.mkdir()
    py_compile.compile(str(other), cfile=str(package / "__init__.pyc"), doraise=True)
    assert node.start_engine() == "first and nothing"
    package.joinpath("__init__.pyc").rename(node.directory / "before.pyc")
    package.rmdir()
    (node.directory / "before.py").unlink()
    assert node.start_engine() == "it ended"


def test_a_package_that_was_put_before_a_module_is_not_run(node: Node) -> None:
    assert node.start_engine() == "first and nothing"
    (node.directory / "before").mkdir()
    node.write("before/__init__", "other")
    assert node.start_engine() == "it ended"
    assert "__init__.py is new since this node was started" in node.end()


def test_what_another_program_has_compiled_again_is_compiled_from_the_same_source(node: Node) -> None:
    source = str(node.directory / "before.py")
    py_compile.compile(source, doraise=True)  # as an installer does, so that the first engine reads no source
    assert node.start_engine() == "first and nothing"
    py_compile.compile(source, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    assert node.start_engine() == "first and nothing"


def test_a_library_that_was_changed_is_not_loaded(node: Node) -> None:
    import _queue

    library = Path(_queue.__file__)
    (node.directory / "role.py").write_text(ROLE.replace("import before", "import before, spare"))
    copy = node.directory / library.name.replace("_queue", "spare")
    copy.write_bytes(library.read_bytes())
    # a module of another name than its library was built for does not start; that it is compared before is what counts
    assert node.start_engine() == "it ended"
    copy.write_bytes(library.read_bytes() + b"\0")
    assert node.start_engine() == "it ended"
    assert f"{copy.name} was changed since this node was started" in node.end()


def test_what_was_loaded_first_counts_until_one_process_has_loaded_all() -> None:
    code = CodeOfRole()
    first, known, is_complete = code.begin()
    assert (known, is_complete) == ({}, False)
    first.note("/a.py", b"a" * 32)
    second, known, is_complete = code.begin()  # the first one was killed while it loaded
    assert (known, is_complete) == ({"/a.py": b"a" * 32}, False)
    second.note("/a.py", b"x" * 32)
    second.note("/b.py", b"b" * 32)
    _, known, is_complete = code.begin()
    assert (known, is_complete) == ({"/a.py": b"a" * 32, "/b.py": b"b" * 32}, False)


def test_a_process_that_loads_without_end_is_refused() -> None:
    record = LoadedCode()
    names = [f"/{number}{'x' * 4000}.py" for number in range(RECORD_BYTES // 4100)]
    for name in names:
        record.note(name, b"d" * 32)
    with pytest.raises(ChangedCodeError, match="more files of code"):
        record.note(names[0] * 9999, b"d" * 32)
    assert [*record.read()] == names
