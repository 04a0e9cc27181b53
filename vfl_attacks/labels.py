"""Attack labels in the privacy audit: infer the class of a row from its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vfl_attacks.clients import Ids, Rows, Wiretap, summed
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig

_DRAWS = 10  # of labelled rows that an attacker knows; success is the mean over draws


@dataclass(frozen=True)
class Finding:
    """A row of the table: how often an attacker is right, and how often guessing is.

    ``measure``: "accuracy", the share of rows whose class is right. Guessing names the most
    frequent class. With two classes it is "AUC". For features it is "R2", the explained share of
    variance. ``rows`` is the number of rows measured, over all trials.
    """

    attack: str
    attacker: str
    measure: str
    success: float
    guessing: float
    rows: int


# --- attacks: they return scores [R, C] of the classes, and the highest wins ----------------------


def direct(gradients: Rows) -> Rows:
    """Infer labels from the signs of output gradients [R, C] (Fu et al., 2022).

    d loss / d y_c is p_c, less one if c is the label. So only the label's component is negative.
    """
    return np.hstack([gradients, -gradients]) if gradients.shape[1] == 1 else -gradients


def by_norm(gradients: Rows, known: Ids, labels: Ids) -> Rows:
    """Infer labels from the log norms of gradient rows [R, E] (Li et al., 2022).

    A row gets the class whose known rows have the nearest mean.
    """
    logs = np.log(np.linalg.norm(gradients, axis=1) + 1e-30)
    means = _class_means(logs[known, None], labels)[:, 0]
    return -np.square(logs[:, None] - means)


def by_direction(gradients: Rows, known: Ids, labels: Ids) -> Rows:
    """Infer labels from the directions of gradient rows [R, E] (Li et al., 2022).

    A row gets the class whose known rows' mean direction has the largest cosine with it.
    """
    directions = _unit(gradients)
    return directions @ _unit(_class_means(directions[known], labels)).T


def complete(embeddings: Rows, known: Ids, labels: Ids) -> Rows:
    """Complete the model (Fu et al., 2022): fit a head to known embeddings [R, E]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaled = StandardScaler().fit_transform(embeddings)
    return LogisticRegression(max_iter=500).fit(scaled[known], labels).predict_log_proba(scaled)


def _class_means(rows: Rows, labels: Ids) -> Rows:
    return np.stack([rows[labels == each].mean(0) for each in range(labels.max() + 1)])


def _unit(rows: Rows) -> Rows:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)


# --- success --------------------------------------------------------------------------------------


def with_known_rows(
    config: RunConfig,
    labels: Ids,
    known: int,
    taps: Sequence[Wiretap],
    own: Wiretap,
    untrained: Wiretap,
) -> list[Finding]:
    """Run the attacks that know a few labelled rows of each class, over several draws."""
    tap, everywhere = taps[0], np.all([each.uploaded for each in taps], axis=0)
    of_messages = tap.gradients, tap.answered
    attacks = [
        ("gradient norms", "eavesdropper: messages of party 0", by_norm, *of_messages),
        ("gradient directions", "eavesdropper: messages of party 0", by_direction, *of_messages),
        ("model completion", "party 0: its embeddings", complete, own.embeddings, own.uploaded),
    ]
    rows_of = untrained.embeddings, untrained.uploaded
    whose = "party 0, untrained: its embeddings"
    attacks.append(("model completion, control", whose, complete, *rows_of))
    if tap.is_masked:
        for name, whose, rows in (
            ("one party", "party 0", tap.embeddings),
            ("sum", "all parties", summed(taps)),
        ):
            said = f"model completion, {name}", f"label holder: uploads of {whose}"
            attacks.append((*said, complete, rows, everywhere))
    findings = []
    for name, attacker, attack, rows, reached in attacks:
        rows, truth = rows[reached], labels[reached]
        of_class = [np.flatnonzero(truth == each) for each in range(labels.max() + 1)]
        if min(map(len, of_class)) <= known:
            raise ConfigError(
                f"Mini-batches had at most {known} rows of some class, so that none remain to "
                "attack: give the run more epochs, or lower --known."
            )
        generator = np.random.default_rng([config.training.seed, 5])
        draws = []
        for _ in range(_DRAWS):
            ids = np.concatenate([generator.choice(each, known, False) for each in of_class])
            scores = attack(rows, ids, truth[ids])
            draws.append((np.delete(scores, ids, 0), np.delete(truth, ids)))
        findings.append(finding(name, f"{attacker}, {known} labels a class", draws))
    return findings


def finding(attack: str, attacker: str, trials: Sequence[tuple[Rows, Ids]]) -> Finding:
    """Return how often the true class scores highest, over all trials; of two classes, the AUC."""
    from sklearn.metrics import roc_auc_score

    rows = sum(len(truth) for _, truth in trials)
    if trials[0][0].shape[1] == 2:
        areas = [roc_auc_score(truth, scores[:, 1] - scores[:, 0]) for scores, truth in trials]
        return Finding(attack, attacker, "AUC", float(np.mean(areas)), 0.5, rows)
    success = np.mean([(scores.argmax(1) == truth).mean() for scores, truth in trials])
    guessing = np.mean([np.bincount(truth).max() / len(truth) for _, truth in trials])
    return Finding(attack, attacker, "accuracy", float(success), float(guessing), rows)
