"""Back ends: each builds a program from a decoder spec and its weights."""
