"""Comparison with other engines: whose formats are compared, what an instruction set is, and how everybody is held to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import MODELS
from benchmarks.peers import work
from benchmarks.peers.engines import Launch
from benchmarks.peers.isa import ISAS, UNKNOWN, are_for_one_processor, list_usable
from benchmarks.peers.judge import judge
from benchmarks.peers.ledger import Ledger, Run
from benchmarks.peers.losses import MODEL, Loss, Losses
from benchmarks.peers.roster import Entrant, Roster
from benchmarks.peers.shapes import Shape
from benchmarks.peers.work import Figure, Tokens, measure

ROW = {"row": "llama.cpp: Q8_0", "loss, %": 0.5, "rms of log-probabilities": 0.1}
SHAPE = Shape("tiny", 64, 128, 2, 4, 2, 16, 256, 4096)
LOSSES = Losses(
    {
        "native bf16: bfloat16": Loss(0.0, 0.02),
        "native bf16: int8": Loss(-0.5, 0.11),
        "native avx2: int8": Loss(-0.9, 0.12),
        "native bf16: int4, groups of 32": Loss(1.2, 0.7),
        "native bf16: GGUF as stored": Loss(3.0, 0.3),
        "llama.cpp: Q8_0": Loss(0.3, 0.1),
        "llama.cpp: Q4_0": Loss(25.0, 0.8),
        "llama.cpp: GGUF as stored": Loss(0.2, 0.1),
        "OpenVINO: int8": Loss(1.3, 0.13),
    }
)


def entrant(peer: str, number_format: str, isa: str = "bf16", engine: str | None = None) -> Entrant:
    return Entrant(peer, number_format, "python", Launch(engine or peer, "model", 1, 1, 1), isa)


def llama(number_format: str, isa: str = "bf16") -> Entrant:
    return entrant("llama.cpp", number_format, isa, "llama")


class TestLosses:
    def test_come_from_the_row_of_the_engine_and_the_format(self) -> None:
        assert LOSSES.of(entrant("cloister", "int8", "avx2")) == Loss(-0.9, 0.12)
        assert LOSSES.of(llama("int4")) == Loss(25.0, 0.8)
        assert LOSSES.of(entrant("ik_llama.cpp", "int8", engine="llama")) == Loss(0.3, 0.1)
        assert LOSSES.of(entrant("openvino", "bf16")) is None
        assert LOSSES.of(entrant("transformers", "bf16")) is None

    def test_of_other_kernels_stand_in_for_what_was_not_measured(self) -> None:
        assert LOSSES.of(entrant("cloister", "int4", "avx2")) == Loss(1.2, 0.7)

    @pytest.mark.parametrize(
        ("ours", "peer", "fair"),
        [
            ("bf16", llama("int8"), False),  # loses more
            ("int8", llama("int8"), True),
            ("int8", entrant("openvino", "int8"), True),  # a little more
            ("int8", llama("int4"), False),
            ("int4", llama("int4"), True),
            ("int4", llama("int8"), True),  # loses less
            ("int4", entrant("openvino", "int4"), True),  # unknown: as many bits
            ("int8", entrant("openvino", "int4"), False),
            ("int8", llama("gguf"), False),
            ("gguf", llama("gguf"), True),
            ("gguf", llama("int8"), False),
        ],
    )
    def test_that_are_about_equal_or_less_are_a_fair_match(self, ours: str, peer: Entrant, fair: bool) -> None:
        assert LOSSES.are_comparable(entrant("cloister", ours), peer) == fair

    def test_are_read_from_what_quality_wrote(self, tmp_path: Path) -> None:
        path = tmp_path / "quality.json"
        assert Losses.read(path).by_label == {}
        path.write_text(json.dumps({"figures": {MODELS[MODEL].title: [ROW]}}))
        assert Losses.read(path).of(llama("int8")) == Loss(0.5, 0.1)


class TestJudge:
    def test_takes_the_best_peer_of_the_same_instruction_set(self, tmp_path: Path) -> None:
        everybody = [entrant("cloister", "int8", isa) for isa in ("avx2", "bf16")]
        everybody += [llama("int8", "avx2"), llama("int8", "bf16"), llama("int4", "avx2")]
        speeds = {"cloister int8 avx2": 30.0, "cloister int8 bf16": 60.0, "llama.cpp int8 avx2": 10.0}
        speeds |= {"llama.cpp int8 bf16": 40.0, "llama.cpp int4 avx2": 99.0}
        runs = [Run("tiny", name, "decode", 0, [speed], 0.0) for name, speed in speeds.items()]
        least, most = judge(Ledger(tmp_path / "ledger.json", runs), SHAPE, everybody, LOSSES)
        assert (least.isa, least.ratio, least.best_loss) == ("avx2", 3.0, Loss(0.3, 0.1))
        assert (most.isa, most.ratio, most.loss) == ("bf16", 1.5, Loss(-0.5, 0.11))


class TestInstructionSets:
    def test_are_what_the_processor_lists(self, tmp_path: Path) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma f16c avx_vnni\n")
        assert [isa.name for isa in list_usable(cpuinfo)] == ["avx2", "avxvnni"]

    def test_kernels_of_a_build_for_this_processor_alone_are_no_measure_of_lesser_ones(self) -> None:
        usable = [ISAS["avx2"], ISAS["vnni"], ISAS["bf16"]]
        assert are_for_one_processor(["bf16", "avx2", "scalar"], usable)
        assert not are_for_one_processor(["amx", "bf16", "vnni", "avx2", "scalar"], usable)
        assert not are_for_one_processor(["avx2", "scalar"], usable[:1])

    def test_of_an_unknown_processor_are_one_that_holds_nobody(self, tmp_path: Path) -> None:
        assert list_usable(tmp_path / "nothing") == [UNKNOWN]

    def test_hold_everybody_but_on_the_best_one(self, tmp_path: Path) -> None:
        roster = Roster(tmp_path, 1, ["int8"], {"backend": "native"}, [ISAS["avx2"], ISAS["bf16"]], ISAS["bf16"])
        (least, most) = (one for one in roster.entrants(SHAPE) if one.peer == "cloister")
        assert least.launch.settings["kernels"] == "avx2"
        assert least.environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        assert "kernels" not in most.launch.settings
        assert most.environment == {}

    def test_have_a_build_of_llama_cpp_each(self, tmp_path: Path) -> None:
        for folder in ("lb", "lb-avx2"):
            (tmp_path / folder / "bin").mkdir(parents=True)
            (tmp_path / folder / "bin" / "llama-bench").touch()
        (tmp_path / "g").mkdir()
        (tmp_path / "g" / "tiny-q8_0.gguf").touch()
        isas = [ISAS["avx2"], ISAS["vnni"], ISAS["bf16"]]
        roster = Roster(tmp_path, 1, ["int8"], {}, isas, ISAS["bf16"])
        builds = {one.isa: one.launch.settings["bin"] for one in roster.entrants(SHAPE) if one.peer == "llama.cpp"}
        assert builds == {"avx2": str(tmp_path / "lb-avx2" / "bin"), "bf16": str(tmp_path / "lb" / "bin")}
        assert "llama.cpp vnni" in roster.missing(SHAPE)


class TestDecode:
    def test_after_a_long_prompt_is_timed_from_its_first_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(work, "MIN_MEASURED_S", 0.0)
        engine = StreamingEngine()
        samples = measure(Figure("decode4096", "decode", 4096, ""), engine, Tokens(100, 0), 1)
        assert engine.lengths == [4096]
        assert samples == [work.NUM_NEW / 2.0]


class StreamingEngine:
    """Takes two seconds for an answer, by its own clock."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def generate(self, prompts: object, num_new: int) -> None:
        raise AssertionError("there is no need to call it")

    def time_decode(self, prompt: list[int], num_new: int) -> float:
        self.lengths.append(len(prompt))
        return 2.0

    def close(self) -> None:
        pass


def test_a_step_of_a_mixture_reads_only_the_experts_that_its_tokens_choose() -> None:
    dense = Shape("dense", 64, 128, 2, 4, 2, 16, 256, 4096)
    mixture = replace(dense, experts_per_token=2, num_experts=8)
    expert = 2 * 3 * 64 * 128

    assert dense.active_share == 1
    assert mixture.layer_params == dense.layer_params + expert + 2 * 64 * 8  # a second expert, and the router
    active = mixture.layer_params + mixture.head_params
    assert mixture.active_share == active / (active + 6 * expert)
    assert mixture.count_expert_params(1) == 0
    assert mixture.count_expert_params(2) == pytest.approx(expert * (8 * (1 - 0.75**2) - 2))
    assert mixture.count_expert_params(1000) == pytest.approx(6 * expert)
