"""Validation measures the loss of training, and noisy labels are not read as if they were true."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import r2_score, roc_auc_score
from torch import Tensor

from strategies.baselines.centralised import Joined
from strategies.baselines.frozen import learn
from strategies.baselines.local_only import Alone
from tests.conftest import Start, nightly, trained
from tests.pairwise import cases
from tests.releases import learned_from
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.labels import LabelNoise, Labels
from vfl_flower.label_holder.held_out import HeldOut
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.label_holder.metrics import Metrics, corrected, metrics
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy.labels import Randomised, RandomisedLabels
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.results.figures import chosen_by

Array = NDArray[Any]
ROWS, PARTIES, SIZE = 60, 3, 4


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))


# --- the loss -----------------------------------------------------------------------------------


def own_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """A user's loss, for classes of one logit and for numbers."""
    return (outputs[:, 0] - labels).abs().pow(1.5)


PRIVACY: dict[str, dict[str, Any]] = {
    "none": {},
    "none, zeroth-order server": {"server-update": "zeroth-order", "server-lr": 0.001},
    "labels": {"privacy": "labels", "epsilon": 1.0, "noise-seed": 3},
    "scalar": {"strategy": "dpzv", "noise-multiplier": 1.0, "noise-seed": 3},
}
TARGETS: dict[str, dict[str, Any]] = {
    "2 classes": {},
    "3 classes": {},
    "regression": {"target": "regression", "label-range": "-3,3"},
    "2 classes, own loss": {"loss": f"{__file__}:own_loss"},
    "regression, own loss": {
        **{"target": "regression", "label-range": "-3,3", "loss": f"{__file__}:own_loss"}
    },
}
WEIGHTS = {"2 classes": "1,3", "2 classes, own loss": "1,3", "3 classes": "1,3,0.5"}
REFUSED = {("labels", "2 classes, own loss"), ("scalar", "laser")}


def holder_of(privacy: str, target: str, weighted: bool, subsets: str) -> LabelHolder:
    """A label holder whose validation rows are its training rows, with the same embeddings."""
    keys = {**PRIVACY[privacy], **TARGETS[target], "batch-size": ROWS, "subsets": subsets}
    if weighted:
        keys["class-weights"] = WEIGHTS[target]
    config = resolve({"top-hidden": 8, "embedding-size": SIZE, **keys})
    generator = np.random.default_rng(0)
    classes = int(target[0]) if "classes" in target else 0
    y: Array = generator.standard_normal(ROWS).astype(np.float32)
    if classes:
        y = generator.integers(0, classes, ROWS)
    labels = Labels(
        y,
        np.concatenate([y, y]),
        tuple(range(classes)),
        "",
        test_places=np.arange(2 * ROWS) % ROWS,
        validation=ROWS,
        whole="these",
        bounds=None if classes else (-3.0, 3.0),
    )
    labels, _ = learned_from(config, labels)
    assert np.array_equal(labels.train, labels.test[:ROWS])
    assert np.array_equal(labels.train, y) == (privacy != "labels")
    noise = ScalarNoise(config, 1.0) if privacy == "scalar" else None
    holder = LabelHolder(config, labels, dict.fromkeys(range(PARTIES), SIZE), noise)
    h = torch.from_numpy(generator.standard_normal((ROWS, PARTIES * SIZE)).astype(np.float32))
    holder.table.rows[:, : PARTIES * SIZE] = h
    holder.held_out.table.rows[:, : PARTIES * SIZE] = h.repeat(2, 1)
    return holder


KINDS = [(target, False) for target in TARGETS] + [(target, True) for target in WEIGHTS]
CASES = [
    (privacy, *kind, subsets)
    for privacy, kind, subsets in cases([*PRIVACY], KINDS, ["off", "sampled", "laser"])
]


@pytest.mark.one_by_day
@pytest.mark.parametrize(("privacy", "target", "weighted", "subsets"), CASES)
def test_validation_measures_the_loss_that_training_minimises(
    privacy: str, target: str, weighted: bool, subsets: str
) -> None:
    if {(privacy, target), (privacy, subsets)} & REFUSED:
        with pytest.raises(ConfigError):
            holder_of(privacy, target, weighted, subsets)
        return
    holder = holder_of(privacy, target, weighted, subsets)
    _, validation, _ = holder.evaluate()
    _, again, _ = holder.evaluate()
    assert validation is not None and again == validation  # the same subsets as before
    with torch.no_grad():
        outputs = holder.top(holder.held_out.table.rows[:ROWS])
    learn(holder, Window(np.arange(ROWS, dtype=np.int32), np.array([ROWS], np.int32)))
    told = holder.evaluate().train_loss
    assert told == (None if privacy == "scalar" else pytest.approx(validation.loss, rel=1e-5))
    # The control: as test rows are measured, without weights, subsets and correction, it differs.
    plain = metrics(outputs, holder.labels, 1.0, holder.loss.own).loss
    assert plain is not None and validation.loss is not None
    noisy_classes = privacy == "labels" and "classes" in target
    assert (abs(plain - validation.loss) > 1e-3) == (weighted or subsets != "off" or noisy_classes)


def test_a_baseline_that_learns_from_no_subsets_is_not_validated_on_them(run: Start) -> None:
    keys = {"dataset": "breast-cancer", "presence": 0.7, "epochs": 1, "strategy": "centralised"}
    strategy, _ = trained(3, keys)
    assert isinstance(strategy, Joined) and strategy.config.subsets == "laser"
    holder = strategy.run.holder
    first = holder.held_out.validation
    with torch.no_grad():
        outputs = holder.top(holder.held_out.table.rows[:first])
    loss = metrics(outputs, holder.held_out.labels[:first], 1.0).loss
    assert strategy.history.last["validation_loss"] == pytest.approx(loss, rel=1e-5)


# --- other figures ------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("kept", [0.6, 0.9])
def test_accuracy_and_auc_by_noisy_labels_tell_those_by_true_ones(
    classes: int, kept: float
) -> None:
    generator, rows = np.random.default_rng(0), 100_000
    true = generator.choice(classes, rows, p=[0.7, *[0.3 / (classes - 1)] * (classes - 1)])
    noisy = np.where(
        generator.random(rows) < kept, true, (true + generator.integers(1, classes, rows)) % classes
    )
    scores = generator.standard_normal((rows, classes)).astype(np.float32)
    scores[np.arange(rows), true] += 1.5
    outputs = scores[:, 1:] - scores[:, :1] if classes == 2 else scores
    z, noted = torch.from_numpy(outputs), torch.from_numpy(noisy)
    due, by_noisy = metrics(z, torch.from_numpy(true), 1.0), metrics(z, noted, 1.0)
    found = corrected(by_noisy, z, noted, LabelNoise(kept))
    assert due.accuracy is not None and by_noisy.accuracy is not None
    assert found.accuracy == pytest.approx(due.accuracy, abs=0.012)
    assert due.accuracy - by_noisy.accuracy > 0.04  # the control
    if classes == 2:
        assert by_noisy.auc is not None and due.auc == pytest.approx(
            roc_auc_score(true, outputs[:, 0])
        )
        assert found.auc == pytest.approx(due.auc, abs=0.012)
        assert due.auc is not None and due.auc - by_noisy.auc > 0.05


def test_r2_and_rmse_by_noisy_numbers_tell_those_by_true_ones() -> None:
    generator, rows, scale = np.random.default_rng(0), 200_000, 2.0
    true = generator.standard_normal(rows)
    noisy = true + generator.laplace(0, scale, rows)
    said = (true + 0.5 * generator.standard_normal(rows)).astype(np.float32)
    z, noted = torch.from_numpy(said)[:, None], torch.from_numpy(noisy.astype(np.float32))
    by_noisy = metrics(z, noted, 3.0)  # a unit of the labels is 3
    found = corrected(by_noisy, z, noted, LabelNoise(variance=2 * scale**2))
    assert found.r2 == pytest.approx(r2_score(true, said), abs=0.1)
    assert found.rmse == pytest.approx(3 * 0.5, abs=0.2)
    assert by_noisy.r2 is not None and by_noisy.r2 < 0.15  # the control
    assert corrected(by_noisy, z, noted, LabelNoise()) == by_noisy
    # Of few rows, whose own variance the noise hides, models still have their order.
    few = [
        corrected(metrics(each, noted[:20], 3.0), each, noted[:20], LabelNoise(variance=1e4))
        for each in (z[:20], z[:20] * 2)
    ]
    errors = [(each[:, 0] - noted[:20]).square().mean() for each in (z[:20], z[:20] * 2)]
    assert all(each.r2 is not None for each in few)
    assert (few[0].r2 > few[1].r2) == (errors[0] < errors[1]).item()  # type: ignore[operator]


def test_the_noise_on_numbers_has_the_variance_that_figures_are_corrected_by() -> None:
    keys = {"privacy": "labels", "target": "regression", "label-range": "-5,15", "noise-seed": 1}
    config = resolve({**keys, "epsilon": 2.0})
    deviation = 20 / np.sqrt(12)
    true = np.zeros(100_000, np.float32)
    labels = Labels(true, true[:2], (), "", 5.0, deviation, whole="numbers", bounds=(-5.0, 15.0))
    noisy = Randomised(config, labels, b"key").labels()
    assert (noisy.train - true).var() == pytest.approx(
        mechanism_of(config).label_noise(labels).variance, rel=0.05
    )


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_best_epoch_is_that_of_the_corrected_loss(
    run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"dataset": "digits", "privacy": "labels", "epsilon": 4.0, "noise-seed": 0}
    keys |= {"optimizer": "sgd", "epochs": 14, "strategy": "centralised"}
    summary = run(4, keys).summary
    assert summary["test_accuracy"] > 0.92
    # An estimate of what the true labels would say, not the accuracy by noisy ones.
    assert chosen_by(summary) == "validation_accuracy"
    assert summary["validation_accuracy"] == pytest.approx(summary["test_accuracy"], abs=0.07)

    def plain(self: HeldOut, top: Any, outputs: Tensor, *others: Any) -> Metrics:
        return metrics(outputs, self.labels[: self.validation], self.deviation)

    monkeypatch.setattr(HeldOut, "_validated", plain)
    control = run(4, keys).summary
    assert control["best_epoch"] < summary["best_epoch"]
    assert control["test_accuracy"] < summary["test_accuracy"] - 0.04


@pytest.mark.parametrize("fraction", [0.0, nightly(0.2)])
def test_the_party_that_alone_publishes_follows_from_noisy_labels(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    """Two data sets have the same noisy labels; the true ones follow party 0, or party 1."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((150, 2)).astype(np.float32)
    noisy = (x.sum(1) + generator.standard_normal(150) > 0).astype(int)

    def forced(self: Randomised) -> Labels:
        labels = self._labels
        return replace(labels, train=noisy[labels.places].astype(labels.train.dtype))

    monkeypatch.setattr(Randomised, "labels", forced)
    for column in (0, 1):
        np.savez(tmp_path / f"{column}.npz", X=x, y=(x[:, column] > 0).astype(int))

    def published() -> list[int]:
        keys = {
            "strategy": "local-only",
            "privacy": "labels",
            "epsilon": 1.0,
            "bottom-model": "linear",
        }
        keys |= {"test-fraction": fraction, "epochs": 6, "party-lr": 0.3, "server-lr": 0.3}
        of_both = [{**keys, "dataset": f"npz:{tmp_path}/{column}.npz"} for column in (0, 1)]
        return [run(2, each).summary["best_party"] for each in of_both]

    one, other = published()
    assert one == other

    def by_test(self: Alone) -> Any:
        return max(
            self._finished.items(), key=lambda each: each[1].run.history.chosen["test_accuracy"]
        )

    monkeypatch.setattr(RandomisedLabels, "hides_labels", False)  # the control: true test labels
    monkeypatch.setattr(Alone, "_best", by_test)
    assert published() == [0, 1]


# --- defaults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "ef-vfl", "centralised", "local-only"])
def test_steps_through_noise_on_labels_do_not_depend_on_the_size_of_gradients(
    strategy: str,
) -> None:
    keys = {"strategy": strategy, "privacy": "labels", "epsilon": 1.0}
    for rows, batch in ((100, 32), (5000, 64), (51_000, 512), (10**6, 512)):
        training = sized(resolve(keys), rows).training
        assert (training.optimizer, training.batch_size) == ("adam", batch)
        assert (training.party_lr, training.server_lr) == (0.0005, 0.0005)
    for own in ({"party-lr": 0.1}, {"server-lr": 0.1}, {"optimizer": "sgd"}):  # chosen by the user
        training = sized(resolve({**keys, **own}), 51_000).training
        assert (training.optimizer, training.batch_size) == ("sgd", 32)
    plain = sized(resolve({"strategy": strategy}), 51_000).training
    assert (plain.optimizer, plain.batch_size) == ("adam", 32)
    by_differences = sized(resolve({**keys, "strategy": "cascaded"}), 51_000).training
    assert by_differences.optimizer == "adam" and by_differences.batch_size == 512
    assert (by_differences.party_lr, by_differences.server_lr) == (0.001, 0.002)


# --- test rows that are training rows -----------------------------------------------------------


@pytest.mark.parametrize("target", ["classification", "regression"])
def test_figures_of_training_rows_come_from_noisy_labels_if_no_row_is_held_out(target: str) -> None:
    keys: dict[str, Any] = {
        **{"dataset": "breast-cancer", "epochs": 1, "test-fraction": 0.0, "noise-seed": 3},
        **{"privacy": "labels", "epsilon": 1.0},
    }
    if target == "regression":
        keys |= {"target": target, "label-range": "0,1"}
    strategy, _ = trained(2, keys)
    held_out, labels = strategy.run.holder.held_out, strategy.labels
    until = held_out.validation
    assert labels.repeats and labels.places is not None and labels.test_places is not None
    given = labels.test_places
    of_place = dict(zip(labels.places.tolist(), strategy.run.holder.labels.tolist(), strict=True))
    of_place |= dict(zip(given[:until].tolist(), held_out.labels[:until].tolist(), strict=True))
    expected = [of_place[place] for place in given[until:].tolist()]
    assert held_out.labels[until:].tolist() == expected
    assert (np.array(expected) != labels.test[until:]).mean() > 0.2  # the control: true labels
