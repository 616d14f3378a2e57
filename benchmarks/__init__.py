"""Measurements of the real engine and scheduler, run by hand: `python -m benchmarks.orca`. See docs/bench.md."""

import sys
from types import TracebackType


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As the command line does: what a person can mend, such as the name of a trace, is one line, and so is Ctrl-C."""
    from cloister.types.errors import CloisterError

    if isinstance(error, CloisterError):
        print(f"error: {error.message}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as the command line does
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_error
