"""Operators of a program beside their roofs: the arithmetic on spans, and a real program."""

import json
from dataclasses import replace

import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, Capability, KVGroup, KVLayout
from cloister.backends.recording import OperatorSpan
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.bench.chips import Chip
from cloister.bench.kernels import REST, make_batch, measure_kernels, num_blocks, union, wall_times
from cloister.bench.roofline import put_under_roof
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.cli import main
from cloister.types.errors import ConfigError
from tests.driving import RandomWeights, make_spec
from tests.history_program import HistoryProgram

CHIP = Chip("toy", {"float32": 1e9}, 1e9, None, None, "made up")
ATTENTION = AttentionSpec(4, 2, 8, 8**-0.5, RopeSpec((1.0,) * 4), qk_norm=True)
SPEC = DecoderSpec("test", 100, 32, (LayerSpec(ATTENTION, MlpSpec(64)),) * 3, 1e-6, 4096)
NATIVE_NAMES = ("embed", "norm", "qkv", "rope", "attention", "output", "mlp_norm", "gate_up", "down", "head")


class RecordingProgram:
    """Says that each of its operators took a second, one after the other, whatever it is given."""

    def __init__(self, names):
        self.names = names
        self.batches = []

    capabilities = Capability.RECORDING

    def step(self, batch, wants):
        self.batches.append(batch)

    def record(self):
        from contextlib import nullcontext

        return nullcontext([OperatorSpan(name, 0, float(number), 1.0) for number, name in enumerate(self.names)])


def test_time_that_threads_share_counts_once():
    spans = [
        OperatorSpan("a", 0, 0.0, 2.0),
        OperatorSpan("a", 1, 1.0, 2.0),
        OperatorSpan("b", 0, 5.0, 1.0),
        OperatorSpan("a", 0, 5.5, 0.25),
    ]
    assert union(spans) == 4.0
    assert wall_times(spans) == {"a": 3.25, "b": 1.0}
    assert union([]) == 0.0


def test_every_counted_operator_belongs_to_a_named_part_of_a_program():
    assert {op.part for op in list_operators(SPEC, Work.decode(9, 2), Numbers())} == set(NATIVE_NAMES)


@pytest.mark.parametrize(
    "names", [NATIVE_NAMES, ("embed", "norm+qkv+rope", "attention", "output+mlp_norm+gate_up+down", "head")]
)
def test_parts_add_up_to_the_whole_however_a_program_joins_them(names):
    work = Work.prefill(7, 2)
    numbers = Numbers(32, 32, 32, 32)
    table = measure_kernels(RecordingProgram(names), SPEC, work, CHIP, numbers, block_size=4, num_repeats=3)
    whole = put_under_roof(work, list_operators(SPEC, work, numbers), CHIP)
    rates = {rate.name: rate for rate in table.rates}
    assert sum(rates[name].num_flops for name in names) == rates["forward"].num_flops == whole.total("num_flops")
    moved = whole.total("weights_bytes") + whole.total("kv_bytes")
    assert sum(rates[name].num_bytes for name in names) == pytest.approx(moved)
    assert all(rates[name].seconds == 1.0 for name in names)
    assert rates[REST].roof_s is None
    assert rates["forward"].roof_s == pytest.approx(whole.limit_s)


def test_work_that_no_roof_is_counted_for_has_none():
    table = measure_kernels(
        RecordingProgram(("schedule", "head")),
        SPEC,
        Work.decode(5, 1),
        CHIP,
        Numbers(32, 32, 32, 32),
        block_size=4,
        num_repeats=1,
    )
    assert {rate.name: rate.roof_s is None for rate in table.rates}["schedule"]


def test_a_program_that_cannot_record_is_refused():
    program = HistoryProgram(vocab_size=9, num_blocks=1, block_size=1)
    with pytest.raises(ConfigError, match="does not say where its time goes"):
        measure_kernels(program, SPEC, Work.decode(5, 1), CHIP, Numbers(), block_size=4, num_repeats=1)


def test_made_up_batches_are_well_formed():
    work = Work("step", 3, 2, 9)
    batch = make_batch(work, 50, 4)
    assert num_blocks(work, 4) == 9
    assert batch.positions.tolist() == [7, 8] * 3
    assert batch.query_starts.tolist() == [0, 2, 4, 6]
    assert batch.logit_rows.tolist() == [1, 3, 5]
    assert sorted(batch.block_tables.ravel().tolist()) == list(range(9))
    assert batch.token_ids.max() < 50


def test_the_command_measures_a_real_program(capsys):
    arguments = (
        "cloister-draft",
        "--prompt",
        "40",
        "--context",
        "48",
        "--batch",
        "2",
        "--repeats",
        "2",
        "--chip",
        "epyc",
        "--kv-memory-mb",
        "64",
    )
    with pytest.raises(SystemExit) as caught:
        main(["bench", "kernels", *arguments, "--json"])
    assert not caught.value.code
    prefill, decode = json.loads(capsys.readouterr().out)["steps"]
    assert (prefill["work"]["num_queries"], decode["work"]["context"]) == (40, 48)
    for step in (prefill, decode):
        rates = {rate["name"]: rate for rate in step["rates"]}
        assert rates["forward"]["seconds"] >= rates["attention"]["seconds"] > 0
        counted = sum(rate["num_flops"] for name, rate in rates.items() if name != "forward")
        assert counted == pytest.approx(rates["forward"]["num_flops"])


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--prompt", "9000", "--kv-memory-mb", "64"), "shorter prompts"),
        (("--batch", "40", "--kv-memory-mb", "16"), "raise --kv-memory-mb"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_advice(capsys, arguments, advice):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "kernels", *arguments, "--chip", "t4"])
    assert caught.value.code == 1
    assert advice in " ".join(capsys.readouterr().err.split())


def test_a_step_of_a_model_with_windows_names_blocks_of_every_group():
    spec = make_spec(hidden=32, intermediate=48, heads=(4, 2), head_dim=8, num_layers=2, vocab=64, window=6)
    layers = (replace(spec.layers[0], attention=replace(spec.layers[0].attention, window=None)), spec.layers[1])
    spec = replace(spec, layers=layers)
    groups = (KVGroup(12, frozenset({0})), KVGroup(4, frozenset({1}), window=6))
    backend = BACKENDS.get("torch")(num_threads=1, device="cpu", dtype="float32")
    program = backend.build(spec, RandomWeights(spec), KVLayout.of_groups(groups, 4))
    for work in (Work.decode(23, 2), Work.prefill(20, 1)):
        output = program.step(make_batch(work, 64, 4, [12, 4]), LOGITS)
        assert output.logits.shape == (work.num_seqs, 64)
