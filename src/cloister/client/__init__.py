"""The sealed client: draws a node, checks its evidence, seals to it, and sends through the relay."""
