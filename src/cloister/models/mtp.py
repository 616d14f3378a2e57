"""Layers behind the last that predict further tokens (multi-token prediction; DeepSeek-V3, arXiv:2412.19437, section 2.2).

A checkpoint may have them and a server may do without, so they are taken out of a checkpoint when it is opened, and read only
when a drafter asks for them (`executor.drafters.mtp`). Embedding and head are those of the model; what a checkpoint keeps of
them a second time is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from cloister.backends.base import Weights
from cloister.backends.spec import DecoderSpec, LayerSpec
from cloister.models.checkpoint import take_tensors
from cloister.models.family import Family
from cloister.models.quantized import Scheme
from cloister.models.safetensors import TensorEntry
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_LAYER: Final = "model.layers.{}"
_REMEDY: Final = "download the checkpoint again, or choose another drafter than mtp"


@dataclass(frozen=True, slots=True)
class MtpLayers:
    """Such layers in a checkpoint, before their weights are read.

    Attributes:
        tensors: by their stored names; empty where the checkpoint has none.
        config: of the model.
    """

    family: Family
    spec: DecoderSpec
    config: Mapping[str, Any]
    scheme: Scheme | None = None
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)

    def open(self) -> tuple[DecoderSpec, Weights]:
        """Returns the first of these layers as a decoder of one layer (`DecoderSpec.merges_hidden`), and its weights, mapped.

        Raises:
            ModelError: there is none, or it is not what config.json says; the message says what to do.
        """
        self._check()
        spec, tensors = self._describe(), dict(self.tensors)
        family = replace(self.family, tensors=self._sources())
        try:
            weights = take_tensors(family, spec, tensors, self.scheme)
        except ModelError as error:
            raise ModelError(f"the layer that predicts further tokens cannot be read: {error.message}; {_REMEDY}") from None
        return spec, weights

    def _check(self) -> None:
        form = self.family.mtp
        if not self.tensors:
            raise ModelError(
                "this checkpoint has no layer that predicts further tokens; download one that has it (quantised copies often "
                "leave it out), or choose another drafter than mtp",
                param="speculate",
            )
        num_found = next(
            number for number in count() if not any(_of_layer(self._prefix(number), name) for name in self.tensors)
        )
        num_named = self.config.get(form.num_layers)
        if num_named is not None and num_named != num_found:
            raise ModelError(
                f"config.json names {num_named!r} layers that predict further tokens, and the checkpoint has {num_found}; "
                f"{_REMEDY}",
                param=form.num_layers,
            )
        for name in form.refused:
            if self.config.get(name):
                raise ModelError(
                    f"{name} is set, and a layer that predicts further tokens is computed with the model's own embedding only; "
                    "choose another drafter than mtp",
                    param=name,
                )

    def _describe(self) -> DecoderSpec:
        return replace(
            self.spec, layers=(_model_layer(self.spec),), head_bias=False, vision=None, streams=None, merges_hidden=True
        )

    def _prefix(self, number: int) -> str:
        """Returns what begins the names of one of the layers, of which 0 is the first."""
        form = self.family.mtp
        return form.layer.format(number + (len(self.spec.layers) if form.is_behind else 0))

    def _sources(self) -> dict[str, Source]:
        """Returns where each module of the first layer lies; what is left to fill in is the number of an expert."""
        form, prefix = self.family.mtp, self._prefix(0)

        def move(source: Source) -> Source:
            instead = None if source.instead is None else move(source.instead)
            return replace(source, name=source.name.replace(_LAYER, prefix, 1).replace("{}", "{1}"), instead=instead)

        layer = {module: move(source) for module, source in self.family.tensors.items() if _LAYER in source.name}
        return layer | {module: replace(source, name=source.name.format(prefix)) for module, source in form.tensors.items()}


def split_off(found: dict[str, TensorEntry], layers: MtpLayers) -> MtpLayers:
    """Takes the layers out of what the files of a checkpoint hold; returns them. They begin with a projection."""
    form = layers.family.mtp
    if form.is_behind:
        first = len(layers.spec.layers)
        end = next(n for n in count(first) if f"{form.layer.format(n)}.{form.projection}.weight" not in found)
        prefixes = tuple(f"{form.layer.format(number)}." for number in range(first, end))
    else:
        prefixes = ("mtp.",)
    names = [name for name in found if name.startswith(prefixes)]
    return replace(layers, tensors={name: found.pop(name) for name in names})


def _of_layer(prefix: str, name: str) -> bool:
    return name.startswith(f"{prefix}.")


def _model_layer(spec: DecoderSpec) -> LayerSpec:
    """Returns the layer of the model that such a layer is like: the last with attention and without a state."""
    found = [layer for layer in spec.layers if layer.attention is not None and layer.state is None]
    if not found:
        raise ModelError("the model has no layer of attention, which one that predicts further tokens would be like")
    return found[-1]
