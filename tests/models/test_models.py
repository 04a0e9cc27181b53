"""Bottom and top models: shapes, seeds, the ways to combine embeddings, and the loss."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.conftest import MANY
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.bottoms import build_bottom, embedding_size, has_gradient
from vfl_flower.models.losses import Loss, loss_per_row, penalty, penalty_gradient
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import choose_device, load_model, model_arrays
from vfl_flower.protocol.systems import resolve, sized


def config_of(**keys: Any) -> RunConfig:
    keys = {"bottom_model": "mlp", **keys}
    if not has_gradient(keys["bottom_model"]):
        keys["strategy"] = "cascaded"
    return sized(resolve({key.replace("_", "-"): value for key, value in keys.items()}), MANY)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().ravel() for p in model.parameters()])


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "linear": [(5,), (4, 3), (4, 4, 3)],
    "mlp": [(5,), (4, 3)],
    "cnn": [(14, 14), (4, 4), (1, 8), (2, 3), (7, 9, 3)],
    "lstm": [(6, 2), (1, 1)],
    "binarised": [(5,), (4, 3)],
    "scorecard": [(5,), (4, 3)],
}
of_each_kind = pytest.mark.parametrize("kind", SHAPES)


@of_each_kind
def test_bottom_model_makes_embeddings(kind: str) -> None:
    config = config_of(bottom_model=kind, bottom_hidden=5)
    for shape in SHAPES[kind]:
        model = build_bottom(config, 0, torch.zeros(shape), 7)
        for rows in (1, 3):
            assert model(torch.randn(rows, *shape)).shape == (rows, 7)


@pytest.mark.parametrize(
    ("kind", "shape", "count", "biases"),
    [
        ("linear", (5,), 5 * 7, 7),
        ("mlp", (5,), 5 * 6 + 6 * 7, 6 + 7),
        ("cnn", (8, 8), (9 * 6 + 6) + (9 * 6 * 6 + 6) + 6 * 2 * 2 * 7, 7),
        ("lstm", (9, 2), 4 * (2 * 6 + 6 * 6 + 2 * 6) + 6 * 7, 7),
        ("binarised", (5,), 5 * 7, 0),
        ("scorecard", (5,), 4 * 5 * 7, 0),
    ],
)
def test_bottom_model_has_so_many_parameters_and_perhaps_no_bias(
    kind: str, shape: tuple[int, ...], count: int, biases: int
) -> None:
    for bias in (True, False):
        config = config_of(bottom_model=kind, bottom_hidden=6, bottom_bias=bias)
        model = build_bottom(config, 0, torch.zeros(shape), 7)
        assert flat(model).numel() == count + bias * biases


def test_colours_are_the_last_axis_of_an_image() -> None:
    config = config_of(bottom_model="cnn", embedding_activation="none")
    model, x = build_bottom(config, 0, torch.zeros(4, 4, 3), 2), torch.randn(2, 4, 4, 3)
    weight, bias = list(model.parameters())[:2]
    planes = functional.conv2d(x.permute(0, 3, 1, 2), weight, bias, 2, 1)
    torch.testing.assert_close(model.layers[0](x), planes)


@pytest.mark.parametrize(
    ("keys", "least", "most"),
    [
        ({}, 0.0, np.inf),
        ({"embedding_activation": "none"}, -np.inf, np.inf),
        ({"embedding_activation": "sigmoid"}, 0.0, 1.0),
        ({"embedding_activation": "tanh"}, -1.0, 1.0),
        ({"top_model": "sum"}, -np.inf, np.inf),
    ],
    ids=str,
)
def test_embedding_activation(keys: dict[str, Any], least: float, most: float) -> None:
    h = build_bottom(config_of(**keys), 0, torch.zeros(5), 8)(20 * torch.randn(50, 5)).detach()
    assert least <= h.min() < h.max() <= most
    assert (h.min() < 0) == (least < 0)
    assert (h.max() > 1) == (most > 1)


# --- models without a gradient ------------------------------------------------------------------


def black_box(kind: str, parameter: list[list[float]]) -> BottomModel:
    keys = {"bottom_model": kind, "embedding_activation": "none"}
    model = build_bottom(config_of(**keys), 0, torch.zeros(2), 2)
    with torch.no_grad():
        next(model.parameters()).copy_(torch.tensor(parameter))
    return model


def test_scorecard_adds_up_the_points_of_each_feature_s_bin() -> None:
    points = [[10.4, 0.0], [20.0, 1.0], [30.0, -2.6], [40.0, 3.0]]  # first feature, bin by bin
    points += [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 50.0]]  # second
    model = black_box("scorecard", points)
    x = torch.tensor([[-1.5, -1.0], [-0.5, 0.5], [0.0, 1.0], [0.7, 7.0], [1.1, -9.0]])
    expected = [
        [1.0 + 0.1, 0.0],  # a feature at an edge is in the bin below
        [2.0 + 0.3, 0.1],
        [2.0 + 0.3, 0.1],
        [3.0 + 0.4, -0.3 + 5.0],
        [4.0 + 0.1, 0.3],
    ]
    torch.testing.assert_close(model(x).detach(), torch.tensor(expected))


def test_binarised_layer_uses_the_signs_of_its_weights() -> None:
    model = black_box("binarised", [[0.3, -2.0], [0.0, 1e-9]])
    x = torch.tensor([[1.0, 10.0], [-3.0, 0.5]])
    expected = torch.tensor([[1.0 - 10.0, 10.0], [-3.0 - 0.5, 0.5]]) / 2**0.5
    torch.testing.assert_close(model(x).detach(), expected)


# --- seeds --------------------------------------------------------------------------------------


@of_each_kind
def test_equal_seeds_give_equal_parameters_and_other_parties_other_ones(kind: str) -> None:
    def parameters(party: int, seed: int = 0) -> Tensor:
        config = config_of(bottom_model=kind, seed=seed)
        return flat(build_bottom(config, party, torch.zeros(4, 4), 3))

    assert torch.equal(parameters(0), parameters(0))
    assert not torch.equal(parameters(0), parameters(1))
    assert not torch.equal(parameters(0), parameters(0, seed=1))


def test_top_model_draws_parameters_from_its_seed() -> None:
    def parameters(seed: int = 0) -> Tensor:
        return flat(build_top(config_of(seed=seed, top_model="linear"), [5], 3))

    linear = config_of(bottom_model="linear")
    others = [flat(build_bottom(linear, party, torch.zeros(5), 3)) for party in range(4)]
    assert torch.equal(parameters(), parameters())
    assert not any(torch.equal(parameters(), each) for each in (parameters(1), *others))


@of_each_kind
def test_models_neither_use_nor_change_the_random_state_of_torch(kind: str) -> None:
    built = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        built.append(flat(build_bottom(config_of(bottom_model=kind), 0, torch.zeros(4, 4), 3)))
        build_top(config_of(), [3, 3], 2)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*built)


# --- the sentences ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "sentence"),
    [
        ("cnn", (5,), r"'cnn' needs images, .* sample has shape \(5,\)"),
        ("lstm", (5,), r"'lstm' needs sequences .* sample has shape \(5,\)"),
        ("lstm", (4, 4, 3), "'lstm' needs sequences"),
    ],
)
def test_model_that_cannot_read_the_data(kind: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_bottom(config_of(bottom_model=kind), 0, torch.zeros(shape), 3)


def test_size_of_embeddings() -> None:
    assert embedding_size(config_of(), 10) == 32
    assert embedding_size(config_of(embedding_size=5), 10) == 5
    assert embedding_size(config_of(top_model="sum"), 10) == 10
    assert embedding_size(config_of(top_model="sum", embedding_size=10), 10) == 10
    with pytest.raises(ConfigError, match="embedding-size = 5 does not fit top-model = 'sum'"):
        embedding_size(config_of(top_model="sum", embedding_size=5), 10)


def test_device_that_is_not_there() -> None:
    assert choose_device(config_of(device="cpu")).type == "cpu"
    for name in ("cuda:99", "meta", "hpu", "vulkan"):
        with pytest.raises(ConfigError, match=f"device = '{name}' is not available here"):
            choose_device(config_of(device=name))


@of_each_kind
def test_a_model_that_no_memory_holds_is_a_sentence_and_takes_none(kind: str) -> None:
    most = 2**31 - 1
    config = config_of(bottom_model=kind, bottom_hidden=most, embedding_size=most)
    with pytest.raises(ConfigError, match=r"^A model needs .* GB, .*\. Choose a smaller bottom-h"):
        build_bottom(config, 0, torch.zeros(8, 8), most)
    with pytest.raises(ConfigError, match=r"^A model needs .* GB, .*a smaller top-hidden"):
        build_top(config_of(top_hidden=most), [32, 32], 10)


# --- the top model ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_model", "combine"), [*product(["linear", "mlp"], ["concat", "mean", "sum"]), ("sum", "")]
)
def test_top_model_combines_embeddings(top_model: str, combine: str) -> None:
    outputs = 4 if top_model == "sum" else 5
    keys = {"combine": combine} if combine else {}
    top = build_top(config_of(top_model=top_model, **keys), [4, 4, 4], outputs)
    parties = torch.randn(3, 6, 4)
    combined = {"concat": torch.cat(list(parties), 1), "mean": parties.mean(0)}
    combined["sum"] = parties.sum(0)
    w = dict(top.named_parameters())
    if top_model == "sum":
        assert not w
        expected = parties.sum(0)
    elif top_model == "linear":
        expected = combined[combine] @ w["layers.0.weight"].T + w["layers.0.bias"]
    else:
        hidden = torch.relu(combined[combine] @ w["layers.0.weight"].T + w["layers.0.bias"])
        expected = hidden @ w["layers.1.weight"].T + w["layers.1.bias"]
    torch.testing.assert_close(top(torch.cat(list(parties), 1)), expected)


def test_losses_are_the_logistic_ones_also_for_large_logits() -> None:
    outputs, labels = torch.randn(8, 5), torch.randint(5, (8,))
    expected = -outputs.log_softmax(1)[torch.arange(8), labels]
    torch.testing.assert_close(loss_per_row(outputs, labels), expected)
    torch.testing.assert_close(loss_per_row(outputs, labels, "mean"), expected.mean())
    one, two = torch.randn(8, 1), torch.randint(2, (8,))
    expected = torch.log1p(torch.exp((1 - 2.0 * two) * one[:, 0]))
    torch.testing.assert_close(loss_per_row(one, two), expected)
    losses = loss_per_row(torch.tensor([[1e4], [-1e4]]), torch.tensor([0, 0]))
    torch.testing.assert_close(losses, torch.tensor([1e4, 0.0]))


@pytest.mark.parametrize(
    ("regulariser", "values"),
    [("l2", [0.0, 0.5, 4.5]), ("nonconvex", [0.0, 0.25, 0.45])],  # w^2 / 2; w^2 / (2 + 2 w^2)
)
def test_regularisers_by_hand_and_their_gradient(regulariser: str, values: list[float]) -> None:
    training = config_of(regulariser=regulariser).training
    found = penalty(training, torch.tensor([0.0, -1.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor(values))
    w = 3 * torch.randn(50, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(penalty(training, w).sum(), [w])
    torch.testing.assert_close(penalty_gradient(training, w.detach()), expected)


@pytest.mark.parametrize("kind", ["binarised", "scorecard"])
def test_black_boxes_have_no_gradient_to_learn_from(kind: str) -> None:
    model = build_bottom(config_of(bottom_model=kind), 0, torch.zeros(5), 3)
    gradients = torch.autograd.grad(model(torch.randn(6, 5)).sum(), list(model.parameters()))
    assert all((gradient == 0).all() for gradient in gradients)


def test_parameters_survive_as_arrays() -> None:
    ours = build_bottom(config_of(), 0, torch.zeros(4), 3)
    theirs = build_bottom(config_of(), 1, torch.zeros(4), 3)
    load_model(theirs, {name: array.copy() for name, array in model_arrays(ours).items()})
    assert torch.equal(flat(theirs), flat(ours))


def test_concatenated_embeddings_may_differ_in_size() -> None:
    assert build_top(config_of(), [2, 3], 5)(torch.randn(4, 5)).shape == (4, 5)


def test_optimizers_by_name() -> None:
    model = BottomModel([torch.nn.Linear(2, 1)], ["none"])
    kinds = {"sgd": ("SGD", 0), "momentum": ("SGD", 0.9), "adam": ("Adam", None)}
    for name, (kind, momentum) in kinds.items():
        optimizer = build_optimizer(config_of(optimizer=name), model, 0.25)
        group = optimizer.param_groups[0]
        found = type(optimizer).__name__, group["lr"], group.get("momentum")
        assert found == (kind, 0.25, momentum)


@pytest.mark.parametrize("classes", [3, 1500])
def test_a_target_is_one_at_its_class_however_many_there_are(classes: int) -> None:
    found = Loss().targets(torch.tensor([0, classes - 1, 1]), classes)
    assert found.dtype == torch.float32 and found.shape == (3, classes)
    assert found.nonzero().tolist() == [[0, 0], [1, classes - 1], [2, 1]]
