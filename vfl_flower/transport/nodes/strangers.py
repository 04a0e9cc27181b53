"""One line for many refused calls: strangers cannot fill a log."""

import time
from threading import Lock

from vfl_flower.config.logs import log

_EVERY = 60.0  # seconds between two lines


class Strangers:
    """Counts refused calls. Logs the first at once, then at most one line a minute."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence
        self._lock = Lock()
        self._number = 0  # since the last line
        self._told = -_EVERY  # when that line was written

    def refused(self) -> None:
        """Count one refused call."""
        with self._lock:
            self._number += 1
        if time.monotonic() >= self._told + _EVERY:
            self.tell()

    def tell(self) -> None:
        """Log how many calls were refused since the last line."""
        with self._lock:
            number, self._number, self._told = self._number, 0, time.monotonic()
        if number:
            log.warning("%s: %d.", self._sentence, number)
