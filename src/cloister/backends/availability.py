"""Whether the back ends' libraries are there: the native kernels, and torch; importing this imports neither."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from cloister.types.errors import ConfigError
from cloister.types.extras import install_command

INSTALL_TORCH = install_command("torch")
_WAYS_ON = "reinstall Cloister, or install the extra cloister[torch] and choose the back end torch"


def why_no_kernels() -> str | None:
    """Returns why the native kernels cannot be used here, or None when they can; it loads them to see."""
    try:
        import_module("cloister.backends.native._native")
    except ModuleNotFoundError:
        return f"the native kernels were not compiled; install a C++ compiler (Debian: apt install g++) and {_WAYS_ON}"
    except ImportError as error:
        return f"the native kernels cannot be loaded ({error}); {_WAYS_ON}"
    return None


def has_torch() -> bool:
    """Whether torch is installed; imports nothing."""
    return find_spec("torch") is not None


def load_torch(device: str, user: str = "") -> None:
    """Imports torch.

    Args:
        user: what needs it, for the message; empty for the back end of this name.

    Raises:
        ConfigError: it is not installed, or cannot be loaded; the message says what to install.
    """
    try:
        import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library that torch opens itself
        is_there = not isinstance(error, ModuleNotFoundError) or error.name != "torch"
        why = f"torch cannot be loaded ({error})" if is_there else "torch is not installed"
        why = f"{user} needs torch: {why}" if user else why
        remedy = f"; install it with: {INSTALL_TORCH}"
        without = why_no_kernels() if device == "cpu" else None
        raise ConfigError(f"{why}{remedy if without is None else f', and {without}'}", param="backend") from None
