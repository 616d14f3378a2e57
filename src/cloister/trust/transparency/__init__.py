"""Verifiable transparency: what runs is what was published, and every client sees the same.

An append-only Merkle log as plain files, witnesses that cosign its checkpoints, releases and epochs as its entries, and the
checks that a client makes before it sends anything.
"""
