"""Targets, class weights, and columns of the label holder's own, against training in one place."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score, root_mean_squared_error
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from strategies import run as run_module
from strategies.baselines.local_only import Alone
from tests import conftest
from tests.conftest import ALL_ROWS, FASTER, MANY, Start, trained
from tests.stepping import by_differences, by_gradient
from vfl_attacks.audit import audit
from vfl_flower import server_app
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.data.labels import Labels, class_weights
from vfl_flower.label_holder import about_data, label_holder
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.label_holder.table import Table, WindowTable
from vfl_flower.launch import engines as engines
from vfl_flower.models.bottoms import build_bottom, embedding_size, learn_bins
from vfl_flower.models.losses import Loss, loss_per_row
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.tops import build_top
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.ends import Arrival, Reading
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.results.figures import headline
from vfl_flower.tools.cli import main
from vfl_flower.tools.compare import compare, table

SIZE, PARTIES, OWN = 3, 2, 5
LENGTHS = [4, 0, 5, 2]
ROWS = sum(LENGTHS)


def config_of(**keys: Any) -> RunConfig:
    keys = {"bottom_model": "mlp", "bottom_hidden": 4, "embedding_size": SIZE, **keys}
    keys = {"embedding_activation": "tanh", **keys}
    return sized(resolve({key.replace("_", "-"): value for key, value in keys.items()}), MANY)


def rows_of(outputs: int, own: int = OWN, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rows of two parties' embeddings and own features, and labels of so many outputs."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(rows, PARTIES * SIZE + own, generator=generator)
    return h, torch.randint(max(2, outputs), (rows,), generator=generator)


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a regression on real data: 442 rows of ten columns."""
    x, y = load_diabetes(return_X_y=True)
    path = tmp_path_factory.mktemp("data") / "diabetes.npz"
    np.savez(path, X=x, y=y)
    keys = {"target": "regression", "party-lr": 0.05, "server-lr": 0.05}
    return {**ALL_ROWS, "dataset": f"npz:{path}", **keys}


def give_columns(monkeypatch: pytest.MonkeyPatch, keys: Mapping[str, Any]) -> Labels:
    """Have the label holder of runs with these keys own the last quarter of the columns."""
    config = resolve(keys)
    block = load_features(config, 3, 4)
    own = block.train.reshape(len(block.train), -1), block.test.reshape(len(block.test), -1)
    labels = replace(load_labels(config), features=own)
    for module in (server_app, engines, conftest):
        monkeypatch.setattr(module, "load_labels", lambda config: labels)
    return labels


def centralised(keys: Mapping[str, Any], parties: int, labels: Labels) -> dict[str, Any]:
    """All blocks of columns, the label holder's own last, trained as one model by plain PyTorch."""
    config = sized(resolve(keys), len(labels.train))
    whole = config.with_values({"presence": 1.0})
    x = [load_features(whole, m, parties).train for m in range(parties)]
    if labels.features:
        x.append(np.asarray(labels.features[0]))
    y, size = torch.from_numpy(labels.train), embedding_size(config, labels.outputs)
    bottoms = [
        build_bottom(config, m, torch.from_numpy(block[0]), size) for m, block in enumerate(x)
    ]
    for model, block in zip(bottoms, x, strict=True):
        learn_bins(model, block)
    top = aggregation_of(config).build_top([size] * len(x), labels.outputs)
    present = None if labels.present is None else torch.from_numpy(labels.present[0]).float()
    blocks = [torch.from_numpy(block) for block in x]
    momentum = 0.9 if config.training.optimizer == "momentum" else 0.0
    of_server = list(nn.ModuleList([top, *bottoms[parties:]]).parameters())
    groups: list[dict[str, Any]] = [{"params": of_server, "lr": config.training.server_lr}]
    if parties:
        of_parties = list(nn.ModuleList(bottoms[:parties]).parameters())
        groups.append({"params": of_parties, "lr": config.training.party_lr})
    optimizer = torch.optim.SGD(groups, momentum=momentum)
    weights = class_weights(config.data, labels.train, len(labels.classes))
    weight = None if weights is None else torch.from_numpy(weights)
    steps = -(-len(y) // config.training.batch_size)
    for epoch in range(config.training.epochs):
        order = sampling_of(config, len(y)).window(None, epoch, 0, steps, b"").index
        for ids in order.split(config.training.batch_size):
            pairs = zip(bottoms, blocks, strict=True)
            h = [bottom(block[ids]) for bottom, block in pairs]
            outputs = top(torch.cat(h if present is None else [*h, present[ids]], dim=1))
            if config.data.target == "regression":
                loss = (outputs[:, 0] - y[ids]).square().sum() / 2
            elif labels.outputs == 1:
                of_rows = None if weight is None else weight[y[ids]]
                loss = functional.binary_cross_entropy_with_logits(
                    outputs[:, 0], y[ids].float(), of_rows, reduction="sum"
                )
            else:
                loss = functional.cross_entropy(outputs, y[ids], weight, reduction="sum")
            optimizer.zero_grad()
            (loss / len(ids)).backward()
            optimizer.step()
    found = {f"party-{m}": dict(bottoms[m].named_parameters()) for m in range(parties)}
    found["top"] = dict(top.named_parameters())
    if labels.features:
        own = bottoms[parties].named_parameters()
        found["top"] |= {f"own.{name}": p for name, p in own}
    return found


def assert_is_centralised(run: Start, keys: dict[str, Any], parties: int, labels: Labels) -> None:
    finished = run(parties, keys)
    assert finished.summary["steps"] >= 50
    for name, expected in centralised(keys, parties, labels).items():
        found = finished.parameters(name) if expected else {}
        assert set(found) == set(expected)
        for key, values in expected.items():
            wanted = values.detach().numpy()
            np.testing.assert_allclose(found[key], wanted, atol=1e-5, rtol=0, err_msg=name + key)


# --- regression ---------------------------------------------------------------------------------


def test_loss_of_numbers_is_half_the_squared_error_and_its_gradient() -> None:
    outputs, labels = torch.randn(6, 1, requires_grad=True), torch.randn(6)
    losses = loss_per_row(outputs, labels)
    torch.testing.assert_close(losses, (outputs[:, 0] - labels) ** 2 / 2)
    (expected,) = torch.autograd.grad(losses.sum(), [outputs])
    found = Loss().gradient(outputs.detach(), labels[:, None], squared=True)
    torch.testing.assert_close(found, expected)


def test_labels_are_standardised_by_the_training_rows(diabetes: dict[str, Any]) -> None:
    labels = load_labels(resolve(diabetes))
    assert (labels.outputs, labels.classes) == (1, ())
    assert labels.train.dtype == labels.test.dtype == np.float32
    y = load_diabetes().target
    order = np.random.default_rng(0).permutation(442)
    test, train = y[order[:89]], y[order[89:]]
    assert labels.mean == pytest.approx(train.mean())
    assert labels.deviation == pytest.approx(train.std())
    for found, values in ((labels.train, train), (labels.test, test)):
        np.testing.assert_allclose(found, (values - train.mean()) / train.std(), atol=1e-6)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [{}, {"bottom-model": "linear", "top-model": "sum"}, {"optimizer": "momentum"}],
    ids=["mlp", "least-squares", "momentum"],
)
def test_regression_is_centralised_least_squares(
    run: Start, diabetes: dict[str, Any], keys: dict[str, Any]
) -> None:
    keys = {**diabetes, "batch-size": 20, "epochs": 3, **keys}
    assert_is_centralised(run, keys, 2, load_labels(resolve(keys)))


def test_rmse_and_r2_equal_scikit_learn_s_in_units_of_the_labels(diabetes: dict[str, Any]) -> None:
    strategy, _ = trained(2, {**diabetes, "epochs": 3})
    holder, labels = strategy.run.holder, strategy.labels
    with torch.no_grad():
        outputs = holder.top(holder.held_out.table.rows)[:, 0].double().numpy()
    predicted = labels.mean + labels.deviation * outputs
    truth = load_diabetes().target[np.random.default_rng(0).permutation(442)[:89]]
    _, validation, metrics = holder.evaluate()
    assert validation is None
    assert metrics.r2 == pytest.approx(r2_score(truth, predicted), abs=1e-5)
    assert metrics.rmse == pytest.approx(root_mean_squared_error(truth, predicted), rel=1e-5)
    assert metrics.rmse is not None and metrics.accuracy is metrics.auc is None
    assert metrics.loss == pytest.approx((metrics.rmse / labels.deviation) ** 2 / 2, rel=1e-5)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({}, 0.3),
        ({"strategy": "vafl", "party-lr": 0.02, "server-lr": 0.02}, 0.2),
        ({"strategy": "ef-vfl"}, 0.3),
        ({"strategy": "centralised"}, 0.3),
        ({"strategy": "cascaded", "party-lr": 0.005}, 0.2),
        ({"strategy": "syn-zoo", "party-lr": 0.005, "server-lr": 0.005}, 0.2),
    ],
    ids=str,
)
def test_systems_learn_numbers(
    run: Start, diabetes: dict[str, Any], keys: dict[str, Any], least: float
) -> None:
    summary = run(2, {**diabetes, "noise-seed": 0, "epochs": 10, **keys}).summary
    assert least < summary["test_r2"] < 1
    assert summary["test_accuracy"] is summary["test_auc"] is None
    assert f"test RMSE {summary['test_rmse']:.4g}, R2 " in headline(summary)


@pytest.mark.nightly
def test_compare_and_alone_go_by_r2(diabetes: dict[str, Any], tmp_path: Path) -> None:
    keys = {**diabetes, "epochs": 3, "out": str(tmp_path / "out")}
    folder = compare(2, keys, [{"strategy": "vafl"}], 0.2)
    figures = json.loads((folder / "compare.json").read_text())
    assert table(folder).splitlines()[0].split()[:3] == ["run", "test", "R²"]
    alone = figures["local-only"]
    assert alone["test_r2"] == alone["test_r2_of_party"][str(alone["best_party"])]


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (["a", "b", "c", "d"] * 5, "are not numbers"),
        ([1.0, 2.0, np.nan, 3.0] * 5, "have missing values"),
        ([7.0] * 20, "are all the same"),
        ([7.0] * 19 + [8.0], "are all the same"),  # in the test rows, or else the training rows
        ([1.0, np.inf] * 10, "have missing values"),
    ],
)
def test_labels_that_no_regression_can_learn(values: list[Any], cause: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", X=np.zeros((20, 2)), y=np.array(values))
    with pytest.raises(ConfigError, match=cause) as caught:
        load_labels(resolve({"dataset": f"npz:{tmp_path}/data.npz", "target": "regression"}))
    assert "7" not in str(caught.value).replace(str(tmp_path), "")


def test_audit_and_mixed_comparisons_refuse_numbers(diabetes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no classes"):
        audit(2, diabetes)
    with pytest.raises(ConfigError, match="compare them separately"):
        compare(2, {}, [{"strategy": "vafl", **diabetes}], 0.9)


# --- class weights ------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"dataset": "breast-cancer", "class-weights": "1,5", "epochs": 5},
        {"class-weights": "3,1,1,1,0.5,1,1,1,1,2", "epochs": 2},
        {"dataset": "breast-cancer", "class-weights": "balanced", "epochs": 5},
    ],
    ids=str,
)
def test_weighted_training_is_the_weighted_loss_of_torch(run: Start, keys: dict[str, Any]) -> None:
    keys = {**keys, "party-lr": 0.1, "server-lr": 0.1}
    assert_is_centralised(run, keys, 2, load_labels(resolve(keys)))


def test_balanced_classes_weigh_the_same_together() -> None:
    config = resolve({"class-weights": "balanced"})
    counts = np.array([10, 30, 0, 60])
    weights = class_weights(config.data, np.repeat(np.arange(4), counts), 4)
    assert weights is not None and weights.dtype == np.float32
    np.testing.assert_allclose((weights * counts)[[0, 1, 3]], 100 / 4)


@pytest.mark.parametrize("own", [0, OWN])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_weight_is_a_number_of_copies(outputs: int, own: int) -> None:
    """A row of weight k is k rows, in gradient rows, losses, and steps of the top model."""
    weights = torch.tensor([1.0, 3.0, 2.0][: max(2, outputs)])
    config = config_of(top_model="linear")
    h, labels = rows_of(outputs, own)
    copies = weights[labels].long()
    lengths = [int(part.sum()) for part in copies.split(LENGTHS)]
    tops = [build_top(config, [SIZE] * PARTIES, outputs, own) for _ in range(2)]
    steps = [build_optimizer(config, top, 0.1) for top in tops]
    divisors = [4, 1, 5, 2]
    rows, losses = by_gradient(tops[0], steps[0], h, labels, LENGTHS, divisors, loss=Loss(weights))
    batch = h.repeat_interleave(copies, 0), labels.repeat_interleave(copies), lengths, divisors
    many, many_losses = by_gradient(tops[1], steps[1], *batch)
    assert rows is not None and many is not None
    sums = torch.zeros(ROWS, PARTIES * SIZE)
    sums.index_add_(0, torch.arange(ROWS).repeat_interleave(copies), many)
    torch.testing.assert_close(rows, sums)
    torch.testing.assert_close(losses, many_losses)
    for p, q in zip(tops[0].parameters(), tops[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("own", [0, OWN])
@pytest.mark.parametrize("combine", ["concat", "mean"])
def test_scalars_and_zeroth_order_steps_of_weighted_rows(combine: str, own: int) -> None:
    keys = {"estimator": "zeroth-order", "server_update": "zeroth-order", "sampling": "poisson"}
    more = {"class_weights": "1,3,0.5", "batch_size": 4}  # 4 rows are expected of each step
    config = config_of(combine=combine, mu=0.1, optimizer="sgd", **keys, **more)
    h, labels = rows_of(3, own)
    weights = torch.tensor([1.0, 3.0, 0.5])
    pair = tuple(torch.randn(2, ROWS, SIZE).unbind())
    assert len(pair) == 2

    def f(model: TopModel, rows: Tensor, divisors: list[int]) -> Tensor:
        losses = functional.cross_entropy(model(rows), labels, reduction="none") * weights[labels]
        sums = torch.stack([part.sum() for part in losses.split(LENGTHS)])
        return sums / torch.tensor(divisors)

    features = h[:, PARTIES * SIZE :].numpy()
    known = Labels(labels.numpy(), labels.numpy(), ("a", "b", "c"), "")
    known = replace(known, features=(features, features)) if own else known
    holder = LabelHolder(config, known, dict.fromkeys(range(PARTIES), SIZE))
    holder.table.rows[:] = h
    window = Window(np.arange(ROWS, dtype=np.int32), np.array(LENGTHS, np.int32))
    top = copy.deepcopy(holder.top)
    halves = [torch.cat([h[:, :SIZE], half, h[:, 2 * SIZE :]], dim=1) for half in pair]
    expected = (f(top, halves[0], [4] * 4) - f(top, halves[1], [4] * 4)) / 0.1
    answers = holder.answer([Arrival(1, window, False, Reading(pair[1], pair), window)])
    assert answers.keys() == {1}
    found = torch.from_numpy(answers[1]["difference"])
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)

    divisors = [4, 1, 5, 2]
    before = copy.deepcopy(top)
    optimizer, rest = build_optimizer(config, top, 0.01), (labels, LENGTHS, divisors)
    directions = Directions(config.estimator, b"key", top)
    losses = by_differences(directions, top, optimizer, h, *rest, loss=Loss(weights))
    torch.testing.assert_close(losses, f(before, h, divisors).detach())
    parameters = dict(before.named_parameters())
    movement = {name: torch.zeros_like(p) for name, p in parameters.items()}
    shapes = [p.shape for p in parameters.values()]
    for step, u in enumerate(Directions(config.estimator, b"key", before).stack(len(LENGTHS))):
        split = u.split([shape.numel() for shape in shapes])
        parts = dict(zip(parameters, map(Tensor.view, split, shapes), strict=True))
        shifted = {name: p + 0.1 * parts[name] for name, p in parameters.items()}

        def at(rows: Tensor, shifted: dict[str, Tensor] = shifted) -> Tensor:
            return functional_call(before, shifted, (rows,))

        at_once: Any = at
        scalar = ((f(at_once, h, divisors) - f(before, h, divisors)) / 0.1)[step].detach()
        for name in movement:
            movement[name] -= 0.01 * scalar * parts[name]
    for name, p in top.named_parameters():
        expected_p = parameters[name] + movement[name]
        torch.testing.assert_close(p, expected_p, rtol=0, atol=2e-5)


def test_parties_that_know_the_labels_weigh_rows_alike(run: Start) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 1, "class-weights": "balanced"}
    one = run(2, {**keys, "strategy": "split-nn"})
    other = run(2, {**keys, "strategy": "ef-vfl", "codec": "identity", "labels": "shared"})
    unweighted = run(2, {**keys, "class-weights": ""})
    for name in ("top", "party-0", "party-1"):
        for key, values in one.parameters(name).items():
            np.testing.assert_array_equal(other.parameters(name)[key], values)
            learns = "edges" not in key
            assert (unweighted.parameters(name)[key] != values).any() == learns


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ("1,2,3", "gives 3 weights for 2 classes"),
        ("5", "gives 1 weights for 2 classes"),
        ("1,0", "Give 'balanced', or positive numbers"),
        ("1,-2", "Give 'balanced', or positive numbers"),
        ("1,nan", "Give 'balanced', or positive numbers"),
        ("1;2", "Give 'balanced', or positive numbers"),
        ("balance", "Give 'balanced', or positive numbers"),
    ],
)
def test_wrong_weights_are_one_sentence_before_training(
    weights: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    keys = f"dataset='breast-cancer' class-weights='{weights}'"
    assert main(["run", "-c", keys, "--out", str(out)]) == 1
    sentence = capsys.readouterr().err
    assert cause in sentence and sentence.count("\n") == 1
    assert not out.exists()


# --- the label holder's own columns -------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"window": 4, "party-lr": 0.0},  # the label holder's steps are in order in any window
        {"combine": "mean", "top-model": "linear", "embedding-activation": "sigmoid"},
        {"combine": "sum", "optimizer": "momentum", "party-lr": 0.02, "server-lr": 0.02},
        {"dataset": "breast-cancer", "bottom-model": "linear", "top-model": "sum", "epochs": 4},
        {"dataset": "breast-cancer", "class-weights": "2,1", "epochs": 4},
    ],
    ids=str,
)
def test_own_columns_are_one_party_more(
    run: Start, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    keys = {**ALL_ROWS, "batch-size": 29, "epochs": 1, "optimizer": "sgd", **keys}
    labels = give_columns(monkeypatch, keys)
    assert_is_centralised(run, keys, 3, labels)


def test_gradient_rows_are_derivatives_by_the_parties_columns() -> None:
    config = config_of()
    h, labels = rows_of(3)
    top = build_top(config, [SIZE] * PARTIES, 3, OWN)
    leaf = h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss_per_row(top(leaf), labels).sum() / 4, [leaf])
    for optimizer in (None, build_optimizer(config, top, 0.0)):
        rows, _ = by_gradient(top, optimizer, h, labels, [ROWS], [4])
        assert rows is not None and rows.shape == (ROWS, PARTIES * SIZE)
        torch.testing.assert_close(rows, expected[:, : PARTIES * SIZE])


@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn", "lstm", "scorecard"])
def test_own_block_is_the_model_of_a_party_after_the_last(kind: str) -> None:
    config = config_of(bottom_model=kind, estimator="zeroth-order", server_update="zeroth-order")
    top = build_top(config, [SIZE] * PARTIES, 3, OWN)
    of_a_table = "mlp" if kind in ("cnn", "lstm") else kind
    expected = build_bottom(
        config.with_values({"bottom-model": of_a_table}), PARTIES, torch.zeros(OWN), SIZE
    )
    assert top.own is not None
    for p, q in zip(top.own.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


NOISELESS = {**FASTER, "strategy": "dpzv", "noise-multiplier": 0.0, "clip": 5.0}
SCORECARD = {"mu": 0.5, "party-lr": 0.02, "server-lr": 0.02}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({"strategy": "ef-vfl", "epochs": 5}, 0.9),
        ({"strategy": "vafl", "window": 4}, 0.9),
        ({"strategy": "vafl-t", "quorum": 2}, 0.9),
        ({"strategy": "cascaded"}, 0.9),
        ({"strategy": "frozen"}, 0.9),
        ({"strategy": "synrevel"}, 0.8),
        ({**NOISELESS, "server-update": "zeroth-order", "server-lr": 0.02}, 0.8),
        ({"strategy": "asyrevel", "bottom-model": "scorecard", **SCORECARD}, 0.8),
    ],
    ids=str,
)
def test_systems_learn_beside_own_columns(
    run: Start, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], least: float
) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 10, "noise-seed": 0, **keys}
    give_columns(monkeypatch, keys)
    finished = run(3, keys)
    assert finished.summary["test_accuracy"] > least
    untrained = build_top(resolve(keys), [32] * 3, 1, 8).own
    assert untrained is not None
    top = finished.parameters("top")
    moved = [
        (top[f"own.{name}"] != p.detach().numpy()).any() for name, p in untrained.named_parameters()
    ]
    assert all(moved)


def test_nothing_is_sent_of_own_columns(run: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 2}
    without = run(3, keys).summary
    give_columns(monkeypatch, keys)
    beside = run(3, keys).summary
    for figure in ("exchanges", "bytes_up", "bytes_down", "evaluation_bytes"):
        assert beside[figure] == without[figure]
    assert beside["test_loss"] != without["test_loss"]


def test_alone_is_a_party_or_the_label_holder(run: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"epochs": 2, "strategy": "local-only", "bottom-model": "mlp", "optimizer": "sgd"}
    labels = give_columns(monkeypatch, keys)
    summary = run(2, keys).summary
    reached = summary["test_accuracy_of_party"]
    assert list(reached) == ["0", "1", "label holder"]
    assert summary["test_accuracy"] == max(reached.values()) > reached["label holder"] > 0.2

    strategy, _ = trained(2, keys)
    assert isinstance(strategy, Alone)
    by_itself = strategy._finished["label holder"]
    assert by_itself.figures()["exchanges"] == by_itself.figures()["parties"] == 0
    assert [entry["epoch"] for entry in by_itself.run.history.entries] == [1, 2]
    expected = centralised(keys, 0, labels)["top"]
    assert set(by_itself.top_arrays()) == set(expected)
    for key, values in expected.items():
        found = by_itself.top_arrays()[key]
        np.testing.assert_allclose(found, values.detach().numpy(), atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"strategy": "ef-vfl", "labels": "shared"}, "labels = 'shared' sends the top model"),
        ({"strategy": "cascaded", "bottom-model": "scorecard"}, "has no gradient"),
        (
            {"strategy": "dpzv"},
            "^privacy = 'scalar' clips gradients of the top model's layers only, and",
        ),
    ],
)
def test_own_columns_refuse_some_options(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], cause: str
) -> None:
    labels = give_columns(monkeypatch, keys)
    with pytest.raises(ConfigError, match=cause):
        LabelHolder(resolve(keys), labels, {0: 32, 1: 32})


# --- which embeddings the label holder keeps ----------------------------------------------------

TOGETHER = [
    {"strategy": "split-nn", "window": 1},
    {"strategy": "split-nn", "window": 8},
    {"strategy": "split-nn", "window": 3, "sampling": "poisson"},
    {"strategy": "cascaded", "quorum": 2, "window": 3},
]


def learnt(keys: Mapping[str, Any]) -> tuple[LabelHolder, NDArray[Any]]:
    """Return a trained label holder, and the parties' final embeddings of the test rows."""
    given = {**FASTER, "dataset": "breast-cancer", "noise-seed": 0, "epochs": 3, **keys}
    holder = trained(2, given)[0].run.holder
    return holder, holder.held_out.table.rows.numpy()


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", TOGETHER, ids=str)
def test_embeddings_of_one_window_are_enough_where_all_parties_step_together(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, by_window = learnt(keys)
    assert isinstance(holder.table, WindowTable)
    assert len(holder.table.rows) < len(holder.labels) == len(holder.table.state_dict()["rows"])
    monkeypatch.setattr(label_holder, "WindowTable", lambda *given: Table(*given[:3]))
    holder, by_all = learnt(keys)
    assert type(holder.table) is Table and len(holder.table.rows) == len(holder.labels)
    np.testing.assert_array_equal(by_window, by_all)


def test_a_window_table_has_no_more_rows_than_an_epoch() -> None:
    holder, _ = learnt({"sampling": "replacement", "window": 10**5})
    assert isinstance(holder.table, WindowTable)
    assert len(holder.labels) <= len(holder.table.rows) < len(holder.labels) + 32


def test_too_large_embeddings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfl_flower.label_holder.table.free_memory", lambda: 50_000.0)
    learnt({"strategy": "split-nn", "window": 1})
    sentence = r"needs 0\.0 GB of memory.* Party 0 has the largest, of size 32: give it a smaller"
    with pytest.raises(ConfigError, match=sentence):
        learnt({"strategy": "vafl"})


def test_a_window_table_needs_steps_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another window would be of other people."""
    holder, _ = learnt({"strategy": "vafl"})
    assert type(holder.table) is Table
    forced = partial(LabelHolder, window_rows=len(holder.labels))
    monkeypatch.setattr(run_module, "LabelHolder", lambda *given: forced(*given[:5]))
    with pytest.raises(VflError, match="a window that all parties have uploaded"):
        learnt({"strategy": "vafl"})


def test_a_window_table_serves_the_latest_window_of_all_parties_alone() -> None:
    table = WindowTable({0: slice(0, 1), 1: slice(1, 2)}, np.zeros((9, 0)), torch.device("cpu"), 3)
    first, second, long = (
        Window(np.array(ids, np.int32), np.array([len(ids)], np.int32))
        for ids in ([4, 2], [7, 2], [1, 3, 5, 7])
    )
    for party in range(2):
        table.write(party, first, torch.full((2, 1), party + 1.0))
    assert table.take(first).tolist() == [[1, 2], [1, 2]]
    with pytest.raises(VflError, match="has other rows"):
        table.take(second)  # another window
    table.write(0, second, torch.full((2, 1), 3.0))
    for window in (first, second):  # party 1 still has the first
        with pytest.raises(VflError, match="has other rows"):
            table.take(window)
    table.write(1, second, torch.full((2, 1), 4.0))
    assert table.take(second).tolist() == [[3, 4], [3, 4]]
    with pytest.raises(VflError, match=r"window of 4 rows.*Correct `most_rows`"):
        table.write(0, long, torch.zeros(4, 1))


# --- the bound on the age of embeddings -----------------------------------------------------------


def asked_again(table: Table, step: int, *lengths: int, parties: int = 2) -> dict[int, list[int]]:
    """The rows that party 0's window of rows 0, 1, ... needs fresh, by its steps' lengths."""
    ids = np.arange(sum(lengths), dtype=np.int32)
    uploads = [(0, Window(ids, np.array(lengths, np.int32)))]
    return {
        party: ids.tolist() for party, ids in table.too_old(uploads, range(parties), step).items()
    }


def test_an_embedding_serves_until_it_is_older_than_max_delay_and_no_longer() -> None:
    columns = {0: slice(0, 1), 1: slice(1, 2)}
    table = Table(columns, np.zeros((6, 0)), torch.device("cpu"), max_delay=3)
    assert asked_again(table, 0, 2) == {1: [0, 1]}  # never uploaded; its own come with the window
    window = Window(np.arange(4, dtype=np.int32), np.array([4], np.int32))
    for party in columns:
        table.write(party, window, torch.zeros(4, 1), step=10)
    assert asked_again(table, 13, 4) == {}
    assert asked_again(table, 14, 4) == {1: [0, 1, 2, 3]}
    assert asked_again(table, 13, 2, 2) == {1: [2, 3]}  # the second step comes a step later
    assert asked_again(table, 11, 1, 1, 1, 1) == {1: [3]}
    assert asked_again(table, 10, 6) == {1: [4, 5]}
    assert asked_again(table, 14, 4, parties=1) == {}  # party 1 can send none
    table.forget(1)
    assert asked_again(table, 10, 2) == {1: [0, 1]}
    assert asked_again(Table(columns, np.zeros((6, 0)), torch.device("cpu")), 99, 4) == {}
    present = np.array([[1, 1], [1, 0], [1, 1]], bool)  # rows that a party lacks are never too old
    table = Table(columns, np.zeros((3, 0)), torch.device("cpu"), 3, present)
    assert asked_again(table, 0, 3) == {1: [0, 2]}


def test_the_digest_of_rows_knows_no_order_and_counts_each_once() -> None:
    def digest(*parts: list[int]) -> str:
        people: Any = [np.array(each, np.uint64) for each in parts]
        found = about_data._digest(replace(load_labels(resolve({})), people=people))
        assert [each.tolist() for each in people] == list(parts)  # the rows keep their order
        return found

    assert digest([3, 1], [2]) == digest([1, 2], [3, 3, 1]) != digest([1, 2], [4])
