"""Runs plans: batch state, inputs of a forward pass, penalties, filters, noise, sampling and log-probabilities. numpy only."""

from cloister.executor.grammar import Grammars
from cloister.executor.model_runner import ModelRunner

__all__ = ["Grammars", "ModelRunner"]
