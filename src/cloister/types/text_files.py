"""Reads text files named in settings."""

from __future__ import annotations

from pathlib import Path

from cloister.types.errors import ConfigError


def read_text_file(path: Path, *, param: str | None = None) -> str:
    """Returns the content of a UTF-8 text file.

    Args:
        param: the setting that names the file.

    Raises:
        ConfigError: the file cannot be read, or is not valid UTF-8; the message contains nothing of it.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path", param=param) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8; save it as UTF-8 text", param=param) from None
