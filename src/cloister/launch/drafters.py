"""Builds the drafters of one engine, and the controller that decides how much they draft."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cloister.backends.base import Backend, Capability, KVLayout, MemoryNeed, Program, SamplingMetadata, Weights
from cloister.backends.draft_heads import DraftHeads
from cloister.backends.factories import FOREIGN_FAMILY
from cloister.backends.lookup_tables import copy_tables
from cloister.backends.spec import DecoderSpec
from cloister.launch.backend import QUANT_VERSION, number_format
from cloister.launch.backend_choice import NO_QUANT
from cloister.models import LoadedModel, load, locate
from cloister.quant import quantize_on_read
from cloister.scheduler.speculation import AdaptiveSpeculation, DrafterLimits, FixedSpeculation, Speculation, SpeculationConfig
from cloister.scheduler.speculation.adaptive import MAX_ROWS
from cloister.types.config import AUTO_DRAFTER, DRAFTER_FILES, EngineConfig
from cloister.types.errors import CloisterError, ConfigError, EngineError
from cloister.types.processes import overwrites

if TYPE_CHECKING:
    from cloister.executor.drafters import Drafter, DrafterContext
    from cloister.executor.drafters.base import HeadRunner
    from cloister.executor.state import SequenceState

_logger = logging.getLogger(__name__)

HEADS: Final = "medusa"
SMALL: Final = "draft_model"
FREE: Final = "ngram"
LOOKED_UP: Final = "rest"
OWN_LAYER: Final = "mtp"


class SmallModel:
    """A loaded draft model (protocol `executor.drafters.base.DraftModel`)."""

    def __init__(
        self, model: LoadedModel, backend: Backend, block_size: int, max_batched_tokens: int, *, copies_tables: bool
    ) -> None:
        if any(layer.state is not None for layer in model.spec.layers):
            raise ConfigError(
                f"a model of the family {model.spec.family!r} cannot draft, because its recurrent state cannot be rolled "
                "back; name a model that has attention layers only",
                param="draft_model",
            )
        self.vocab_size = model.spec.vocab_size
        self.max_positions = model.spec.max_positions
        self._model = model
        self._backend = backend
        self._need = backend.need(model.spec, model.weights, block_size=block_size, max_batched_tokens=max_batched_tokens)
        if copies_tables:
            weights, self._need = copy_tables(model.weights, self._need)
            self._model = replace(model, weights=weights)
        self._block_size = block_size
        self.weights_bytes = self._need.weights_bytes + self._need.activations_bytes

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of its KV; blocks are of the engine's size."""
        return self._need.unpacked_block_bytes * block_size // self._block_size

    def build(self, kv: KVLayout) -> Program:
        """Builds its program in addition to the model's; programs of one back end take turns."""
        return self._backend.build(self._model.spec, self._model.weights, kv, identity=self._model.info.fingerprint)


class MtpLayer:
    """A loaded multi-token prediction layer (protocol `executor.drafters.base.DraftModel`).

    Args:
        program: returns the program of the model, once it is built.
        num_tokens: the most tokens of one step.
        identity: identifies exactly these weights (`Backend.build`).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        backend: Backend,
        program: Callable[[], Program | None],
        *,
        block_size: int,
        num_tokens: int,
        identity: str | None = None,
    ) -> None:
        self.vocab_size, self.max_positions = spec.vocab_size, spec.max_positions
        self._spec, self._weights, self._backend, self._program, self._identity = spec, weights, backend, program, identity
        self._need = backend.need(spec, weights, block_size=block_size, max_batched_tokens=num_tokens)
        self._block_size = block_size
        states_bytes = 4 * 3 * num_tokens * spec.hidden_size  # hidden states: the model's output, kept, and concatenated
        self.weights_bytes = self._need.weights_bytes + self._need.activations_bytes + states_bytes

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of its KV; blocks are of the engine's size."""
        return self._need.unpacked_block_bytes * block_size // self._block_size

    def build(self, kv: KVLayout) -> Program:
        """Builds its program beside the model's, which lends its embedding and head."""
        return self._backend.build(self._spec, self._weights, kv, identity=self._identity, beside=self._program())


def _open_mtp(config: EngineConfig, model: LoadedModel, backend: Backend, lent: _Lent, max_batched_tokens: int) -> MtpLayer:
    if model.mtp is None:
        raise ConfigError(
            "the drafter mtp needs safetensors files of a family that Cloister computes itself; choose another drafter",
            param="speculate",
        )
    spec, weights = model.mtp.open()
    return MtpLayer(
        spec,
        weights if config.quant == NO_QUANT else quantize_on_read(spec, weights, number_format(config.quant)),
        backend,
        lambda: lent.program,
        block_size=config.block_size,
        # those of the model's step, and for each sequence the positions that this layer has not read yet
        num_tokens=max_batched_tokens + config.max_num_seqs * (config.block_size + 1),
        identity=f"{model.info.fingerprint} {config.quant} {QUANT_VERSION} mtp",
    )


class _Lent:
    """What drafters use of the engine. Drafters get it before the engine is complete."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.metadata_of: Callable[[list[SequenceState], list[int]], SamplingMetadata] | None = None

    def head_runner(self, heads: DraftHeads) -> HeadRunner:
        from cloister.executor.drafters.head_runner import make_head_runner

        if self.program is None or Capability.HEAD not in self.program.capabilities:
            raise EngineError("this back end lends no head to drafters")
        return make_head_runner(heads, self.program)

    def sampling_metadata(self, states: list[SequenceState], rows: list[int]) -> SamplingMetadata:
        if self.metadata_of is None:
            raise EngineError("the engine is not complete")
        return self.metadata_of(states, rows)


@dataclass(frozen=True)
class DraftersAtHand:
    """The drafters of an engine: created first, and allocated once the model is built.

    Attributes:
        drafters: by name.
        num_fixed: fixed number of drafts a step from the settings; None adapts it.
        shares_rates: whether acceptance of one request's drafts is the prior of others.
    """

    drafters: dict[str, Drafter]
    num_fixed: int | None
    shares_rates: bool
    is_auto: bool
    lent: _Lent

    @property
    def fixed_bytes(self) -> int:
        """Memory of all drafters outside of blocks, in bytes."""
        return sum(drafter.fixed_bytes for drafter in self.drafters.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The drafters in use: only the first one if the settings fix the number of drafts."""
        return tuple(self.drafters)[: None if self.num_fixed is None else 1]

    def add_blocks(self, need: MemoryNeed) -> MemoryNeed:
        """Returns the model's memory needs, including the KV of drafters for each of its blocks."""
        extra = sum(drafter.kv_block_bytes for drafter in self.drafters.values())
        return replace(need, kv_block_bytes=need.kv_block_bytes + extra)

    def num_rows(self, max_num_seqs: int, max_batched_tokens: int) -> int:
        """Returns the number of additional rows of vocabulary width that verification and drafts need."""
        num_drafts = self.num_drafts(max_num_seqs, max_batched_tokens)
        return num_drafts * (2 if any(self.drafters[name].has_probs for name in self.names) else 1)

    def num_drafts(self, max_num_seqs: int, max_batched_tokens: int) -> int:
        """Returns the most drafts of a step."""
        if not self.drafters:
            return 0
        most = max(MAX_ROWS, 2 * max_num_seqs) if self.num_fixed is None else self.num_fixed * max_num_seqs
        return min(most, max_batched_tokens)

    @property
    def most_drafts(self) -> int:
        """The most drafts of one sequence."""
        most = max((self.drafters[name].max_drafts for name in self.names), default=0)
        return most if self.num_fixed is None else min(most, self.num_fixed)

    def allocate(self, program: Program, kv: KVLayout) -> None:
        """Allocates each drafter, once the model is built.

        Raises:
            ConfigError: a chosen drafter is not supported by this program.
        """
        self.lent.program = program
        for name, drafter in list(self.drafters.items()):
            if _needs_of(drafter) & ~program.capabilities:
                if not self.is_auto:
                    raise ConfigError(
                        f"this back end has no hidden states for {name}; choose another drafter", param="speculate"
                    )
                del self.drafters[name]
            else:
                drafter.allocate(kv)

    def bind(self, sampling_metadata: Callable[[list[SequenceState], list[int]], SamplingMetadata]) -> None:
        """Connects the drafters with the function that returns how the engine samples the next tokens of its sequences."""
        self.lent.metadata_of = sampling_metadata

    def speculation(self) -> Speculation | None:
        """Returns the controller of drafts; None without drafters."""
        limits = {
            name: DrafterLimits(drafter.max_drafts, drafter.shape, watches=drafter.wants_hidden or drafter.num_top > 0)
            for name, drafter in self.drafters.items()
        }
        if not limits:
            return None
        if self.num_fixed is None:
            return AdaptiveSpeculation(SpeculationConfig(shares_rates=self.shares_rates), limits)
        (name,) = self.names
        return FixedSpeculation(name, self.num_fixed, limits[name])


def _needs_of(drafter: Drafter) -> Capability:
    """Returns the capabilities of the model's program that a drafter needs."""
    needs = Capability.HEAD if drafter.wants_hidden else Capability(0)
    return needs | (Capability.EVERY_HIDDEN if drafter.wants_every_hidden else Capability(0))


def open_drafters(
    config: EngineConfig, model: LoadedModel, backend: Backend, *, max_model_len: int, max_batched_tokens: int
) -> DraftersAtHand:
    """Creates the drafters from the settings; none if there are none.

    Raises:
        CloisterError: a chosen drafter cannot be created; the message says what to do.
    """
    lent = _Lent()
    is_auto = config.speculate == AUTO_DRAFTER
    found: dict[str, Drafter] = {}
    if config.speculates:
        from cloister.executor.drafters import DRAFTERS

        context = _make_context(config, model, backend, lent, max_model_len, max_batched_tokens)
        for name in config.drafter_names:
            found[name] = DRAFTERS.get(name)(_with_files(context, config, name))
        if is_auto:
            found = _find_all(context, config, model)
        found = _without_positions(found, model, is_auto) if _has_states_alone(model) else found
    return DraftersAtHand(found, config.draft_tokens, config.profile == "open", is_auto, lent)


def _has_states_alone(model: LoadedModel) -> bool:
    layers = model.spec.layers
    return bool(layers) and all(layer.attention is None for layer in layers)


def _without_positions(found: dict[str, Drafter], model: LoadedModel, is_auto: bool) -> dict[str, Drafter]:
    """Returns the drafters that keep no KV under the model's block numbers: a model without attention has no such blocks.

    Raises:
        ConfigError: the settings name a drafter that does.
    """
    from cloister.executor.drafters.draft_model import PagedDrafter

    keeping = [name for name, drafter in found.items() if isinstance(drafter, PagedDrafter)]
    if keeping and not is_auto:
        raise ConfigError(
            f"{keeping[0]} keeps KV beside that of the model, and one of the family {model.spec.family!r} has none; choose "
            "ngram or another drafter without a model of its own",
            param="speculate",
        )
    return {name: drafter for name, drafter in found.items() if name not in keeping}


def _find_all(context: DrafterContext, config: EngineConfig, model: LoadedModel) -> dict[str, Drafter]:
    """Returns the candidates of `auto`: drafters made for the model, and those that need no files."""
    from cloister.executor.drafters import DRAFTERS

    found: dict[str, Drafter] = {}

    def find(name: str) -> bool:
        """Creates a drafter if its files exist; those named in settings must exist."""
        try:
            found[name] = DRAFTERS.get(name)(_with_files(context, config, name))
        except CloisterError as error:
            if name in DRAFTER_FILES and getattr(config, DRAFTER_FILES[name]) is not None:
                raise
            if name == OWN_LAYER or (model.path / "drafters" / name).exists():
                _logger.warning("auto does without %s: %s", name, error.message)
        return name in found

    if model.mtp is not None and model.mtp.tensors:
        find(OWN_LAYER)
    is_foreign = model.spec.family == FOREIGN_FAMILY
    has_heads = not is_foreign and config.draft_model is None and find(HEADS)
    # Heads predict answers like those they were trained on, a small model also running text: where there is one, it is worth
    # its KV.
    if not is_foreign and (not has_heads or (model.path / "drafters" / SMALL).is_dir()):
        find(SMALL)
    has_own = (model.path / "drafters" / LOOKED_UP).is_dir() and _allows_datastores(config)
    if config.datastore is not None or has_own:
        find(LOOKED_UP)
    found[FREE] = DRAFTERS.get(FREE)(context)
    return found


def _with_files(context: DrafterContext, config: EngineConfig, name: str) -> DrafterContext:
    return replace(context, files=getattr(config, DRAFTER_FILES[name])) if name in DRAFTER_FILES else context


def _make_context(
    config: EngineConfig, model: LoadedModel, backend: Backend, lent: _Lent, max_model_len: int, max_batched_tokens: int
) -> DrafterContext:
    from cloister.executor.drafters import DrafterContext

    def open_model(name: str) -> SmallModel:
        model = load(locate(name), None, None, None)
        return SmallModel(model, backend, config.block_size, max_batched_tokens, copies_tables=overwrites(config.profile))

    return DrafterContext(
        model_path=model.path,
        vocab_size=model.spec.vocab_size,
        hidden_size=model.spec.hidden_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        eos_token_ids=model.info.eos_token_ids,
        files=None,
        open_model=open_model,
        head_runner=lent.head_runner,
        sampling_metadata=lent.sampling_metadata,
        open_mtp=lambda: _open_mtp(config, model, backend, lent, max_batched_tokens),
        fingerprint=model.info.fingerprint,
    )


def _allows_datastores(config: EngineConfig) -> bool:
    from cloister.policy import Policy  # late import: an engine needs nothing else of it

    return Policy(str(config.profile)).allows("datastore")
