"""Engines on other machines: a front's transport to them over TLS, and the process that runs one there."""
