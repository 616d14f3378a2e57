"""The embedded model in every format, on text that it was not trained on."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from cloister.backends.base import Weights
from cloister.launch.calibrating import cut_windows
from cloister.models import load, locate
from cloister.quant import FORMATS, FormatOptions, HeldWeights, KVDtype, quantize_on_read
from cloister.quant.calibration import CALIBRATORS, calibrate
from cloister.quant.passages import CALIBRATION, HELD_OUT, read_passages
from cloister.quant.quality import IntArray, TextScore, measure
from cloister.text import Tokenizer
from tests.thinning import thin

MODEL = load(locate("cloister-5m"))


@cache
def windows() -> IntArray:
    ids = Tokenizer(MODEL.path).encode(read_passages(HELD_OUT), parse_special=False)[: 10 * 512]
    return np.array(ids, np.int32).reshape(10, 512)


def measured(weights: Weights, kv_dtype: KVDtype = "bfloat16") -> TextScore:
    return measure(MODEL.spec, weights, windows(), kv_dtype)


@cache
def plain() -> TextScore:
    return measured(MODEL.weights)


@cache
def rounded(name: str) -> TextScore:
    return measured(quantize_on_read(MODEL.spec, MODEL.weights, FORMATS.get(name)(FormatOptions())))


def test_the_model_knows_its_field() -> None:
    assert 20 < plain().perplexity < 50


@pytest.mark.parametrize(
    ("name", "loss", "agreement"), thin([("int8", 0.05, 0.97), ("int4", 0.9, 0.87), ("qoq", 1.2, 0.85)], [("int4", 0.9, 0.87)])
)
def test_rounding_costs_no_more_than_it_did(name: str, loss: float, agreement: float) -> None:
    assert abs(rounded(name).perplexity - plain().perplexity) < loss
    assert rounded(name).agreement(plain()) > agreement


@pytest.mark.slow
def test_more_bits_lose_less() -> None:
    losses = [rounded(name).perplexity - plain().perplexity for name in ("int8", "int4", "qoq")]
    assert losses == sorted(losses)


def test_a_cache_of_8_bits_costs_next_to_nothing() -> None:
    assert abs(measured(MODEL.weights, "int8").perplexity - plain().perplexity) < 0.03


@pytest.mark.slow  # test_on_load.py sees the same of `int4`
def test_gptq_takes_back_a_quarter_of_what_qoq_changes() -> None:
    number_format = FORMATS.get("qoq")(FormatOptions())
    text = cut_windows(MODEL, read_passages(CALIBRATION), 4096)
    tensors = dict(calibrate(MODEL.spec, MODEL.weights, text, number_format, CALIBRATORS.get("gptq")))
    found = measured(HeldWeights(tensors))
    assert change(found) < 0.75 * change(rounded("qoq"))
    assert found.perplexity - plain().perplexity < 0.5
    assert measured(HeldWeights(tensors), "int4").perplexity - plain().perplexity < 0.8


def change(outcome: TextScore) -> float:
    """Root mean square of the change of log-probabilities: perplexity of so short a text moves by luck."""
    return float(np.sqrt(np.square(outcome.losses - plain().losses).mean()))
