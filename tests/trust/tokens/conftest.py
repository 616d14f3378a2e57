from __future__ import annotations

from tests.memory import tmp_path as tmp_path
