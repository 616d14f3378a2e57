"""A program that reads one prompt and keeps it where it should not: `python leaky.py LEAK`.

The prompt comes on stdin: text, token ids and a directory. It says "kept" when it is done, and waits to be killed. "nothing"
leaves it to a child that ends.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
import threading
import time
from array import array

KEPT: list[object] = []
LOCAL = threading.local()


def read() -> tuple[str, list[int], str]:
    """Reads text, token ids and a directory, in calls that leave nothing in buffers of the interpreter."""
    data = b""
    while not data.endswith(b"\n"):
        data += os.read(0, 65536)
    text, ids, directory = data.decode().rstrip("\n").split("\t")
    return text, [int(token_id) for token_id in ids.split(",")], directory


def floats(ids: list[int]) -> array[float]:
    """What a model might compute from a prompt."""
    return array("f", [token_id * 1.618 for token_id in ids])


def chunk(size: int, text: str) -> None:
    """Writes a text into a chunk of malloc's and frees it as it is."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    before = libc.malloc(size)
    place = libc.malloc(size)
    after = libc.malloc(size)  # or the chunk would become one with what is free behind it
    KEPT.append((before, after))
    data = text.encode()
    ctypes.memmove(place + 16, data, len(data))
    libc.free(place)


@functools.lru_cache(maxsize=8)
def cached(text: str) -> int:
    return len(text)


def in_thread(text: str) -> None:
    def keep() -> None:
        LOCAL.text = "in a thread: " + text
        done.set()
        time.sleep(600)

    done = threading.Event()
    threading.Thread(target=keep, daemon=True).start()
    done.wait()


def in_child(text: str) -> None:
    reading, writing = os.pipe()
    if os.fork() == 0:
        KEPT.append("for the child: " + text)
        os.write(writing, b".")
        time.sleep(600)
    os.read(reading, 1)


def leak(what: str, text: str, ids: list[int], directory: str) -> None:
    match what:
        case "list of prompts":
            KEPT.append(text)
        case "lru_cache":
            cached(text)
        case "log file":
            with open(os.path.join(directory, "node.log"), "a") as file:
                file.write(f"prompt: {text}\n")
        case "deleted file":
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                file.write(text.encode())
                KEPT.append(os.dup(file.fileno()))
        case "shared memory file":
            with open(f"/dev/shm/cloister-leak-{os.getpid()}", "wb", buffering=0) as file:
                file.write(text.encode("utf-16-le"))
        case "freed chunk":
            chunk(4096, text)
        case "chunk in tcache":
            chunk(256, text)
        case "token ids as int64":
            import numpy as np

            KEPT.append(np.array(ids, np.int64))
        case "token ids as integers":
            KEPT.append(ids)
        case "thread-local":
            in_thread(text)
        case "K/V rows":
            KEPT.append(memoryview(floats(ids)).cast("B")[2:].tobytes())
        case "logits":
            KEPT.append(floats(ids[::-1]))
        case "child process":
            in_child(text)
        case _:
            raise SystemExit(f"there is no leak {what!r}")


def forget() -> None:
    """Reads the prompt in a child that ends: buffers on the stack are nothing that an allocator overwrites."""
    if os.fork() == 0:
        read()
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    if sys.argv[1] == "nothing":
        forget()
    else:
        leak(sys.argv[1], *read())
    os.write(1, b"kept\n")
    time.sleep(600)
