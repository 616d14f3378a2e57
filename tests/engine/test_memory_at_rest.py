"""What an engine's process holds when it is ready, beside weights and KV."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

NUM_TOKENS = 150_000
_MEASURE = """
import sys
from pathlib import Path
from cloister.engine.machine import return_free_memory
from cloister.text import Tokenizer

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

small = Tokenizer(sys.argv[1])
return_free_memory()
before = resident_bytes()
large = Tokenizer(sys.argv[2])
return_free_memory()
print(resident_bytes() - before, large.vocab_size)
"""


def write_tokenizer(path: Path, num_tokens: int) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token_id for token_id, letter in enumerate(letters)}
    vocab |= {f"token{token_id:06d}": token_id for token_id in range(len(vocab), num_tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_large_vocabulary_is_held_once_and_its_reading_leaves_nothing(tmp_path: Path) -> None:
    paths = [str(write_tokenizer(tmp_path / str(size), size)) for size in (300, NUM_TOKENS)]
    command = [sys.executable, "-c", _MEASURE, *paths]
    found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=300).stdout.split()
    assert int(found[1]) == NUM_TOKENS
    assert (
        int(found[0]) < 300 * NUM_TOKENS
    )  # measured 255 bytes an entry, all of it the library's; 340 where strings of ours were made, 550 untrimmed


def test_ids_with_a_gap_are_counted_to_the_last(tmp_path: Path) -> None:
    from cloister.text import Tokenizer

    path = write_tokenizer(tmp_path / "gap", 300)
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["model"]["vocab"]["far"] = 777
    (path / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer(path).vocab_size == 778
