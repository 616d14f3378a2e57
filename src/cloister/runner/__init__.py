"""Runs plans: batch state, inputs of a forward, penalties, filters, noise, samples and log-probabilities. numpy only."""

from cloister.runner.grammar import Grammars
from cloister.runner.model_runner import ModelRunner

__all__ = ["Grammars", "ModelRunner"]
