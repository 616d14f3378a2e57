"""Runs named checks of one client against a server and says what each one saw, as lines of `client<TAB>check<TAB>result`."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Check = Callable[..., Any]
PROGRAMS = Path(sys.executable).parent
"""Where the programs of a client lie."""
TOKENIZER = Path(__file__).resolve().parents[2] / "src/cloister/models/embedded/cloister-5m"
"""A tokenizer for clients that count tokens themselves."""


def run_checks(client: str, checks: dict[str, Check]) -> None:
    """Runs every check; one that raises is `FAILED` with the reason. Exits with 1 if any failed."""
    num_failed = 0
    for name, check in checks.items():
        try:
            seen = check()
            seen = asyncio.run(seen) if inspect.isawaitable(seen) else seen
            print(f"{client}\t{name}\tok: {seen}", flush=True)
        except Exception as error:
            num_failed += 1
            print(f"{client}\t{name}\tFAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
    sys.exit(1 if num_failed else 0)


def server_url() -> str:
    """The server's address, from the command line."""
    return sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def model_name(url: str) -> str:
    """The model that the server at `url` serves."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        return str(json.load(reply)["data"][0]["id"])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What does the PostgreSQL command VACUUM do?"}]
