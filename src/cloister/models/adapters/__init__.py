"""Low-rank adapters on disk: PEFT's directories, opened without torch."""

from cloister.models.adapters.peft import Adapter, read_adapter, read_rank

__all__ = ["Adapter", "read_adapter", "read_rank"]
