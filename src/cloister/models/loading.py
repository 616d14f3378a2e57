"""Loads a model directory or GGUF file: its spec, its weights on disk, and what the server needs to know of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.backends.base import Weights
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import DecoderSpec
from cloister.models.checkpoint import digest_files, open_checkpoint, read_headers
from cloister.models.classes import read_encoder
from cloister.models.config import read_json
from cloister.models.decoder import choose_family, find_family, read_spec
from cloister.models.generation import read_generation
from cloister.models.gguf import open_gguf
from cloister.models.image_processing import normalised_as_configured, processor_files
from cloister.models.location import Digests, find_model, require_tokenizer
from cloister.models.mtp import MtpLayers, split_off
from cloister.models.quantized import split_config
from cloister.models.text_part import take_text_part
from cloister.models.transformers_fallback import open_foreign
from cloister.types.errors import ModelError
from cloister.types.request import EncoderInfo, ModelInfo

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that a back end can build a program from.

    Attributes:
        info: its `fingerprint` is the SHA-256 of config and checkpoint files, or of the GGUF file (hex); the engine adds its
            own part.
        path: the directory, or the GGUF file.
        mtp: layers of the checkpoint that predict further tokens, unread; None where none are known of.
    """

    spec: DecoderSpec
    weights: Weights
    info: ModelInfo
    path: Path
    mtp: MtpLayers | None = None


def load(
    path: Path | str,
    name: str | None = None,
    digests: Path | None = None,
    max_model_len: int | None = None,
    *,
    strict: bool = False,
) -> LoadedModel:
    """Opens a model directory or a GGUF file; the weights stay on disk, mapped.

    Args:
        path: a directory without safetensors, but with one GGUF file in it, is that file.
        name: what to call the model; None takes the directory's name, or the file's without its ending.
        digests: file that remembers digests of weights, which makes a second start quick; None hashes every time.
        max_model_len: the greatest length of a sequence, which decides some kinds of rotary scaling (`rope.RopeReader`); None
            for the positions that the model names.
        strict: refuse fields of config.json of which nothing is known; else they are ignored with a warning.

    Raises:
        ModelError: something is missing, unknown or contradictory; the message names it.
    """
    path = find_model(Path(path))
    remembered = Digests(digests)
    return (
        _load_gguf(path, name, remembered, max_model_len)
        if path.is_file()
        else _load_directory(path, name, remembered, max_model_len, _refuse_unknown if strict else _warn_of_unknown)
    )


def _load_gguf(path: Path, name: str | None, digests: Digests, max_model_len: int | None) -> LoadedModel:
    opened = open_gguf(path, digests, max_model_len)
    # of the file beside it, as `cloister pull` writes
    ends, sampling = read_generation(path.parent, {}, opened.spec.vocab_size)
    info = ModelInfo(
        name=name or path.stem,
        path=str(path),
        max_model_len=opened.spec.max_positions,
        vocab_size=opened.spec.vocab_size,
        eos_token_ids=tuple(dict.fromkeys([*opened.eos_token_ids, *ends])),
        defaults={**opened.defaults, **sampling},
        fingerprint=opened.fingerprint,
        created_s=int(path.stat().st_mtime),
        encoder=EncoderInfo() if isinstance(opened.spec, EncoderSpec) else None,
    )
    return LoadedModel(opened.spec, opened.weights, info, path)


def _warn_of_unknown(names: Sequence[str]) -> None:
    _logger.warning(
        "config.json has fields of which nothing is known here, and which are ignored: %s (--strict-config refuses them)",
        ", ".join(names),
    )


def _refuse_unknown(names: Sequence[str]) -> None:
    raise ModelError(
        f"config.json has fields of which nothing is known here: {', '.join(names)}; remove them, or leave --strict-config out",
        param=names[0],
    )


def _load_directory(
    path: Path,
    name: str | None,
    digests: Digests,
    max_model_len: int | None,
    on_unknown: Callable[[Sequence[str]], None],
) -> LoadedModel:
    whole, scheme = split_config(path, read_json(path / "config.json"))
    config = take_text_part(whole)
    weights: Weights
    mtp = None
    if choose_family(config) is None:
        spec, weights = open_foreign(path, config)
    else:
        family = find_family(config)
        spec = normalised_as_configured(read_spec(family, config, max_model_len, on_unknown), path)
        found = read_headers(path, family)
        mtp = split_off(found, MtpLayers(family, spec, config, scheme))
        weights = open_checkpoint(found, family, spec, scheme)
    text = config.get("text_config")
    of_decoder = {**text, **config} if isinstance(text, dict) else config
    eos_token_ids, defaults = read_generation(path, of_decoder, spec.vocab_size)
    require_tokenizer(path)
    encoder = read_encoder(config, spec) if isinstance(spec, EncoderSpec) else None
    info = ModelInfo(
        name=name or path.name,
        path=str(path),
        max_model_len=spec.max_positions,
        vocab_size=spec.vocab_size,
        eos_token_ids=eos_token_ids,
        defaults=defaults,
        fingerprint=digest_files(path, digests, () if spec.vision is None else processor_files(path)),
        created_s=int((path / "config.json").stat().st_mtime),
        encoder=encoder,
    )
    return LoadedModel(spec, weights, info, path, mtp)
