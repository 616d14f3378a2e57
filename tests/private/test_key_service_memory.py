"""A private key is in memory while it opens requests, and nowhere in it after the ring has dropped it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cloister.trust.residue.finder import Finder
from cloister.trust.residue.needles import of_bytes
from cloister.trust.residue.processes import Process
from cloister.trust.residue.scan import search_process
from cloister.types.processes import OVERWRITING
from tests.trust.residue.test_planted_leaks import can_trace

pytestmark = pytest.mark.skipif(not can_trace(), reason="memory of other processes may not be read here")


def test_a_key_that_was_dropped_is_nowhere_in_memory() -> None:
    private = os.urandom(96)
    command = [sys.executable, "-m", "tests.private.leaving_key"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **OVERWRITING})
    halves = (private[:32], private[32:64], private[64:])  # d and z of ML-KEM, and the scalar of X25519
    finder = Finder([of_bytes("key", place, half) for place, half in enumerate(halves)])
    process = Process(holder.pid, os.getpid(), 0, "holder", "")
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(private)
        holder.stdin.flush()
        assert holder.stdout.readline() == b"held\n"
        assert {find.owner for find in search_process(process, finder).finds} == {0, 1, 2}
        holder.stdin.write(b".")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"destroyed\n"
        after = search_process(process, finder)
        assert not after.gaps
        assert not after.finds
    finally:
        holder.kill()
        holder.communicate()
