"""`cloister verify traces`: starts a node, sends marked requests through the whole path, and searches for residue."""
