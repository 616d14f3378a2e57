"""Reads a Hugging Face config.json field by field and refuses fields that no code has read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from cloister.types.errors import ModelError

T = TypeVar("T", int, float, bool, str)

_MOST = 1 << 63  # of an integer that stands for a float: some configs write 1e9 as an integer
MAX_SIZE = 2**31 - 1  # what the kernels count in
_MOST_FLOAT = 3.4e38  # of float32, in which models compute

_NAMES_AND_DATES = (
    "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "architectures", "model_type",
    "transformers_version", "transformers_weights", "unsloth_version",
)  # fmt: skip
_STORAGE = ("dtype", "torch_dtype", "unsloth_fixed")  # each tensor's own header says its type
_TRAINING = (
    "attention_dropout", "initializer_range", "gradient_checkpointing", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id", "num_labels", "finetuning_task",
    "task_specific_params", "chunk_size_feed_forward", "_attn_implementation", "tokenizer_class", "prefix", "is_decoder",
    "cache_implementation", "auto_map", "_num_labels", "is_llama_config", "transformers.js_config", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "loss_type", "classifier_dropout", "use_return_dict", "_output_attentions",
    "_attn_implementation_internal", "_attn_implementation_autoset", "_experts_implementation",
    "_experts_implementation_internal", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan",
    "base_model_fsdp_plan",
)  # fmt: skip
_GENERATION = (
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "mask_token_id", "sep_token_id", "cls_token_id",
    "decoder_start_token_id",
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

# Fields that change the models of some families. One that does not read them is not what the config means.
MEANINGFUL = frozenset((
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "hidden_act",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_chunk_size", "no_rope_layers",
    "attention_bias", "mlp_bias", "qkv_bias", "lm_head_bias", "head_dim", "num_key_value_heads", "intermediate_size",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "use_qk_norm", "clip_qkv", "alibi", "parallel_attn",
    "num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "moe_intermediate_size",
    "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_local_base_freq", "quantization_config", "vision_config", "use_bidirectional_attention",
))  # fmt: skip


class ConfigFields:
    """The fields of one JSON object; each is taken once, and `finish` refuses what nobody took.

    Args:
        values: the object; null counts as absent, as in transformers.
        source: what to call it in messages, such as "config.json".
        names: what the object calls a field, where that is not its name here; the first that is there counts.
        defaults: of fields, by their names here; they come before those of `take`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str = "config.json",
        *,
        names: Mapping[str, Sequence[str]] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        self.source = source
        self._names, self._defaults = names or {}, defaults or {}
        self._nulls = {name for name, value in values.items() if value is None}
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
            ModelError: it is absent and has no default, has another type, or is no finite number. Null counts as absent, but
                not for a boolean whose default is true: transformers reads some of those as false.
        """
        stored = self.name_of(name)
        if stored not in self._values:
            default = self._defaults.get(name, default)  # type: ignore[assignment]
            if default is Any:
                raise ModelError(f"{self.source} has no {stored!r}; the model directory is not complete", param=stored)
            if default is True and stored in self._nulls:
                raise ModelError(f"{stored!r} in {self.source} must be true or false, not null", param=stored)
            return default  # type: ignore[return-value]
        value = self._values.pop(stored)
        if kind is float and type(value) is int and abs(value) <= _MOST:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{stored!r} in {self.source} must be of type {kind.__name__}", param=stored)
        if isinstance(value, float) and not abs(value) <= _MOST_FLOAT:
            raise ModelError(f"{stored!r} in {self.source} must be a finite number of float32, not {value}", param=stored)
        return value

    def name_of(self, name: str) -> str:
        """Returns what the object calls a field."""
        known = self._names.get(name, (name,))
        return next((stored for stored in known if stored in self._values), known[0])

    def take_nullable(self, name: str, kind: type[T]) -> T | None:
        """Returns field `name` where null is a value of its own: None if it is null, or absent and without a default."""
        return None if self.name_of(name) in self._nulls else self.take(name, kind, None)

    def take_limit(self, name: str) -> float | None:
        """Returns field `name` as a positive number, None where it is null or absent."""
        limit = self.take_nullable(name, float)
        if limit is not None and not 0 < limit < math.inf:
            raise ModelError(f"{name!r} in {self.source} must be positive, or null for none, not {limit}", param=name)
        return limit

    def peek(self, name: str, default: int | None = None) -> int:
        """Returns field `name`, an integer, and leaves it to be taken (`take` says what is raised)."""
        stored, is_there = self.name_of(name), self.name_of(name) in self._values
        value = self.take(name, int) if default is None else self.take(name, int, default)
        if is_there:
            self._values[stored] = value
        return value

    def peek_any(self, name: str) -> Any:
        """Returns field `name` as it is, None when absent, and leaves it to be taken."""
        return self._values.get(self.name_of(name), self._defaults.get(name))

    def put(self, name: str, value: object) -> None:
        """Sets field `name`, whatever it was."""
        self._values[self.name_of(name)] = value

    def need(self, *names: str) -> None:
        """Raises ModelError for the first field that is absent, whatever its default."""
        for stored in map(self.name_of, names):
            if stored not in self._values:
                raise ModelError(f"{self.source} has no {stored!r}; the model directory is not complete", param=stored)

    def extended(self, more: Mapping[str, object], defaults: Mapping[str, object]) -> ConfigFields:
        """Returns what is left of the fields and more of them, under the same names, with defaults."""
        return ConfigFields({**self._values, **more}, self.source, names=self._names, defaults=defaults)

    def require(self, name: str, only: object) -> None:
        """Takes a field that would change the model, and raises ModelError unless it is absent or has its only value."""
        value = self._values.pop(self.name_of(name), None)
        if value not in (None, only):
            raise ModelError(f"{name!r} in {self.source} is only supported as {only!r}", param=name)

    def drop(self, names: Iterable[str]) -> None:
        """Takes fields that change nothing."""
        for name in names:
            self._values.pop(name, None)

    def take_size(self, name: str, default: int | None = None) -> int:
        """Returns field `name` as a positive integer (`take` says what is raised)."""
        stored = self.name_of(name)
        size = self.take(name, int) if default is None else self.take(name, int, default)
        if size <= 0:
            raise ModelError(f"{stored!r} in {self.source} must be positive, not {size}", param=stored)
        if size > MAX_SIZE:
            raise ModelError(f"{stored!r} in {self.source} must be at most {MAX_SIZE}", param=stored)
        return size

    def look(self, name: str) -> Any:
        """Returns field `name` as it is, None when absent, and leaves it to be taken."""
        return self._values.get(self.name_of(name), self._defaults.get(name))

    def take_any(self, name: str) -> Any:
        """Returns field `name` as it is, None when absent."""
        return self._values.pop(self.name_of(name), self._defaults.get(name))

    def finish(self) -> None:
        """Raises ModelError for the first field that was not taken and is not known to be harmless."""
        for name in self.find_unknown():
            raise ModelError(
                f"{self.source} has a field {name!r} that is not known here; it may change the answers, so the model is "
                "refused. Remove the field if you are sure that it does not.",
                param=name,
            )

    def find_unknown(self) -> tuple[str, ...]:
        """Returns the fields that were not taken and of which nothing is known.

        Raises:
            ModelError: one was not taken that changes a model.
        """
        for name, value in self._values.items():
            if name in ONLY and value != ONLY[name]:
                raise ModelError(f"{name!r} in {self.source} is only supported as {ONLY[name]!r}", param=name)
            if name in MEANINGFUL and value is not False:
                raise ModelError(
                    f"{self.source} has a field {name!r} that changes models of other families and that this one does not read."
                    " Remove the field if you are sure that it means nothing.",
                    param=name,
                )
        return tuple(name for name in self._values if name not in ONLY and name not in HARMLESS and name not in MEANINGFUL)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ModelError: there is no such file, or it holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; give the directory of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError):
        raise ModelError(f"{path} is not readable JSON; download the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; download the model again")
    return value


def names_tower(path: Path) -> bool:
    """Whether the config.json of a model directory names an image tower; False without one, as for a GGUF file.

    Raises:
        ModelError: it holds no JSON object.
    """
    file = path / "config.json"
    return file.is_file() and "vision_config" in read_json(file)
