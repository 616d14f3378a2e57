"""Mixers with a state, against the layers of transformers, and cut into calls of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import FalconH1Config, Lfm2Config, Mamba2Config, Qwen3_5TextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Model
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as TheirMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from cloister.backends.spec import GatedDeltaNetSpec, Mamba2Spec, ShortConvSpec, StateSpec
from cloister.backends.torch.mixers import StateMixer, make_mixer
from cloister.backends.torch.reading import WeightReader
from cloister.backends.torch.schedule import Team, use_one_thread_per_operation
from tests.driving import GivenWeights
from tests.model_factory import randomise

HIDDEN, NUM_TOKENS = 48, 70
NAMES = {
    "in_proj": "in", "out_proj": "out", "conv1d": "conv", "conv": "conv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A spec, and the layer of transformers that it describes."""

    spec: StateSpec
    layer: Callable[[], torch.nn.Module]


def mamba2(**fields: Any) -> Callable[[], torch.nn.Module]:
    given: dict[str, Any] = {
        "num_heads": 8, "head_dim": 12, "hidden_size": HIDDEN, "state_size": 20, "n_groups": 2, "conv_kernel": 4,
        "num_hidden_layers": 1, "chunk_size": 16, **fields,
    }  # fmt: skip
    return lambda: TheirMamba2Mixer(Mamba2Config(**given), 0)


def falcon(**fields: Any) -> Callable[[], torch.nn.Module]:
    given: dict[str, Any] = {
        "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_d_ssm": 60, "hidden_size": HIDDEN, "mamba_d_state": 9,
        "mamba_n_groups": 3, "mamba_d_conv": 4, "num_hidden_layers": 1, "mamba_chunk_size": 16, "vocab_size": 32,
        "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, **fields,
    }  # fmt: skip
    return lambda: FalconH1Model(FalconH1Config(**given)).layers[0].mamba  # the model makes the layer's multipliers


def lfm2(**fields: Any) -> Callable[[], torch.nn.Module]:
    given: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_hidden_layers": 1, "layer_types": ["conv"], "num_attention_heads": 4,
        "num_key_value_heads": 2, **fields,
    }  # fmt: skip
    return lambda: Lfm2ShortConv(Lfm2Config(**given), 0)


def delta_net(**fields: Any) -> Callable[[], torch.nn.Module]:
    given: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
        **fields,
    }  # fmt: skip
    return lambda: Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**given), 0)


MAMBA2 = Mamba2Spec(num_heads=8, head_dim=12, num_groups=2, d_state=20, kernel_size=4)
FALCON = Mamba2Spec(num_heads=6, head_dim=10, num_groups=3, d_state=9, kernel_size=4, norm=None)
CASES: dict[str, Case] = {
    "Mamba 2": Case(MAMBA2, mamba2()),
    "Mamba 2, biases, no convolution bias, time steps limited, one group": Case(
        Mamba2Spec(8, 12, 1, 20, 3, projection_bias=True, output_bias=True, conv_bias=False, time_step_limit=(0.3, 0.9)),
        mamba2(use_bias=True, use_conv_bias=False, time_step_limit=(0.3, 0.9), n_groups=1, conv_kernel=3),
    ),
    "Falcon-H1, no norm": Case(FALCON, falcon()),
    "Falcon-H1, norm before the gate, multipliers": Case(
        Mamba2Spec(
            6, 10, 3, 9, 4, norm="before_gate", projection_bias=True, input_scale=0.7, section_scales=(0.5, 1.5, 0.8, 1.2, 0.6),
        ),
        falcon(
            mamba_rms_norm=True, mamba_proj_bias=True, ssm_in_multiplier=0.7, ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.6],
        ),
    ),
    "gated delta net": Case(GatedDeltaNetSpec(2, 6, 12, 10, 4), delta_net()),
    "gated delta net, one head, another activation": Case(
        GatedDeltaNetSpec(1, 1, 16, 24, 3, "gelu"),
        delta_net(
            linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16, linear_value_head_dim=24,
            linear_conv_kernel_dim=3, hidden_act="gelu",
        ),
    ),
    "LFM2": Case(ShortConvSpec(HIDDEN, 3), lfm2()),
    "LFM2, biases, a longer filter": Case(ShortConvSpec(HIDDEN, 5, bias=True), lfm2(conv_bias=True, conv_L_cache=5)),
}  # fmt: skip


def canonical(layer: torch.nn.Module, spec: StateSpec) -> dict[str, Any]:
    """Returns the tensors of a layer of transformers under canonical names."""
    found = {}
    for name, tensor in layer.named_parameters():
        module, dot, last = name.rpartition(".")
        flat = (tensor.squeeze(1) if tensor.dim() == 3 else tensor).detach().numpy()  # a filter for each channel
        if module == "in_proj_qkv" and isinstance(spec, GatedDeltaNetSpec):
            parts = np.split(flat, (spec.key_size, 2 * spec.key_size))
            found |= {f"layers.0.mixer.{part}.weight": rows for part, rows in zip("qkv", parts, strict=True)}
        else:
            found[f"layers.0.mixer.{NAMES.get(module, module)}{dot}{last}"] = flat
    return found


def make_pair(case: Case) -> tuple[torch.nn.Module, StateMixer]:
    use_one_thread_per_operation()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = case.layer().eval()
        randomise(layer, tied=False)
    reader = WeightReader(GivenWeights(canonical(layer, case.spec)), torch.float32, torch.device("cpu"), Team(1))
    eps = getattr(getattr(layer, "norm", None), "variance_epsilon", 0.0)
    return layer, make_mixer(case.spec, reader, "layers.0", eps)


def rows(num_rows: int = NUM_TOKENS) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).standard_normal((num_rows, HIDDEN), dtype=np.float32))


def pad(found: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(found, (0, 0, 0, -len(found) % 32))


@torch.no_grad()
def run(mixer: StateMixer, spec: StateSpec, given: torch.Tensor, cuts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs and the last state, computed in calls that end at `cuts`."""
    features, state = mixer.project(pad(given))[: len(given)], torch.zeros(spec.state_size)
    parts = [mixer.advance(part, state) for part in torch.tensor_split(features, cuts) if len(part)]
    return mixer.finish(pad(torch.cat(parts)))[: len(given)], state


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_computes_what_the_layer_of_transformers_does(name: str) -> None:
    case = CASES[name]
    layer, mixer = make_pair(case)
    with torch.no_grad():
        theirs = layer(rows()[None])[0]
    ours, _ = run(mixer, case.spec, rows(), ())
    assert theirs.abs().max() > 0.5
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(1,), (2, 3, 4), (5, 38), (69,), tuple(range(1, NUM_TOKENS))], ids=str)
def test_bits_do_not_depend_on_how_tokens_are_cut_into_calls(name: str, cuts: tuple[int, ...]) -> None:
    case = CASES[name]
    _, mixer = make_pair(case)
    whole, last = run(mixer, case.spec, rows(), ())
    cut, cut_last = run(mixer, case.spec, rows(), cuts)
    assert torch.equal(whole, cut)
    assert torch.equal(last, cut_last)
    assert last.abs().max() > 0


@pytest.mark.parametrize("name", CASES)
def test_sizes_of_features_and_mixed_rows_are_as_named(name: str) -> None:
    spec = CASES[name].spec
    _, mixer = make_pair(CASES[name])
    with torch.no_grad():
        features = mixer.project(pad(rows()))
        mixed = mixer.advance(features, torch.zeros(spec.state_size))
    assert (features.shape[1], mixed.shape[1]) == (mixer.num_features, mixer.num_mixed)
    assert mixer.num_features + mixer.num_mixed == spec.step_size
