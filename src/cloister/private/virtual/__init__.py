"""Sealed units of several machines in virtual time, with faults: the code of production on a network that is simulated."""
