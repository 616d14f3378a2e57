"""Places to write to, looked at before the work whose results go there."""

from __future__ import annotations

import os
from pathlib import Path

from cloister.types.errors import ConfigError


def make_folder(folder: Path) -> Path:
    """Returns a folder that can be written to, made if it was not there.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is a file; name a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; name another one") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to the folder {folder}; name another one, or change who may write there")
    return folder


def find_place(file: Path) -> Path:
    """Returns a path at which a file can be written; its folder is made if it was not there.

    Raises:
        ConfigError: it is a folder, or its folder cannot be made or written to.
    """
    file = file.expanduser()
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file")
    make_folder(file.parent)
    return file
