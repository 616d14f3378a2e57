"""What threads decode has a decoder that was made when its module was imported."""

from __future__ import annotations

import ast
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "src" / "cloister" / "engine"


def test_engines_decode_with_decoders_that_were_made_before_their_threads():
    """msgspec 0.22 resolves a type when it is first decoded: several threads that do so at once end the process (SIGSEGV)."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted(ENGINE.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode"
        if any(keyword.arg == "type" for keyword in node.keywords)
    ]
    assert found == []
