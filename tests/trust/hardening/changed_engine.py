"""Has a starter make processes of one role, and says what each of them loaded; a line on standard input asks for the next one.

Argument: the directory of the modules `role`, `before` and perhaps `late`.
"""

import socket
import sys

from cloister.trust.hardening.measure import Needs
from cloister.trust.hardening.starter import Role, fork_starter


def main(directory: str) -> None:
    sys.path.insert(0, directory)
    starter = fork_starter("open", Needs("starter", fork=True), {"engine": Role("role", Needs("engine"))})
    for _ in sys.stdin:
        near, far = socket.socketpair()
        with near:
            with far:
                starter.start("engine", [], far.fileno())
            print(near.recv(100).decode() or "it ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
