"""Verifiable transparency: nodes run published code, and all clients see the same log.

An append-only Merkle log as plain files, witnesses that cosign its checkpoints, releases and epochs as its entries, and the
checks of a client before it sends anything.
"""
