"""The older forms of configs and checkpoints that are on the hub mean what the newest ones mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cloister.backends.tensors import GroupedTensor
from cloister.models import load
from cloister.models.decoder import choose_family
from cloister.models.families import FAMILIES
from cloister.models.gguf.architecture import ARCHITECTURES
from cloister.models.quantized.encoding import Encoder
from cloister.models.rope import SCALINGS
from cloister.models.safetensors import write_tensors
from cloister.quant import FORMATS, FormatOptions
from cloister.types.errors import ModelError
from tests.driving import build_from
from tests.model_factory import make_model

TOKENS = np.random.default_rng(2).integers(0, 320, 60).tolist()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def rename(path: Path, change: Callable[[str], str], **more: Any) -> None:
    stored = load_file(path / "model.safetensors")
    save_file({**{change(name): tensor for name, tensor in stored.items()}, **more}, path / "model.safetensors")


def test_rotary_fields_of_pythia_mean_rope_parameters(tmp_path: Path) -> None:
    path = make_model(tmp_path, "gpt_neox", rope_parameters={"rope_theta": 300.0, "partial_rotary_factor": 0.5})
    before = load(path).spec

    def change(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config.update(rotary_pct=0.5, rotary_emb_base=300)

    edit(path, change)
    assert load(path).spec == before
    edit(path, lambda config: config.update(rotary_pct=0.25))
    assert load(path).spec != before


def test_su_and_yarn_of_early_phi3_mean_longrope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [3.5] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    path = make_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=256)
    before = load(path).spec
    for kind in ("su", "yarn"):

        def change(config: dict[str, Any], kind: str = kind) -> None:
            config.pop("rope_parameters", None)
            config.update(rope_theta=10000.0, rope_scaling={"type": kind, **factors})

        edit(path, change)
        assert load(path).spec == before


def test_rope_fields_of_early_gemma3_mean_rope_parameters(tmp_path: Path) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    path = make_model(tmp_path, "gemma3_text", rope_parameters=parameters, num_hidden_layers=6, sliding_window=40)
    before = load(path).spec
    assert [layer.attention.window for layer in before.layers] == [40, 40, 40, 40, 40, None]

    def change(config: dict[str, Any]) -> None:
        for name in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
            del config[name]
        config.update(rope_theta=1000000, rope_local_base_freq=500, rope_scaling={"rope_type": "linear", "factor": 8.0})

    edit(path, change)
    assert load(path).spec == before
    edit(path, lambda config: config.update(sliding_window_pattern=2))
    assert [layer.attention.window for layer in load(path).spec.layers] == [40, None] * 3


def test_rope_fields_of_olmo3_on_the_hub_mean_rope_parameters(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.2}
    parameters = {
        "full_attention": {**yarn, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
    path = make_model(tmp_path, "olmo3", rope_parameters=parameters, num_hidden_layers=4, sliding_window=40)
    before = load(path).spec
    assert [layer.attention.window for layer in before.layers] == [40, 40, 40, None]

    def change(config: dict[str, Any]) -> None:
        del config["rope_parameters"], config["layer_types"]
        config.update(rope_theta=500000, rope_scaling=yarn)

    edit(path, change)
    assert load(path).spec == before


def test_every_fourth_layer_of_smollm3_turns_nothing_unless_the_config_says_which(tmp_path: Path) -> None:
    path = make_model(tmp_path, "smollm3")
    edit(path, lambda config: config.pop("no_rope_layers"))
    assert [layer.attention.rope is None for layer in load(path).spec.layers] == [False, False, False, True]
    edit(path, lambda config: config.update(no_rope_layer_interval=2))
    assert [layer.attention.rope is None for layer in load(path).spec.layers] == [False, True, False, True]


def test_a_window_of_null_is_none_and_one_that_is_absent_the_family_s(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral", sliding_window=None)
    assert load(path).spec.layers[0].attention.window is None
    edit(path, lambda config: config.pop("sliding_window"))
    assert load(path).spec.layers[0].attention.window == 4096


def test_experts_are_counted_under_either_name(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe")
    before = load(path).spec
    edit(path, lambda config: config.update(num_experts=config.pop("num_local_experts")))
    assert load(path).spec == before


HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    "Phi-4 mini": (
        "phi3",
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "attention_bias": False,
         "auto_map": {"AutoConfig": "x"}, "embd_pdrop": 0.0},
    ),
    "Gemma 2": ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    "DistilGPT2": ("gpt2", {"_num_labels": 1, "n_ctx": 1024, "summary_activation": None, "task_specific_params": {}}),
    "OPT": ("opt", {"activation_dropout": 0.0, "prefix": "</s>", "layerdrop": 0.0}),
    "Qwen3 with experts": ("qwen3_moe", {"max_window_layers": 48, "rope_scaling": None, "use_sliding_window": False}),
    "SmolLM3": ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_what_models_of_the_hub_say_beside_that_changes_nothing(name: str, tmp_path: Path) -> None:
    family, more = HUB[name]
    path = make_model(tmp_path, family)
    before = load(path).spec
    edit(path, lambda config: config.update(more))
    assert load(path).spec == before


def test_more_chosen_experts_than_there_are_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mixtral")
    edit(path, lambda config: config.update(num_experts_per_tok=6))
    with pytest.raises(ModelError, match="there are 5 experts"):
        load(path)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [("mixtral", "num_local_experts", 50000), ("mixtral", "num_local_experts", 10**12), ("llama", "num_hidden_layers", 10**12)],
)
def test_a_config_that_asks_for_any_number_of_tensors_is_refused_at_once(
    family: str, field: str, value: int, tmp_path: Path
) -> None:
    path = make_model(tmp_path, family)
    edit(path, lambda config: config.update({field: value}))
    with pytest.raises(ModelError, match=r"at most|many more tensors"):
        load(path)


def test_the_350m_of_opt_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model(tmp_path, "opt")
    edit(path, lambda config: config.update(word_embed_proj_dim=32))
    with pytest.raises(ModelError, match="350m"):
        load(path)


def test_a_checkpoint_of_the_bare_decoder_with_its_old_buffers_is_read(tmp_path: Path) -> None:
    path = make_model(tmp_path, "gpt2")
    before = build_from(path).run("a", TOKENS)
    buffers = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.bool_), "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    rename(path, lambda name: name.removeprefix("transformer."), **buffers)
    assert build_from(path).run("a", TOKENS).tobytes() == before.tobytes()
    rename(path, str, **{"h.0.attn.other": np.ones(3, np.float32)})
    with pytest.raises(ModelError, match=r"attn\.other"):
        load(path)


def test_a_checkpoint_of_a_fused_family_that_lacks_the_fused_matrix_is_refused_by_its_name(tmp_path: Path) -> None:
    path = make_model(tmp_path, "phi3")
    rename(path, lambda name: name.replace("0.self_attn.qkv_proj", "0.self_attn.other"))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.qkv_proj\.weight"):
        load(path)


def test_a_fused_matrix_stays_mapped(tmp_path: Path) -> None:
    weights = load(make_model(tmp_path, "phi3")).weights
    key = weights.read("layers.1.k.weight")
    assert isinstance(key, np.ndarray)
    assert not key.flags.owndata
    assert not key.flags.writeable


def test_somebody_may_ask_whether_an_architecture_is_known() -> None:
    assert choose_family({"architectures": ["MambaForCausalLM"]}) is None
    family = choose_family({"architectures": ["Other", "GPTNeoXForCausalLM"]})
    assert family is not None
    assert family.name == "gpt_neox"


def write_in_int8(path: Path) -> dict[str, Any]:
    """Writes every matrix of a directory's layers as it is stored, in 8 bits, and returns what was written."""
    number_format, encoder, written = FORMATS.get("int8")(FormatOptions()), Encoder(), {}
    for name, tensor in load_file(path / "model.safetensors").items():
        is_matrix = tensor.ndim == 2 and any(char.isdigit() for char in name)
        written[name] = number_format.quantize(tensor) if is_matrix else tensor
        encoder.add(name, written[name])
    edit(path, lambda config: config.update(quantization_config=encoder.describe("rtn")))
    write_tensors(path / "model.safetensors", encoder.parts)
    return written


def test_a_quantised_fused_matrix_is_cut_into_runs_of_its_rows(tmp_path: Path) -> None:
    path = make_model(tmp_path, "phi3", hidden_size=128, intermediate_size=192)
    written, weights = write_in_int8(path), load(path).weights
    fused = written["model.layers.1.self_attn.qkv_proj.weight"]
    starts = {"q": 0, "k": 128, "v": 192}
    for name, start in starts.items():
        tensor = weights.read(f"layers.1.{name}.weight")
        assert isinstance(tensor, GroupedTensor)
        assert np.array_equal(tensor.codes, fused.codes[start : start + len(tensor.codes)])
        assert np.array_equal(tensor.scales, fused.scales[start : start + len(tensor.codes)])
    assert np.isfinite(build_from(path).run("a", TOKENS)).all()


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_quantised_matrix_that_would_have_to_be_turned_round_is_refused(family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family, **({"n_embd": 128} if family == "gpt2" else {"hidden_size": 128}))
    write_in_int8(path)
    with pytest.raises(ModelError, match="unquantised checkpoint"):
        load(path)


def test_the_page_of_models_names_every_family_scaling_and_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(any(f"`{name}`" in row for row in rows) for name in (*FAMILIES, *SCALINGS, *ARCHITECTURES))
