"""Imports the modules of an engine with the native back end. A template does so while the settings are still being read
(`engine.spawning`)."""

from __future__ import annotations

import cloister.backends.native.backend
import cloister.engine.memory_scrubber
import cloister.engine.step_ahead
import cloister.executor.layerwise
import cloister.launch.engine
import cloister.text.grammar  # noqa: F401
from cloister.engine import EngineCore, OutputProcessor
from cloister.executor import Grammars, ModelRunner
from cloister.executor.adapters import plan_room
from cloister.text import Tokenizer

__all__ = ["EngineCore", "Grammars", "ModelRunner", "OutputProcessor", "Tokenizer", "plan_room"]
