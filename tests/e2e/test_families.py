"""Families from end to end: two sequences at once through the engine choose the tokens that transformers chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloister import LLM, SamplingParams
from cloister.types.errors import ConfigError
from tests.model_factory import make_model
from tests.reference import reference_logits

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "gemma2", "gpt2", "gpt_neox", "olmo2", "phi3", "gemma3n_text", "deepseek_v32"]
)
def test_an_engine_answers_as_transformers(family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family)
    with LLM(str(path), num_threads=1, kv_memory_mb=4, max_model_len=128, dtype="float32") as llm:
        answers = llm.generate(["the cat sat on the mat", "what is that, and then"], GREEDY)
    for answer in answers:
        chosen_ids = answer.outputs[0].token_ids
        assert len(chosen_ids) == 16
        tokens = [*answer.prompt_token_ids, *chosen_ids]
        logits = reference_logits(path, tokens[:-1])[len(answer.prompt_token_ids) - 1 :]
        chosen = logits[np.arange(len(logits)), chosen_ids]
        assert (logits.max(1) - chosen < 1e-4).all()


def test_dynamic_scaling_is_set_by_the_greatest_length(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", **DYNAMIC)
    fingerprints = []
    for asked, expected in ((None, 64), (32, 32), (200, 200)):
        with LLM(str(path), num_threads=1, kv_memory_mb=2, max_model_len=asked, dtype="float32") as llm:
            assert llm.model.max_model_len == expected
            fingerprints.append(llm.model.fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    with pytest.raises(ConfigError, match="set 256 or less"):
        LLM(str(path), num_threads=1, kv_memory_mb=2, max_model_len=300)
