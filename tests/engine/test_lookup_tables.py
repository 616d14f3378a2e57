"""Under `private` no table of which a step reads the rows of its tokens is a mapped file: pages in the cache show which."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.launch.engine import build_engine
from cloister.types.config import EngineConfig
from tests.encoder_factory import make_encoder
from tests.gguf_converter import convert

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says which files are mapped")


def look(path: Path, backend: str, profile: str) -> tuple[bool, int]:
    """Returns whether an engine leaves a file of its model mapped, and the bytes of weights in its plan of memory."""
    config = EngineConfig(str(path), backend, profile=profile, weights_cache="", num_threads=1, max_num_seqs=1, kv_memory_mb=4)
    engine = build_engine(config)
    mapped = any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    return mapped, dict(engine.memory)["weights"]


@pytest.mark.parametrize(  # the native back end packs all other tables
    ("backend", "family"),
    [("native", "gemma3n_text"), ("torch", "gemma3n_text"), ("torch", "qwen3_next"), ("torch", "BertModel")],
)
def test_no_table_stays_mapped_under_private_and_the_plan_of_memory_counts_it(
    backend: str, family: str, tmp_path: Path
) -> None:
    path = tmp_path / family
    if family == "BertModel":
        make_encoder(path, family)
    else:
        convert(path, family)
    is_mapped, num_bytes = look(path, backend, "private")
    assert not is_mapped
    is_mapped, others = look(path, backend, "open")
    assert is_mapped, "what this test is about"
    assert num_bytes > others
