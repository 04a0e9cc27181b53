"""Zeroth-order estimates against true gradients, and every half of the exchange by hand."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.conftest import MANY, Start
from tests.pairwise import pairwise
from tests.stepping import by_differences, by_gradient
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.models import top_layers
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.losses import loss_per_row
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.tops import build_top
from vfl_flower.party.learner import Learner
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.directions import window as directions_module
from vfl_flower.protocol.directions.differences import values_of_pairs
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.ends import Arrival, Reading
from vfl_flower.protocol.estimators.zeroth_order import Pair, ZerothOrder
from vfl_flower.protocol.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.messages import TrainOrder

SECRET = b"secret"
KEY = SECRET + b"|1"  # of a party's first message
LENGTHS = [4, 0, 5, 2]
ROWS = sum(LENGTHS)
SIZE, PARTIES, OUTPUTS = 3, 2, 3
MINE = slice(SIZE, 2 * SIZE)

DIRECTIONS = ["gaussian", "sphere", "scaled-sphere"]
DIFFERENCES = ["one-sided", "two-sided"]
OPTIMIZERS = ["sgd", "momentum", "adam"]
every_direction = pytest.mark.parametrize("directions", DIRECTIONS)
both_differences = pytest.mark.parametrize("differences", DIFFERENCES)


def config_of(**keys: Any) -> RunConfig:
    """Of parties with smooth, small models, which are far apart at w and at w + mu u."""
    keys = {"bottom_hidden": 4, "embedding_activation": "tanh", "mu": 0.1, **keys}
    keys = {"embedding_size": SIZE, **keys}
    keys = {"estimator": "zeroth-order", "server_update": "zeroth-order", **keys}
    return sized(resolve({key.replace("_", "-"): value for key, value in keys.items()}), MANY)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def party_of(config: RunConfig, rows: int = ROWS) -> tuple[Learner, Tensor]:
    """A party as its estimator sees it, and the features of its training rows."""
    image = config.models.bottom in ("cnn", "lstm")
    shape = (4, 4) if image else (5,)
    x = torch.randn(rows, *shape, generator=generator(2))
    party = Party(config, 0, PARTIES, OUTPUTS, FeatureBlock(x.numpy(), x[:0].numpy(), "")).learner
    party.secret = SECRET
    return party, x


def model_of(config: RunConfig, rows: int = ROWS) -> tuple[BottomModel, Tensor]:
    """A party's model, and the features of its training rows."""
    party, x = party_of(config, rows)
    return party.model, x


def order_of(steps: int, exchange: int = 1) -> TrainOrder:
    return TrainOrder(exchange=exchange, epoch=0, first=0, steps=steps, coordinated=False)


def window_of(lengths: list[int]) -> Window:
    """Steps on the first rows, one after the other."""
    return Window(np.arange(sum(lengths), dtype=np.int32), np.array(lengths, np.int32))


def learn(
    party: Learner, optimizer: torch.optim.Optimizer, u: Tensor | None, scalars: Tensor
) -> None:
    """A party's steps, where the directions ``u`` of its upload are still at hand, or not."""
    party.optimizer, party.trace = optimizer, u
    order, window = order_of(len(scalars)), window_of([0] * len(scalars))
    ZerothOrder(party.config).update(party, {"difference": scalars}, order, window)


def holder_of(
    config: RunConfig, h: Tensor, labels: Tensor, noise: ScalarNoise | None = None
) -> LabelHolder:
    """A label holder with these rows in its table."""
    known = Labels(labels.numpy(), labels[:0].numpy(), ("a", "b", "c"), "")
    holder = LabelHolder(config, known, dict.fromkeys(range(PARTIES), SIZE), noise)
    holder.table.rows[:] = h
    return holder


def answer(holder: LabelHolder, pair: Pair, lengths: list[int]) -> Tensor:
    """The scalars that the second party gets for a pair of the first rows."""
    assert holder.columns[1] == MINE
    window = window_of(lengths)
    arrival = Arrival(1, window, False, Reading(pair[1], pair), window)
    joint = holder.sampling.join([window])
    feedback = ZerothOrder(holder.config).answer(holder, [arrival], joint)
    assert feedback.keys() == {1} and feedback[1].keys() == {"difference"}
    return feedback[1]["difference"]


def others(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Embeddings of all parties, and labels."""
    h = torch.randn(rows, PARTIES * SIZE, generator=generator(3))
    return h, torch.randint(OUTPUTS, (rows,), generator=generator(4))


def top_of(config: RunConfig) -> TopModel:
    return build_top(config, [SIZE] * PARTIES, OUTPUTS)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def at(model: nn.Module, shift: Tensor, x: Tensor) -> Tensor:
    """A model's outputs where its parameters, in a row, are shifted by so much."""
    parts = shift.split([p.numel() for p in model.parameters()])
    shifted = {
        name: p.detach() + part.view_as(p)
        for (name, p), part in zip(model.named_parameters(), parts, strict=True)
    }
    return functional_call(model, shifted, (x,))


def drawn(config: RunConfig, model: nn.Module, steps: int = len(LENGTHS)) -> Tensor:
    """The directions of a window, [steps, d]."""
    return Directions(config.estimator, KEY, model).stack(steps)


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directions_module, "_STACK", 0)


# --- identity 3: what the estimates estimate ----------------------------------------------------


def differences_of(
    config: RunConfig, model: BottomModel, x: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """A window with the same mini-batch in every step: the scalars, and the directions."""
    rows = len(x)
    h, labels = others(rows)
    lengths = [rows] * steps
    many = x.repeat(steps, *[1] * (x.dim() - 1))
    pair, u = values_of_pairs(model, many, lengths, Directions(config.estimator, KEY, model))
    assert u is not None
    holder = holder_of(config, h.repeat(steps, 1), labels.repeat(steps))
    holder.optimizer = None  # its own steps are not what is looked at
    return answer(holder, pair, lengths), u


def true_gradient(config: RunConfig, model: BottomModel, x: Tensor) -> Tensor:
    h, labels = others(len(x))
    h[:, MINE] = model(x)
    loss = loss_per_row(top_of(config)(h), labels).mean()
    return torch.cat([g.ravel() for g in torch.autograd.grad(loss, list(model.parameters()))])


@every_direction
@both_differences
def test_mean_of_many_estimates_is_the_gradient(directions: str, differences: str) -> None:
    config = config_of(directions=directions, differences=differences, mu=1e-2)
    party, x = party_of(config, rows=6)
    model = party.model
    gradient, before, steps = true_gradient(config, model, x), flat(model), 6000
    scalars, u = differences_of(config, model, x, steps)
    learn(party, build_optimizer(config, model, 1.0 / steps), u, scalars)
    estimate = before - flat(model)
    # d = 39: the mean of S estimates is off by sqrt(d / S), here 8 %, of the gradient's length.
    assert torch.cosine_similarity(estimate, gradient, dim=0) > 0.99
    assert estimate.norm() / gradient.norm() == pytest.approx(1.0, abs=0.05)


# --- directions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directions", "phi"), [("gaussian", 1), ("sphere", 39), ("scaled-sphere", 1)]
)
def test_directions_have_the_moments_of_their_kind(directions: str, phi: int) -> None:
    config = config_of(directions=directions)
    model, _ = model_of(config)
    steps = 40_000
    u = drawn(config, model, steps)
    assert u.shape == (steps, 39)
    assert Directions(config.estimator, KEY, model).set.phi == phi
    norms = u.norm(dim=1)
    if directions != "gaussian":
        radius = 1.0 if directions == "sphere" else 39**0.5
        torch.testing.assert_close(norms, torch.full_like(norms, radius))
    # phi E[u u'] is the identity, which makes phi <g, u> u an estimate of g.
    second = phi * (u.T @ u) / steps
    assert (second - torch.eye(39)).abs().max() < 5 * (2 / steps) ** 0.5
    assert (phi**0.5 * u.mean(0)).abs().max() < 5 / steps**0.5
    if directions == "gaussian":
        assert (u.pow(4).mean() - 3).abs() < 5 * (96 / u.numel()) ** 0.5


@every_direction
def test_directions_are_drawn_again_one_by_one(
    directions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(directions=directions)
    model, _ = model_of(config)
    whole = drawn(config, model, 5)
    monkeypatch.setattr(directions_module, "_BLOCK", 7)
    again = Directions(config.estimator, KEY, model)
    for step in (0, 1, 1, 4, 2, 3, 0):  # in any order, as often as it is wanted
        tensors = [torch.zeros_like(p) for p in again.parameters]
        again.add(step, tensors, 3.0)
        found = torch.cat([tensor.ravel() for tensor in tensors])
        torch.testing.assert_close(found, 3.0 * whole[step])
    assert torch.equal(again.stack(5), whole)


def test_directions_differ_between_keys_and_steps() -> None:
    config = config_of()
    model, _ = model_of(config)
    keys: Any = b"one", b"other", b"one|1"
    keys = *keys, b"key 67792", b"key 90987"  # the lowest 32 bits of their seeds agree
    all_drawn = torch.cat([Directions(config.estimator, key, model).stack(3) for key in keys])
    for number, one in enumerate(all_drawn):
        for other in all_drawn[:number]:
            assert not torch.isclose(one, other, rtol=1e-6).any()


# --- the party ----------------------------------------------------------------------------------


@both_differences
@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn", "lstm", "binarised", "scorecard"])
def test_pair_is_the_embeddings_at_both_ends_of_each_step(kind: str, differences: str) -> None:
    config = config_of(bottom_model=kind, differences=differences, mu=0.3)
    model, x = model_of(config)
    u = drawn(config, model)
    pair, stacked = values_of_pairs(model, x, LENGTHS, Directions(config.estimator, KEY, model))
    assert (stacked is None) == (kind == "lstm")
    other = -0.3 if differences == "two-sided" else 0.0
    for found, mu in zip(pair, (0.3, other), strict=True):
        expected = [
            at(model, mu * u[s], rows) for s, rows in enumerate(x.split(LENGTHS)) if len(rows)
        ]
        torch.testing.assert_close(found, torch.cat(expected).detach(), rtol=1e-5, atol=1e-5)
    assert (pair[0] - pair[1]).abs().max() > 0.01


@pairwise(
    lengths=[LENGTHS, [0, 0], [0], [ROWS], [1] * ROWS],
    kind=["linear", "mlp", "cnn"],
    differences=DIFFERENCES,
    optimizer=OPTIMIZERS,
)
def test_stacked_steps_are_those_taken_one_after_the_other(
    kind: str, lengths: list[int], differences: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        bottom_model=kind, differences=differences, optimizer=optimizer, directions="sphere"
    )
    scalars = torch.randn(len(lengths), generator=generator(5))
    pairs, models = [], []
    for in_place in (False, True):
        if in_place:
            one_after_the_other(monkeypatch)
        party, _ = party_of(config, sum(lengths))
        party.optimizer = build_optimizer(config, party.model, 0.01)
        estimator, window = ZerothOrder(config), window_of(lengths)
        for exchange in range(2):  # the optimizer's state passes on
            order = order_of(len(lengths), exchange)
            sent = estimator.embed(party, order, window)
            pairs.append([sent[name] for name in estimator.block_names()])
            assert (party.trace is None) == (in_place or len(lengths) == 1)
            estimator.update(party, {"difference": scalars}, order, window)
        models.append(party.model)
    for ours, theirs in zip(pairs[:2], pairs[2:], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=1e-4, atol=1e-5)


@every_direction
@both_differences
def test_parameters_are_restored_to_rounding(
    directions: str, differences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(directions=directions, differences=differences)
    model, x = model_of(config)
    before = flat(model)
    values_of_pairs(model, x, LENGTHS, Directions(config.estimator, KEY, model))
    assert torch.equal(flat(model), before)
    one_after_the_other(monkeypatch)
    for _ in range(10):
        values_of_pairs(model, x, LENGTHS, Directions(config.estimator, KEY, model))
    torch.testing.assert_close(flat(model), before, rtol=0, atol=1e-5)


@pairwise(differences=DIFFERENCES, regulariser=["l2", "nonconvex"], in_place=[True, False])
def test_regulariser_adds_its_own_differences(
    differences: str, regulariser: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"regulariser": regulariser, "regulariser_weight": 0.3, "directions": "scaled-sphere"}
    config = config_of(differences=differences, **keys)
    party, _ = party_of(config)
    model = party.model
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # so that the two regularisers are far apart
    scalars = torch.tensor([0.5, 0.0, -1.0, 2.0])

    def g(w: Tensor) -> float:
        squares = w.double().square()
        return float((squares / (2 if regulariser == "l2" else 2 * (1 + squares))).sum())

    w, mu = flat(model), 0.1
    expected = w.clone()
    for scalar, u in zip(scalars, drawn(config, model), strict=True):
        if differences == "two-sided":
            own = (g(w + mu * u) - g(w - mu * u)) / (2 * mu)
        else:
            own = (g(w + mu * u) - g(w)) / mu
        assert abs(own) > 0.05
        expected -= 0.01 * (scalar + 0.3 * own) * u
    if in_place:
        one_after_the_other(monkeypatch)
    learn(party, build_optimizer(config, model, 0.01), None, scalars)
    torch.testing.assert_close(flat(model), expected, rtol=1e-4, atol=1e-5)


@both_differences
def test_each_embedding_of_a_pair_has_its_own_noise(differences: str) -> None:
    keys = {"privacy": "perturbed-embedding", "embedding_bound": 100.0, "noise_seed": 0}
    config = config_of(differences=differences, embedding_activation="none", **keys)
    model, x = model_of(config)
    perturb = Perturbation(config.privacy, b"secret", 1, tuple(LENGTHS), last=1)
    clean, _ = values_of_pairs(model, x, LENGTHS, Directions(config.estimator, KEY, model))
    noisy, _ = values_of_pairs(model, x, LENGTHS, Directions(config.estimator, KEY, model), perturb)
    noise = [one - other for one, other in zip(noisy, clean, strict=True)]
    zeros = torch.zeros(ROWS, SIZE)
    torch.testing.assert_close(noise[0], perturb.of_pair()(1, zeros), rtol=0, atol=0.03)
    torch.testing.assert_close(noise[1], perturb(1, zeros), rtol=0, atol=0.03)
    assert not torch.isclose(noise[0], noise[1], atol=0.1).all()


# --- the label holder ---------------------------------------------------------------------------


def test_scalars_are_divided_by_what_the_sampling_says() -> None:
    (h, labels), lengths = others(), [4, 5, 2]
    pair = h[:, :SIZE], h[:, MINE]
    found = [
        answer(holder_of(config_of(batch_size=4, **keys), h, labels), pair, lengths)
        for keys in ({}, {"sampling": "poisson"})
    ]
    torch.testing.assert_close(4 * found[1], torch.tensor(lengths) * found[0])
    assert found[0].abs().min() > 0.01


def of_rows_together(outputs: Tensor, labels: Tensor) -> Tensor:
    """A user's loss, in which each row's loss depends on the other rows."""
    losses = loss_per_row(outputs, labels)
    return losses / losses.mean()


@pairwise(differences=DIFFERENCES, kind=["plain", "noisy", "weighted", "own loss"], at_once=[1, 2])
def test_parties_in_step_are_answered_together_as_one_by_one(
    differences: str, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"differences": differences, "batch_size": 4}
    if kind == "noisy":
        keys |= {"privacy": "scalar", "noise_multiplier": 1.0, "noise_seed": 3, "clip": 0.5}
    if kind == "weighted":
        keys |= {"class_weights": "balanced"}
    config, (h, labels) = config_of(**keys), others()
    noisy = ScalarNoise(config, 1.0) if kind == "noisy" else None
    holder = holder_of(config, h, labels, noisy)
    width = holder.top.first(h).shape[1]
    monkeypatch.setattr(top_layers, "_AT_ONCE", at_once * ROWS * max(width, OUTPUTS))
    if kind == "own loss":
        holder.loss = replace(holder.loss, own=of_rows_together)
    pairs = torch.randn(PARTIES, 2, ROWS, SIZE, generator=generator(6)).unbind()
    window = window_of(LENGTHS)
    arrivals = [
        Arrival(party, window, True, Reading(pair[1], tuple(pair.unbind())), window)
        for party, pair in enumerate(pairs)
    ]
    estimator, found = ZerothOrder(config), []
    for groups in ([arrivals], [[each] for each in arrivals]):
        if noisy:
            noisy.drawn = 0
        answers = [estimator._scalars(holder, group, h, labels) for group in groups]
        found.append([each[m]["difference"] for each in answers for m in each])
    assert [each.shape for each in found[0]] == PARTIES * [(len(LENGTHS),)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0][0], found[0][1], atol=1e-2)


@pairwise(
    differences=DIFFERENCES,
    combine=["concat", "mean"],
    in_place=[False, True],
    optimizer=OPTIMIZERS,
)
def test_steps_of_the_top_model_by_hand(
    differences: str, combine: str, in_place: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"combine": combine, "optimizer": optimizer, "differences": differences}
    config = config_of(top_hidden=4, directions="sphere", **keys)
    if in_place:
        one_after_the_other(monkeypatch)
    top, (h, labels) = top_of(config), others()
    by_hand, before = nn.Parameter(flat(top)), copy.deepcopy(top)
    divisors = [4, 1, 5, 2]
    ours = build_optimizer(config, top, 0.01)
    directions_of_top = Directions(config.estimator, KEY, top)
    losses = by_differences(directions_of_top, top, ours, h, labels, LENGTHS, divisors)

    theirs = build_optimizer(config, nn.ParameterList([by_hand]), 0.01)
    two_sided, end = differences == "two-sided", 0
    for step, u in enumerate(drawn(config, top)):
        rows = slice(end, end + LENGTHS[step])
        end = rows.stop
        f = torch.zeros(2)
        if LENGTHS[step]:
            ends = (at(before, mu * u, h[rows]) for mu in (0.1, -0.1 if two_sided else 0.0))
            f = torch.stack([loss_per_row(end, labels[rows]).sum() for end in ends])
            f /= divisors[step]
        scalar = (f[0] - f[1]) / (0.2 if two_sided else 0.1)
        by_hand.grad = len(u) * scalar * u
        theirs.step()
        torch.testing.assert_close(losses[step], f.mean() if two_sided else f[1])
    torch.testing.assert_close(flat(top), by_hand.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("combine", ["concat", "mean"])
def test_a_window_without_rows_is_answered_by_zeros(combine: str) -> None:
    config = config_of(combine=combine, optimizer="sgd", sampling="poisson", batch_size=4)
    holder, (h, _) = holder_of(config, *others()), others(0)
    before = flat(holder.top)
    assert answer(holder, (h[:, MINE], h[:, MINE]), [0]).tolist() == [0.0]
    (losses,) = holder.losses  # of the top model, which has had its step by then
    assert losses.tolist() == [0.0]
    assert holder.steps == 1
    torch.testing.assert_close(flat(holder.top), before)


def test_a_top_model_without_parameters_only_tells_its_losses() -> None:
    config = config_of(top_model="sum")
    top, (h, labels) = build_top(config, [SIZE] * PARTIES, SIZE), others()
    of_four = [4, 4, 4, 4]
    directions = Directions(config.estimator, KEY, top)
    losses = by_differences(directions, top, None, h, labels, LENGTHS, of_four)
    rows = loss_per_row(h[:, :SIZE] + h[:, SIZE:], labels)
    expected = [part.sum() / 4 for part in rows.split(LENGTHS)]
    torch.testing.assert_close(losses, torch.stack(expected))


# --- one difference for all ---------------------------------------------------------------------


def joint_answer(holder: LabelHolder, pairs: dict[int, Pair], lengths: list[int]) -> Tensor:
    """The scalars that all parties get for pairs of the same rows."""
    window = window_of(lengths)
    arrivals = [
        Arrival(party, window, True, Reading(pair[1], pair), window)
        for party, pair in pairs.items()
    ]
    answers = holder.answer(arrivals)
    assert answers.keys() == pairs.keys()
    one, *others = (each["difference"] for each in answers.values())
    for other in others:
        np.testing.assert_array_equal(other, one)
    return torch.from_numpy(one)


def joint_config(**keys: Any) -> RunConfig:
    of_all = {"perturbs": "all", "strategy": "synrevel", "noise_seed": 0}
    return config_of(**of_all, optimizer="sgd", server_lr=0.3, **keys)


@pairwise(
    differences=DIFFERENCES,
    in_place=[True, False],
    combine=["concat", "mean"],
    server_update=["zeroth-order", "first-order"],
    clip=[None, 0.3],
)
def test_a_joint_difference_by_hand(
    differences: str,
    in_place: bool,
    combine: str,
    server_update: str,
    clip: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {"differences": differences, "combine": combine, "server_update": server_update}
    config = joint_config(**keys)
    noise = None
    if clip:
        private = {"clip": clip, "noise_multiplier": 0.0, "top_clip": 1e9}
        config = joint_config(**keys, privacy="scalar", **private)
        noise = ScalarNoise(config, 0.0)
    if in_place:
        one_after_the_other(monkeypatch)
    h, labels = others()
    holder = holder_of(config, h, labels, noise)
    halves = torch.randn(2, 2, ROWS, SIZE, generator=generator(6))
    pairs: dict[int, Pair] = {m: (halves[m, 0], halves[m, 1]) for m in range(PARTIES)}
    before, lengths = copy.deepcopy(holder.top), [4, 5, 2]
    key = holder.secret + b"|1"
    found = joint_answer(holder, pairs, lengths)

    of_top = server_update == "zeroth-order"
    u = Directions(config.estimator, key, before).stack(len(lengths))
    ends = (0.1, -0.1 if differences == "two-sided" else 0.0)
    expected, row, clipped = [], 0, 0
    for step, length in enumerate(lengths):
        rows, of_rows = slice(row, row + length), []
        row += length
        for end, mu in enumerate(ends):
            embedded = torch.cat([halves[m, end, rows] for m in range(PARTIES)], dim=1)
            outputs = at(before, (mu if of_top else 0.0) * u[step], embedded)
            of_rows.append(loss_per_row(outputs, labels[rows]))
        change = (of_rows[0] - of_rows[1]) / (ends[0] - ends[1])
        if clip:
            clipped += int((change.abs() > clip).sum())
            change = change.clamp(-clip, clip)
        expected.append(change.mean())
    assert bool(clipped) == bool(clip)
    torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=1e-3, atol=1e-4)
    assert holder.steps == len(lengths)
    if of_top:  # it steps by this scalar along its own directions
        due = flat(before) - 0.3 * found @ u
        torch.testing.assert_close(flat(holder.top), due, rtol=1e-4, atol=1e-5)
    else:  # as ever, by what the table holds
        assert holder.optimizer is not None
        theirs = build_optimizer(config, before, 0.3)
        by_gradient(before, theirs, h, labels, lengths, lengths, rows_wanted=False)
        torch.testing.assert_close(flat(holder.top), flat(before), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"strategy": "cascaded"}, "^perturbs = 'all' .* synchronous system, with a quorum of all"),
        ({"strategy": "dpzv"}, "^perturbs = 'all' .* synchronous system, with a quorum of all 3"),
        ({"strategy": "split-nn"}, "^perturbs = 'all' is for differences .* Leave `perturbs`"),
        ({"strategy": "ef-vfl"}, "^perturbs = 'all' is for differences .* Leave `perturbs`"),
    ],
    ids=str,
)
def test_a_joint_difference_needs_a_synchronous_system_of_zeroth_order(
    run: Start, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        run(3, {**keys, "perturbs": "all", "dataset": "breast-cancer"})
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


# --- what is sent -------------------------------------------------------------------------------


@both_differences
def test_a_lossy_codec_keeps_what_tells_a_pair_apart(differences: str) -> None:
    config = config_of(differences=differences, codec="top-k", keep=1.0, mu=1e-3)
    party, x = party_of(config)
    estimator, window = ZerothOrder(config), window_of(LENGTHS)
    sent = estimator.embed(party, order_of(len(LENGTHS)), window)
    one, other = (estimator.uplinks(torch.zeros(ROWS, SIZE)) for _ in range(2))
    reading = estimator.read(other.decode(one.encode(sent, window, ""), window), window)
    exact, _ = values_of_pairs(
        party.model, x, LENGTHS, Directions(config.estimator, KEY, party.model)
    )
    # Numbers are sent as float16. Its rounding of two embeddings would be as large as mu.
    change, found = (pair[0] - pair[1] for pair in (exact, reading.embeddings))
    assert (found - change).norm() < 1e-3 * change.norm()
    fresh = sum(exact) / 2 if differences == "two-sided" else exact[1]
    torch.testing.assert_close(reading.fresh, fresh, rtol=1e-3, atol=1e-3)


@pairwise(directions=DIRECTIONS, at_hand=[True, False], in_place=[True, False])
def test_window_of_plain_steps_by_hand(
    directions: str, at_hand: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(directions=directions)
    party, _ = party_of(config)
    model = party.model
    u, before = drawn(config, model), flat(model)
    scalars = torch.tensor([0.5, 0.0, -1.0, 2.0])
    phi = 39 if directions == "sphere" else 1
    if in_place:
        one_after_the_other(monkeypatch)
    learn(party, build_optimizer(config, model, 0.1), u if at_hand else None, scalars)
    expected = before - 0.1 * phi * (0.5 * u[0] - u[2] + 2 * u[3])
    torch.testing.assert_close(flat(model), expected, rtol=1e-4, atol=1e-5)


def row_loss(top: TopModel, h: list[float], label: int) -> float:
    return loss_per_row(top(torch.tensor([h])), torch.tensor([label])).item()


@both_differences
@pytest.mark.parametrize("clip", [None, 0.2])
def test_answer_by_hand(differences: str, clip: float | None) -> None:
    mu = 0.1
    config = config_of(differences=differences, mu=mu, sampling="poisson", batch_size=4)
    noise = None
    if clip:
        private = {"strategy": "dpzv", "noise-multiplier": 0.0, "clip": clip, "mu": mu}
        private |= {"sampling": "poisson", "calibration": "secret"}
        private |= {"batch-size": 4, "embedding-size": SIZE}
        config = resolve({**private, "differences": differences})
        noise = ScalarNoise(config, 0.0)
    top = top_of(config)
    h, labels = others()
    pair = tuple(torch.randn(2, ROWS, SIZE, generator=generator(6)).unbind())
    assert len(pair) == 2
    found = answer(holder_of(config, h, labels, noise), pair, LENGTHS)

    expected, row, clipped = [], 0, 0
    for length in LENGTHS:
        total = 0.0
        for _ in range(length):
            losses = [
                row_loss(top, [*h[row, :SIZE].tolist(), *half[row].tolist()], int(labels[row]))
                for half in pair
            ]
            difference = (losses[0] - losses[1]) / (2 * mu if differences == "two-sided" else mu)
            if clip and abs(difference) > clip:
                difference, clipped = clip if difference > 0 else -clip, clipped + 1
            total += difference
            row += 1
        expected.append(total / 4)  # as Poisson sampling has it
    assert expected[1] == 0.0  # a step without rows
    assert bool(clipped) == bool(clip)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("differences", "names", "kept"),
    [
        ("one-sided", ("perturbed", "embedding"), [2.0, 4.0]),
        ("two-sided", ("plus", "minus"), [1.5, 3.0]),
    ],
)
def test_what_a_pair_is_called_and_brings_to_the_table(
    differences: str, names: tuple[str, str], kept: list[float]
) -> None:
    config = config_of(differences=differences, embedding_size=2)
    estimator, table, window = ZerothOrder(config), torch.zeros(1, 2), window_of([1])
    assert estimator.block_names() == names
    pair = np.array([[1.0, 2.0]], np.float32), np.array([[2.0, 4.0]], np.float32)
    sent = dict(zip(names, pair, strict=True))
    reading = estimator.read(estimator.uplinks(table).decode(sent, window), window)
    assert reading.fresh.tolist() == [kept]
    assert [each.tolist() for each in reading.embeddings] == [each.tolist() for each in pair]
