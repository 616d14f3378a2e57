"""An agent with tools, against a served model through the openai package: `python examples/agent.py ["A question"]`.

Without --base-url it starts a server of its own for as long as it runs. The embedded model was never trained to choose
tools, so the call is forced (`tool_choice="required"`): a grammar makes it a valid call whatever the model is. With a model
that uses tools, `--tool-choice auto` lets it decide, and it goes on until it answers without a call.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit("error: this example needs the package openai; install it with: pip install openai")

QUESTION = "What is the Python module csv?"
MODULES = ("csv", "json", "random", "re", "sqlite3", "tempfile")
MAX_TURNS = 4
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "describe_module",
            "description": "Returns the first line of the documentation of a Python module.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": list(MODULES)}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    }
]


def describe_module(name: str) -> str:
    """Returns the first line of a module's documentation."""
    if name not in MODULES:
        return f"There is no module {name} here."
    return (inspect.getdoc(importlib.import_module(name)) or "It has no documentation.").partition("\n")[0]


@contextmanager
def serving(base_url: str | None) -> Iterator[str]:
    """Yields the address of a server: the one given, or one that runs as long as the block does."""
    if base_url is not None:
        yield base_url
        return
    command = [sys.executable, "-m", "cloister.cli", "serve", "--model", "cloister-5m", "--port", "0", "--no-log-requests"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("Serving on ")), None)
        if line is None:
            raise SystemExit("the server did not start; run `cloister serve` to see why")
        yield line.split()[-1] + "/v1"
    finally:
        process.terminate()
        process.wait(60)


def answer(client: OpenAI, question: str, tool_choice: Literal["auto", "required"]) -> Iterator[str]:
    """Yields what happens, line by line: calls, what they brought, and the answer."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        choice: Literal["auto", "required", "none"] = tool_choice if turn == 0 or tool_choice == "auto" else "none"
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            yield f"answer: {message.content}"
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            if call.type != "function":
                continue
            found = describe_module(**json.loads(call.function.arguments))
            yield f"call: {call.function.name}({call.function.arguments})"
            yield f"found: {found}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--base-url", help="such as http://127.0.0.1:8000/v1; unset, a server of its own")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--tool-choice", choices=("auto", "required"), default="required")
    chosen = parser.parse_args()
    with serving(chosen.base_url) as base_url, OpenAI(base_url=base_url, api_key=chosen.api_key, timeout=60) as client:
        for line in answer(client, chosen.question, chosen.tool_choice):
            print(line, flush=True)


if __name__ == "__main__":
    main()
