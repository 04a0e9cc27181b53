"""Noise on scalars and on the top model: its deviation, what counts it, and what it is worth."""

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from numpy.typing import NDArray
from torch import Tensor

from strategies.baselines.frozen import learn
from tests.conftest import Start, nightly, trained
from tests.pairwise import pairwise
from tests.protocol.test_accountants import epsilon_of_scalars
from tests.releases import accountant_of, log_of
from tests.stepping import by_differences, by_gradient
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, DivergedError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.held_out import HeldOut
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.models.losses import Loss, loss_of
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.tops import build_top
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.privacy.accountant import EVERYONE, Accountant
from vfl_flower.protocol.privacy.embeddings import EmbeddingAccountant
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.protocol.privacy.scalars import (
    GUARANTEE,
    ScalarAccountant,
    calibrated_by_theorem_vi5,
    epsilon_of_theorem_vi5,
)
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.results.figures import headline
from vfl_flower.transport import messages

DPZV = {
    **{"strategy": "dpzv", "dataset": "breast-cancer", "batch-size": 64, "window": 8},
    **{"bottom-model": "mlp", "top-model": "mlp"},
}
SECRET: dict[str, Any] = {"sampling": "poisson", "calibration": "secret"}
PAPER: dict[str, Any] = {"sampling": "poisson", "calibration": "paper"}
ROWS, STEPS = 455, 8  # of breast-cancer, in mini-batches of 64; the last has 7


def scalar_log(rows: int = ROWS, **keys: Any) -> tuple[ReleaseLog, ScalarAccountant]:
    """The log of a run with noise on scalars, and its accountant."""
    given = {key.replace("_", "-"): value for key, value in keys.items()}
    found = log_of(resolve({**DPZV, **given}), rows)
    assert isinstance(found.accountant, ScalarAccountant)
    return found, found.accountant


def gaussian(multiplier: float, releases: int, delta: float = 1e-5) -> float:
    """Epsilon of so many releases: a label changed is twice what they are clipped to."""
    return float(get_epsilon_gaussian(multiplier / 2 / math.sqrt(releases), delta))


# --- the noise ----------------------------------------------------------------------------------


def assert_standard_normal(unit: Tensor) -> None:
    count = unit.numel()
    assert unit.mean().abs() < 5 / math.sqrt(count)
    assert (unit.square().mean() - 1).abs() < 5 * math.sqrt(2 / count)
    assert (unit.pow(4).mean() - 3).abs() < 5 * math.sqrt(96 / count)
    assert (unit[1:] * unit[:-1]).mean().abs() < 5 / math.sqrt(count)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("multiplier", "clip", "divisors"),
    [(1.5, 0.2, [32]), (0.3, 4.0, [5]), (2.0, 1.0, [64, 64, 64, 7])],
)
def test_scalars_get_gaussian_noise_by_the_rows_they_are_means_of(
    multiplier: float, clip: float, divisors: list[int]
) -> None:
    noise = ScalarNoise(resolve({**DPZV, "clip": clip}), multiplier)
    times = 8000 // len(divisors)
    drawn = noise.added_to(torch.full((times * len(divisors),), 7.0), divisors * times) - 7.0
    assert noise.clip == clip
    for step, divisor in enumerate(divisors):  # the last mini-batch is smaller: more noise
        assert_standard_normal(drawn[step :: len(divisors)] / (multiplier * clip / divisor))


def test_gradients_get_gaussian_noise_by_the_rows_they_are_means_of() -> None:
    noise = ScalarNoise(resolve({**DPZV, "clip": 9.0, "top-clip": 0.3}), 2.0)
    shapes = [(300, 200), (200,)]
    before = [torch.full(shape, 3.0) for shape in shapes]
    one, other = (noise.added_to_gradients(before, 16) for _ in range(2))
    assert [tuple(each.shape) for each in one] == shapes
    drawn = torch.cat([(each - 3.0).ravel() for each in one]) / (2.0 * 0.3 / 16)
    again = torch.cat([(each - 3.0).ravel() for each in other]) / (2.0 * 0.3 / 16)
    assert_standard_normal(drawn)
    assert (drawn * again).mean().abs() < 5 / math.sqrt(len(drawn))
    assert noise.drawn == 2


def test_noise_on_scalars_is_secret_unless_a_seed_is_given() -> None:
    def drawn(noise_seed: int) -> list[float]:
        noise = ScalarNoise(resolve({**DPZV, "noise-seed": noise_seed}), 1.0)
        of_top = noise.added_to_gradients([torch.zeros(3)], 32)[0].tolist()
        return [*noise.added_to(torch.zeros(5), [32] * 5).tolist(), *of_top]

    assert len(set(drawn(-1))) >= 6  # of 8 on a grid
    assert drawn(-1) != drawn(-1)
    assert drawn(3) == drawn(3) != drawn(4)


def test_scalar_noise_leaves_embeddings_as_they_are() -> None:
    keys = {**DPZV, "noise-seed": 0, "embedding-activation": "none"}
    config = resolve(keys)
    party = Party(config, 0, 2, 1)
    party.describe(messages.DescribeOrder(outputs=1))
    test = party.evaluate(messages.EvaluateOrder(exchange=1)).arrays["embedding"]
    with torch.no_grad():
        clean = party.learner.model(torch.from_numpy(party.inputs.block.test))
    np.testing.assert_allclose(test, clean.numpy(), atol=1e-6)
    order = messages.TrainOrder(exchange=2, epoch=0, first=0, steps=8, coordinated=False)
    pair = party.train(order).arrays
    assert np.abs(pair["plus"] - pair["minus"]).max() < 1.0  # two mu along one direction


# --- the top model's steps ----------------------------------------------------------------------

LENGTHS, DIVISORS = [6, 1, 5], [6, 1, 4]
TOP_ROWS, SIZE, PARTIES = sum(LENGTHS), 3, 2


def rows_of(outputs: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    h = scale * torch.randn(TOP_ROWS, PARTIES * SIZE, generator=generator)
    h[::3] *= 0.01  # so that some are not clipped
    return h, torch.randint(max(2, outputs), (TOP_ROWS,), generator=generator)


def flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().ravel() for part in parts])


@pairwise(
    kind=["linear", "mlp"],
    combine=["concat", "mean", "sum"],
    outputs=[1, 3],
    weights=[None, [1.0, 4.0, 0.5]],
    kept=[1.0, 0.8],
)
def test_the_top_model_steps_by_rows_gradients_of_clipped_norm(
    kind: str, combine: str, outputs: int, weights: list[float] | None, kept: float
) -> None:
    """DP-SGD without its noise, against autograd, one row at a time."""
    keys = {"combine": combine, "top-model": kind, "top-hidden": 5, "embedding-size": SIZE}
    config = resolve({**DPZV, **keys, "optimizer": "sgd"})
    top = build_top(config, [SIZE] * PARTIES, outputs)
    by_hand, (h, labels) = copy.deepcopy(top), rows_of(outputs)
    parameters = list(by_hand.parameters())
    loss = Loss(None if weights is None else torch.tensor(weights), kept)

    def gradient_of(row: int) -> Tensor:
        of_row = loss.per_row(by_hand(h[row : row + 1]), labels[row : row + 1])[0]
        return flat(torch.autograd.grad(of_row, parameters))

    bound = float(torch.stack([gradient_of(row).norm() for row in range(TOP_ROWS)]).median())
    config = config.with_values({"top-clip": bound})
    batch, noise = (h, labels, LENGTHS, DIVISORS), ScalarNoise(config, 0.0)
    optimizer = build_optimizer(config, top, 0.3)
    _, losses = by_gradient(top, optimizer, *batch, rows_wanted=False, loss=loss, noise=noise)
    clipped, row = 0, 0
    for length, divisor, found in zip(LENGTHS, DIVISORS, losses, strict=True):
        rows = slice(row, row + length)
        expected = loss.per_row(by_hand(h[rows]), labels[rows]).sum() / divisor
        torch.testing.assert_close(found, expected.detach())
        gradients = [gradient_of(each) for each in range(row, row + length)]
        clipped += sum(bool(each.norm() > bound) for each in gradients)
        total = torch.stack([each * (bound / each.norm()).clamp_max(1.0) for each in gradients])
        with torch.no_grad():
            parts = total.sum(0).split([p.numel() for p in parameters])
            for p, part in zip(parameters, parts, strict=True):
                p.sub_(0.3 * part.view_as(p) / divisor)
        row += length
    assert 0 < clipped < TOP_ROWS
    torch.testing.assert_close(flat(top.parameters()), flat(parameters))


@pytest.mark.parametrize("server_update", ["first-order", "zeroth-order"])
@pytest.mark.parametrize("label", [0, 1])
def test_a_row_moves_the_top_model_no_further_than_its_bound(
    server_update: str, label: int
) -> None:
    """However large an embedding is: by C / U, or along the direction by a scalar as large."""
    keys = {"server-update": server_update, "clip": 0.2, "top-clip": 0.2, "optimizer": "sgd"}
    config = resolve({**DPZV, **keys, "embedding-size": SIZE, "top-hidden": 5})
    for size in (1.0, 1e6, 1e30):
        top = build_top(config, [SIZE] * PARTIES, 1)
        before = flat(top.parameters())
        optimizer, noise = build_optimizer(config, top, 1.0), ScalarNoise(config, 0.0)
        batch = torch.full((1, 6), size), torch.tensor([label]), [1], [4]
        if server_update == "first-order":
            by_gradient(top, optimizer, *batch, rows_wanted=False, noise=noise)
            moved, most = (flat(top.parameters()) - before).norm(), 0.2 / 4
        else:
            directions = Directions(config.estimator, b"key", top)
            u = directions.stack(1)[0]
            by_differences(directions, top, optimizer, *batch, noise=noise)
            moved, most = (flat(top.parameters()) - before).norm(), 0.2 / 4 * float(u.norm())
        assert moved <= most * (1 + 1e-4)


@pytest.mark.one_by_day
@pytest.mark.parametrize("server_update", ["first-order", "zeroth-order"])
@pytest.mark.parametrize("multiplier", [0.5, 20.0])
def test_steps_of_the_top_model_carry_noise(server_update: str, multiplier: float) -> None:
    keys = {"server-update": server_update, "optimizer": "sgd", "top-clip": 0.3, "clip": 0.7}
    config = resolve({**DPZV, **keys, "top-hidden": 40, "embedding-size": SIZE})
    h, labels = rows_of(1)
    moved: list[Tensor] = []
    steps = 1 if server_update == "first-order" else 150
    top = build_top(config, [SIZE] * PARTIES, 1)
    start = flat(top.parameters())
    for each in (0.0, multiplier):
        noise = ScalarNoise(config, each)
        for step in range(steps):
            mine = copy.deepcopy(top)
            batch = h[:6], labels[:6], [6], [6]
            optimizer = build_optimizer(config, mine, 1.0)
            if server_update == "first-order":
                by_gradient(mine, optimizer, *batch, rows_wanted=False, noise=noise)
            else:
                directions = Directions(config.estimator, b"%d" % step, mine)
                by_differences(directions, mine, optimizer, *batch, noise=noise)
            moved.append(flat(mine.parameters()) - start)
    found = torch.stack(moved[steps:]) - torch.stack(moved[:steps])
    if server_update == "zeroth-order":  # a scalar along each direction, which is of length sqrt(d)
        unit = found.norm(dim=1) / start.numel() ** 0.5 / (multiplier * 0.7 / 6)
    else:
        unit = found[0] / (multiplier * 0.3 / 6)
    assert (unit.square().mean() - 1).abs() < 5 * math.sqrt(2 / unit.numel())


def test_with_the_noise_of_the_paper_the_top_model_learns_as_ever() -> None:
    holders = [
        LabelHolder(config, labels_of(TOP_ROWS), {0: SIZE, 1: SIZE}, ScalarNoise(config, 5.0))
        for config in (resolve({**DPZV, **given, "embedding-size": SIZE}) for given in (PAPER, {}))
    ]
    plain = resolve({**DPZV, **PAPER, "privacy": "none", "embedding-size": SIZE})
    holders.append(LabelHolder(plain, labels_of(TOP_ROWS), {0: SIZE, 1: SIZE}))
    h, _ = rows_of(1)
    reached = []
    for holder in holders:
        holder.step(h, holder.labels, LENGTHS, DIVISORS, gradients=False)
        reached.append(flat(holder.top.parameters()))
    of_paper, noisy, without = reached
    assert torch.equal(of_paper, without)
    assert (noisy - without).abs().max() > 0.01


def labels_of(rows: int, one: int = 0) -> Labels:
    labels = np.arange(rows) % 2
    labels[0] = one
    return Labels(labels, labels, ("a", "b"), "")


@pytest.mark.parametrize("label", [0, 1])
def test_no_label_decides_by_its_loss_whether_a_run_goes_on(label: int) -> None:
    """Two losses whose sum overflows stop a run, but not with noise on scalars."""
    keys = {"embedding-size": SIZE, "top-model": "linear"}

    def answers(config: RunConfig, noise: ScalarNoise | None) -> None:
        holder = LabelHolder(config, labels_of(4, label), {0: SIZE, 1: SIZE}, noise)
        with torch.no_grad():
            next(holder.top.parameters()).fill_(1e37)
        holder.table.rows[:] = 3.0
        learn(holder, Window(np.array([0, 2], np.int32), np.array([2], np.int32)))

    config = resolve({**DPZV, **keys, "noise-multiplier": 1.0})
    answers(config, ScalarNoise(config, 1.0))
    without = resolve({**DPZV, **keys, "privacy": "none"})
    if label == 0:
        with pytest.raises(DivergedError):
            answers(without, None)
    else:
        answers(without, None)


# --- what is counted ----------------------------------------------------------------------------


def window(ids: list[int], lengths: list[int]) -> Window:
    return Window(np.array(ids, np.int32), np.array(lengths, np.int32))


def test_a_row_is_counted_in_each_scalar_and_step_that_it_is_in() -> None:
    log, counted = scalar_log(4, noise_multiplier=3.0, delta=1e-4)
    counted.steps_allowed(40, 2, 1, True)
    assert log.permits_answers([(0, window([0, 3, 1], [2, 1]))])
    assert log.permits_answers([(1, window([3, 2], [2]))])
    assert counted.taken.tolist() == [2, 2, 2, 4]  # each a scalar and a step of the top model
    assert counted.released == 3
    assert counted.figures()["epsilon"] == pytest.approx(gaussian(3.0, 4, 1e-4))


@pytest.mark.parametrize(
    ("keys", "of_a_row"),
    [
        ({}, 3 + 1),
        ({"perturbs": "all"}, 2),
        ({"perturbs": "all", "server_update": "zeroth-order"}, 1),
        ({"server_update": "zeroth-order"}, 3 + 1),
        ({"top_model": "sum", "embedding_size": "auto"}, 3),
        ({"top_model": "sum", "embedding_size": "auto", "perturbs": "all"}, 1),
    ],
    ids=str,
)
def test_a_synchronous_answer_is_a_scalar_for_each_party_and_one_step(
    keys: dict[str, Any], of_a_row: int
) -> None:
    log, counted = scalar_log(4, noise_multiplier=3.0, **keys)
    counted.steps_allowed(12, 3, 3, keys.get("top_model") != "sum")
    assert log.permits_answers([(party, window([1, 2], [1, 1])) for party in range(3)])
    assert counted.taken.tolist() == [0, of_a_row, of_a_row, 0]
    assert counted.figures()["epsilon"] == pytest.approx(gaussian(3.0, of_a_row))


class Watching:
    """The ClientApp; the scalars that parties get, and in how many uploads each row was."""

    def __init__(self) -> None:
        self.scalars: dict[int, list[NDArray[Any]]] = {}
        self.uploads = np.zeros(ROWS, int)

    def __call__(self, message: Any, context: Any) -> Any:
        sent = message.content.array_records["arrays"]
        if "difference" in sent:
            got = self.scalars.setdefault(context.node_config["partition-id"], [])
            got.append(sent["difference"].numpy())
        reply = client_app.app(message, context)
        arrays: Any = reply.content.array_records.get("arrays", {})
        if "ids" in arrays:
            np.add.at(self.uploads, arrays["ids"].numpy(), 1)
        return reply


NO_TOP = {"top-model": "sum", "embedding-size": "auto"}
SYSTEMS: dict[str, tuple[dict[str, Any], int, int]] = {
    # Releases that contain a row, over two epochs of three parties; and the top model's part.
    "asynchronous": ({}, 2 * 3 * 2, 6),
    "asynchronous, zeroth-order server": ({"server-update": "zeroth-order"}, 2 * 3 * 2, 6),
    "asynchronous, no top model": (NO_TOP, 2 * 3, 0),
    "synchronous": ({"quorum": 3}, 2 * (3 + 1), 2),
    "synchronous, no top model": ({"quorum": 3, **NO_TOP}, 2 * 3, 0),
    "joint": ({"quorum": 3, "perturbs": "all"}, 2 * 2, 2),
    "joint, with the top model": (
        *({"quorum": 3, "perturbs": "all", "server-update": "zeroth-order"}, 2 * 1, 0),
    ),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", SYSTEMS)
def test_epsilon_of_a_run_is_of_all_that_it_releases(name: str) -> None:
    more, releases, of_top = SYSTEMS[name]
    keys = {**DPZV, "epochs": 2, "noise-multiplier": 9.0, **more}
    client: Any = Watching()
    strategy, _ = trained(3, keys, client)
    figures = strategy.figures()
    theirs = PLDAccountant().compose(GaussianDpEvent(9.0 / 2), releases)
    assert figures["epsilon"] == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)
    assert figures["epsilon"] == pytest.approx(gaussian(9.0, releases))
    assert figures["delta"] == 1e-5
    # Each scalar that differs, and each step of the top model, has its own noise.
    sent = {party: np.concatenate(got) for party, got in client.scalars.items()}
    assert all(len(got) == 2 * STEPS for got in sent.values())
    numbers = len({float(each) for got in sent.values() for each in got})
    drawn = 2 * STEPS if "joint" in name else 3 * 2 * STEPS
    assert drawn - 1 <= numbers <= drawn  # two may be equal once they are rounded to float32
    noise = strategy.run.holder.noise
    assert noise is not None and noise.drawn == drawn + of_top * STEPS
    if name.startswith("asynchronous"):
        assert client.uploads.max() == 2 * 3


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", SYSTEMS)
def test_noise_is_calibrated_to_all_that_a_run_releases(name: str) -> None:
    more, releases, _ = SYSTEMS[name]
    strategy, _ = trained(3, {**DPZV, "epochs": 2, "epsilon": 0.7, "delta": 1e-6, **more})
    figures = strategy.figures()
    assert figures["epochs"] == 2.0
    assert figures["epsilon"] == pytest.approx(0.7, rel=1e-6)
    assert figures["delta"] == 1e-6
    assert gaussian(figures["noise_multiplier"], releases, 1e-6) == pytest.approx(0.7)
    config = resolve({**DPZV, **more})
    of_paper = epsilon_of_theorem_vi5(
        config.with_values({"delta": 1e-6}), ROWS, figures["noise_multiplier"], 2 * 3 * STEPS
    )
    assert figures["epsilon_of_paper"] == pytest.approx(of_paper)


@pytest.mark.parametrize(
    ("keys", "multiplier"),
    [
        ({"top_model": "sum", "embedding_size": "auto"}, 66.7),
        ({"perturbs": "all", "server_update": "zeroth-order"}, 33.4),
    ],
)
def test_noise_of_20_epochs_of_mnist_at_epsilon_1(keys: dict[str, Any], multiplier: float) -> None:
    """2 * 3.73 sqrt(releases of a record): 80 scalars of four parties, or 20 that are joint."""
    _, counted = scalar_log(60_000, epsilon=1.0, delta=1e-5, batch_size=2048, epochs=20, **keys)
    planned = 20 * 4 * 30
    assert counted.steps_allowed(planned, 4, 4, keys.get("top_model") != "sum") == planned
    assert counted.multiplier == pytest.approx(multiplier, abs=0.05)


def test_a_single_party_has_one_scalar_and_one_step() -> None:
    strategy, _ = trained(1, {**DPZV, "epochs": 2, "noise-multiplier": 9.0})
    assert strategy.figures()["epsilon"] == pytest.approx(gaussian(9.0, 2 * 2))


@pytest.mark.parametrize(("multiplier", "noise_seed"), [(2.0, 0), (0.0, -1), (0.0, 0)])
def test_noise_that_is_known_or_none_is_worth_no_epsilon(
    run: Start, multiplier: float, noise_seed: int
) -> None:
    given = {"noise-multiplier": multiplier, "noise-seed": noise_seed}
    summary = run(2, {**DPZV, **given, "epochs": 1}).summary
    assert (summary["epsilon"], summary["delta"], summary["epsilon_of_paper"]) == (None,) * 3
    assert not {"epsilon_secret_batches", "epsilon_protects"} & summary.keys()
    assert summary["noise_multiplier"] == multiplier
    assert "epsilon" not in headline(summary)


def test_a_headline_says_what_its_epsilon_is_of(run: Start) -> None:
    summary = run(2, {**DPZV, "epochs": 1}).summary
    assert "epsilon_secret_batches" not in summary
    first, second = headline(summary).splitlines()
    assert "epsilon 1 at delta 1e-05" in first
    assert second == (
        f"epsilon protects: labels of the training rows. relation: {GUARANTEE.relation}. "
        f"adversary: {EVERYONE}."
    )


def test_a_baseline_that_learns_without_scalars_refuses_noise_on_them(run: Start) -> None:
    keys = {**DPZV, "privacy": "scalar", "estimator": "zeroth-order", "epsilon": 1.0, "epochs": 1}
    for strategy in ("frozen", "local-only", "centralised"):
        with pytest.raises(ConfigError, match=f"strategy = '{strategy}' .*Leave `privacy` out"):
            run(2, {**keys, "strategy": strategy})


# --- no row is in more releases than its budget allows ------------------------------------------


def test_an_answer_beyond_the_budget_is_not_counted_and_not_given(tmp_path: Path) -> None:
    log, counted = scalar_log(6, epsilon=1.0, batch_size=3, epochs=1)
    assert counted.steps_allowed(2 * 2, 2, 1, True) == 4
    log.keep(tmp_path / "releases.journal", "a run")
    assert counted.most == 2 * 2
    first, second = (0, window([0, 1, 2], [3])), (0, window([3, 4, 5], [3]))
    assert log.permits_answers([first]) and log.permits_answers([first])
    taken, size = counted.taken.copy(), (tmp_path / "releases.journal").stat().st_size
    assert gaussian(counted.multiplier, 4) == counted.figures()["epsilon"] == pytest.approx(1.0)
    for again in (first, (1, window([5, 4, 2], [3])), (1, window([3, 2], [1, 1]))):
        assert not log.permits_answers([again])
    assert np.array_equal(counted.taken, taken)
    assert (tmp_path / "releases.journal").stat().st_size == size
    assert counted.released == 2
    assert log.permits_answers([second])
    # Whoever goes on from the journal has the same budget left.
    log_after, after = scalar_log(6, epsilon=1.0, batch_size=3, epochs=1)
    after.steps_allowed(2 * 2, 2, 1, True)
    log_after.keep(tmp_path / "releases.journal")
    assert np.array_equal(after.taken, counted.taken)
    assert not log_after.permits_answers([first]) and log_after.permits_answers([second])
    assert not log_after.permits_answers([second])
    assert after.figures()["epsilon"] == pytest.approx(1.0)
    # A secret sample of two steps may have a row twice, and a group is refused as a whole.
    counted.most, counted.top = 5, 0
    counted.taken[:] = 3
    assert not log.permits_answers([(0, window([1, 2, 2, 2], [2, 1, 1]))])
    assert log.permits_answers([(0, window([1, 2, 2], [2, 1]))])
    assert not log.permits_answers([(party, window([1], [1])) for party in range(2)])
    assert counted.taken.tolist() == [3, 4, 5, 3, 3, 3]


def test_parties_get_zeros_and_nobody_learns_beyond_the_budget() -> None:
    """Some parties take over steps of slower ones, and are with some rows more than all planned."""
    keys = {**DPZV, "epochs": 3, "epsilon": 1.0, "delay": "straggler", "window": 4}
    client: Any = Watching()
    strategy, _ = trained(3, keys, client)
    run, figures = strategy.run, strategy.figures()
    scalars = np.concatenate([each for got in client.scalars.values() for each in got])
    refused = int((scalars == 0).sum())
    assert client.uploads.max() > 3 * 3  # which would be more than is paid for
    assert 0 < refused < len(scalars) == run.budget.answered == 3 * 3 * STEPS
    assert isinstance(run.accountant, ScalarAccountant)
    assert run.accountant.released == run.holder.steps == len(scalars) - refused
    assert run.holder.noise is not None and run.holder.noise.drawn == 2 * (len(scalars) - refused)
    assert run.accountant.taken.max() == run.accountant.most == 3 * 3 * 2
    assert figures["epsilon"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.one_by_day
@pytest.mark.parametrize("quorum", [1, 2])
def test_answers_that_say_nothing_leave_all_models_as_they_were(
    monkeypatch: pytest.MonkeyPatch, run: Start, quorum: int
) -> None:
    keys = {**DPZV, "epochs": 1, "epsilon": 1.0, "quorum": quorum}
    begun, learned = run(2, {**keys, "party-lr": 0.0, "server-lr": 0.0}), run(2, keys)
    steps_allowed = ScalarAccountant.steps_allowed

    def nothing_left(self: ScalarAccountant, *given: Any) -> int:
        allowed = steps_allowed(self, *given)
        self.most = 0
        return allowed

    monkeypatch.setattr(ScalarAccountant, "steps_allowed", nothing_left)
    refused = run(2, keys)
    assert refused.summary["epsilon"] == 0.0 and refused.summary["epochs"] == 1.0
    for name in ("top", "party-0", "party-1"):
        for key, values in refused.parameters(name).items():
            np.testing.assert_array_equal(values, begun.parameters(name)[key])
            assert (values != learned.parameters(name)[key]).any()


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("more", "of_a_pass", "steps_of_a_pass"),
    [
        ({}, 2, STEPS),
        ({"quorum": 2}, 3, 2 * STEPS),
        ({"quorum": 2, "perturbs": "all"}, 2, 2 * STEPS),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [3, 8])
def test_a_run_stops_at_the_last_whole_pass_that_its_budget_allows(
    run: Start, window: int, more: dict[str, Any], of_a_pass: int, steps_of_a_pass: int
) -> None:
    budget = {"epsilon": 2.0, "noise-multiplier": 16.0}
    keys = {**DPZV, **budget, "epochs": 20, "window": window, "eval-every": 20, **more}
    client: Any = Watching()
    finished = run(2, keys, client)
    summary = finished.summary
    passes = summary["steps"] * (2 if "quorum" in more else 1) // steps_of_a_pass
    releases = passes * of_a_pass
    assert 1 < passes < 20
    assert summary["epochs"] == pytest.approx(passes * steps_of_a_pass / 2 / STEPS, abs=1e-3)
    assert summary["epsilon"] == gaussian(16.0, releases) <= 2.0
    assert gaussian(16.0, releases + of_a_pass) > 2.0
    scalars = np.concatenate([each for got in client.scalars.values() for each in got])
    assert len(scalars) == passes * steps_of_a_pass and scalars.all()  # and none was refused
    assert summary["failure"] is None
    assert finished.history[-1]["epoch"] == summary["epochs"]


# --- as if mini-batches were secret -------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("top", [True, False])
def test_noise_for_secret_batches_is_calibrated_to_scalars_and_top_model(top: bool) -> None:
    steps = 2 * 3 * STEPS
    budget: dict[str, Any] = {"epsilon": 0.5, "delta": 1e-3}
    _, counted = scalar_log(**SECRET, **budget)
    assert counted.steps_allowed(steps, 3, 1, top) == steps
    # Two releases over one sample are as one of less noise.
    each = counted.multiplier / (math.sqrt(2) if top else 1)
    assert 0.99 * 0.5 <= epsilon_of_scalars(counted.config, ROWS, each, steps) <= 0.5
    _, counted = scalar_log(**SECRET, **budget, noise_multiplier=counted.multiplier)
    assert steps <= counted.steps_allowed(9 * steps, 3, 1, top) <= 1.02 * steps


@pytest.mark.parametrize("top", [True, False])
def test_noise_of_the_paper_is_reported_with_what_it_spends(top: bool) -> None:
    log, counted = scalar_log(**PAPER, epsilon=5.0, delta=1e-3)
    assert counted.steps_allowed(72, 3, 1, top) == 72
    assert counted.multiplier == calibrated_by_theorem_vi5(counted.config, ROWS, 72)
    assert log.permits_answers([(0, window([0, 1, 2] * 36, [2, 1] * 36))])
    figures = counted.figures()
    assert figures["epsilon_of_paper"] == pytest.approx(5.0)
    spent = epsilon_of_scalars(counted.config, ROWS, counted.multiplier, 72)
    assert figures["epsilon_secret_batches"] == spent != pytest.approx(5.0, rel=0.01)
    if top:  # which learns from labels without noise, for which no epsilon holds
        assert figures["epsilon"] is None and "epsilon_protects" not in figures
    else:
        assert figures["epsilon"] == pytest.approx(gaussian(counted.multiplier, 36, 1e-3))


@pytest.mark.parametrize("kind", [{}, nightly(SECRET), nightly(PAPER)])
@pytest.mark.parametrize("more", [{}, {"noise_multiplier": 40.0}])
def test_scalar_noise_is_scaled_by_the_rows_where_more_are_asked_for(
    kind: dict[str, Any], more: dict[str, Any]
) -> None:
    found = []
    for batch in (ROWS, 100 * ROWS):
        budget: dict[str, Any] = {"batch_size": batch, "epochs": 3, "epsilon": 2.0, "delta": 1e-3}
        log, counted = scalar_log(**kind, **budget, **more)
        sampling = sampling_of(counted.config, ROWS)
        assert sampling.divisors(np.array([ROWS], np.int32)).tolist() == [ROWS]
        counted.steps_allowed(6, 2, 1, True)
        assert log.permits_answers([(0, window(list(range(ROWS)), [ROWS]))])
        found.append(counted.figures())
    assert found[0] == found[1] and found[0]["noise_multiplier"] > 0


def test_epsilon_for_who_knows_the_mini_batches() -> None:
    log, counted = scalar_log(4, **SECRET, batch_size=2, noise_multiplier=3.0, delta=1e-4)
    counted.steps_allowed(6, 2, 1, False)
    assert counted.figures()["epsilon"] == counted.figures()["epsilon_secret_batches"] == 0.0
    for party, ids in enumerate(([0, 3, 3], [3, 1, 3])):
        assert log.permits_answers([(party, window(ids, [2, 0, 1]))])
    figures = counted.figures()
    # Row 3 was in four scalars, of both parties; all six count for those who do not know that.
    assert figures["epsilon"] == pytest.approx(gaussian(3.0, 4, 1e-4))
    assert figures["epsilon_secret_batches"] == epsilon_of_scalars(counted.config, 4, 3.0, 6)


def test_mini_batches_may_all_have_been_empty() -> None:
    log, counted = scalar_log(4, **SECRET, batch_size=1, noise_multiplier=3.0, delta=1e-4)
    counted.steps_allowed(2, 1, 1, False)
    assert log.permits_answers([(0, window([], [0, 0]))])
    figures = counted.figures()
    assert figures["epsilon"] == 0.0  # it is known that no row was in them
    assert figures["epsilon_secret_batches"] == epsilon_of_scalars(counted.config, 4, 3.0, 2) > 0


# --- Poisson mini-batches of more rows than there are --------------------------------------------


@pytest.mark.parametrize("privacy", ["scalar", "none"])
def test_no_label_that_epsilon_covers_ends_a_run_by_its_loss(privacy: str) -> None:
    # A party makes a row's outputs so large that the loss is finite with one of two labels only.
    keys = {"epsilon": 1.0} if privacy == "scalar" else {"privacy": "none", "sampling": "shuffle"}
    config = resolve({**DPZV, "test-fraction": 0.0, "validation-fraction": 0.0, **keys})
    labels = load_labels(config)
    assert labels.repeats
    config = sized(config, len(labels.train))
    outputs = torch.where(torch.from_numpy(labels.test) > 0, 3e38, -3e38)[:, None]
    loss = loss_of(config, labels.train, 2, 1.0, torch.device("cpu"))

    def evaluated(few: int) -> float | None:
        said = outputs.clone()
        said[:few] *= -1  # as if the labels of these rows were the other class
        none = np.zeros((len(said), 0), np.float32)
        held = HeldOut(config, labels, {0: slice(0, 1)}, none, None, torch.device("cpu"))
        top: Any = lambda rows: said  # noqa: E731
        return held.metrics(top, loss, None)[1].loss

    if privacy == "scalar":
        assert evaluated(0) is None and evaluated(2) is None
    else:  # the control
        assert evaluated(0) == 0
        with pytest.raises(DivergedError):
            evaluated(2)


def test_an_order_whose_uploads_nobody_counts_is_not_sent() -> None:
    class Another(messages.Turn):
        kind = "query.another"

    log, _ = scalar_log(4, noise_multiplier=3.0)
    log.ordered(0, messages.CheckpointOrder(exchange=1, number=1))  # it uploads nothing
    with pytest.raises(TypeError, match="Another may upload rows that nobody counts"):
        log.ordered(0, Another(exchange=1))


def test_the_accountant_is_that_of_the_privacy() -> None:
    kinds = {"none": Accountant, "perturbed-embedding": EmbeddingAccountant}
    for privacy, kind in kinds.items():
        assert type(accountant_of(resolve({"privacy": privacy}), 10)) is kind
    assert type(accountant_of(resolve(DPZV), 10)) is ScalarAccountant
    without, none = accountant_of(resolve({}), 10), mechanism_of(resolve({}))
    assert without.steps_allowed(77, 2, 1, True) == 77
    assert none.scalar_noise(without) is None and none.release_log(without) is None


def test_a_group_is_refused_as_a_whole() -> None:
    log, counted = scalar_log(4, epsilon=1.0, batch_size=2, epochs=1, quorum=2)
    counted.steps_allowed(2 * 2, 2, 2, True)
    assert counted.most == 2 + 1
    both = [(party, window([0, 1], [2])) for party in range(2)]
    assert log.permits_answers(both)
    assert not log.permits_answers([(party, window([1, 2], [2])) for party in range(2)])
    assert counted.taken.tolist() == [3, 3, 0, 0]


@pytest.mark.nightly
def test_noise_of_the_paper_holds_where_no_top_model_learns(run: Start) -> None:
    of_top = {"top-model": "sum", "embedding-size": "auto"}
    client: Any = Watching()
    keys = {**DPZV, **PAPER, **of_top, "epochs": 3, "epsilon": 5.0}
    summary = run(3, keys, client).summary
    holds = gaussian(summary["noise_multiplier"], int(client.uploads.max()))
    assert summary["epsilon"] == pytest.approx(holds)
