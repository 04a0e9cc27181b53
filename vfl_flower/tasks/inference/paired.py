"""Paired tests of a finished run against other models, on the same held-out people.

Two models of the same people err on the same people. So their difference is surer than their
intervals show. DeLong et al. (1988) test a difference of AUCs: its variance follows from each row's
`placements`, sorted as in Sun and Xu (2014). McNemar (1947) tests decisions: among people about
whom one model alone is right, each is right half of the time if they are equally good.

The checkpoint has what the top model reads, so nobody asks the parties.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_json
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.assessment import threshold
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.of_model import scored_by
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference.contribution import outputs_of
from vfl_flower.tasks.inference.importance import SURE, Fall, Score
from vfl_flower.tasks.inference.rows import labels_of

FILE = "paired.json"
_LEAST = 1e-99  # p-value: none is 0
_ROWS = 320  # with more, the bound on a p-value is below `_LEAST`


def paired(folders: Sequence[Path]) -> None:
    """Test the first run against others, and models of own columns; write `FILE` in its folder."""
    (found, labels, people, first), tests = _tested(folders[0]), []
    for folder in folders[1:]:
        _, labels_there, people_there, second = _tested(folder)
        _, *at = np.intersect1d(people, people_there, return_indices=True)
        one, other = first[at[0]], second[at[1]]
        alike = len(one) and labels.whole == labels_there.whole and one.classes == other.classes
        if not (alike and np.allclose(one.labels, other.labels, rtol=1e-5)):
            raise ConfigError(
                f"{folders[0]} and {folder} have no test rows in common, or other labels. Compare "
                "runs on the same people."
            )
        tests.append({"other": folder.name, **difference(one, other)})
    for name, scored in _own_models(found, labels, first):
        tests.append({"other": f"{name} alone", **difference(first, scored)})
    write_json(folders[0] / FILE, {"tests": tests})


def _tested(folder: Path) -> tuple[Checkpoint, Labels, NDArray[Any], Scored]:
    """Return a finished run, its labels, and its test rows: who is in them, and their scores."""
    found = checkpoint.load(folder)
    labels = labels_of(found)
    if labels.repeats or not found.finished:
        raise ConfigError(f"The run in {folder} has no test rows, or has not finished.")
    rows, every = labels.tested, (True,) * len(found.strategy["holder"]["sizes"])
    people = rows.people[1] if rows.people else np.asarray(rows.test_places)
    return found, labels, people, scored_by(found, outputs_of(found, rows)(every), rows.test)


def difference(one: Scored, other: Scored) -> dict[str, Any]:
    """Return the difference of two models on the same rows, its 95 % interval and its p-value.

    The figure is AUC for two classes, accuracy for more, and R2 for numbers. ``only_one`` counts
    the rows about which the first model alone is right. The test of these counts is exact.
    """
    score, rows = Score(np.asarray(one.labels), len(one.classes)), len(one)
    mine, theirs = (score.shares(each.said.reshape(rows, -1)) for each in (one, other))
    value, margin = score.fall(mine - theirs)
    # A test that exchanges the two models' scores of some rows has no p-value below 2^(1 - rows).
    surest = -NormalDist().inv_cdf(2.0 ** -min(rows, _ROWS))
    margin = max(margin, SURE * abs(value) / surest)
    p = math.erfc(SURE * abs(value) / margin / math.sqrt(2)) if margin else 1.0
    ends = Fall(value, margin).ends()
    found = {"metric": score.metric, "pairs": rows, **ends, "p": max(p, _LEAST)}
    if one.classes:
        from scipy.stats import binomtest  # lazy: it is slow to import

        right, right_there = (
            (each.said[:, 1] > each.threshold if len(one.classes) == 2 else each.said.argmax(1))
            == each.labels
            for each in (one, other)
        )
        alone = int((right & ~right_there).sum()), int((right_there & ~right).sum())
        found |= dict(zip(("only_one", "only_other"), alone, strict=True))
        found["p_of_decisions"] = max(float(binomtest(alone[0], sum(alone) or 1).pvalue), _LEAST)
    return found


def _own_models(found: Checkpoint, labels: Labels, run: Scored) -> Iterator[tuple[str, Scored]]:
    """Yield names of models of own columns, and test rows by them; none if noise hides labels."""
    if labels.features is None or mechanism_of(found.config).hides_labels:
        return
    from sklearn import ensemble, linear_model  # lazy: they are slow to import

    models: dict[str, Any] = {
        "logistic regression": linear_model.LogisticRegression(max_iter=1000),
        "gradient boosting": ensemble.HistGradientBoostingClassifier(random_state=0),
    }
    if not labels.classes:
        models = {"linear regression": linear_model.LinearRegression()}
        models["gradient boosting"] = ensemble.HistGradientBoostingRegressor(random_state=0)
    (x, held_out), first, flags = labels.features, labels.validation, 0.5
    for name, model in models.items():
        model.fit(x[:], labels.train)
        if not labels.classes:
            said = labels.mean + labels.deviation * model.predict(held_out)
        else:
            said = np.zeros((len(held_out), len(labels.classes)))
            said[:, model.classes_] = model.predict_proba(held_out)
        if len(labels.classes) == 2:
            given = said[:first, 1], labels.test[:first] == 1
            flags = threshold.chosen(found.config.assessment.rule, *given)
        yield name, Scored(said[first:], run.labels, run.classes, flags)
