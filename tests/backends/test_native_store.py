"""Packed models in files: the next start reads them, and whatever a file has become, a model is never wrong."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloister.backends.base import KVLayout, Weights
from cloister.backends.native import store
from cloister.backends.native.backend import NativeBackend
from cloister.backends.native.store import PackedStore
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import Driver, RandomWeights
from tests.native import SPECS, GivenWeights, changed, with_rope

SPEC = SPECS["windowed"]
IDENTITY = "these very weights"


@pytest.fixture(autouse=True)
def _small_models_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LEAST_BYTES", 0)


def start(directory: Path, weights: Weights, identity: str = IDENTITY, kernels: str | None = None) -> bytes:
    backend = NativeBackend(num_threads=1, device="cpu", dtype="bfloat16", store=PackedStore(directory), kernels=kernels)
    program = backend.build(SPEC, weights, KVLayout(8, 16), identity=identity)
    return Driver(program, 8, 16).run("a", list(range(40))).tobytes()


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "qoq"])
def test_a_second_start_reads_no_weights_and_gives_the_same_bits(quant: str, tmp_path: Path) -> None:
    plain = RandomWeights(SPEC)
    weights = plain if quant == "none" else QuantizedWeights(plain, FORMATS.get(quant)(FormatOptions()))
    first = start(tmp_path / "new", weights)
    assert start(tmp_path / "new", GivenWeights({})) == first
    with pytest.raises(KeyError):
        start(tmp_path / "new", GivenWeights({}), "other weights")


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_what_one_instruction_set_packed_another_one_computes_as_if_it_had_packed_it(quant: str, tmp_path: Path) -> None:
    plain = RandomWeights(SPEC)
    weights = plain if quant == "none" else QuantizedWeights(plain, FORMATS.get(quant)(FormatOptions()))
    for packing, computing in ((None, "scalar"), ("scalar", None)):
        directory = tmp_path / str(packing)
        start(directory, weights, kernels=packing)
        own = start(tmp_path / "own", weights, str(packing), computing)
        assert start(directory, GivenWeights({}), kernels=computing) == own


def test_only_their_owner_may_read_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    start(directory, RandomWeights(SPEC))
    (file,) = directory.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_another_reader_packed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, RandomWeights(SPEC))
    monkeypatch.setattr(store, "READER", store.READER + 1)
    with pytest.raises(KeyError):
        start(tmp_path, GivenWeights({}))


def test_the_same_weights_under_another_rotation_are_packed_anew(tmp_path: Path) -> None:
    weights, backend = (
        RandomWeights(SPEC),
        NativeBackend(num_threads=1, device="cpu", dtype="bfloat16", store=PackedStore(tmp_path)),
    )
    found = []
    for kept in (backend, NativeBackend(num_threads=1, device="cpu", dtype="bfloat16")):
        for interleaved in (False, True):
            spec = changed(SPEC, attention={"rope": with_rope(SPEC, 24, interleaved=interleaved)})
            program = kept.build(spec, weights, KVLayout(8, 16), identity=IDENTITY)
            found.append(Driver(program, 8, 16).run("a", list(range(40))).tobytes())
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def keep(directory: Path, identity: str, most_files: float) -> bool:
    """Saves the model under a name, where there is room for so many like it; returns whether it was kept."""
    (file,) = directory.parent.joinpath("one").iterdir()
    model = PackedStore(file.parent).load(f"{IDENTITY} BF16")
    assert model is not None
    size = sum(array.nbytes for _, array in store._arrays(model))
    return PackedStore(directory, round((most_files - 1) * file.stat().st_size + size)).save(identity, model)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    start(tmp_path / "one", RandomWeights(SPEC))
    return tmp_path / "kept"


def kept(directory: Path) -> list[str]:
    return [name for name in "abcd" if PackedStore(directory)._path(name).exists()]


def test_the_model_used_longest_ago_makes_room(directory: Path) -> None:
    assert keep(directory, "a", 2)
    assert keep(directory, "b", 2)
    for number, name in enumerate("ab"):
        os.utime(PackedStore(directory)._path(name), (number, number))
    assert PackedStore(directory).load("a") is not None  # the last one that was used
    assert keep(directory, "c", 2)
    assert kept(directory) == ["a", "c"]


def test_a_model_that_somebody_reads_is_not_removed(directory: Path) -> None:
    assert keep(directory, "a", 1)
    with PackedStore(directory)._path("a").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not keep(directory, "b", 1)
        assert kept(directory) == ["a"]
    assert keep(directory, "b", 1)
    assert kept(directory) == ["b"]


def test_a_model_larger_than_the_limit_is_not_kept_and_removes_nothing(directory: Path) -> None:
    assert keep(directory, "a", 1)
    assert not keep(directory, "b", 0.9)
    assert kept(directory) == ["a"]


def test_only_packed_models_are_removed(directory: Path) -> None:
    directory.mkdir()
    others = [directory / name for name in ("digests.json", "0" * 32, "0" * 32 + ".json", "x" * 32 + ".packed")]
    for other in others:
        other.write_bytes(bytes(1 << 20))
    assert keep(directory, "a", 1)
    assert all(other.exists() for other in others)


def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    weights = RandomWeights(SPEC)
    expected = start(tmp_path / "new", weights)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert start(tmp_path / "full", weights) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named_once_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    taken.touch()  # as unwritable to root as to anybody
    start(taken / "weights", RandomWeights(SPEC))
    (message,) = caplog.messages
    assert message == f"packed weights cannot be kept in {taken / 'weights'} (Not a directory); every start packs them anew"


def test_a_full_disk_is_no_obstacle(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    small = [str(mount), "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if mount is None or umount is None or subprocess.run(small, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can make a disk of 64 KiB")
    try:
        assert start(disk, RandomWeights(SPEC)) == start(tmp_path / "new", RandomWeights(SPEC))
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run([umount, str(disk)], check=True)


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
    change_header(file, lambda header: header["arrays"]["layers.0.qkv.codes"].__setitem__(1, 4096))


def move_an_array_beyond_the_end(file: Path) -> None:
    change_header(file, lambda header: header["arrays"]["norm.weight"].__setitem__(2, header["num_bytes"]))


def drop_a_norm(file: Path) -> None:
    change_header(file, lambda header: header["arrays"].pop("norm.weight"))


def claim_more_outputs(file: Path) -> None:
    change_header(file, lambda header: header["matrices"]["embedding"].__setitem__(1, 10_000))


def forget_a_matrix(file: Path) -> None:
    change_header(file, lambda header: header["matrices"].pop("layers.0.down"))


DAMAGES = (
    cut_short,
    overwrite_the_magic,
    break_the_header,
    halve_the_codes,
    move_an_array_beyond_the_end,
    drop_a_norm,
    claim_more_outputs,
    forget_a_matrix,
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
