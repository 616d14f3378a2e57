"""Chat with a model in this process: `python examples/chat.py ["A question"]`; without a question it reads lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from cloister import LLM, SamplingParams


def questions(first: str | None) -> Iterator[str]:
    """Yields what is asked: the one question of the command line, or line after line."""
    if first is not None:
        yield first
        return
    print("Ask something; an empty line ends.", file=sys.stderr)
    while line := sys.stdin.readline().strip():
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--model", default="cloister-5m")
    chosen = parser.parse_args()
    messages: list[dict[str, str]] = []
    with LLM(chosen.model) as llm:
        for question in questions(chosen.question):
            messages.append({"role": "user", "content": question})
            answer = ""
            for part in llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=200)):
                answer += part.text
                print(part.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
