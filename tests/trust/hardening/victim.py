"""A process that holds a secret in memory, in a descriptor and in nothing else; prints where, and waits."""

import ctypes
import json
import os
import secrets
import sys

SIZE = 64


def main() -> None:
    secret = ctypes.create_string_buffer(secrets.token_bytes(SIZE), SIZE)
    near, far = os.pipe()
    os.write(far, secret.raw)
    told = {"pid": os.getpid(), "address": ctypes.addressof(secret), "secret": secret.raw.hex(), "descriptor": near}
    print(json.dumps(told), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
