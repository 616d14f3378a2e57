"""The roofline: operators are counted as the course's tables count them, and stand under the right roof."""

import json
from dataclasses import replace
from math import prod

import pytest

from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from cloister.bench.chips import CHIPS, Chip, find_chip
from cloister.bench.roofline import HEADERS, draw_roofline, list_rows, put_under_roof, scale, scale_time, to_json, to_markdown
from cloister.bench.roofline_operators import Numbers, Work, cut, list_operators
from cloister.models.decoder import tensor_shapes
from cloister.types.errors import ConfigError

L, D, H = 384, 512, 64  # the course's letters: sequence length, model dimension, head dimension


def make_spec(num_kv_heads=D // H, windows=(None, None), **kinds):
    attention = AttentionSpec(D // H, num_kv_heads, H, H**-0.5, RopeSpec((1.0,) * (H // 2)), **kinds)
    layers = tuple(LayerSpec(replace(attention, window=window), MlpSpec(4 * D)) for window in windows)
    return DecoderSpec("test", vocab_size=1000, hidden_size=D, layers=layers, norm_eps=1e-6, max_positions=4096)


def by_name(operators):
    return {operator.name: operator for operator in operators}


# The course's tables (COMP4901Y, generative inference): multiplications over numbers moved, in fp16, which is FLOP per byte.


def test_prefill_intensities_are_those_of_the_course():
    found = by_name(list_operators(make_spec(), Work.prefill(L, 1, square=True), Numbers()))
    expected = {
        "q": L * D / (2 * L + D),
        "k": L * D / (2 * L + D),
        "v": L * D / (2 * L + D),
        "scores QK^T": L * H / (2 * H + L),
        "values PV": L * H / (2 * H + L),
        "o": L * D / (2 * L + D),
        "up": 4 * L * D / (5 * L + 4 * D),
        "down": 4 * L * D / (5 * L + 4 * D),
    }
    assert {name: found[name].intensity for name in expected} == pytest.approx(expected)


def test_experts_that_some_token_chose_are_read_once_each():
    spec = make_spec(windows=(None,))
    moe = MoeSpec(8, 2, MlpSpec(4 * D), shared=MlpSpec(D), shared_gate=True)
    spec = replace(spec, layers=(replace(spec.layers[0], mlp=moe, post_norm=True),))
    dense, one, many = (
        by_name(list_operators(model, Work.decode(L, rows), Numbers()))
        for model, rows in ((make_spec(windows=(None,)), 1), (spec, 1), (spec, 1000))
    )
    assert one["experts' up"].weights_bytes == pytest.approx(2 * dense["up"].weights_bytes)
    assert one["experts' up"].num_flops == 2 * dense["up"].num_flops
    assert many["experts' up"].weights_bytes == pytest.approx(8 * dense["up"].weights_bytes)
    assert {"router", "shared down", "mlp post norm"} <= set(one)
    assert cut(spec, 2).layers[0].mlp == replace(moe, expert=MlpSpec(2 * D), shared=MlpSpec(D // 2))


def test_decode_intensities_are_those_of_the_course():
    found = by_name(list_operators(make_spec(), Work.decode(L + 1, 1), Numbers()))
    expected = {
        "q": D / (2 + D),
        "k": D / (2 + D),
        "v": D / (2 + D),
        "scores QK^T": (H + L * H) / (2 * H + L + L * H + 1),
        "values PV": (H + L * H) / (2 * H + L + L * H + 1),
        "o": D / (2 + D),
        "up": 4 * D / (5 + 4 * D),
        "down": 4 * D / (5 + 4 * D),
    }
    assert {name: found[name].intensity for name in expected} == pytest.approx(expected)


def test_a_row_of_llama_2_7b_computed_by_hand():
    llama = DecoderSpec(
        "llama", 32000, 4096,
        (LayerSpec(AttentionSpec(32, 32, 128, 128**-0.5, RopeSpec((1.0,) * 64)), MlpSpec(11008)),) * 32, 1e-5, 4096,
    )  # fmt: skip
    prefill, decode = draw_roofline(llama, find_chip("a100-sxm-80gb"), model="llama-2-7b", prompt=2048, context=2048).steps
    q, gate = (next(row for row in prefill.rows if row.operator.name == name) for name in ("q", "gate"))
    assert q.operator.num_flops == 2 * 2048 * 4096**2 == 68_719_476_736
    assert q.operator.num_bytes == 2 * (2048 * 4096 + 4096**2 + 2048 * 4096) == 67_108_864
    assert (q.operator.intensity, q.bound, q.operator.count) == (1024.0, "compute", 32)
    assert q.seconds == pytest.approx(32 * 68_719_476_736 / 312e12)
    assert gate.operator.num_flops == 2 * 2048 * 4096 * 11008
    # decode reads 6.6 G of weights (all but the embedding) and 32 layers of 2 x 2048 x 4096 keys and values, in 16 bits
    read = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096 + 65 * 4096 + 4096) + 2 * 32 * 2 * (2048 + 1) * 4096
    assert decode.total("weights_bytes") + decode.total("kv_bytes") == read
    assert decode.limit_s == pytest.approx(read / 2.039e12)
    assert {row.bound for row in decode.rows} == {"memory"}


def test_causal_scores_are_counted_one_by_one():
    for queries, context, window in ((1, 9, None), (5, 5, None), (5, 9, None), (7, 7, 3), (4, 10, 3), (3, 4, 20)):
        seen = [[k for k in range(p + 1) if window is None or k > p - window] for p in range(context - queries, context)]
        work = Work("step", 3, queries, context)
        assert work.num_pairs(window) == 3 * sum(map(len, seen))
        assert work.num_keys(window) == 3 * len(set().union(*seen))


def test_grouped_heads_share_the_keys_they_read():
    many, few = (by_name(list_operators(make_spec(n), Work.decode(1000, 4), Numbers()))["scores QK^T"] for n in (8, 2))
    assert many.num_flops == few.num_flops
    assert many.kv_bytes == 4 * few.kv_bytes == 4 * 1000 * D * 2


def test_weights_that_are_read_are_the_tensors_of_the_model():
    for spec in (make_spec(2, qk_norm=True, qkv_bias=True, output_bias=True), make_spec()):
        operators = list_operators(spec, Work.decode(10, 1), Numbers())
        read = sum(op.weights_bytes * op.count for op in operators if op.name != "embed")
        sizes = {name: 2 * prod(shape) for name, shape in tensor_shapes(spec)}
        qk_norms = sum(n for name, n in sizes.items() if ".q_norm." in name)  # q and k norm are one row of the table
        assert read == sum(sizes.values()) - sizes["embed.weight"] - qk_norms


def test_layers_of_two_kinds_stand_apart():
    names = [op.name for op in list_operators(make_spec(windows=(None, 16, None)), Work.decode(100, 1), Numbers())]
    counts = {op.name: op.count for op in list_operators(make_spec(windows=(None, 16, None)), Work.decode(100, 1), Numbers())}
    assert len(names) == len(set(names))
    assert counts["scores QK^T (full)"] == 2
    assert counts["scores QK^T (window 16)"] == 1


def test_narrow_numbers_move_fewer_bytes_and_multiply_faster():
    chip = find_chip("h100-sxm")
    wide = draw_roofline(make_spec(), chip, model="m").steps[1]
    narrow = draw_roofline(make_spec(), chip, model="m", numbers=Numbers(4.5, 8, 8, 4.5)).steps[1]
    assert narrow.total("weights_bytes") < wide.total("weights_bytes") * 4.6 / 16
    assert narrow.total("kv_bytes") == wide.total("kv_bytes") / 2
    q = next(row.operator for row in narrow.rows if row.operator.name == "q")
    assert chip.product_format(q.bits) == "int8"


def test_a_weight_of_four_bits_with_wide_activations_is_multiplied_wide():
    q = by_name(list_operators(make_spec(), Work.decode(10, 1), Numbers(weights_bits=4)))["q"]
    assert find_chip("a100").product_format(q.bits) == "bfloat16"
    assert find_chip("t4").product_format(q.bits) == "float16"


def test_the_ridge_divides_memory_from_compute():
    chip = Chip("toy", {"float32": 100.0, "bfloat16": 1000.0}, 10.0, None, 1.0, "made up")
    assert chip.ridge(16) == 100.0
    work = Work.prefill(64, 1)
    step = put_under_roof(work, list_operators(make_spec(), work, Numbers()), chip)
    for row in step.rows:
        if row.operator.unit == "matrix":
            assert row.bound == ("compute" if row.operator.intensity > 100 else "memory")


def test_the_limit_is_below_the_sum_of_operators():
    for chip in CHIPS.values():
        for step in draw_roofline(make_spec(), chip, model="m", num_seqs=8).steps:
            assert 0 < step.limit_s < step.seconds


def test_two_chips_halve_the_weights_and_talk():
    chip = find_chip("h200")
    one, two = (draw_roofline(make_spec(), chip, model="m", num_chips=n) for n in (1, 2))
    assert two.kv_bytes == one.kv_bytes / 2
    assert two.weights_bytes == pytest.approx(one.weights_bytes / 2, rel=0.01)
    sent = {row.operator.name: row.operator.link_bytes for row in two.steps[1].rows if row.bound == "link"}
    assert sent == {"attention all-reduce": 2 * D, "mlp all-reduce": 2 * D, "all-gather": 1000}
    assert not any(row.bound == "link" for row in one.steps[1].rows)


def test_fewer_kv_heads_than_chips_are_repeated_and_odd_cuts_refused():
    assert cut(make_spec(2), 4).layers[0].attention.num_kv_heads == 1
    with pytest.raises(ConfigError, match="do not divide over 3 chips"):
        cut(make_spec(), 3)
    with pytest.raises(ConfigError, match="no link"):
        draw_roofline(make_spec(), find_chip("m2-ultra"), model="m", num_chips=2)


@pytest.mark.parametrize(
    ("words", "name"),
    [("A100", "a100-sxm-80gb"), ("H100 PCIe", "h100-pcie"), ("4090", "rtx-4090"), ("Ascend 910B", "ascend-910b"), ("l4", "l4")],
)
def test_a_chip_is_found_by_part_of_its_name(words, name):
    assert find_chip(words).name == name


@pytest.mark.parametrize("name", ["a1000", "", "-", "here"])
def test_an_unknown_chip_is_refused_with_the_names_that_there_are(name):
    with pytest.raises(ConfigError, match=r"it has: a100-sxm-80gb.*mi300x.*here"):
        find_chip(name)


def test_every_chip_names_its_source_and_computes_faster_in_fewer_bits():
    for chip in CHIPS.values():
        assert chip.source
        peaks = [chip.product_peak(bits) for bits in (8, 16)]
        assert peaks[0] >= peaks[1]
        assert chip.ridge(16) > 1


def test_a_width_that_a_chip_cannot_multiply_is_refused():
    with pytest.raises(ConfigError, match="tpu-v5e has no peak for products of 32 bits"):
        draw_roofline(make_spec(), find_chip("tpu"), model="m", numbers=Numbers(activation_bits=32))


def test_the_report_says_the_same_in_every_form():
    drawn = draw_roofline(make_spec(), find_chip("l4"), model="m", num_seqs=2)
    values = json.loads(json.dumps(to_json(drawn)))
    for step, given in zip(drawn.steps, values["steps"], strict=True):
        rows = list_rows(step)
        assert [row[0] for row in rows] == [*(op["name"] for op in given["operators"]), "all"]
        assert all(len(row) == len(HEADERS) for row in rows)
        assert sum(op["seconds"] for op in given["operators"]) == pytest.approx(given["seconds"])
        assert given["tokens_per_s"] == pytest.approx(step.work.num_tokens / step.seconds)
        assert rows[-1][3] == scale(given["num_flops"])
    assert to_markdown(drawn).count("| q |") == 2


def test_a_model_that_does_not_fit_is_said_not_to():
    drawn = draw_roofline(make_spec(), replace(find_chip("l4"), memory_bytes=1e6), model="m")
    assert not drawn.fits
    assert "does not fit" in to_markdown(drawn)


def test_figures_have_three_digits_and_a_prefix():
    assert [scale(v) for v in (0, 7, 1530, 2.5e9)] == ["0 ", "7 ", "1.53 k", "2.5 G"]
    assert [scale_time(v) for v in (2, 0.0031, 4.2e-6)] == ["2.00 s", "3.10 ms", "4.20 us"]
