"""Packed models in files: the next start reads them, and whatever a file has become, a model is never wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloister.backends.base import KVLayout
from cloister.backends.native import store
from cloister.backends.native.backend import NativeBackend
from cloister.backends.native.store import PackedStore
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import Driver, RandomWeights
from tests.native import SPECS, GivenWeights

SPEC = SPECS["windowed"]
IDENTITY = "these very weights"


@pytest.fixture(autouse=True)
def _small_models_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LEAST_BYTES", 0)


def start(directory: Path, weights: object, identity: str = IDENTITY) -> bytes:
    backend = NativeBackend(num_threads=1, device="cpu", dtype="bfloat16", store=directory)
    program = backend.build(SPEC, weights, KVLayout(8, 16), identity=identity)  # type: ignore[arg-type]
    return Driver(program, 8, 16).run("a", list(range(40))).tobytes()


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "qoq"])
def test_a_second_start_reads_no_weights_and_gives_the_same_bits(quant: str, tmp_path: Path) -> None:
    plain = RandomWeights(SPEC)
    weights = plain if quant == "none" else QuantizedWeights(plain, FORMATS.get(quant)(FormatOptions()))
    first = start(tmp_path / "new", weights)
    assert start(tmp_path / "new", GivenWeights({})) == first
    with pytest.raises(KeyError):
        start(tmp_path / "new", GivenWeights({}), "other weights")


def test_only_their_owner_may_read_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    start(directory, RandomWeights(SPEC))
    (file,) = directory.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def change_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Writes the file anew with another header before the same data."""
    content = file.read_bytes()
    header = json.loads(content[24 : 24 + int.from_bytes(content[16:24], "little")])
    data = content[-header["num_bytes"] :]
    change(header)
    written = json.dumps(header).encode()
    start = -(-(24 + len(written)) // 4096) * 4096
    file.write_bytes((content[:16] + len(written).to_bytes(8, "little") + written).ljust(start, b"\0") + data)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def overwrite_the_magic(file: Path) -> None:
    file.write_bytes(b"another programs" + file.read_bytes()[16:])


def break_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"arrays"', b'"arrays{', 1))


def halve_the_codes(file: Path) -> None:
    change_header(file, lambda header: header["arrays"]["0.qkv.codes"].__setitem__(1, 4096))


def move_an_array_beyond_the_end(file: Path) -> None:
    change_header(file, lambda header: header["arrays"]["norm"].__setitem__(2, header["num_bytes"]))


def drop_a_norm(file: Path) -> None:
    change_header(file, lambda header: header["arrays"].pop("norm"))


def claim_more_outputs(file: Path) -> None:
    change_header(file, lambda header: header["matrices"]["embedding"].__setitem__(1, 10_000))


def forget_the_layers(file: Path) -> None:
    change_header(file, lambda header: header["matrices"].__setitem__("layers", [[]]))


DAMAGES = (
    cut_short,
    overwrite_the_magic,
    break_the_header,
    halve_the_codes,
    move_an_array_beyond_the_end,
    drop_a_norm,
    claim_more_outputs,
    forget_the_layers,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used_and_is_written_anew(damage: Callable[[Path], None], tmp_path: Path) -> None:
    weights = RandomWeights(SPEC)
    first = start(tmp_path, weights)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    damage(file)
    assert file.read_bytes() != whole
    assert PackedStore(tmp_path).load(f"{IDENTITY} BF16") is None
    assert start(tmp_path, weights) == first
    assert file.read_bytes() == whole


def test_what_a_killed_start_left_behind_goes_with_the_next_one(tmp_path: Path) -> None:
    start(tmp_path, RandomWeights(SPEC))
    (file,) = tmp_path.iterdir()
    file.rename(file.with_suffix(".12345"))
    start(tmp_path, RandomWeights(SPEC))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_start_that_is_interrupted_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, RandomWeights(SPEC))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_is_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    assert start(file, RandomWeights(SPEC)) == start(tmp_path / "new", RandomWeights(SPEC))
