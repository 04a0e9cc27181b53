"""A privacy mechanism from outside the package: one file and an entry point."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vfl_flower
from tests.conftest import Start
from tests.strategy.test_checkpoint import interrupted, resumed
from tests.strategy.test_plugins import SMALL, install, write
from vfl_flower.config.errors import ConfigError
from vfl_flower.protocol.systems import resolve

MECHANISM = '''
"""laplace.py: Laplace noise on scalars, whose epsilons add up (Dwork et al., 2006)."""

import numpy as np

from vfl_flower.config.errors import ConfigError
from vfl_flower.protocol.privacy.accountant import EVERYONE, Accountant, Guarantee
from vfl_flower.protocol.privacy.journal import ANSWERED, Event
from vfl_flower.protocol.privacy.mechanism import Mechanism
from vfl_flower.protocol.privacy.noise import ScalarNoise

GUARANTEE = Guarantee("labels of the training rows", "one person's label is changed", EVERYONE)


class LaplaceScalars(Mechanism):
    hides_labels = True
    encodes_by_row = True

    def check(self, estimator):
        if not estimator.answers_by_scalars or self.config.models.top != "sum":
            raise ConfigError(
                "privacy = 'laplace' has noise on scalars alone. Set estimator = 'zeroth-order' "
                "and top-model = 'sum'."
            )
        if self.config.privacy.noise_multiplier is None:
            raise ConfigError("privacy = 'laplace' has no noise yet. Set noise-multiplier.")

    def scalar_noise(self, accountant):
        return Laplace(self.config, self.config.privacy.noise_multiplier)

    def accountant(self, rows, estimator):
        return LaplaceAccountant(self.config, rows, estimator)


class Laplace(ScalarNoise):
    def standard(self, generator, numbers):
        return generator.laplace(size=numbers)


class LaplaceAccountant(Accountant):
    counts = (ANSWERED,)

    def __init__(self, config, rows, estimator):
        super().__init__(config, rows, estimator)
        self.taken = np.zeros(rows, np.int64)

    def count(self, event):
        self.released += event.first
        np.add.at(self.taken, event.rows, 1)

    def so_far(self):
        yield Event(ANSWERED, 0, self.released)
        for times in range(self.taken.max(initial=0)):
            rows = np.flatnonzero(self.taken > times).astype(np.int32)
            yield Event(ANSWERED, 0, rows=rows)

    def figures(self):
        # A label changes a mean of U differences by 2 C / U; the noise has scale s C / U.
        spent = 2 * int(self.taken.max()) / self.config.privacy.noise_multiplier
        return {**super().figures(), "epsilon": spent, "delta": 0.0, **GUARANTEE.figures()}
'''

ROUNDING = '''
"""Randomised rounding: a number becomes one end of its range (Duchi et al., 2018)."""

from dataclasses import replace

import numpy as np

from vfl_flower.config.errors import ConfigError
from vfl_flower.protocol.privacy.accountant import EVERYONE, Accountant, Guarantee
from vfl_flower.protocol.privacy.mechanism import Mechanism

GUARANTEE = Guarantee("labels of the training rows", "one person's label is changed", EVERYONE)


class RoundedLabels(Mechanism):
    hides_labels = True
    costs_by_step = False
    covers_validation = True

    def check(self, estimator):
        if self.config.data.target != "regression":
            raise ConfigError("privacy = 'rounding' is for numbers. Set target = 'regression'.")
        self.check_range()

    def labels(self, labels, accountant):
        odds, (low, high) = np.exp(self.config.privacy.epsilon), labels.bounds
        generator = np.random.default_rng()

        def noisy(values):
            shares = (values * labels.deviation + labels.mean - low) / (high - low)
            chance = (1 + (odds - 1) * shares.clip(0, 1)) / (odds + 1)
            ends = generator.random(len(values)) < chance
            share = (ends * (odds + 1) - 1) / (odds - 1)  # which has the true share for its mean
            numbers = low + (high - low) * share
            return ((numbers - labels.mean) / labels.deviation).astype(np.float32)

        test = labels.test.copy()
        test[: labels.validation] = noisy(test[: labels.validation])
        return replace(labels, train=noisy(labels.train), test=test)

    def accountant(self, rows, estimator):
        return Once(self.config, rows, estimator)


class Once(Accountant):
    def figures(self):
        spent = {"epsilon": self.config.privacy.epsilon, "delta": 0.0}
        return {**super().figures(), **spent, **GUARANTEE.figures()}
'''

SCALARS = {**SMALL, "strategy": "cascaded", "top-model": "sum", "embedding-size": "auto"}


def test_a_mechanism_of_ones_own_trains_and_its_epsilon_is_reported(
    run: Start, tmp_path: Path
) -> None:
    laplace = f"{write(tmp_path, 'laplace.py', MECHANISM)}:LaplaceScalars"
    own = {"privacy": laplace, "noise-multiplier": 40.0}
    keys = {**SCALARS, "epochs": 5, "noise-seed": 0, "validation-fraction": 0.0}
    noisy, without = run(2, {**keys, **own}), run(2, keys)
    # Two asynchronous parties have a row in one scalar each, in each epoch.
    assert noisy.summary["epsilon"] == pytest.approx(2 * 2 * 5 / 40)
    assert noisy.summary["delta"] == 0.0
    assert noisy.summary["epsilon_protects"] == "labels of the training rows"
    assert without.summary["epsilon"] is None  # the control
    for name, values in without.parameters("party-0").items():  # directions are the same
        assert (noisy.parameters("party-0")[name] != values).any()


@pytest.mark.nightly
def test_releases_of_a_mechanism_of_ones_own_are_kept_and_counted_again(tmp_path: Path) -> None:
    laplace = f"{write(tmp_path, 'laplace.py', MECHANISM)}:LaplaceScalars"
    keys = {**SCALARS, "privacy": laplace, "noise-multiplier": 40.0, "checkpoint-every": 4}
    folder = interrupted(tmp_path / "cut", {**keys, "window": 1, "epochs": 3}, after=2, parties=2)
    assert (folder / "releases.journal").exists()
    run = resumed(folder, 2)
    # Mini-batches that were answered after the checkpoint were answered twice.
    assert 2 * 2 * 3 / 40 <= run.summary["epsilon"] <= 2 * 2 * 4 / 40


@pytest.mark.nightly  # test_plugins.py installs such a package each time
def test_a_package_declares_a_mechanism(tmp_path: Path) -> None:
    """Another process finds it, as it finds what pip has installed."""
    write(tmp_path, "laplace.py", MECHANISM)
    entry = "[vfl_flower.mechanisms]\nlaplace = laplace:LaplaceScalars\n"
    install(tmp_path, "laplace-scalars", entry)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "vfl_flower.tools.cli"]
    run = [*command, "run", "--parties", "2", "--out", str(tmp_path / "run"), "-c"]
    run.append(
        "privacy='laplace' strategy='cascaded' top-model='sum' embedding-size='auto' "
        "dataset='breast-cancer' epochs=2 expert='noise-multiplier=40.0'"
    )
    for each in ([*command, "list", "privacy"], run):
        said = subprocess.run(
            each, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
        ).stdout
        assert ("scalar, laplace" if each is not run else "epsilon 0.2 at delta 0") in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] == pytest.approx(2 * 2 * 2 / 40)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"estimator": "first-order"}, "on scalars alone. Set estimator = 'zeroth-order' and"),
        ({"top-model": "mlp"}, "on scalars alone. Set estimator = 'zeroth-order' and top-"),
        ({"noise-multiplier": None}, "privacy = 'laplace' has no noise yet. Set noise-multiplier."),
        ({"validation-fraction": 0.2}, "does not cover the labels of validation rows, which"),
        ({"grow": "runs/then"}, "counts the releases of one run, but grow continues"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_mechanism_of_ones_own_is_a_sentence(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    laplace = f"{write(tmp_path, 'laplace.py', MECHANISM)}:LaplaceScalars"
    given = {**SCALARS, "privacy": laplace, "noise-multiplier": 40.0, **keys}
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve({key: value for key, value in given.items() if value is not None})


@pytest.mark.nightly
def test_a_mechanism_of_ones_own_randomises_the_labels_that_all_learn_from(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4000, 4)).astype(np.float32)
    y = np.clip(5 + 2 * x[:, 0] + x[:, 2], 0, 10)
    rounding = f"{write(tmp_path, 'rounding.py', ROUNDING)}:RoundedLabels"
    keys = {"target": "regression", "label-range": "0,10", "epsilon": 2.0, "privacy": rounding}
    model = vfl_flower.train(keys, [x[:, :2], x[:, 2:]], y)
    assert (model.summary["epsilon"], model.summary["delta"]) == (2.0, 0.0)
    assert model.summary["test_r2"] > 0.7
    with pytest.raises(ConfigError, match=r"is for numbers. Set target = 'regression'\.$"):
        vfl_flower.train({"privacy": rounding, "epsilon": 2.0}, [x[:, :2], x[:, 2:]], y > 5)
    with pytest.raises(ConfigError, match="needs the lowest and the highest possible"):
        vfl_flower.train({**keys, "label-range": ""}, [x[:, :2], x[:, 2:]], y)
