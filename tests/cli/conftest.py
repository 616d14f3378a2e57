"""A store of one's own, and a package index on loopback."""

from __future__ import annotations

from tests.package_index import index, store

__all__ = ["index", "store"]
