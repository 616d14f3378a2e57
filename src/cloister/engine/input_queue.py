"""Messages of the front that the engine has not read yet."""

from __future__ import annotations

import threading

from cloister.types.events import FrontMessage


class InputQueue:
    """A queue from any thread to the engine's thread, which reads all of it between two steps."""

    def __init__(self) -> None:
        self._messages: list[FrontMessage] = []
        self._is_woken = False
        self._arrived = threading.Condition()

    def put(self, message: FrontMessage) -> None:
        """Adds a message and wakes the engine."""
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def wake(self) -> None:
        """Wakes the engine without a message, when something that it waits for is done."""
        with self._arrived:
            self._is_woken = True
            self._arrived.notify()

    def take(self) -> list[FrontMessage]:
        """Removes and returns all messages, oldest first."""
        with self._arrived:
            messages, self._messages = self._messages, []
            self._is_woken = False
        return messages

    def wait(self, timeout_s: float) -> None:
        """Waits until a message arrives, the engine is woken, or `timeout_s` has passed."""
        with self._arrived:
            if not (self._messages or self._is_woken):
                self._arrived.wait(timeout_s)
