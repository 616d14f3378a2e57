"""Cryptography and isolation of the private cloud, without sockets.

`sealing`, `tokens`, `transparency`, `attestation`, `receipts`, `shape` of answers, `hardening` of processes, `residue` in
memory. This file imports nothing, because `hardening` must run before any library is loaded.
"""
