"""Residue: marked prompts, and a search for them in a node's memory and files from outside."""
