"""Receipts as files that only their owner can open."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cloister.privacy.receipts import Receipt
from cloister.privacy.transparency.files import SECRET, write_whole
from cloister.types.errors import ConfigError

_PRIVATE = 0o700


class ReceiptFolder:
    """Keeps receipts in a folder, one a file, named by the SHA-256 of what was signed. It is a `Keep`.

    Request and answer are not kept: whoever wants to show them later has to keep their exact bytes.

    Raises:
        ConfigError: the folder cannot be made, or not be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        try:
            self.folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder} for receipts: {error.strerror}", param="receipts") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"the folder {folder} for receipts cannot be written; choose another", param="receipts")

    def __call__(self, receipt: Receipt) -> None:
        name = hashlib.sha256(receipt.jws.encode()).hexdigest()[:32]
        write_whole(self.folder / f"{name}.receipt.json", receipt.encode(), SECRET)
