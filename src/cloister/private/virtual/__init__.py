"""Sealed units of several machines in virtual time, with faults: the code that runs in production, on a network that is simulated."""
