"""Receipts: what a node signs about one answer for whoever asked, and how it is checked later. Pure: no I/O, no clock.

`claims` is what is signed, `transcript` the digests that both sides take of an exchange, `wish` how a client asks for a
receipt, and `receipt` the file that it keeps.
"""
