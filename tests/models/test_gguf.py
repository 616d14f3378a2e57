"""GGUF files against the reference library's dequantisation, and against the same weights in safetensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from cloister.backends.base import Weights
from cloister.backends.tensors import GroupedTensor, dequantized
from cloister.models import load
from cloister.models.gguf.tensors import TYPES as KNOWN
from cloister.models.gguf.tensors import find_entry
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFArray, read_gguf
from tests.driving import build
from tests.gguf_factory import TYPES, finish, make_gguf, quantise
from tests.reference import greedy

PROMPT = np.random.default_rng(1).integers(0, 320, 60).tolist()
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


class Dequantised:
    """Weights as float32 numbers (protocol `backends.base.Weights`)."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def names(self) -> Sequence[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def form(self, name: str) -> None:
        return None

    def read(self, name: str) -> npt.NDArray[Any]:
        return dequantized(self._weights.read(name)).astype(np.float32)

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        return ((name, self.read(name)) for name in self.names())


def same_bits(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    return first.dtype == second.dtype == np.float32 and first.tobytes() == second.tobytes()


def answers(path: Path) -> tuple[list[int], npt.NDArray[np.float32]]:
    model = load(path)
    return greedy(build(model.spec, Dequantised(model.weights)), PROMPT, 12)


def test_every_supported_type_is_tested() -> None:
    assert {kind.name for kind in KNOWN.values()} == set(TYPES)
    assert all(GGMLQuantizationType[kind.name] == number for number, kind in KNOWN.items())


@pytest.mark.parametrize("kind", TYPES)
def test_a_dequantised_tensor_has_the_bits_of_the_reference(kind: str, tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", "llama", kind)
    expected, weights = load(tmp_path / "tiny").weights, load(file).weights
    assert weights.names() == expected.names()
    for name in weights.names():
        tensor = dequantized(weights.read(name))
        assert tensor.shape == weights.shape(name) == expected.shape(name)
        assert same_bits(tensor.astype(np.float32), dequantized(expected.read(name))), name


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.startswith("Q")])
def test_blocks_of_any_scale_and_sign_have_the_bits_of_the_reference(kind: str, tmp_path: Path) -> None:
    """Random bytes everywhere: negative and subnormal scales, all codes."""
    number = GGMLQuantizationType[kind]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (40, 512 // quants.GGML_QUANT_SIZES[number][0], quants.GGML_QUANT_SIZES[number][1]), np.uint8)
    starts = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for start in starts:
        floats = rng.integers(0, 1 << 16, (*raw.shape[:2], 1), np.uint16)
        floats[(floats & 0x7C00) == 0x7C00] &= 0x83FF  # neither infinite nor NaN
        raw[..., start : start + 2] = floats.view(np.uint8)
    rows = raw.reshape(40, -1)
    kind_here = KNOWN[number]
    codes, scales, offsets = kind_here.unpack(raw.reshape(-1, raw.shape[2]))
    shape = (40, 512 // kind_here.group_size)
    tensor = GroupedTensor(
        codes.reshape(40, 512), scales.reshape(shape), np.full(shape, kind_here.zero, np.uint8),
        None if offsets is None else offsets.reshape(shape), kind_here.bits, kind_here.group_size, "int8",
    )  # fmt: skip
    assert int(codes.max()) < 1 << kind_here.bits
    assert same_bits(tensor.dequantize(), quants.dequantize(rows, number))


def write_factors(writer: GGUFWriter) -> None:
    """As llama.cpp's converter writes them: of weights, and of inputs, which are not rounded here."""
    writer.add_tensor("blk.0.attn_q.scale", np.array([0.5], np.float32))
    writer.add_tensor("blk.1.ffn_down.scale", np.array([4], np.float32))
    writer.add_tensor("blk.1.ffn_down.input_scale", np.array([7], np.float32))


def test_a_matrix_in_nvfp4_may_have_a_factor_in_a_tensor_of_its_own(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", "llama", "NVFP4", edit=write_factors)
    expected, weights = load(tmp_path / "tiny").weights, load(file).weights
    for name, factor in (("layers.0.q.weight", 0.5), ("layers.1.down.weight", 4), ("layers.0.down.weight", 1)):
        assert same_bits(dequantized(weights.read(name)), dequantized(expected.read(name)) * np.float32(factor)), name


def write_experts(path: Path, factors: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Writes the matrices [3, 8, 64] of three experts, and returns what the reference library makes of them."""
    rows = quantise(np.zeros((24, 64), np.float32), "NVFP4")
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("experts.weight", rows.reshape(3, 8, 36), raw_dtype=GGMLQuantizationType.NVFP4)
    writer.add_tensor("experts.scale", factors)
    finish(writer)
    plain: npt.NDArray[np.float32] = quants.dequantize(rows, GGMLQuantizationType.NVFP4).reshape(3, 8, 64)
    return plain


def test_each_expert_in_nvfp4_has_its_own_factor(tmp_path: Path) -> None:
    factors = np.array([1, 0.25, 8], np.float32)
    plain = write_experts(tmp_path / "experts.gguf", factors)
    file = read_gguf(tmp_path / "experts.gguf")
    for expert in range(3):
        found = dequantized(find_entry(file, "experts.weight", expert=expert).read())
        assert same_bits(found, plain[expert] * factors[expert])


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(2, np.float32), "must be 3 numbers of type F32"),
        (np.ones(3, np.float16), "must be 3 numbers of type F32"),
        (np.array([1, np.nan, 1], np.float32), "no number"),
        (np.array([1, np.inf, 1], np.float32), "no number"),
    ],
)
def test_factors_that_fit_no_experts_are_refused(factors: npt.NDArray[Any], message: str, tmp_path: Path) -> None:
    write_experts(tmp_path / "experts.gguf", factors)
    with pytest.raises(ModelError, match=message):
        find_entry(read_gguf(tmp_path / "experts.gguf"), "experts.weight", expert=1).read()


@pytest.mark.parametrize("scale", [0x7F, 0x80, 0xFF])
def test_a_scale_of_nvfp4_that_is_no_number_or_has_a_sign_is_refused(scale: int, tmp_path: Path) -> None:
    write_experts(tmp_path / "experts.gguf", np.ones(3, np.float32))
    file = read_gguf(tmp_path / "experts.gguf")
    damaged = bytearray(file.path.read_bytes())
    damaged[file.tensors["experts.weight"].start + 36 + 2] = scale
    file.path.write_bytes(damaged)
    with pytest.raises(ModelError, match="no number"):
        find_entry(file, "experts.weight", expert=0).read()


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, a KV head for each head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3, head_dim of its own": ("qwen3", {"head_dim": 128}),
    "qwen3, tied, biases": ("qwen3", {"head_dim": 64, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_have_the_bits_of_the_same_weights_in_safetensors(name: str, tmp_path: Path) -> None:
    family, config = VARIANTS[name]
    file = make_gguf(tmp_path / "tiny", family, "Q5_K", **config)
    (tokens, logits), (their_tokens, their_logits) = answers(file), answers(tmp_path / "tiny")
    assert tokens == their_tokens
    assert same_bits(logits, their_logits)


def write_linear(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_rope_scaling_factor(4.0)


def write_yarn(writer: GGUFWriter) -> None:
    writer.add_string("qwen2.rope.scaling.type", "yarn")
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def write_llama3(writer: GGUFWriter) -> None:
    """The factors that llama.cpp's converter derives for Llama 3.1."""
    frequencies = 10000.0 ** -(np.arange(0, 64, 2, dtype=np.float64) / 64)
    blend = np.clip((64 * frequencies / (2 * np.pi) - 1.0) / 3.0, 0, 1)
    writer.add_tensor("rope_freqs.weight", (1 / ((1 - blend) / 8.0 + blend)).astype(np.float32))


SCALINGS = {
    "linear": ("llama", LINEAR, write_linear),
    "yarn": ("qwen2", YARN, write_yarn),
    "llama 3.1": ("llama", LLAMA3, write_llama3),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotary_positions_are_those_of_the_config(name: str, tmp_path: Path) -> None:
    family, parameters, edit = SCALINGS[name]
    file = make_gguf(tmp_path / "tiny", family, "BF16", edit=edit, rope_parameters=parameters)
    ours, theirs = (load(path).spec.layers[0].attention.rope for path in (file, tmp_path / "tiny"))
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    assert not np.allclose(ours.inv_freq, plain, rtol=0.1)
    assert np.allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-6)
    assert ours.attention_scale == theirs.attention_scale
    (tokens, logits), (their_tokens, their_logits) = answers(file), answers(tmp_path / "tiny")
    assert tokens == their_tokens
    assert np.abs(logits - their_logits).max() < 1e-4


def test_matrices_stay_in_few_bits_and_numbers_stay_mapped(tmp_path: Path) -> None:
    weights = load(make_gguf(tmp_path / "tiny", "llama", "Q4_K")).weights
    query, norm = weights.read("layers.0.q.weight"), weights.read("norm.weight")
    assert isinstance(query, GroupedTensor)
    assert (query.bits, query.group_size, query.activations) == (4, 32, "int8_group")
    assert isinstance(norm, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        norm[0] = 1


def test_a_large_tensor_is_unpacked_in_parts_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load(make_gguf(tmp_path / "tiny", "llama", "Q5_1")).weights
    whole = weights.read("layers.1.k.weight")
    monkeypatch.setattr("cloister.models.gguf.tensors._CHUNK_BYTES", 1000)
    parts = weights.read("layers.1.k.weight")
    assert isinstance(whole, GroupedTensor)
    assert isinstance(parts, GroupedTensor)
    assert same_bits(whole.dequantize(), parts.dequantize())


def write_ends_and_sampling(writer: GGUFWriter) -> None:
    writer.add_eot_token_id(4)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)


def test_what_a_front_needs_comes_from_the_file(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", "llama", "Q8_0", edit=write_ends_and_sampling)
    info = load(file).info
    assert (info.name, info.path, info.max_model_len, info.vocab_size) == ("tiny-Q8_0", str(file), 2048, 320)
    assert info.eos_token_ids == (1, 4, 0)  # as named, then <|endoftext|>
    assert info.defaults == {"temperature": 0.5, "top_k": 20.0}


def test_the_fingerprint_covers_every_byte(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", "llama", "Q8_0")
    before = load(file).info.fingerprint
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    assert load(file).info.fingerprint != before


def refuse(tmp_path: Path, message: str, edit: Any = None, kind: str = "F16", **config: Any) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(make_gguf(tmp_path / "tiny", "llama", kind, edit=edit, **config))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_rope_dimension_count(32), "'rope.dimension_count' .* must be the size of a head"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "'longrope' .* known: none, linear, yarn"),
        (lambda w: w.add_expert_used_count(2), "'expert_used_count' .* only supported as 0"),
        (lambda w: w.add_expert_count(8), "has no 'expert_used_count'"),
        (lambda w: w.add_uint32("llama.expert_gating_func", 2), "'expert_gating_func' .* only supported as 1"),
        (lambda w: w.add_sliding_window(64), "'attention.sliding_window'.* may change the answers"),
        (lambda w: w.add_uint16("split.count", 2), "one part of a model; join"),
        (lambda w: w.add_type("adapter"), "holds no model"),
        (lambda w: w.add_quantization_version(1), "blocks of another version than 2"),
        (lambda w: w.add_array("llama.attention.head_count_kv_by_layer", [1, 2]), "may change the answers"),
        (lambda w: w.add_tensor("blk.0.extra.weight", np.zeros(4, np.float32)), "has no place for"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.float32)), "lacks the tensor"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(32, np.float32)), "positive F32 for each frequency"),
        (lambda w: w.add_eot_token_id(320), "no id of its token list"),
        (lambda w: w.add_string("general.sampling.temp", "hot"), "must be of type float"),
    ],
)
def test_what_would_have_to_be_ignored_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    refuse(tmp_path, message, edit)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba'; supported are: llama, qwen2, qwen3"):
        load(tmp_path / "other.gguf")


def test_an_unsupported_type_names_the_supported_ones(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        rows = np.zeros((16, 82), np.uint8)
        writer.add_tensor("rope_freqs.weight", rows, raw_dtype=GGMLQuantizationType.IQ2_S)

    refuse(tmp_path, "has the type IQ2_S; supported are: F32, F16, BF16, Q4_0", add)


def test_a_scale_that_is_no_number_is_told(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "tiny", "llama", "Q8_0")
    weights = load(file).weights
    raw = quantise(weights.read("layers.0.down.weight").dequantize(), "Q8_0").tobytes()  # type: ignore[union-attr]
    content = file.read_bytes()
    place = content.index(raw[:64])
    file.write_bytes(content[:place] + b"\x00\x7e" + content[place + 2 :])
    with pytest.raises(ModelError, match=r"'blk.0.ffn_down.weight' .* no number"):
        load(file).weights.read("layers.0.down.weight")


def test_yarn_of_a_config_is_that_of_transformers(tmp_path: Path) -> None:
    from tests.model_factory import make_model
    from tests.reference import compare

    path = make_model(tmp_path, "llama", rope_parameters={**YARN, "beta_fast": 24.0})
    assert "yarn" in json.loads((path / "config.json").read_text())["rope_parameters"]["rope_type"]
    agreement = compare(path, PROMPT * 2, 20)
    assert agreement.difference <= 1e-4
    assert agreement.num_equal == agreement.num_tokens


def test_texts_are_found_among_many_as_if_all_were_decoded() -> None:
    texts = ["a", "", "</s>", "b</s>", "<|im_end|>", "</s>", "ä", "<|im_end|", "</s>"]
    raw = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)
    array = GGUFArray(8, len(texts), raw)
    wanted = {"</s>", "<|im_end|>", "ä", "absent"}
    assert array.strings() == texts
    assert array.find(wanted) == [(number, text) for number, text in enumerate(texts) if text in wanted]
    with pytest.raises(ValueError, match="not an array of strings"):
        GGUFArray(4, 1, bytes(4)).find(wanted)
