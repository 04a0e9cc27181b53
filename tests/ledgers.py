"""Ledgers as tests read them."""

from pathlib import Path

from vfl_flower.records.ledger import opened


def numbers_in(path: Path, name: str) -> dict[int, int]:
    """Return the counts of a name by key, or the numbers of a table."""
    with opened(path) as ledger:
        entries = {key: value for (which, key), value in ledger._entries.items() if which == name}
        if not isinstance(entries.get(0), bytes):
            return {key: int(value) for key, value in sorted(entries.items())}
        keys, numbers = ledger.table(name)
    return dict(zip(keys.tolist(), numbers.tolist(), strict=True))
