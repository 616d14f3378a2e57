"""The command line. `main` starts the engines' template before it imports anything else, so that both load in parallel."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cloister.cli.commands import VERBS, app

__all__ = ["VERBS", "app", "main"]

PRELOADED: Final = "cloister.launch.preloading"
UNFORKED: Final = frozenset(
    (
        *("--explain", "--help", "--help-all", "-h", "--json", "--sealed", "--no-fork-server", "--on", "--backend", "--device"),
        *("private", "paranoid"),
    )
)
"""Arguments of `serve` with which engines are most likely not forked from a template. A settings file can have the same effect
but is not read yet; the template is then started in vain."""


def __getattr__(name: str) -> object:
    if name not in ("VERBS", "app"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.commands"), name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 an error that says what to do, 2 wrong usage, 130 Ctrl-C.

    `serve` starts the template of its engines first, which then imports what an engine needs while this process reads the
    settings and imports what a front needs.

    Args:
        arguments: arguments without the program's name; None uses those of the process.
    """
    try:
        _run(arguments, sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # during imports, or while the template starts
        sys.exit(130)
    except (MemoryError, ImportError) as error:  # during imports
        from cloister.types.errors import OUT_OF_MEMORY, lacks_memory

        if not lacks_memory(error):
            raise
        sys.exit(f"error: {OUT_OF_MEMORY}")


def _run(arguments: Sequence[str] | None, given: Sequence[str]) -> None:
    if not forks_engines(given):
        from cloister.cli.commands import run

        run(arguments)
        return
    from cloister.engine.spawning import discard_early_template, start_early_template

    gc.disable()  # until the server runs: imports leave hardly any garbage, and collections take a quarter of the import time
    try:
        start_early_template(PRELOADED)

        from cloister.cli.commands import run

        run(arguments)
    finally:
        discard_early_template()
        gc.enable()


def forks_engines(arguments: Sequence[str]) -> bool:
    """Whether these arguments start a server whose engines are forked from a template, judged by the arguments alone."""
    if sys.platform != "linux" or list(arguments[:1]) != ["serve"]:
        return False
    # a sealed process has loaded `trust.hardening`, and may not execute a program
    words = (word for argument in arguments for word in argument.split("=", 1))
    return UNFORKED.isdisjoint(words) and "cloister.trust.hardening" not in sys.modules
