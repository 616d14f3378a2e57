"""Reading a Hugging Face config.json field by field, so that no field is ignored by accident (rule 10)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from cloister.types.errors import ModelError

T = TypeVar("T", int, float, bool, str)

_NAMES_AND_DATES = ("_name_or_path", "architectures", "model_type", "transformers_version", "unsloth_version")
_STORAGE = ("dtype", "torch_dtype", "unsloth_fixed")  # each tensor's own header says its type
_TRAINING = (
    "attention_dropout", "initializer_range", "gradient_checkpointing", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id", "num_labels", "finetuning_task",
    "task_specific_params", "chunk_size_feed_forward", "_attn_implementation", "tokenizer_class", "prefix",
)  # fmt: skip
_GENERATION = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "do_sample", "early_stopping", "max_length", "min_length", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "exponential_decay_length_penalty",
)  # fmt: skip

# Fields that change no logit, whatever they hold. Token ids and generation settings are read in `generation`.
# `pretraining_tp` only says in how many slices the trainer computed a product.
HARMLESS = frozenset((*_NAMES_AND_DATES, *_STORAGE, *_TRAINING, *_GENERATION, "pretraining_tp"))

# Fields that would change the model, and the only value with which Cloister computes what they ask for.
ONLY: Mapping[str, object] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
}


class ConfigFields:
    """The fields of one JSON object; each is taken once, and `finish` refuses what nobody took.

    Args:
        values: the object; null counts as absent, as in transformers.
        source: what to call it in messages, such as "config.json".
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.source = source
        self._values = {name: value for name, value in values.items() if value is not None}

    @overload
    def take(self, name: str, kind: type[T]) -> T: ...
    @overload
    def take(self, name: str, kind: type[T], default: T) -> T: ...
    @overload
    def take(self, name: str, kind: type[T], default: None) -> T | None: ...
    def take(self, name: str, kind: type[T], default: T | type[Any] | None = Any) -> T | None:
        """Returns field `name` as `kind`, or `default` when it is absent.

        Raises:
            ModelError: it is absent and has no default, or has another type.
        """
        if name not in self._values:
            if default is Any:
                raise ModelError(f"{self.source} has no {name!r}; the model directory is not complete", param=name)
            return default  # type: ignore[return-value]
        value = self._values.pop(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{name!r} in {self.source} must be of type {kind.__name__}", param=name)
        return value

    def take_size(self, name: str, default: int | None = None) -> int:
        """Returns field `name` as a positive integer (`take` says what is raised)."""
        size = self.take(name, int) if default is None else self.take(name, int, default)
        if size <= 0:
            raise ModelError(f"{name!r} in {self.source} must be positive, not {size}", param=name)
        return size

    def take_any(self, name: str) -> Any:
        """Returns field `name` as it is, None when absent."""
        return self._values.pop(name, None)

    def finish(self) -> None:
        """Raises ModelError for the first field that was not taken and is not known to be harmless."""
        for name, value in self._values.items():
            if name in ONLY and value != ONLY[name]:
                raise ModelError(f"{name!r} in {self.source} is only supported as {ONLY[name]!r}", param=name)
            if name not in ONLY and name not in HARMLESS:
                raise ModelError(
                    f"{self.source} has a field {name!r} that this family does not know; it may change the answers, so "
                    "the model is refused. Remove the field if you are sure that it does not.",
                    param=name,
                )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ModelError: there is no such file, or it holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; give the directory of a Hugging Face model") from None
    except (OSError, ValueError):
        raise ModelError(f"{path} is not readable JSON; download the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; download the model again")
    return value
