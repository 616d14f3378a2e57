"""The command that installs an extra of the package, for messages. Pure."""

from __future__ import annotations

import shlex
import sys


def install_command(extra: str) -> str:
    """Returns the command that adds an extra to this installation.

    It names this environment's Python: the pip of another one would not find Cloister there, and would install another project
    of that name from the package index.
    """
    return f"{shlex.quote(sys.executable or 'python')} -m pip install 'cloister[{extra}]'"
