"""Attack drift in the privacy audit: learn columns of a party from its reports of drift.

A label holder chooses the rows of a prediction, and learns how many columns of the party drift
moderately and largely. It builds groups near a threshold, and adds one person to each of them. The
two counts then depend on that person's values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vfl_attacks.clients import Ids, Rows
from vfl_attacks.features import explained
from vfl_attacks.labels import Finding
from vfl_flower.data.bins import Bins
from vfl_flower.data.drift import HIDING, LARGE, LEAST, MODERATE, Drift, drift_of

_TARGETS = 200  # rows to attack
_REPORTS = 30  # on each row, such as one a day
_TRIES = 300  # groups to look among

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]


def drift_counts(
    block: Rows, embeddings: Rows, shown: int, generator: np.random.Generator
) -> list[Finding]:
    """Return how well 30 reports on each row reveal the columns of a party.

    The first attacker gets exact counts, as in a simulation. The second one gets the
    reports of a real node, which hides its indices and takes 30 days for 30 reports on a row.

    Parameters
    ----------
    block, embeddings : the party's columns [N, F], and its embeddings [N, E], which help to choose
        groups.
    shown : rows whose columns the attacker knows, at most a tenth of all.
    """
    from sklearn.linear_model import RidgeCV

    few = max(2, min(shown, len(block) // 10))
    ends = few, few + min(_TARGETS, len(block) // 4)
    known, targets, pool = np.split(generator.permutation(len(block)), ends)
    if len(pool) < 2 * LEAST:
        return []
    asked, findings = np.concatenate([known, targets]), []
    for whose, spread in (("exact", 0.0), ("of a real node", HIDING)):
        heard = reports(block, embeddings, pool, asked, spread, generator)
        success = 0.0
        if heard.shape[1]:
            decoder = RidgeCV(np.logspace(0, 5, 11)).fit(heard[:few], block[known])
            found, mean = decoder.predict(heard[few:]), block[known].mean(0)
            success = explained(block[targets], found, mean)
        attacker = f"label holder: {heard.shape[1] // 2} reports a row, features of {few} rows"
        name = f"drift of chosen groups, {whose}"
        findings.append(Finding(name, attacker, "R2", success, 0.0, len(targets)))
    return findings


def reports(
    block: Rows,
    embeddings: Rows,
    pool: Ids,
    asked: Ids,
    spread: float,
    generator: np.random.Generator,
) -> Numbers:
    """Return the party's reports on groups with one asked row each, [asked, 2 x reports].

    A group has `LEAST` rows. The attacker chooses some of them by a direction of the embeddings. It
    keeps groups whose reports are not all equal.

    Parameters
    ----------
    spread : spread of the factor that hides an index, as `data.drift.HIDING`.
    """
    bins = [Bins.learn(column) for column in block.T]
    binned = np.stack([each.of(column) for each, column in zip(bins, block.T, strict=True)], 1)
    width, every = max(each.count for each in bins), np.arange(len(bins))
    then = _counts(binned, width)
    found: list[Numbers] = []
    for _ in range(_TRIES):
        by = np.argsort(embeddings[pool] @ generator.standard_normal(embeddings.shape[1]))
        first = int(generator.uniform(0.05, 1) * (LEAST - 1))
        rest = generator.choice(by[first:], LEAST - 1 - first, replace=False)
        group = _counts(binned[pool[np.concatenate([by[:first], rest])]], width)
        columns = zip(then, group, strict=True)
        drifts = np.array([_of_column(*column, len(bins)) for column in columns])
        raw, value, chance = drifts[every, binned[asked]].transpose(2, 0, 1)  # each [asked, F]
        factor = np.exp(generator.uniform(-spread, spread, raw.shape))
        drifting, large = raw * factor > chance, value * factor > LARGE
        moderate = ~large & (value * factor > MODERATE)
        said = np.stack([(drifting & each).sum(1) for each in (moderate, large)], axis=1)
        if (np.ptp(said, axis=0) > 0).any():
            found.append(said.astype(np.float64))
        if len(found) == _REPORTS:
            break
    return np.concatenate(found, axis=1) if found else np.zeros((len(asked), 0))


def _counts(binned: Counts, width: int) -> Counts:
    """Return counts by column and bin, [F, width]."""
    return np.stack([np.bincount(column, minlength=width) for column in binned.T])


def _of_column(then: Counts, group: Counts, looks: int) -> list[Drift]:
    """Return the drift of a column for each bin that one more row may be in, [width]."""
    return [drift_of(then, group + each, looks) for each in np.eye(len(group), dtype=np.int64)]
