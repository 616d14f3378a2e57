"""Creates the back end and the number format that settings and model require."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cloister.backends import BACKENDS
from cloister.backends.availability import has_torch
from cloister.backends.base import Backend
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.factories import FOREIGN_FAMILY
from cloister.backends.native.limits import list_missing
from cloister.backends.spec import DecoderSpec
from cloister.engine.machine import Machine
from cloister.kv.codec_levels import is_lossy
from cloister.launch.backend_choice import NO_QUANT, chosen_backend
from cloister.launch.kept_files import cache_bytes, weights_cache
from cloister.models import LoadedModel
from cloister.quant import FORMATS, FormatOptions, NumberFormat, choose_kv_dtype, quantize_on_read
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.launch.loading import Loading
    from cloister.text import Tokenizer

_logger = logging.getLogger(__name__)
QUANT_VERSION: Final = 2
"""Increment it when a number format encodes the same weights differently."""


def make_backend(config: EngineConfig, machine: Machine, spec: DecoderSpec) -> Backend:
    """Returns the back end from the settings, for a model with this spec."""
    name = choose_backend_for(config, spec)
    if isinstance(spec, EncoderSpec) and config.quant != NO_QUANT:
        raise ConfigError("an encoder is computed as its weights are stored; leave `quant` out", param="quant")
    if name == FOREIGN_FAMILY and config.quant != NO_QUANT:
        raise ConfigError("a model without a spec cannot be quantised here; leave `quant` out", param="quant")
    if config.weights_cache and weights_cache(config) is None:
        _logger.warning("this user has no home, so packed weights are not kept; name a directory with --weights-cache")
    if name == "torch" and chosen_backend(config) == "native" and not isinstance(spec, EncoderSpec):  # torch has all
        _logger.warning(
            "the native back end does not compute %s, which this model needs; torch computes it",
            ", ".join(list_missing(spec)),
        )
    takes_any_kv = name == "native" and config.quant != NO_QUANT  # the torch back end always keeps KV in `dtype`
    return BACKENDS.get(name)(
        num_threads=config.num_threads or machine.num_cpus,
        device=config.device or "cpu",
        dtype=config.dtype,
        kv_dtype=config.kv_dtype or (choose_kv_dtype(number_format(config.quant), spec) if takes_any_kv else None),
        # on a CPU `fast` only permits lossy KV tiers; kernels stay exact
        numerics="exact" if is_lossy(config.kv_tier_codec) and (config.device or "cpu") == "cpu" else config.numerics,
        store=weights_cache(config),
        store_bytes=cache_bytes(config),
    )


def choose_backend_for(config: EngineConfig, spec: DecoderSpec) -> str:
    """Returns the name of the back end for a model of that spec.

    Unless the settings name one, it is torch for models that the native kernels do not support, if torch is installed. Without
    torch the native back end reports what it lacks.
    """
    if spec.family == FOREIGN_FAMILY:
        return FOREIGN_FAMILY
    name = chosen_backend(config)
    if config.backend is None and name == "native" and list_missing(spec) and has_torch():
        return "torch"
    return name


def number_format(name: str) -> NumberFormat:
    """Returns the number format of that name with its default options."""
    return FORMATS.get(name)(FormatOptions())


def write_in_few_bits(
    config: EngineConfig, model: LoadedModel, loading: Loading, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """Returns the model with its weights in the number format from the settings: calibrated, or rounded while they are read.

    Args:
        loading: reports the progress of a calibration.
        tokenizer: the model's tokenizer, if already open.
    """
    if config.quant == NO_QUANT:
        return model
    from cloister.launch.calibrating import calibrate_on_load, choose_method

    form = number_format(config.quant)
    if choose_method(config.quant_method, model, form) == "rtn":
        return replace(model, weights=quantize_on_read(model.spec, model.weights, form))
    cache, most_bytes = weights_cache(config), cache_bytes(config)
    return calibrate_on_load(model, form, tokenizer, cache, most_bytes, loading)
