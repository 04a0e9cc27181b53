"""A budget: what rules allow in total and on one day, counted in a ledger.

A service spends little at a time, so a budget counts some ahead on the disk. It gives the rest back
to the day on which it counted it. After a crash, a count is too high by at most `AHEAD`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from vfl_flower.records.ledger import Ledger, today

AHEAD = 1000


class Limit(NamedTuple):
    """The most that a rule allows, in total or on one day."""

    name: str  # of the count in the ledger, whose entry 0 is the total, and others are days
    most: int | None  # None if there is no such rule
    rule: str  # for the end of a sentence
    daily: bool = False


def limits_of(name: str, rule: str, total: int | None, per_day: int | None) -> list[Limit]:
    """Return the limits of a rule, and of the rule of the same name ``-per-day``."""
    rates = (rule, total, False), (f"{rule}-per-day", per_day, True)
    return [Limit(name, most, f"{which} = {most}", daily) for which, most, daily in rates]


def last_day(ledger: Ledger, limits: Sequence[Limit]) -> int:
    """Return this day, or the last one that was counted: a clock may be set back."""
    names = {limit.name for limit in limits}
    return max(today(), *(ledger.last(name) for name in names))


def left(ledger: Ledger, limits: Sequence[Limit], day: int) -> tuple[int, str]:
    """Return how many the limits leave, at least one limit, and the rule that leaves the fewest."""
    return min(
        (limit.most - ledger.count(limit.name, day * limit.daily), limit.rule)
        for limit in limits
        if limit.most is not None
    )


def count(ledger: Ledger, limits: Sequence[Limit], more: int, day: int) -> None:
    """Add to all counts that have limits."""
    for name, key in sorted({(limit.name, day * limit.daily) for limit in limits}):
        ledger.add(name, more, key)


class Budget:
    """Counts what a service spends, before it spends it. `close` gives back what is left."""

    def __init__(
        self, opened: Callable[[], AbstractContextManager[Ledger]], limits: Sequence[Limit]
    ) -> None:
        self._opened, self._limits = opened, limits
        self._rules = [limit.most for limit in limits if limit.most is not None]
        self._left, self._day, self._rule = 0, 0, ""  # counted ahead on that day, and not spent
        self.ledger = b""  # secret of the ledger with the last count

    def take_some(self, wanted: int) -> tuple[int, str]:
        """Count as many as the limits allow; return how many, and the rule that refuses others."""
        if not self._rules:
            return wanted, ""
        if wanted and (wanted > self._left or today() > self._day):
            with self._opened() as ledger:
                self._settle(ledger)
                day = last_day(ledger, self._limits)
                most, self._rule = left(ledger, self._limits, day)
                few = min(AHEAD, max(self._rules) // 100)  # to count ahead, if they are left
                more = few if wanted <= few <= most else max(0, min(wanted, most))
                count(ledger, self._limits, more, day)
                self._day, self.ledger = day, ledger.secret
            self._left = more  # it is on the disk now
        allowed = min(wanted, self._left)
        self._left -= allowed
        return allowed, "" if allowed == wanted else self._rule

    def give_back(self, number: int) -> None:
        """Take back what was just counted, since it is not spent."""
        if self._rules:
            self._left += number

    def close(self) -> None:
        """Give back what is left."""
        if self._left:
            with self._opened() as ledger:
                self._settle(ledger)

    def _settle(self, ledger: Ledger) -> None:
        """Give back what is left to its day, unless the owner has deleted that ledger."""
        if self._left and ledger.secret == self.ledger:
            count(ledger, self._limits, -self._left, self._day)
        self._left = 0
