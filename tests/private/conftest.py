from __future__ import annotations

from tests.engine.kv_fixtures import patience as patience
from tests.engine.kv_fixtures import tokenizer as tokenizer
from tests.memory import tmp_path as tmp_path
