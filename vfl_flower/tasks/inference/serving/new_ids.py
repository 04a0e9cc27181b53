"""How many new ids each caller of a service has asked about today.

The parties count each id that they are asked about, for ever (`alignment.asked_ids`). So a service
asks them about at most ``new-ids-per-day`` ids of each caller that are in no file of the label
holder. An id counts for each caller that asks about it, and once a day. So nobody learns from the
count what other callers ask about.
"""

from __future__ import annotations

import json
import time
from collections.abc import Set
from pathlib import Path

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import told, unsealed, write_sealed
from vfl_flower.tasks.inference.serving.requests import UnavailableError

_DAY = 86400


class NewIds:
    """Counts new ids by caller, for a day of UTC. The counts outlive the service.

    Parameters
    ----------
    path : the file of the counts. After a restart, ids of the same day count again.

    Raises
    ------
    ConfigError
        If the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked: dict[str, set[int | str]] = {}  # by caller, since the service began
        self._day, self._counts = 0, dict[str, int]()
        try:
            if path.exists():
                said = json.loads(unsealed(path))
                self._day, self._counts = said["day"], said["counts"]
        except (OSError, ValueError, KeyError, TypeError, VflError):
            raise ConfigError(
                f"{path} cannot be read, which counts the new ids of callers. Delete it."
            ) from None

    def count(self, caller: str, ids: Set[int | str], most: int) -> None:
        """Count new ids before parties are asked about them.

        Raises
        ------
        UnavailableError
            If the caller has fewer ids left today. Then none is counted.
        VflError
            If the file cannot be written.
        """
        now = int(time.time())
        if now // _DAY > self._day:  # a clock that is set back must not start a new day
            self._day, self._counts, self._asked = now // _DAY, {}, {}
        new = ids - self._asked.get(caller, set())
        if not new:
            return
        counts = self._counts | {caller: self._counts.get(caller, 0) + len(new)}
        if counts[caller] > most:
            left = max(0, most - self._counts.get(caller, 0))
            raise UnavailableError(
                f"The request has {len(new)} ids that the alignment does not have, and this "
                f"caller may ask about {left} more today. Ask again tomorrow (UTC), or ask the "
                f"label holder to raise new-ids-per-day = {most}.",
                *("new-ids", 429, max(1, (self._day + 1) * _DAY - now)),
            )
        with told(self._path):
            write_sealed(self._path, json.dumps({"day": self._day, "counts": counts}).encode())
        self._counts = counts
        self._asked.setdefault(caller, set()).update(new)
