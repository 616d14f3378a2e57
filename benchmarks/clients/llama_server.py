#!/usr/bin/env python3
"""Stands in for `llama-server` in llama.cpp's own server tests: takes its flags and runs `cloister serve` with ours.

Usage: in tools/server/tests of llama.cpp, LLAMA_SERVER_BIN_PATH=.../llama_server.py pytest unit/test_security.py ...
Flags about llama.cpp's own files, slots and devices have no counterpart and are left out; the model is the embedded one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from cloister.policy.credentials import Credentials
from cloister.policy.keyfile import write_credentials

NAMED_BY_TESTS = ("gpt-3.5-turbo", "gpt-3.5-turbo-instruct")
"""Models that the tests ask for: llama.cpp takes any name, we take those that we serve."""


def main() -> None:
    """Replaces this process by the server, so that the tests' signals reach it."""
    parser = argparse.ArgumentParser()
    for flag in ("--host", "--port", "--alias", "--api-key", "--ctx-size", "--parallel"):
        parser.add_argument(flag)
    given, _ = parser.parse_known_args()
    flags = ["--host", given.host or "127.0.0.1", "--port", given.port or "8080", "--max-model-len", given.ctx_size or "512"]
    flags += ["--model", "cloister-5m", "--served-model-name", ",".join([given.alias or "cloister-5m", *NAMED_BY_TESTS])]
    flags += ["--api-keys", str(write_key(given.api_key))] if given.api_key else []
    flags += ["--allowed-origins", "*"]
    os.execv(sys.executable, [sys.executable, "-m", "cloister.cli", "serve", *flags])


def write_key(api_key: str) -> Path:
    """Writes a key file that knows the very key that a test sends; `cloister keys` only makes keys of its own."""
    made, _ = Credentials.empty().add("test")
    known = replace(made, keys=(replace(made.keys[0], digest=made._digest(api_key)),))
    path = Path(tempfile.mkdtemp()) / "keys.json"
    write_credentials(path, known)
    return path


if __name__ == "__main__":
    main()
