"""Zeroth-order estimates against true gradients, and every half of the exchange by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from vfl_flower.axes.estimators import zeroth_order
from vfl_flower.axes.estimators.directions import Directions
from vfl_flower.axes.estimators.zeroth_order import answer, block_names, fresh, step_top, update
from vfl_flower.axes.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.client_app import embed
from vfl_flower.config import RunConfig
from vfl_flower.models.bottoms import BottomModel, build_bottom
from vfl_flower.models.losses import loss_per_row
from vfl_flower.models.tops import TopModel, build_top
from vfl_flower.models.training import build_optimizer
from vfl_flower.systems import resolve

KEY = b"key"
LENGTHS = [4, 0, 5, 2]
ROWS = sum(LENGTHS)
SIZE, PARTIES, OUTPUTS = 3, 2, 3
MINE = slice(SIZE, 2 * SIZE)

every_direction = pytest.mark.parametrize("directions", ["gaussian", "sphere", "scaled-sphere"])
both_differences = pytest.mark.parametrize("differences", ["one-sided", "two-sided"])
every_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])


def config_of(**keys: Any) -> RunConfig:
    """Of parties with smooth, small models, which are far apart at w and at w + mu u."""
    keys = {"bottom_hidden": 4, "embedding_activation": "tanh", "mu": 0.1, **keys}
    keys = {"estimator": "zeroth-order", "server_update": "zeroth-order", **keys}
    return resolve({key.replace("_", "-"): value for key, value in keys.items()})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def party(config: RunConfig, rows: int = ROWS) -> tuple[BottomModel, Tensor]:
    image = config.models.bottom in ("cnn", "lstm")
    shape = (4, 4) if image else (5,)
    x = torch.randn(rows, *shape, generator=generator(2))
    return build_bottom(config, 0, shape, SIZE), x


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
    outputs: Tensor = functional_call(model, shifted, (x,))
    return outputs


def drawn(config: RunConfig, model: nn.Module, steps: int = len(LENGTHS)) -> Tensor:
    """The directions of a window, [steps, d]."""
    return Directions(config, KEY, model).stack(steps)


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroth_order, "_STACK", 0)


# --- identity 3: what the estimates estimate ----------------------------------------------------


def differences_of(
    config: RunConfig, model: BottomModel, x: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """A window with the same mini-batch in every step: the scalars, and the directions."""
    rows = len(x)
    h, labels = others(rows)
    lengths = [rows] * steps
    many = x.repeat(steps, *[1] * (x.dim() - 1))
    pair, u = embed(model, many, lengths, Directions(config, KEY, model))
    assert u is not None
    scalars = answer(
        config,
        top_of(config),
        h.repeat(steps, 1),
        MINE,
        pair,
        labels.repeat(steps),
        lengths,
        lengths,
        None,
    )
    return scalars, u


def true_gradient(config: RunConfig, model: BottomModel, x: Tensor) -> Tensor:
    h, labels = others(len(x))
    h[:, MINE] = model(x)
    loss = loss_per_row(top_of(config)(h), labels).mean()
    return torch.cat([g.ravel() for g in torch.autograd.grad(loss, list(model.parameters()))])


@every_direction
@both_differences
def test_mean_of_many_estimates_is_the_gradient(directions: str, differences: str) -> None:
    config = config_of(directions=directions, differences=differences, mu=1e-2)
    model, x = party(config, rows=6)
    gradient, before, steps = true_gradient(config, model, x), flat(model), 20_000
    scalars, u = differences_of(config, model, x, steps)
    optimizer = build_optimizer(config, model, 1.0 / steps)
    update(optimizer, Directions(config, KEY, model), u, scalars)
    estimate = before - flat(model)
    # d = 39: the mean of S estimates is off by sqrt(d / S), here 4.4 %, of the gradient's length.
    assert torch.cosine_similarity(estimate, gradient, dim=0) > 0.99
    assert estimate.norm() / gradient.norm() == pytest.approx(1.0, abs=0.05)


@every_direction
def test_two_sided_differences_have_less_bias_and_less_error(directions: str) -> None:
    # Along directions of about the same length, so with the same curvature at play. A convex loss:
    # every one-sided difference is above the derivative.
    mu = 3.0 if directions == "sphere" else 0.5
    bias, error = {}, {}
    for differences in ("one-sided", "two-sided"):
        config = config_of(
            directions=directions,
            differences=differences,
            mu=mu,
            bottom_model="linear",
            embedding_activation="none",
            top_model="linear",
        )
        model, x = party(config, rows=6)
        scalars, u = differences_of(config, model, x, 2000)
        errors = scalars - u @ true_gradient(config, model, x)
        bias[differences], error[differences] = errors.mean().item(), errors.abs().mean().item()
    assert bias["one-sided"] == pytest.approx(error["one-sided"], rel=1e-3)
    assert abs(bias["two-sided"]) < 0.05 * bias["one-sided"]
    assert error["two-sided"] < 0.3 * error["one-sided"]


# --- directions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directions", "phi"), [("gaussian", 1), ("sphere", 39), ("scaled-sphere", 1)]
)
def test_directions_have_the_moments_of_their_kind(directions: str, phi: int) -> None:
    config = config_of(directions=directions)
    model, _ = party(config)
    steps = 40_000
    u = drawn(config, model, steps)
    assert u.shape == (steps, 39)
    assert Directions(config, KEY, model).phi == phi
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
    model, _ = party(config)
    whole = drawn(config, model, 5)
    monkeypatch.setattr(zeroth_order, "_BLOCK", 7)
    again = Directions(config, KEY, model)
    for step in (0, 1, 1, 4, 2, 3, 0):  # in any order, as often as it is wanted
        tensors = [torch.zeros_like(p) for p in again.parameters]
        again.add(step, tensors, 3.0)
        found = torch.cat([tensor.ravel() for tensor in tensors])
        torch.testing.assert_close(found, 3.0 * whole[step])
    assert torch.equal(again.stack(5), whole)


def test_directions_differ_between_keys_and_steps() -> None:
    config = config_of()
    model, _ = party(config)
    all_drawn = [
        row
        for key in (b"one", b"other", b"one|1")
        for row in Directions(config, key, model).stack(3)
    ]
    for number, one in enumerate(all_drawn):
        for other in all_drawn[:number]:
            assert not torch.isclose(one, other, rtol=1e-6).any()


def test_directions_have_more_than_32_bits_of_seed() -> None:
    # The seeds of these two keys agree in the lowest 32 bits.
    config = config_of()
    model, _ = party(config)
    one, other = (Directions(config, b"key %d" % n, model).stack(1) for n in (67792, 90987))
    assert not torch.equal(one, other)


# --- the party ----------------------------------------------------------------------------------


@both_differences
@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn", "lstm", "binarised", "scorecard"])
def test_pair_is_the_embeddings_at_both_ends_of_each_step(kind: str, differences: str) -> None:
    config = config_of(bottom_model=kind, differences=differences, mu=0.3)
    model, x = party(config)
    u = drawn(config, model)
    pair, stacked = embed(model, x, LENGTHS, Directions(config, KEY, model))
    assert (stacked is None) == (kind == "lstm")
    other = -0.3 if differences == "two-sided" else 0.0
    for found, mu in zip(pair, (0.3, other), strict=True):
        expected = [
            at(model, mu * u[s], rows) for s, rows in enumerate(x.split(LENGTHS)) if len(rows)
        ]
        torch.testing.assert_close(found, torch.cat(expected).detach(), rtol=1e-5, atol=1e-5)
    assert (pair[0] - pair[1]).abs().max() > 0.01


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [0], [ROWS], [1] * ROWS], ids=str)
@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn"])
@both_differences
@every_optimizer
def test_stacked_steps_are_those_taken_one_after_the_other(
    kind: str,
    lengths: list[int],
    differences: str,
    optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(
        bottom_model=kind, differences=differences, optimizer=optimizer, directions="sphere"
    )
    scalars = torch.randn(len(lengths), generator=generator(5))
    pairs, models = [], []
    for in_place in (False, True):
        if in_place:
            one_after_the_other(monkeypatch)
        model, x = party(config, sum(lengths))
        steps = build_optimizer(config, model, 0.01)
        for window in range(2):  # the optimizer's state passes on
            directions = Directions(config, b"%d" % window, model)
            pair, u = embed(model, x, lengths, directions)
            assert (u is None) == (in_place or len(lengths) == 1)
            update(steps, Directions(config, b"%d" % window, model), u, scalars)
            pairs.append(pair)
        models.append(model)
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
    model, x = party(config)
    before = flat(model)
    embed(model, x, LENGTHS, Directions(config, KEY, model))
    assert torch.equal(flat(model), before)
    one_after_the_other(monkeypatch)
    for _ in range(10):
        embed(model, x, LENGTHS, Directions(config, KEY, model))
    torch.testing.assert_close(flat(model), before, rtol=0, atol=1e-5)


def test_a_model_that_cannot_be_stacked_learns_like_any_other() -> None:
    config = config_of(bottom_model="lstm")
    model, x = party(config)
    u, before = drawn(config, model), flat(model)
    scalars = torch.randn(len(LENGTHS), generator=generator(5))
    _, trace = embed(model, x, LENGTHS, Directions(config, KEY, model))
    assert trace is None
    optimizer = build_optimizer(config, model, 0.1)
    update(optimizer, Directions(config, KEY, model), trace, scalars)
    torch.testing.assert_close(flat(model), before - 0.1 * scalars @ u, rtol=1e-4, atol=1e-5)


@every_direction
@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_window_of_plain_steps_by_hand(
    directions: str, at_hand: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(directions=directions)
    model, _ = party(config)
    u, before = drawn(config, model), flat(model)
    scalars = torch.tensor([0.5, 0.0, -1.0, 2.0])
    phi = 39 if directions == "sphere" else 1
    if in_place:
        one_after_the_other(monkeypatch)
    optimizer = build_optimizer(config, model, 0.1)
    update(optimizer, Directions(config, KEY, model), u if at_hand else None, scalars)
    expected = before - 0.1 * phi * (0.5 * u[0] - u[2] + 2 * u[3])
    torch.testing.assert_close(flat(model), expected, rtol=1e-4, atol=1e-5)


@both_differences
@pytest.mark.parametrize("regulariser", ["l2", "nonconvex"])
@pytest.mark.parametrize("in_place", [True, False])
def test_regulariser_adds_its_own_differences(
    differences: str, regulariser: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        differences=differences,
        regulariser=regulariser,
        regulariser_weight=0.3,
        directions="scaled-sphere",
    )
    model, _ = party(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # so that the two regularisers are far apart
    scalars = torch.tensor([0.5, 0.0, -1.0, 2.0])

    def g(w: Tensor) -> float:
        terms = [
            v * v / 2 if regulariser == "l2" else v * v / (2 * (1 + v * v)) for v in w.tolist()
        ]
        return float(sum(terms))

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
    optimizer = build_optimizer(config, model, 0.01)
    update(optimizer, Directions(config, KEY, model), None, scalars)
    torch.testing.assert_close(flat(model), expected, rtol=1e-4, atol=1e-5)


@both_differences
def test_each_embedding_of_a_pair_has_noise_of_its_own(differences: str) -> None:
    keys = {"privacy": "perturbed-embedding", "embedding_bound": 100.0, "noise_seed": 0}
    config = config_of(differences=differences, embedding_activation="none", **keys)
    model, x = party(config)
    perturb = Perturbation(config, b"secret", 1, tuple(LENGTHS), last=1)
    clean, _ = embed(model, x, LENGTHS, Directions(config, KEY, model))
    noisy, _ = embed(model, x, LENGTHS, Directions(config, KEY, model), perturb)
    noise = [one - other for one, other in zip(noisy, clean, strict=True)]
    zeros = torch.zeros(ROWS, SIZE)
    torch.testing.assert_close(noise[0], perturb.of_pair()(1, zeros), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(noise[1], perturb(1, zeros), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(noise[0], noise[1], atol=1e-4).all()


# --- the label holder ---------------------------------------------------------------------------


def row_loss(top: TopModel, h: list[float], label: int) -> float:
    return loss_per_row(top(torch.tensor([h])), torch.tensor([label])).item()


@both_differences
@pytest.mark.parametrize("clip", [None, 0.2])
def test_answer_by_hand(differences: str, clip: float | None) -> None:
    mu = 0.1
    config = config_of(differences=differences, mu=mu)
    noise = None
    if clip:
        private = {"strategy": "dpzv", "noise-multiplier": 0.0, "clip": clip, "mu": mu}
        config = resolve({**private, "differences": differences})
        noise = ScalarNoise(config, 0.0)
    top = top_of(config)
    h, labels = others()
    pair = tuple(torch.randn(2, ROWS, SIZE, generator=generator(6)).unbind())
    assert len(pair) == 2
    divisors = [4, 4, 4, 4]  # as Poisson sampling has them
    found = answer(config, top, h.clone(), MINE, pair, labels, LENGTHS, divisors, noise)

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
        expected.append(total / 4)
    assert expected[1] == 0.0  # a step without rows
    assert bool(clipped) == bool(clip)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@both_differences
@pytest.mark.parametrize(
    ("combine", "in_place"),
    [
        ("concat", False),
        ("concat", True),
        ("mean", False),
        ("mean", True),
    ],
)
@every_optimizer
def test_steps_of_the_top_model_by_hand(
    differences: str,
    combine: str,
    in_place: bool,
    optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {"combine": combine, "optimizer": optimizer, "differences": differences}
    config = config_of(top_hidden=4, directions="sphere", **keys)
    if in_place:
        one_after_the_other(monkeypatch)
    top, (h, labels) = top_of(config), others()
    by_hand, before = nn.Parameter(flat(top)), copy.deepcopy(top)
    divisors = [4, 1, 5, 2]
    ours = build_optimizer(config, top, 0.01)
    losses = step_top(config, top, ours, h, labels, LENGTHS, divisors, KEY)

    theirs = build_optimizer(config, nn.ParameterList([by_hand]), 0.01)
    two_sided, end = differences == "two-sided", 0
    for step, u in enumerate(drawn(config, top)):
        rows = slice(end, end + LENGTHS[step])
        end = rows.stop
        f = torch.zeros(2)
        if LENGTHS[step]:
            f = torch.stack(
                [
                    loss_per_row(at(before, mu * u, h[rows]), labels[rows]).sum() / divisors[step]
                    for mu in (0.1, -0.1 if two_sided else 0.0)
                ]
            )
        scalar = (f[0] - f[1]) / (0.2 if two_sided else 0.1)
        by_hand.grad = len(u) * scalar * u
        theirs.step()
        torch.testing.assert_close(losses[step], f.mean() if two_sided else f[1])
    torch.testing.assert_close(flat(top), by_hand.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("combine", ["concat", "mean"])
def test_a_window_without_rows_is_answered_by_zeros(combine: str) -> None:
    config = config_of(combine=combine, optimizer="sgd")
    top, (h, labels) = top_of(config), others(0)
    pair = h[:, MINE], h[:, MINE]
    scalars = answer(config, top, h.clone(), MINE, pair, labels, [0], [4], None)
    assert scalars.tolist() == [0.0]
    before, optimizer = flat(top), build_optimizer(config, top, 0.1)
    losses = step_top(config, top, optimizer, h, labels, [0], [4], KEY)
    assert losses.tolist() == [0.0]
    torch.testing.assert_close(flat(top), before)


def test_a_top_model_without_parameters_only_tells_its_losses() -> None:
    config = config_of(top_model="sum")
    top, (h, labels) = build_top(config, [SIZE] * PARTIES, SIZE), others()
    losses = step_top(config, top, None, h, labels, LENGTHS, [4, 4, 4, 4], KEY)
    rows = loss_per_row(h[:, :SIZE] + h[:, SIZE:], labels)
    expected = [part.sum() / 4 for part in rows.split(LENGTHS)]
    torch.testing.assert_close(losses, torch.stack(expected))


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
    config = config_of(differences=differences)
    assert block_names(config) == names
    pair = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]])
    assert fresh(config, pair).tolist() == [kept]
