"""A paper, a codec, an estimator, a runtime, data and models of one's own: one file each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tests.conftest import Start
from tests.stepping import by_gradient
from tests.test_checkpoint import assert_equal_runs, interrupted, resumed
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.plugins import ENGINES, SYSTEMS, Registry
from vfl_flower.label_holder.results import results_folder
from vfl_flower.launch.engines import predict_local, prepare, run_local
from vfl_flower.models.training import build_optimizer
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.tools.cli import main
from vfl_flower.transport.messages import Predicted, Upload
from vfl_flower.transport.wire import read_reply

SMALL = {"dataset": "breast-cancer", "epochs": 2, "batch-size": 64, "bottom-hidden": 8}

PAPER = '''
"""A sixth paper: asynchronous, compressed zeroth order with error feedback, on two-sided pairs."""

from vfl_flower.protocol.schedule import HALF
from vfl_flower.protocol.systems import System

SIXTH = System(
    name="sixth",
    about="Half of the parties, compressed pairs, error feedback.",
    quorum=HALF,
    defaults={
        "estimator": "zeroth-order",
        "differences": "two-sided",
        "codec": "qsgd",
        "compression": "error-feedback",
        "party-lr": 0.01,
        "server-lr": 0.1,
    },
)
'''

CODEC = '''
"""Signs: an entry's sign, and the mean magnitude of its vector (1-bit SGD)."""

import numpy as np

from vfl_flower.config.errors import VflError
from vfl_flower.transport.messages import checked


class Signs:
    uses = ()

    def __init__(self, config):
        pass

    def names(self, name):
        return f"{name}.means", f"{name}.bits"

    def encode(self, name, rows, sizes, key, of_row=None):
        v = rows.reshape(-1)
        starts = np.cumsum(sizes) - sizes
        means = np.add.reduceat(np.abs(v), starts) / sizes
        return {f"{name}.means": means.astype(np.float32), f"{name}.bits": np.packbits(v > 0)}

    def decode(self, name, arrays, shape, sizes):
        total = int(sizes.sum())
        means = checked(arrays, f"{name}.means", "float32", sizes.shape)
        bits = checked(arrays, f"{name}.bits", "uint8", (-(-total // 8),))
        signs = 2 * np.unpackbits(bits)[:total].astype(np.float32) - 1
        return (signs * means.repeat(sizes)).reshape(shape)
'''

AGGREGATION = '''
"""The mean of the parties' embeddings, where each counts with a bounded norm."""

from vfl_flower.config.errors import ConfigError
from vfl_flower.models.top_layers import CombiningTop
from vfl_flower.protocol.aggregation.base import Aggregation

BOUND = 2.0


class ClippedMean(CombiningTop):
    def combined(self, blocks, h):
        blocks = blocks.view(len(blocks), self.blocks, -1)
        norms = blocks.norm(dim=2, keepdim=True).clamp_min(1e-12)
        return (blocks * (BOUND / norms).clamp_max(1.0)).mean(1)


class Clipped(Aggregation):
    tops = ClippedMean, None  # a top model of one's own cannot read it
    defaults = {"combine": "mean"}

    def check(self, answers_by_scalars, baseline):
        if self.config.models.combine != "mean":
            raise ConfigError("aggregation = 'clipped' is a mean: set combine = 'mean'.")
'''

SEALED = '''
"""A weighted sum of embeddings, which parties round to eighths before they leave."""

import numpy as np

from vfl_flower.models.top_layers import CombiningTop
from vfl_flower.protocol.aggregation.base import Aggregation, Seal


class WeightedSum(CombiningTop):
    def combined(self, blocks, h):
        blocks = blocks.view(len(blocks), self.blocks, -1)
        weights = 2.0 / (1 + np.arange(self.blocks))
        return sum(float(weight) * blocks[:, each] for each, weight in enumerate(weights))


class Rounding(Seal):
    def hide(self, arrays):
        return {name: np.float32(np.round(8 * rows) / 8) for name, rows in arrays.items()}


class Weighted(Aggregation):
    tops = WeightedSum, None
    defaults = {"combine": "sum"}

    def seal(self, party, parties):
        return Rounding()
'''

ESTIMATOR = '''
"""Signs of gradient rows: the label holder answers the direction alone (signSGD)."""

from vfl_flower.protocol.estimators.first_order import FirstOrder


class SignRows(FirstOrder):
    answer_dtype = "int8"  # as gradient rows travel, unless a codec compresses them

    def answer(self, end, arrivals, joint):
        answers = super().answer(end, arrivals, joint)
        return {
            party: {name: rows.sign().char() for name, rows in blocks.items()}
            for party, blocks in answers.items()
        }

    def update(self, end, blocks, order, window):
        rows = blocks["gradient"].float() / len(window.ids)
        super().update(end, {"gradient": rows}, order, window)
'''

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

RUNTIME = '''
"""A runtime whose parties live in threads of their own."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from vfl_flower import client_app, server_app
from vfl_flower.transport.flower_internals import set_message_id
from vfl_flower.transport.local import LocalGrid
from vfl_flower.launch.engines import Finished, of_server, prepare


class ThreadGrid(LocalGrid):
    engine = "threads"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.threads = {node: ThreadPoolExecutor(1) for node in self.contexts}
        self.answers = {}

    def push_messages(self, messages):
        keys = []
        for message in messages:
            keys.append(f"thread-{len(self.answers)}")
            set_message_id(message, keys[-1])
            node = message.metadata.dst_node_id
            serve = self.threads[node].submit
            self.answers[keys[-1]] = serve(client_app.app, message, self.contexts[node])
        return keys

    def pull_messages(self, message_ids):
        waiting = [self.answers[key] for key in message_ids]
        return [each.result() for each in wait(waiting, 1, FIRST_COMPLETED).done]


def run_threads(parties, run_config, node_configs=()):
    config, run_config = prepare(parties, run_config, node_configs)
    finished = Finished(Path(run_config["out"]))
    states = [{"states": str(finished.folder)}] * parties
    grid = ThreadGrid(client_app.app, parties, run_config, config, states)
    server_app.app(grid, of_server(run_config, grid.run_id))
    return finished
'''

DATASET = '''
"""Waves: rows are sums of two sines, and the label says which is the faster."""

import numpy as np

from vfl_flower.data.partitioned import PartitionedData


def open_waves(data, place):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 400)
    steps = np.linspace(0, 6, 24)
    rows = np.sin((1 + labels[:, None]) * steps) + 0.1 * generator.standard_normal((400, 24))
    return PartitionedData(lambda columns: [rows[columns(rows.shape[1:])]], lambda: [labels])
'''

TOWER = """
import torch


class Tower(torch.nn.Module):
    def __init__(self, sample, size):
        super().__init__()
        self.first = torch.nn.Linear(sample.numel(), 12)
        self.last = torch.nn.Linear(12, size)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))
"""

SOURCE = '''
import numpy as np

from vfl_flower.data.source import Source


class Waves(Source):
    """What no table holds, read row by row."""

    lazy = True

    @property
    def id_column(self):
        return np.arange(100, 300)

    def rows(self, places, preparation):
        ids = self.id_column[places]
        return np.stack([np.sin(np.arange(6) * each) for each in ids]).astype(np.float32)
'''


def write(folder: Path, name: str, text: str) -> str:
    place = folder / name
    place.write_text(textwrap.dedent(text))
    return str(place)


def test_a_sixth_paper_is_one_file_under_forty_lines(run: Start, tmp_path: Path) -> None:
    assert len(PAPER.splitlines()) < 40
    place = write(tmp_path, "sixth.py", PAPER)
    summary = run(4, {**SMALL, "strategy": f"{place}:SIXTH", "window": 4}).summary
    assert (summary["schedule"], summary["quorum"]) == ("t-sync", 2)
    assert summary["config"]["codec"] == "qsgd"
    assert SYSTEMS.load(f"{place}:SIXTH").axes == (
        "t-sync · zeroth-order, two-sided · first-order server · qsgd, error feedback · no privacy"
    )
    assert summary["test_accuracy"] > 0.6


@pytest.mark.nightly
def test_a_codec_of_ones_own_serves_both_directions_with_and_without_feedback(
    run: Start, tmp_path: Path
) -> None:
    signs = f"{write(tmp_path, 'signs.py', CODEC)}:Signs"
    whole = run(2, SMALL).summary
    for compression in ("direct", "error-feedback"):
        keys = {**SMALL, "codec": signs, "compression": compression, "epochs": 20}
        summary = run(2, {**keys, "downlink-codec": signs}).summary
        assert summary["bytes_up"] / 20 < whole["bytes_up"] / 2 / 25
        assert summary["bytes_down"] / 20 < whole["bytes_down"] / 2 / 25
        assert summary["test_accuracy"] > 0.8


def test_an_estimator_of_ones_own_trains(run: Start, tmp_path: Path) -> None:
    estimator = f"{write(tmp_path, 'sign_rows.py', ESTIMATOR)}:SignRows"
    keys = {**SMALL, "party-lr": 0.05, "epochs": 5}
    whole, signs = run(2, keys).summary, run(2, {**keys, "estimator": estimator}).summary
    assert signs["bytes_down"] == whole["bytes_down"] / 4
    assert signs["test_accuracy"] > 0.85
    assert signs["test_loss"] != whole["test_loss"]


@pytest.mark.parametrize("compression", ["direct", "error-feedback"])
@pytest.mark.parametrize("codec", ["identity", "top-k", "qsgd", "float16", "bfloat16"])
def test_an_estimator_of_ones_own_goes_with_every_codec(
    codec: str, compression: str, run: Start, tmp_path: Path
) -> None:
    estimator = f"{write(tmp_path, 'sign_rows.py', ESTIMATOR)}:SignRows"
    whole = run(2, SMALL).summary
    keys = {"codec": codec, "compression": compression, "keep": 0.25 if codec == "top-k" else None}
    both = {f"{way}{key}": value for way in ("", "downlink-") for key, value in keys.items()}
    given = {key: value for key, value in both.items() if value is not None}
    summary = run(2, {**SMALL, **given, "estimator": estimator, "party-lr": 0.05}).summary
    assert summary["test_accuracy"] > 0.6
    assert summary["bytes_down"] < whole["bytes_down"] / 1.8
    assert (summary["bytes_up"] == whole["bytes_up"]) is (codec == "identity")


# --- an aggregation -----------------------------------------------------------------------------


def install(folder: Path, name: str, entry_points: str) -> None:
    """Make a distribution in a folder of `sys.path`, which declares entry points."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"strategy": "vafl"},
        {"strategy": "ef-vfl", "labels": "shared"},
        {"window": 4, "top-model": "linear"},
        {"strategy": "cascaded"},
        {"strategy": "syn-zoo", "perturbs": "all", "server-update": "first-order", "epochs": 25},
        {"strategy": "centralised"},
    ],
    ids=str,
)
def test_an_aggregation_of_ones_own_trains_and_predicts(
    keys: dict[str, Any], run: Start, tmp_path: Path
) -> None:
    clipped = f"{write(tmp_path, 'clipped.py', AGGREGATION)}:Clipped"
    keys = {**SMALL, "epochs": 10, "optimizer": "adam", "aggregation": clipped, **keys}
    keys |= {"party-lr": 0.01, "server-lr": 0.01, "noise-seed": 0}
    finished = run(3, keys)
    assert finished.summary["config"]["combine"] == "mean"
    assert finished.summary["test_accuracy"] > 0.85
    plain = run(3, {**keys, "aggregation": "plain", "combine": "mean"}).summary
    assert finished.summary["test_loss"] != plain["test_loss"]
    assert finished.summary["bytes_up"] == plain["bytes_up"]
    file = predict_local({"model": str(finished.folder)})
    predicted = json.loads(file.with_suffix(".json").read_text())
    assert predicted["accuracy"] == finished.summary["test_accuracy"]
    assert predicted["loss"] == pytest.approx(finished.summary["test_loss"], rel=1e-5)


@pytest.mark.parametrize("own", [0, 2])
def test_gradient_rows_of_an_aggregation_of_ones_own_are_those_of_autograd(
    own: int, tmp_path: Path
) -> None:
    clipped = f"{write(tmp_path, 'clipped.py', AGGREGATION)}:Clipped"
    aggregation = aggregation_of(resolve({"aggregation": clipped, "embedding-size": 3}))
    top = aggregation.build_top([3, 3, 3], 4, own)
    generator = torch.Generator().manual_seed(0)
    h = 3 * torch.randn(20, 9 + own, generator=generator)
    labels = torch.randint(4, (20,), generator=generator)
    assert 5 < int((h[:, :3].norm(dim=1) > 2).sum()) < 20  # some are clipped
    wanted = h.clone().requires_grad_()
    (due,) = torch.autograd.grad(torch.nn.functional.cross_entropy(top(wanted), labels), wanted)
    for optimizer in (None, build_optimizer(sized(resolve({}), 2000), top, 0.0)):
        rows, _ = by_gradient(top, optimizer, h, labels, [20], [20])
        torch.testing.assert_close(rows, due[:, :9], rtol=1e-4, atol=1e-7)
    first, second = torch.randn(2, 20, 3, generator=generator)
    for said, block in zip(
        top.pair(h, slice(3, 6), first, second, [20], b""), (first, second), strict=True
    ):
        replaced = h.clone()
        replaced[:, 3:6] = block
        torch.testing.assert_close(said, top(replaced))


def test_a_party_seals_its_blocks_before_they_leave(run: Start, tmp_path: Path) -> None:
    weighted = f"{write(tmp_path, 'weighted.py', SEALED)}:Weighted"
    uploads: list[Any] = []
    served = client_app.app

    class Listening(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            reply: Message = served(message, context)
            if message.metadata.message_type in ("train", "evaluate", "query.predict"):
                kind = Predicted if message.metadata.message_type == "query.predict" else Upload
                uploads.append(read_reply(reply, kind).arrays["embedding"])
            return reply

    keys = {**SMALL, "epochs": 5, "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01}
    finished = run(3, {**keys, "aggregation": weighted}, Listening())
    assert finished.summary["test_accuracy"] > 0.85
    assert len(uploads) > 50 and all((8 * each == np.round(8 * each)).all() for each in uploads)
    with patch.object(client_app, "app", Listening()):
        uploads.clear()
        predict_local({"model": str(finished.folder)})
    assert len(uploads) == 3 and all((8 * each == np.round(8 * each)).all() for each in uploads)


def test_a_run_with_an_aggregation_of_ones_own_is_resumed(tmp_path: Path) -> None:
    weighted = f"{write(tmp_path, 'weighted.py', SEALED)}:Weighted"
    keys = {**SMALL, "epochs": 3, "noise-seed": 0, "checkpoint-every": 6, "aggregation": weighted}
    whole = run_local(3, {**keys, "out": str(tmp_path / "whole")})
    again = resumed(interrupted(tmp_path / "cut", keys, after=2, parties=3), 3)
    assert_equal_runs(again, whole, 3)


def test_a_package_declares_an_aggregation(tmp_path: Path) -> None:
    """Another process finds it, as it finds what pip has installed."""
    write(tmp_path, "clipped.py", AGGREGATION)
    install(tmp_path, "clipped", "[vfl_flower.aggregations]\nclipped = clipped:Clipped\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "vfl_flower.tools.cli"]
    listing = [*command, "list", "aggregation"]
    run = [*command, "run", "--parties", "2", "--out", str(tmp_path / "run"), "-c"]
    run.append("aggregation='clipped' dataset='breast-cancer' optimizer='adam' epochs=5")
    said = [
        subprocess.run(
            each, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
        ).stdout
        for each in (listing, run)
    ]
    assert "plain, secure, clipped, or FILE.py:NAME" in said[0]
    assert re.search(r"test accuracy 0\.9", said[1])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"combine": "concat"}, "^aggregation = 'clipped' is a mean: set combine = 'mean'."),
        ({"presence": 0.5}, "needs the embeddings of all parties: leave out align, presence and"),
        ({"subsets": "sampled"}, "needs the embeddings of all parties: leave out align, presence"),
        ({"top-model": f"{__name__}:Dropping"}, "Dropping' reads them side by side: choose a top"),
    ],
)
def test_what_does_not_go_with_an_aggregation_of_ones_own_is_a_sentence(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    clipped = f"{write(tmp_path, 'clipped.py', AGGREGATION)}:Clipped"
    with pytest.raises(ConfigError, match=said):
        resolve({"aggregation": clipped, **keys})


def test_an_aggregation_can_need_parties_that_step_together_and_models_that_begin_anew(
    run: Start, tmp_path: Path
) -> None:
    own = "    abreast = True\n    may_grow = False\n    defaults = "
    place = write(tmp_path, "abreast.py", AGGREGATION.replace("    defaults = ", own))
    keys = {**SMALL, "aggregation": f"{place}:Clipped"}
    with pytest.raises(ConfigError, match=r"needs parties that step together: choose a synchro"):
        run(2, {**keys, "strategy": "vafl"})
    with pytest.raises(ConfigError, match=r"cannot begin by the models of an earlier run: leave"):
        resolve({**keys, "grow": "earlier"})
    assert run(2, keys).summary["failure"] is None


# --- a privacy mechanism -------------------------------------------------------------------------

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


def test_releases_of_a_mechanism_of_ones_own_are_kept_and_counted_again(tmp_path: Path) -> None:
    laplace = f"{write(tmp_path, 'laplace.py', MECHANISM)}:LaplaceScalars"
    keys = {**SCALARS, "privacy": laplace, "noise-multiplier": 40.0, "checkpoint-every": 4}
    folder = interrupted(tmp_path / "cut", {**keys, "window": 1, "epochs": 3}, after=2, parties=2)
    assert (folder / "releases.journal").exists()
    run = resumed(folder, 2)
    # Mini-batches that were answered after the checkpoint were answered twice.
    assert 2 * 2 * 3 / 40 <= run.summary["epsilon"] <= 2 * 2 * 4 / 40


def test_a_package_declares_a_mechanism(tmp_path: Path) -> None:
    """Another process finds it, as it finds what pip has installed."""
    write(tmp_path, "laplace.py", MECHANISM)
    entry = "[vfl_flower.mechanisms]\nlaplace = laplace:LaplaceScalars\n"
    install(tmp_path, "laplace-scalars", entry)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "vfl_flower.tools.cli"]
    run = [*command, "run", "--parties", "2", "--out", str(tmp_path / "run"), "-c"]
    run.append(
        "privacy='laplace' noise-multiplier=40.0 strategy='cascaded' top-model='sum' "
        "embedding-size='auto' dataset='breast-cancer' epochs=2"
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
        (
            {"estimator": "first-order"},
            "on scalars alone. Set estimator = 'zeroth-order' and",
        ),
        (
            {"top-model": "mlp"},
            "on scalars alone. Set estimator = 'zeroth-order' and top-",
        ),
        ({"noise-multiplier": None}, "privacy = 'laplace' has no noise yet. Set noise-multiplier."),
        ({"validation-fraction": 0.2}, "does not cover the labels of validation rows, which"),
        ({"grow": "runs/then"}, "counts what one run releases, and by grow there would be"),
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


def test_a_mechanism_of_ones_own_randomises_the_labels_that_all_learn_from(tmp_path: Path) -> None:
    import vfl_flower

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
    with pytest.raises(ConfigError, match="needs the lowest and the highest label that can be"):
        vfl_flower.train({**keys, "label-range": ""}, [x[:, :2], x[:, 2:]], y)


def test_a_runtime_of_ones_own_gives_what_ours_do(run: Start, tmp_path: Path) -> None:
    threads = f"{write(tmp_path, 'threads.py', RUNTIME)}:run_threads"
    finished = ENGINES.load(threads)(3, {**SMALL, "out": str(tmp_path / "threads")})
    ours = run(3, SMALL)
    assert finished.summary["engine"] == "threads"
    for name, values in ours.parameters("top").items():
        np.testing.assert_array_equal(finished.parameters("top")[name], values)


def test_the_command_takes_what_is_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper, waves = write(tmp_path, "sixth.py", PAPER), write(tmp_path, "waves.py", DATASET)
    threads, tower = write(tmp_path, "threads.py", RUNTIME), write(tmp_path, "tower.py", TOWER)
    keys = f"strategy='{paper}:SIXTH' dataset='{waves}:open_waves' bottom-model='{tower}:Tower'"
    arguments = ["run", "-c", f"{keys} epochs=2", "--engine", f"{threads}:run_threads"]
    assert main([*arguments, "--out", str(tmp_path / "run"), "--parties", "3"]) == 0
    assert re.search(r"test accuracy 0\.\d", capsys.readouterr().out)


def test_a_model_of_ones_own_is_trained_by_every_estimator(run: Start, tmp_path: Path) -> None:
    tower = f"{write(tmp_path, 'tower.py', TOWER)}:Tower"
    for strategy in ("split-nn", "cascaded", "frozen"):
        finished = run(2, {**SMALL, "bottom-model": tower, "strategy": strategy})
        assert sorted(finished.parameters("party-0")) == [
            *("layers.0.first.bias", "layers.0.first.weight"),
            *("layers.0.last.bias", "layers.0.last.weight"),
        ]


def test_a_source_of_ones_own_is_read_row_by_row(tmp_path: Path) -> None:
    import pandas as pd

    from vfl_flower.launch.engines import run_local

    ids = np.arange(150, 350)
    frame = pd.DataFrame({"id": ids, "label": (np.sin(5 * ids) > 0).astype(int), "own": ids % 7})
    frame.to_csv(tmp_path / "labels.csv", index=False)
    waves = {"source": f"{write(tmp_path, 'own_waves.py', SOURCE)}:Waves"}
    keys = {"dataset": f"files:{tmp_path / 'labels.csv'}", "epochs": 20, "batch-size": 16}
    summary = run_local(1, {**keys, "out": str(tmp_path / "run")}, node_configs=[waves]).summary
    assert summary["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "no-such"},
        {"codec": "no-such"},
        {"estimator": "no-such"},
        {"aggregation": "no-such"},
        {"bottom-model": "no-such"},
        {"privacy": "no-such"},
    ],
    ids=str,
)
def test_an_unknown_name_is_a_sentence_that_lists_those_known(keys: dict[str, str]) -> None:
    ((key, name),) = keys.items()
    with pytest.raises(ConfigError) as error:
        resolve(keys)
    assert str(error.value).startswith(f"{key} = {name!r} is not known: choose one of ")


@pytest.mark.parametrize(
    ("key", "name", "like"),
    [
        ("strategy", "vafll", "vafl"),
        ("strategy", "VAFL-T", "vafl-t"),
        ("codec", "topk", "top-k"),
        ("optimizer", "adamax", "adam"),
        ("bottom-model", "lineer", "linear"),
        ("privacy", "label", "labels"),
        ("dataset", "digit", "digits"),
        ("dataset", "file:a.csv", "files:a.csv"),
        ("dataset", "a.csv", "csv:a.csv"),
    ],
)
def test_a_name_that_is_misspelt_is_told_what_it_is_like(key: str, name: str, like: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(2, {key: name}, ())
    start = f"{key} = {name!r} is not known: did you mean {like!r}? "
    assert str(error.value).startswith(start) and str(error.value).count("?") == 1


@pytest.mark.parametrize(
    "place",
    [
        "nowhere.py:SIXTH",
        "{folder}/sixth.py:SEVENTH",
        "no.such.module:SIXTH",
        "{folder}/broken.py:X",
    ],
)
def test_a_place_without_what_it_names_is_a_sentence(place: str, tmp_path: Path) -> None:
    write(tmp_path, "sixth.py", PAPER)
    write(tmp_path, "broken.py", "def (")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        resolve({"strategy": place.format(folder=tmp_path)})


def test_a_file_that_is_rewritten_is_loaded_anew(tmp_path: Path) -> None:
    place = write(tmp_path, "sixth.py", PAPER)
    assert SYSTEMS.load(f"{place}:SIXTH").quorum.word == "t-sync"
    write(tmp_path, "sixth.py", PAPER.replace("HALF", "ONE"))
    assert SYSTEMS.load(f"{place}:SIXTH").quorum.word == "async"


def test_an_installed_package_declares_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from vfl_flower.config import plugins

    entry = EntryPoint("borrowed", "strategies.papers.vafl:VAFL", "vfl_flower.systems")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    assert "borrowed" in SYSTEMS.names
    assert SYSTEMS.load("borrowed") is SYSTEMS.load("vafl")


def test_a_data_set_of_an_installed_package_may_take_a_place_or_not(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    from vfl_flower.config import plugins

    write(tmp_path, "packaged_waves.py", DATASET)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("waves", "packaged_waves:open_waves", "vfl_flower.datasets")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    for name in ("waves", "waves:anything"):
        assert run(2, {"dataset": name, "epochs": 1}).summary["dataset"] == name


def test_results_of_what_is_ones_own_are_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper, waves = write(tmp_path, "sixth.py", PAPER), write(tmp_path, "waves.py", DATASET)
    keys = {"strategy": f"{paper}:SIXTH", "dataset": f"{waves}:open_waves"}
    monkeypatch.chdir(tmp_path)
    folder = results_folder(resolve(keys))
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("sixth.py-SIXTH-waves.py-open_waves-")


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("nn.Linear(len(sample), size + 1)", r"makes \(2, 33\) of 2 rows"),
        ("nn.Linear(len(sample) + 1, size)", r"cannot read samples of shape \(15,\): "),
    ],
)
def test_a_model_that_makes_no_embeddings_is_a_sentence_before_training(
    layer: str, said: str, run: Start, tmp_path: Path
) -> None:
    text = (
        "from torch import nn\n\n\nclass Tower(nn.Sequential):\n"
        f"    def __init__(self, sample, size):\n        super().__init__({layer})\n"
    )
    keys = {**SMALL, "bottom-model": f"{write(tmp_path, 'wrong.py', text)}:Tower"}
    with pytest.raises(PartyError, match=f"Party 0.*{said}"):
        run(2, keys)


def test_a_model_with_dropout_says_the_same_twice_and_of_each_row_alone() -> None:
    import vfl_flower

    features = np.random.default_rng(0).standard_normal((60, 4))
    tower = f"{__name__}:Dropping"
    keys = {"epochs": 2, "bottom-model": tower, "batch-size": 16}
    model = vfl_flower.train(keys, [features[:, :2], features[:, 2:]], features[:, 0] > 0)
    whole = model.predict_proba([features[:, :2], features[:, 2:]])
    np.testing.assert_array_equal(model.predict_proba([features[:, :2], features[:, 2:]]), whole)
    alone = model.predict_proba([features[:1, :2], features[:1, 2:]])
    np.testing.assert_allclose(alone, whole[:1], atol=1e-6)


class Dropping(torch.nn.Sequential):
    """A tower that is another one while it is trained."""

    def __init__(self, sample: torch.Tensor, size: int) -> None:
        super().__init__(torch.nn.Linear(len(sample), size), torch.nn.Dropout(0.5))


def test_who_else_is_told_is_told_of_all(run: Start, tmp_path: Path) -> None:
    text = (
        "from vfl_flower.label_holder.callbacks import Callback\n\n\n"
        "class Board(Callback):\n"
        "    def say(self, what):\n"
        f"        with open({str(tmp_path / 'said')!r}, 'a') as file:\n"
        "            file.write(what)\n\n"
        "    def evaluated(self, entry):\n        self.say('e')\n\n"
        "    def ended(self):\n        self.say('.')\n"
    )
    run(2, {**SMALL, "observer": f"{write(tmp_path, 'board.py', text)}:Board"})
    assert (tmp_path / "said").read_text() == "ee."


TARGET = '''\
"""target.py: stop at a target, and save a checkpoint each time that the model is the best."""

from vfl_flower.label_holder.callbacks import Callback


class Target(Callback):
    def evaluated(self, entry):
        state = self.run.state
        if state.best == entry:
            self.run.save()
        if entry["test_accuracy"] >= 0.9:
            self.run.stop(f"The target is reached in epoch {state.epoch:.3g}")
'''


def test_a_callback_stops_a_run_at_a_target_and_saves_it(run: Start, tmp_path: Path) -> None:
    keys = {**SMALL, "epochs": 50, "observer": f"{write(tmp_path, 'target.py', TARGET)}:Target"}
    accuracies = [entry["test_accuracy"] for entry in run(2, keys).history]
    assert len(accuracies) < 50 and accuracies[-1] >= 0.9 > max(accuracies[:-1], default=0)
    assert len(run(2, {**keys, "observer": "none"}).history) > len(accuracies)  # the control


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("strategy", "has no 'about'"),
        ("estimator", "has no 'check'"),
        ("aggregation", "has no 'tops'"),
        ("codec", "has no 'uses'"),
        ("bottom-model", "cannot be called"),
        ("privacy", "has no 'check'"),
        ("observer", "has no 'evaluated'"),
        ("dataset", "cannot be called"),
    ],
)
def test_what_is_something_else_is_a_sentence(
    key: str, said: str, run: Start, tmp_path: Path
) -> None:
    text = "class Other:\n    name = 1\n\n\nOTHER = Other()\n"
    place = write(tmp_path, "other.py", text)
    with pytest.raises(VflError, match=f"{key} = '.*other.py:OTHER' is none: it {said}"):
        run(2, {**SMALL, key: f"{place}:OTHER"})


def test_a_system_with_a_default_that_is_no_key_is_a_sentence(tmp_path: Path) -> None:
    paper = write(tmp_path, "sixth.py", PAPER.replace('"party-lr"', '"party_lr"'))
    with pytest.raises(ConfigError, match="no option 'party_lr'"):
        resolve({"strategy": f"{paper}:SIXTH"})


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    keys = {"strategy": f"{write(tmp_path, 'sixth.py', PAPER)}:SIXTH"}
    assert resolve(keys).training.party_lr == 0.01
    write(tmp_path, "sixth.py", PAPER.replace('"party-lr": 0.01', '"party-lr": 0.5'))
    assert resolve(keys).training.party_lr == 0.5


def test_every_name_of_ours_is_there() -> None:
    from vfl_flower.config import plugins

    for each in vars(plugins).values():
        if isinstance(each, Registry):
            for name in each.known:
                assert callable(each.load(name)) or each is SYSTEMS


@pytest.mark.parametrize(
    "key", ["strategy", "codec", "estimator", "aggregation", "bottom-model", "dataset"]
)
def test_a_node_runs_no_code_that_a_run_configuration_names(key: str, tmp_path: Path) -> None:
    from flwr.app import Context, RecordDict

    from tests.party.nodes import DESCRIBE, asked
    from vfl_flower.transport.messages import Description

    texts = {"strategy": PAPER, "codec": CODEC, "estimator": ESTIMATOR, "bottom-model": TOWER}
    texts["aggregation"] = AGGREGATION
    names = {
        "aggregation": "Clipped",
        "strategy": "SIXTH",
        "codec": "Signs",
        "estimator": "SignRows",
        "bottom-model": "Tower",
    }
    ran = tmp_path / "ran"
    proof = f"\n\nimport pathlib\n\npathlib.Path({str(ran)!r}).touch()\n"
    place = write(tmp_path, "own.py", texts.get(key, DATASET) + proof)
    keys = {"dataset": "breast-cancer", key: f"{place}:{names.get(key, 'open_waves')}"}
    for simulated in (False, True):
        node: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "simulated": simulated}
        run_config: Any = keys
        context = Context(1, 2, node, RecordDict(), run_config)
        if simulated:
            asked(context, DESCRIBE, Description)
            assert ran.exists()
            continue
        with pytest.raises(VflError, match=f"^failed: {key} names code"):
            asked(context, DESCRIBE, Description)
        assert not ran.exists()
