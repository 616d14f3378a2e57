"""A draft as a directory of Hugging Face's `LlamaForCausalLM`, with the tokenizer of the model that it drafts for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from cloister.models import LoadedModel
from cloister.models.safetensors import write_tensors
from cloister.train.decoder import Decoder, Shape
from cloister.types.errors import ModelError

_COPIED: Final = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def check_source(path: Path) -> None:
    """Raises ModelError for a model whose tokenizer cannot be copied."""
    if path.is_file():
        raise ModelError(
            f"{path.name} has its tokenizer inside; a draft needs files of it: give the directory of the Hugging Face model"
        )


def llama_config(shape: Shape, bos_token_id: int | None, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Returns `config.json` of a decoder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": bos_token_id,
        "torch_dtype": "bfloat16",
    }


def write_draft(draft: Decoder, model: LoadedModel, directory: Path) -> None:
    """Writes a draft beside copies of the model's tokenizer files; `config.json` last: now it is a model.

    Raises:
        ModelError: it cannot be written there.
    """
    weights = {
        f"model.{name}": weight.detach().float().numpy().astype(ml_dtypes.bfloat16)
        for name, weight in draft.state_dict().items()
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").unlink(missing_ok=True)
        for name in _COPIED:
            if (model.path / name).is_file():
                shutil.copyfile(model.path / name, directory / name)
        write_tensors(directory / "model.safetensors", {name: np.ascontiguousarray(one) for name, one in weights.items()})
        config = llama_config(draft.shape, None, model.info.eos_token_ids)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(f"the draft cannot be written to {directory}: {error.strerror}; free space or name another") from None
