"""How many new ids each caller of a service has asked about today.

The parties count each id that they are asked about, for ever (`alignment.asked_ids`). So a service
asks them about at most ``new-ids-per-day`` ids of each caller that are in no file of the label
holder. An id counts for each caller that asks about it, and once a day. So nobody learns from the
count what other callers ask about.
"""

import time
from collections.abc import Set
from pathlib import Path

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.records.ledger import opened, today
from vfl_flower.tasks.inference.serving.requests import UnavailableError

_DAY = "day"  # name in the ledger: the last day


class NewIds:
    """Counts new ids by caller and day of UTC, in a file. After a restart, ids count again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked: dict[str, set[int | str | bytes]] = {}  # by caller, since the service began
        self._day = 0
        try:
            if path.exists():
                with opened(path) as ledger:
                    self._day = ledger.count(_DAY)
        except VflError:
            raise ConfigError(
                f"{path} cannot be read, which counts the new ids of callers. Delete it."
            ) from None

    def count(self, caller: str, ids: Set[int | str | bytes], most: int) -> None:
        """Count new ids before parties are asked about them, or raise `UnavailableError`."""
        if today() > self._day:  # a clock that is set back must not start a new day
            self._day, self._asked = today(), {}
        new = ids - self._asked.get(caller, set())
        if not new:
            return
        with opened(self._path) as ledger:
            left = most - ledger.count(f"of {caller}", self._day)
            if len(new) > left:
                raise UnavailableError(
                    f"The request has {len(new)} ids that the alignment does not have, and this "
                    f"caller may ask about {max(0, left)} more today. Ask again tomorrow (UTC), or "
                    f"ask the label holder to raise new-ids-per-day = {most}.",
                    *("new-ids", 429, max(1, (self._day + 1) * 86400 - int(time.time()))),
                )
            ledger.add(f"of {caller}", len(new), self._day)
            ledger.write(_DAY, self._day)
        self._asked.setdefault(caller, set()).update(new)
