"""The people that a party's explanations are about, and the secret of their permutations.

The label holder chooses the rows. The difference of two embeddings of a row shows the difference of
two people's values. If few rows are explained, or one row with many permutations, these differences
add up to the column. So on a real node (`claimed`):

- An explanation has at least 200 rows, or ``min-rows``, and one permutation of each feature.
- Permutations and the order of features follow from a lasting secret and from the set of people. A
  repeated explanation of the same people, of any model, permutes as the first one did.
- A person who was explained in one set of people is in no other set for 30 days.

A ledger beside the states has the secret and the set of each person.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.store import home
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.ids import People, people_of_rows
from vfl_flower.records.ledger import Value, content_in_file, opened_by_party, today
from vfl_flower.tasks.inference.party.model import LoadedModel
from vfl_flower.transport.node import refused

LEAST, DAYS = 200, 30
"""Least rows of an explanation, and the days for which a person is in one set of people."""
_SETS = "set"  # name in the ledger: person -> number of the set, and the day in the last 16 bits


def people_of(model: LoadedModel, places: NDArray[np.int32]) -> People:
    """Return a number for the person of each row, [n], the same in all runs."""
    if model.source:
        return model.source.people(model.in_source[places])
    return people_of_rows(model.party.config.data.dataset, model.block.test_rows[places])


@contextmanager
def claimed(context: Context, people: People, repeats: int) -> Iterator[bytes]:
    """Yield the secret of these people's set, and then put the people into the set.

    If the block fails, the people are in no set. Another explanation waits meanwhile.
    """
    least = max(LEAST, Rules.of(context.node_config).min_rows)
    if len(people) < least:
        raise refused(
            context, f"to explain {len(people)} rows, which would show columns: {least} are needed"
        )
    if repeats > 1:
        raise refused(
            context,
            f"to permute a feature {repeats} times, which would show the column: set repeats = 1",
        )
    path = home("", context) / f"party-{context.node_config.get('partition-id')}.explained"
    sentence = "cannot count the people that it explains: its own log says why."
    with opened_by_party(path, sentence, _earlier) as ledger:
        digest = hashlib.blake2b(np.sort(people).tobytes(), key=ledger.secret, digest_size=32)
        number, sets = int.from_bytes(digest.digest()[:5]), ledger.numbers(_SETS, people)
        if ((sets >> 16 != number) & (today() - (sets & 0xFFFF) < DAYS)).any():
            raise refused(
                context,
                f"to explain people of an explanation of the last {DAYS} days beside other "
                "people: differences would show columns. Explain the same rows, or wait",
            )
        yield digest.digest()
        ledger.put(_SETS, people, number << 16 | today())


def _earlier(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the files of an earlier version: the sets of people, and the secret."""
    yield from content_in_file(_SETS)(path)
    yield from content_in_file("secret")(path.with_suffix(".explain-secret"))
