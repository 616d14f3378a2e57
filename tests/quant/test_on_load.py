"""`--quant int4` and `qoq` calibrate once: later starts read what was found, and nothing that goes wrong stops the server."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import Weights
from cloister.backends.tensors import dequantized
from cloister.launch import calibrating
from cloister.launch.backend import number_format, write_in_few_bits
from cloister.launch.calibrating import calibrate_on_load, choose_method, cut_windows
from cloister.launch.loading import Loading
from cloister.models import LoadedModel, load, locate
from cloister.quant import QuantizedWeights
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.quant.quality import measure
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError
from tests.thinning import thin

MODEL = load(locate("cloister-5m"))
QUIET = Loading("model", shown=False)
INT4 = number_format("int4")


@pytest.fixture(scope="module", autouse=True)
def short_text() -> Iterator[None]:
    """Little text, for tests of what is done with the codes and not of how good they are."""
    with pytest.MonkeyPatch.context() as patch:
        use_text_of(512, patch)
        yield


def use_text_of(num_tokens: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calibrating, "_FEWEST_TOKENS", num_tokens)
    patch.setattr(calibrating, "_MOST_TOKENS", num_tokens)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    folder = tmp_path_factory.mktemp("cache")
    return folder, calibrate_on_load(MODEL, INT4, cache=folder)


@pytest.fixture
def forbid_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("it calibrates again")

    monkeypatch.setattr(calibrating, "calibrate", refuse)


def same_weights(first: Weights, second: Weights) -> bool:
    return all(np.array_equal(dequantized(first.read(name)), dequantized(second.read(name))) for name in first.names())


def test_four_bits_change_answers_a_good_deal_less_than_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    use_text_of(2048, monkeypatch)  # a quarter of what a server takes: the embedded model has few inputs
    windows = cut_windows(MODEL, read_passages(HELD_OUT), 3072)

    def change(weights: Weights) -> float:
        """Root mean square of the change of log-probabilities: perplexity of so short a text moves by luck."""
        return float(np.sqrt(np.square(measure(MODEL.spec, weights, windows).losses - plain).mean()))

    plain = measure(MODEL.spec, MODEL.weights, windows).losses
    assert change(calibrate_on_load(MODEL, INT4).weights) < 0.8 * change(QuantizedWeights(MODEL.weights, INT4))


@pytest.mark.usefixtures("forbid_calibration")
def test_a_second_start_reads_what_the_first_one_found(cached: tuple[Path, LoadedModel]) -> None:
    folder, first = cached
    second = calibrate_on_load(MODEL, INT4, cache=folder)
    assert second.info.fingerprint == first.info.fingerprint != MODEL.info.fingerprint
    assert same_weights(first.weights, second.weights)
    assert second.path == MODEL.path  # tokenizer and drafters are those of the model


@pytest.mark.usefixtures("forbid_calibration")
def test_other_formats_and_other_text_are_not_taken_for_it(
    cached: tuple[Path, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="again"):
        calibrate_on_load(MODEL, number_format("qoq"), cache=cached[0])
    monkeypatch.setattr(calibrating, "read_passages", lambda _: "Another text. " * 5000)
    with pytest.raises(AssertionError, match="again"):
        calibrate_on_load(MODEL, INT4, cache=cached[0])


def test_what_was_cut_short_is_found_again(cached: tuple[Path, LoadedModel], tmp_path: Path) -> None:
    shutil.copytree(cached[0], tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("calibrated/*/model.safetensors")
    file.write_bytes(b"\x08")
    second = calibrate_on_load(MODEL, INT4, cache=tmp_path)
    assert same_weights(second.weights, cached[1].weights)
    assert not list(tmp_path.glob("calibrated/*.*"))  # nothing half done is left


@pytest.mark.parametrize(
    "where",
    thin([None, Path("/dev/null/cache")], [Path("/dev/null/cache")]),
    ids=["no cache", "a place that cannot be written"],
)
def test_without_a_place_to_keep_it_the_weights_stay_in_memory(where: Path | None, cached: tuple[Path, LoadedModel]) -> None:
    held = calibrate_on_load(MODEL, INT4, cache=where)
    assert same_weights(held.weights, cached[1].weights)
    assert len(held.info.fingerprint) == 64
    assert held.info.fingerprint != MODEL.info.fingerprint
    form = held.weights.form("layers.0.q.weight")
    assert form is not None
    assert form.shape == (1, MODEL.spec.hidden_size)


def test_what_was_used_longest_ago_makes_room(cached: tuple[Path, LoadedModel], tmp_path: Path) -> None:
    shutil.copytree(cached[0], tmp_path, dirs_exist_ok=True)
    calibrate_on_load(MODEL, number_format("qoq"), cache=tmp_path, most_bytes=5 << 20)
    (kept,) = tmp_path.glob("calibrated/*")
    assert "qoq" in (kept / "config.json").read_text()


def test_auto_calibrates_four_bits_only_and_rounds_what_no_text_runs_through(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_method("auto", MODEL, INT4) == "gptq"
    assert choose_method("rtn", MODEL, INT4) == "rtn"
    assert choose_method("auto", MODEL, number_format("int8")) == "rtn"
    assert choose_method("gptq", MODEL, number_format("int8")) == "gptq"
    assert not caplog.records
    strange = replace(MODEL, spec=replace(MODEL.spec, norm="layer"))
    with caplog.at_level(logging.WARNING):
        assert choose_method("auto", strange, INT4) == "rtn"
    assert "rounded to nearest" in caplog.text
    assert "int4" in caplog.text
    with pytest.raises(ConfigError, match="quant_method gptq"):
        choose_method("gptq", strange, INT4)


def test_weights_that_have_few_bits_already_are_left_alone_and_a_line_says_so(
    cached: tuple[Path, LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_method("auto", cached[1], INT4) == "rtn"
    assert "its projections stay as they are; quant = int4" in caplog.text


def test_the_settings_choose(tmp_path: Path) -> None:
    config = EngineConfig(quant="int4", weights_cache=str(tmp_path))
    rounded = write_in_few_bits(replace(config, quant_method="rtn"), MODEL, QUIET)
    calibrated = write_in_few_bits(config, MODEL, QUIET)
    assert rounded.info.fingerprint == MODEL.info.fingerprint != calibrated.info.fingerprint
    assert not same_weights(rounded.weights, calibrated.weights)
    assert write_in_few_bits(EngineConfig(), MODEL, QUIET) is MODEL
