"""Cloister: a language-model server that people with secrets can trust."""

__version__ = "0.1.0"
