"""The default model: the catalogue's, pulled if the profile allows it, else the embedded one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from cloister.launch.settings import Settings
from cloister.models import locate
from cloister.models.pulling import CATALOGUE, DEFAULT_MODEL, CatalogueModel, Store
from cloister.types.errors import ModelError

_FEATURE = "default-model-download"


def choose_default_model(
    settings: Settings,
    announce: Callable[[str], None],
    *,
    may_pull: bool = True,
    store: Store | None = None,
    default: CatalogueModel = CATALOGUE[DEFAULT_MODEL],
) -> Settings:
    """Returns the settings with the default model if none is set; a sealed node uses the one in the package.

    Args:
        announce: called with a line of explanation if the embedded model is used instead of the default.
        may_pull: False downloads nothing and only states what would be done.
        store: store of pulled models; None for this user's.

    Raises:
        ModelError: the downloaded default model is not the published one, or the disk has no room for it.
    """
    is_named = next(reason.why for reason in settings.engine.reasons if reason.name == "model") != "default"
    if is_named or settings.models or settings.server.config.sealed:
        return settings
    store = store or Store()
    if store.find(default.name) is not None:
        return _with_model(settings, default.name, "the default; it was pulled before")
    embedded = settings.engine.config.model
    if not settings.policy.is_default(_FEATURE):
        why = f"the profile {settings.policy.profile.value} downloads nothing at start; `cloister pull {default.name}` does"
    elif not may_pull:
        return _with_model(
            settings, default.name, f"the default; it is downloaded at start ({default.download_bytes / 1e6:.0f} MB)"
        )
    else:
        from cloister.models.pulling.downloads import DigestMismatchError
        from cloister.models.pulling.pull import pull_catalogue_model
        from cloister.models.pulling.store import StoreFullError

        try:
            pull_catalogue_model(default, store, progress=True)
        except DigestMismatchError as error:  # an attack or a broken mirror: too serious for a log line
            raise ModelError(f"{error.message}. `cloister serve {embedded}` serves the model in the package") from None
        except StoreFullError as error:  # otherwise the operator would notice only by poor answers
            raise ModelError(f"{error.message}. `cloister serve {embedded}` serves the model in the package, a toy") from None
        except ModelError as error:
            why = error.message
        else:
            return _with_model(settings, default.name, "the default; it was downloaded at this start")
    announce(f"warning: {embedded} is served, a toy model in the package, instead of {default.name}: {why}")
    return _with_model(settings, embedded, why)


def fetch_model(settings: Settings, *, may_pull: bool = True) -> Settings:
    """Returns the settings of a verb with a local model: the chosen one, or the default.

    Downloads a model of the catalogue now, before anything else writes to the terminal.

    Args:
        may_pull: False downloads nothing.

    Raises:
        ModelError: the chosen model cannot be fetched.
    """
    settings = choose_default_model(settings, _tell, may_pull=may_pull)
    if may_pull and settings.engine.config.model in CATALOGUE and not settings.models:
        locate(settings.engine.config.model, progress=True)
    return settings


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _with_model(settings: Settings, model: str, why: str) -> Settings:
    return replace(settings, engine=settings.engine.explain(model=(model, why)))
