"""What a client remembers of the log between runs: one small file that only ever moves forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cloister.privacy.transparency.checks import View
from cloister.privacy.transparency.files import SECRET, locked, remove_unfinished_of, write_whole
from cloister.privacy.transparency.held import adopt_baseline
from cloister.types.errors import ConfigError


class Memory:
    """A `View` on disk. Several clients of one person may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()

    def load(self) -> View:
        """What was remembered; the empty view on first use.

        Raises:
            ConfigError: the file is broken, or of an older version. It is not passed over: whoever could break it could hide
                a split view.
        """
        try:
            view = msgspec.convert(adopt_baseline(msgspec.json.decode(self.path.read_bytes(), type=dict[str, Any])), View)
        except FileNotFoundError:
            return View()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{self.path} is broken ({error}); remove it to read the log from its beginning again"
            raise ConfigError(message) from None
        if view.epoch and view.roll.current is None:  # no epoch is believed without one
            raise ConfigError(
                f"{self.path} is of a version that knew no memberships; remove it to read the log from its beginning again"
            )
        return view

    def save(self, view: View, begun: View) -> bool:
        """Remembers a view that was read on from what the file had.

        Args:
            begun: what `load` returned then.

        Returns:
            False: another program wrote the file meanwhile, and it is as that one left it. Its view may be of another log than
            this one, which sizes do not tell: load it, and read the log on from there.

        Raises:
            ConfigError: the file is broken, or cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.path.parent}: {error.strerror}") from None
        with locked(self.path.parent):
            remove_unfinished_of(self.path)
            kept = self.load()
            if kept == begun:
                write_whole(self.path, msgspec.json.encode(view, order="sorted"), SECRET)
            return kept in (begun, view)
