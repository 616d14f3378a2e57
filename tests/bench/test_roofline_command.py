"""`cloister roofline` as a person meets it, and this machine measured as a chip."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from cloister.backends import BACKENDS
from cloister.bench.kernels import measure_here
from cloister.cli import main
from cloister.models import locate
from tests.gguf_factory import make_gguf


def run(capsys, *arguments):
    """Returns (exit status, standard output, standard error) of one command."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


def test_both_tables_are_printed_with_their_totals(capsys):
    status, out, _ = run(capsys, "roofline", "cloister-5m", "--chip", "a100", "--prompt", "64", "--context", "96")
    assert status == 0
    assert "Prefill: 1 sequence of 64 tokens" in out
    assert "Decode: 1 token of 1 sequence, 96 keys each" in out
    assert out.count("scores QK^T") == 2
    assert out.count("tokens/s one operator after the other") == 2
    assert "ridge point 153.0 FLOP/B" in out


def test_a_config_alone_is_enough(capsys, tmp_path):
    shutil.copy(locate("cloister-5m") / "config.json", tmp_path / "config.json")
    figures = []
    for model in ("cloister-5m", str(tmp_path), str(tmp_path / "config.json")):
        status, out, _ = run(capsys, "roofline", model, "--chip", "t4", "--json")
        assert status == 0
        figures.append(json.loads(out)["steps"])
    assert figures[0] == figures[1] == figures[2]


def test_a_gguf_file_is_enough(capsys, tmp_path):
    file = make_gguf(tmp_path / "model", "qwen3", "Q4_0")
    figures = []
    for model in (file, tmp_path / "model" / "config.json"):
        status, out, _ = run(capsys, "roofline", str(model), "--chip", "l4", "--weights-bits", "4.5", "--json")
        assert status == 0
        figures.append(json.loads(out)["steps"])
    assert figures[0] == figures[1]


def test_every_flag_changes_the_figures(capsys):
    seen = []
    for flags in (
        (), ("--prompt", "100"), ("--context", "100"), ("--batch", "3"), ("--weights-bits", "4.5"), ("--activation-bits", "32"),
        ("--kv-bits", "8"), ("--head-bits", "8"), ("--tp", "2"), ("--square",), ("--chip", "l4"),
    ):  # fmt: skip
        status, out, _ = run(capsys, "roofline", "cloister-5m", "--chip", "h200", "--json", *flags)
        assert status == 0
        seen.append(json.loads(out)["steps"])
    assert all(seen.count(steps) == 1 for steps in seen)


def test_markdown_and_a_picture(capsys, tmp_path):
    picture = tmp_path / "plots" / "roof.png"
    status, out, _ = run(capsys, "roofline", "cloister-5m", "--chip", "h100", "--markdown", "--plot", str(picture))
    assert status == 0
    assert "### Prefill: 1 sequence of 512 tokens" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("cloister-5m", "--chip", "abacus"), "it has: a100-sxm-80gb"),
        (("no-such-model", "--chip", "t4"), "a GGUF file or a config.json"),
        (("cloister-5m", "--chip", "t4", "--weights-bits", "0"), "from 1 to 32"),
        (("cloister-5m", "--chip", "t4", "--tp", "3"), "choose a divisor"),
        (("cloister-5m", "--chip", "m2-ultra", "--tp", "2"), "leave --tp at 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(capsys, arguments, advice):
    status, out, err = run(capsys, "roofline", *arguments)
    assert (status, out) == (1, "")
    assert advice in " ".join(err.split())


def test_a_config_of_an_unknown_family_is_refused(capsys, tmp_path):
    config = json.loads((locate("cloister-5m") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["AbacusForCausalLM"]}))
    status, _, err = run(capsys, "roofline", str(tmp_path), "--chip", "t4")
    assert status == 1
    assert "AbacusForCausalLM" in err


def test_this_machine_is_measured():
    chip = measure_here(1, read_bytes=32 << 20, product_size=256)
    assert 1e8 < chip.read_bytes_per_s < 1e13
    assert 1e8 < chip.peaks["float32"] < 1e15
    assert chip.memory_bytes is not None
    compiled = "native" in BACKENDS.names() and find_spec("cloister.backends.native._native") is not None
    assert set(chip.peaks) == ({"int8", "bfloat16", "float32"} if compiled else {"float32"})
    assert all(peak > 1e8 for peak in chip.peaks.values())


def test_the_documentation_lists_every_chip():
    from cloister.bench.chips import CHIPS

    page = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text(encoding="utf-8")
    for chip in CHIPS.values():
        peaks = " | ".join(f"{chip.peaks[form] / 1e12:.4g}" if form in chip.peaks else "-" for form in chip_formats())
        assert f"| `{chip.name}` | {peaks} | {chip.read_bytes_per_s / 1e9:g} | {chip.source} |" in page


def chip_formats():
    return ("float32", "bfloat16", "float16", "float8", "int8")
