"""Rate-limit headers: what remains of an API key's limits."""

from __future__ import annotations

import math
import time

from cloister.server.calls import HttpCall


def limit_headers(call: HttpCall) -> list[tuple[bytes, bytes]]:
    """Returns the headers that say what is left of a key's limits, named and written as OpenAI does."""
    if call.account is None:
        return []
    headers = []
    for left in call.account.allowances(time.monotonic(), time.time()):
        values = {"limit": str(left.limit), "remaining": str(left.remaining), "reset": format_duration(left.reset_s)}
        headers += [(f"x-ratelimit-{what}-{left.kind}".encode(), value.encode()) for what, value in values.items()]
    return headers


def format_duration(duration_s: float) -> str:
    """Returns a time as OpenAI's headers have it, such as `6m0s`, `1s` or `120ms`."""
    if duration_s < 1:
        return f"{math.ceil(max(0.0, duration_s) * 1000)}ms"
    minutes, seconds = divmod(math.ceil(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (seconds, "s"))
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return "".join(f"{count}{unit}" for count, unit in parts[first:])
