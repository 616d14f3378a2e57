"""Models as data: Hugging Face directories, opened without torch."""

from cloister.models.loading import LoadedModel, load
from cloister.models.location import embedded_names, locate
from cloister.models.pooling import read_pooling

__all__ = ["LoadedModel", "embedded_names", "load", "locate", "read_pooling"]
