"""`python -m cloister.cli` is `cloister`."""

from cloister.cli import main

main()
