"""Is routing honest? What clients drew and what nodes opened, tested against the capacities.

`records` is what was seen, `tails` and `power` are arithmetic, `hypotheses` the tests, `verdict` their joint judgement;
`trial` sends the requests, through the programs themselves.
"""
