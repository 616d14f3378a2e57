"""Tests whether routing is honest: compares the nodes that clients drew and that opened requests with the capacities.

`records` holds observations, `tails` the probabilities, `hypotheses` the tests and their verdict; `trial` sends the requests
through the real programs.
"""
