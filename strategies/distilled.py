"""Distil a run's model into one of the label holder's own columns, which predicts without parties.

Parties embed the people once, as for a prediction, and the run's model scores them. A student
learns these scores (Hinton et al., 2015) and the labels, in a mix that validation rows choose.
People without labels teach by their scores alone, as in VFed-SSD (Li et al., 2022).

Where noise hides labels, scores replace every protected label. So the student is post-processing
of the run's model, and its epsilon is the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from strategies.baselines.frozen import Frozen
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import KEYS, RunConfig
from vfl_flower.data.at_label_holder import load_own_labels, own_table
from vfl_flower.data.labels import Labels, class_weights
from vfl_flower.data.split import Alignment
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.assessment.intervals import figure, generator
from vfl_flower.label_holder.calibration import probabilities
from vfl_flower.label_holder.checkpoint import Checkpoint, Keeper
from vfl_flower.label_holder.held_out import outputs_of
from vfl_flower.label_holder.metrics import metrics
from vfl_flower.models.losses import Loss, with_soft_targets
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.model import TrainedModel
from vfl_flower.tasks.inference.releases import UploadCount
from vfl_flower.transport.base import Transport
from vfl_flower.transport.messages import Predicted, PredictOrder

MIXES = (0.0, 0.5, 0.75, 1.0)
"""Shares of the scores in the student's loss. The rest is of the labels."""
_BY_SCORES = {"batch-size": 256, "server-lr": 0.002, "optimizer": "adam", "epochs": 15}
"""Training of a student with many rows: scores have little noise, and few labels are overfitted."""
_MANY = 5000  # rows
_DRAWS = 200  # of a bootstrap
_OF_ROWS = ("align", "min-parties", "presence")  # options that say which rows parties lack


class Student(Frozen):
    """Trains the label holder's model without any party.

    ``targets`` come from `mixed`; None for the labels.
    """

    more: Mapping[str, Any] = {}

    def learn(self, transport: Transport, targets: Tensor | None) -> Student:
        """Train on the targets, and restore the best model."""
        holder = self.prepare(transport, {}).holder
        if targets is not None:
            holder.labels = targets.to(holder.device)
            holder.loss = Loss(own=with_soft_targets(holder.loss))
        self.train()
        self.run.tell("trained")
        return self

    def test_outputs(self) -> Tensor:
        """Return the outputs of the test rows."""
        top, rows = self.run.holder.top.eval(), self.run.holder.held_out.table.rows
        with torch.no_grad():
            return outputs_of(top, rows[self.labels.validation :]).cpu()

    def figures(self) -> dict[str, Any]:
        """Return the student's part of ``summary.json``."""
        return {**super().figures(), **self.more}


def distil(
    transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str, keeper: Keeper
) -> Student:
    """Return a student of the model of ``config.model``, after ``keeper`` has saved it.

    Options of models and training in ``given`` are the student's. Raise `ConfigError` if the run,
    its file or a party does not fit.
    """
    found = checkpoint.load(config.model)
    labels, hides = _labels(found, config.model), mechanism_of(found.config).hides_labels
    model = TrainedModel(transport, config, given, run, found)
    at, extra, others = _places(model, labels)
    many = len(labels.train) + int(extra.sum()) >= _MANY
    many = many and not {*_BY_SCORES, "warm-up"} & given.keys()
    own = _config(found, given)
    by_scores = _config(found, {**_BY_SCORES, **given}) if many else own
    epsilon = UploadCount(config, found).add()
    outputs = model.embed(PredictOrder, Predicted)[0].outputs
    scores = outputs[:, 0]
    if labels.classes:
        scores = torch.from_numpy(probabilities(outputs, None)).float()
    of_train, of_held = at[: len(labels.train)], at[len(labels.train) :]
    if hides:
        labels = _without_labels(labels, scores[of_train], scores[of_held])
    columns = model.rows.own[extra]
    students: dict[float, Student] = {}
    for mix in (1.0,) if hides else MIXES if labels.validation else (0.0, 1.0):
        learned = labels
        targets: Tensor | None = None
        if mix:  # else it is the local-only model
            targets = mixed(mix, torch.cat([scores[of_train], scores[extra]]), _given(own, labels))
            learned = _with_people(labels, scores[extra], columns, others)
        students[mix] = Student(by_scores if mix else own, learned).learn(transport, targets)
    losses = {mix: each.history.chosen["validation_loss"] for mix, each in students.items()}
    mix = min(losses, key=lambda each: losses[each]) if labels.validation else 1.0
    student, local = students[mix], students.get(0.0)
    tested = {
        "federation": outputs[of_held[labels.validation :]],
        "distilled": student.test_outputs(),
    }
    tested |= {"local_only": local.test_outputs()} if local else {}
    about = compared(tested, torch.from_numpy(labels.tested.test))
    about |= {"run": Path(config.model).expanduser().absolute().name, "mix": mix}
    about |= {"validation_losses": losses, "people_without_label": int(extra.sum())}
    of_run = found.strategy["figures"].items()
    privacy = {name: each for name, each in of_run if name.startswith(("epsilon", "delta"))}
    privacy |= {} if epsilon is None else {"epsilon": epsilon}
    _save(student, found, keeper, {**privacy, "distilled": about})
    return student


def _save(student: Student, found: Checkpoint, keeper: Keeper, more: Mapping[str, Any]) -> None:
    """Save a student's model under the privacy of the run that it learned from."""
    privacy = {n: v for n, v in found.config.values().items() if KEYS[n].section == "privacy"}
    student.given, student.config = (
        each.with_values(privacy) for each in (student.given, student.config)
    )
    student.more, student.keeper = more, keeper
    keeper.rows, keeper.used = found.rows, found.used
    student.run.transcript.whole = False  # a rerun would have to ask the parties
    student.checkpoints = student.keep_in(keeper)
    keeper.earlier = found  # its people are the student's, by their scores
    student.assess()
    student.finish()


def _labels(found: Checkpoint, folder: str) -> Labels:
    """Return the labels of a run, with the label holder's columns, or refuse the run."""
    data, about = found.config.data, found.about_labels
    if not found.finished or not found.parties:
        raise ConfigError(
            f"The run in {folder} has not finished, or has no parties. Name a finished run with "
            "parties."
        )
    if not about["preparation"]:
        raise ConfigError(
            f"The label holder of the run in {folder} has no columns to score people by. Train on "
            "files, with columns in the label holder's file."
        )
    own = own_table(data)
    if len(own.ids) <= found.rows.max() or own.digest(found.rows) != about["ids"]:
        raise ConfigError(
            f"{own.path} has changed since the model was trained. Restore it. If people have "
            "withdrawn, train anew."
        )
    labels = load_own_labels(data, own, Alignment(about["alignment"], found.rows), about)
    if labels.repeats:
        raise ConfigError(
            f"The run in {folder} has no test rows to compare by. Train with a test-fraction."
        )
    return labels


def _places(
    model: TrainedModel, labels: Labels
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[Any]]:
    """Return places of training and held-out rows among the scored rows.

    Return also a mask of all others, and their numbers, as in `Labels.people`.
    """
    rows, then = model.rows, model.found.config.data.dataset
    assert rows.table is not None and rows.places is not None  # the run is on files
    known: NDArray[Any] = rows.places
    if parts := labels.people:
        known = rows.table.people(known)
    elif model.config.data.own_data and model.config.data.dataset != then:
        raise ConfigError(f"{rows.table.path} needs ids to find the people of {then}. Add them.")
    assert labels.places is not None and labels.test_places is not None
    wanted = np.concatenate(parts or (labels.places, labels.test_places))
    order = np.argsort(known)
    at = order[np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)]
    if gone := int((known[at] != wanted).sum()):
        raise ConfigError(
            f"{gone} people of the run are not in {rows.table.path}, or a party lacks them now. "
            "Name a file with all of them, and restore the parties' files."
        )
    extra = ~np.isin(known, wanted)
    return at, extra, known[extra]


def _without_labels(labels: Labels, train: Tensor, held_out: Tensor) -> Labels:
    """Return labels with scores in place of protected ones. Test rows keep their labels.

    Classes of validation rows are drawn from their probabilities. So their loss is on average the
    loss of the scores.
    """
    first = labels.validation
    chosen = train.numpy(), held_out[:first].numpy()
    if labels.classes:
        drawn = generator().random((first, 1)) > chosen[1].cumsum(1)[:, :-1]
        chosen = chosen[0].argmax(1), drawn.sum(1)
    return replace(labels, train=chosen[0], test=np.concatenate([chosen[1], labels.test[first:]]))


def _config(found: Checkpoint, given: Mapping[str, Any]) -> RunConfig:
    """Return the student's configuration: the run's data, and the defaults of a table's model."""
    then, alike = found.config.values(), ("seed", "loss", "metrics", "threshold", "calibrate")
    kept = {n: v for n, v in then.items() if n in alike or KEYS[n].section == "data"}
    kept = {n: v for n, v in kept.items() if v is not None and n not in _OF_ROWS}
    own = {n: v for n, v in given.items() if KEYS[n].section in ("models", "training")}
    return resolve({**kept, **own, "strategy": "local-only"})


def _given(config: RunConfig, labels: Labels) -> Tensor:
    """Return the labels as targets, with class weights."""
    numbers = torch.from_numpy(labels.train)
    if not labels.classes:
        return numbers
    targets = functional.one_hot(numbers, len(labels.classes)).float()
    weights = class_weights(config.data, labels.train, len(labels.classes))
    return targets if weights is None else targets * torch.from_numpy(weights)


def mixed(mix: float, scores: Tensor, labels: Tensor) -> Tensor:
    """Return targets and weights [N, K + 1] of rows with scores [N, K], the first with labels.

    The loss is the scores' mean loss times ``mix``, plus the labels' mean loss times 1 - ``mix``.
    So few labels count as much as many scores. If numbers have another loss than the squared one,
    their targets are mixed instead.
    """
    known, weights = len(labels), torch.full((len(scores), 1), mix)
    weights[:known] += (1 - mix) * len(scores) / known
    targets, given = (each.reshape(len(each), -1) for each in (scores, labels))
    both = given.lerp(targets[:known], mix / weights[:known])
    return torch.cat([torch.cat([both, targets[known:]]), weights], 1)


def _with_people(
    labels: Labels, scores: Tensor, columns: NDArray[np.float32], numbers: NDArray[Any]
) -> Labels:
    """Add people outside the run to the training rows, with their most probable class."""
    if not len(scores):
        return labels
    assert labels.features is not None
    guessed = scores.argmax(1) if labels.classes else scores
    features = np.concatenate([np.asarray(labels.features[0][:]), columns]), labels.features[1]
    train, people = np.concatenate([labels.train, guessed.numpy()]), labels.people
    people = people and (np.concatenate([people[0], numbers]), people[1])  # `vfl forget` finds them
    return replace(labels, train=train, features=features, people=people)


def compared(outputs: Mapping[str, Tensor], labels: Tensor) -> dict[str, Any]:
    """Return each model's AUC, accuracy or R2, and ``kept``, the share of the gain.

    ``kept`` is (distilled - local_only) / (federation - local_only), with a bootstrap's interval.
    It is None without a local-only model, or if the gain is not clear of chance.
    """

    def figures(at: Any) -> dict[str, dict[str, Any]]:
        found = {name: metrics(each[at], labels[at], 1.0) for name, each in outputs.items()}
        return {name: each.figures() for name, each in found.items()}

    found = figures(slice(None))
    key = next(key for key in ("auc", "r2", "accuracy") if found["federation"][key] is not None)
    about: dict[str, Any] = {"metric": key, "local_only": None, "kept": None}
    about |= {name: each[key] for name, each in found.items()}
    if about["local_only"] is None:
        return about
    random, names = generator(), ("distilled", "federation", "local_only")
    drawn: list[list[Any]] = []
    for _ in range(_DRAWS):
        each = figures(random.integers(0, len(labels), len(labels)))
        drawn.append([each[name][key] for name in names])
    drawn = [each for each in drawn if None not in each]  # a draw may lack a class
    now, run, local = np.array([[about[name] for name in names], *drawn]).T
    if np.quantile((run - local)[1:], 0.025) > 0:
        kept = (now - local) / (run - local)
        about["kept"] = figure(kept[0], *np.quantile(kept[1:], (0.025, 0.975)))
    return about
