"""Ledgers as tests read them."""

from __future__ import annotations

from pathlib import Path

from vfl_flower.records.ledger import opened


def numbers_in(path: Path, name: str) -> dict[int, int]:
    """Return the counts of a name by key, or the numbers of a table."""
    with opened(path) as ledger:
        question = "SELECT key, value FROM entries WHERE name = ?"
        counts = dict(ledger._connection.execute(question, (name,)))
        if not any(isinstance(count, bytes) for count in counts.values()):
            return counts
        keys, numbers = ledger._table(name)
    return dict(zip(keys.tolist(), numbers.tolist(), strict=True))
