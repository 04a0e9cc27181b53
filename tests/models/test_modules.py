"""User models: whole modules, wherever a pass is made, kept, repeated or left out."""

import copy
import json
import logging
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from tests import towers
from tests.conftest import ALL_ROWS, Start, nightly
from tests.fleet import assert_equals, fleet
from tests.party.nodes import asked
from tests.strategy.test_checkpoint import assert_equal_runs, interrupted, resumed
from vfl_flower import client_app
from vfl_flower.config.errors import CodeError, ConfigError, PartyError, VflError
from vfl_flower.data import samples, source
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import FeatureBlock, load_features
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.models import passes
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import kept, load_model, model_arrays
from vfl_flower.party import builder, refusals
from vfl_flower.party import session as between
from vfl_flower.party.party import Party
from vfl_flower.protocol.directions.differences import values_of_pairs
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.messages import DescribeOrder, Description, EvaluateOrder, TrainOrder

TOWERS = "tests.towers"
CANCER: dict[str, Any] = {
    **ALL_ROWS,
    **{"dataset": "breast-cancer", "batch-size": 64, "embedding-size": 4, "epochs": 2},
    **{"top-hidden": 8, "noise-seed": 0},
}
DIGITS: dict[str, Any] = {
    **ALL_ROWS,
    **{"dataset": "digits", "bottom-model": f"{TOWERS}:Conv", "top-model": "linear"},
    **{"embedding-size": 6, "batch-size": 64, "noise-seed": 0},
}
MOMENTUM: dict[str, Any] = {"optimizer": "momentum", "party-lr": 0.02, "server-lr": 0.02}


def own(name: str, **keys: Any) -> dict[str, Any]:
    return {**CANCER, "bottom-model": f"{TOWERS}:{name}", **keys}


# --- it is the same training --------------------------------------------------------------------


def centralised(keys: Mapping[str, Any], window: int) -> dict[str, dict[str, Any]]:
    """Train the same modules in plain PyTorch on joined data, and return their states.

    The gradients of a window are at the bottom models that it met; of one step, that is all.
    """
    labels = load_labels(resolve(keys))
    config = sized(resolve(keys), len(labels.train))
    y = torch.from_numpy(labels.train)
    x = [torch.from_numpy(load_features(config, m, 2).train) for m in range(2)]
    bottoms = [build_bottom(config, m, x[m][0], 6) for m in range(2)]
    top = build_top(config, [6, 6], labels.outputs)
    models = nn.ModuleList([*bottoms, top])
    optimizer = torch.optim.SGD(models.parameters(), lr=config.training.party_lr, momentum=0.9)
    steps = -(-len(y) // config.training.batch_size)
    for epoch in range(config.training.epochs):
        drawn = sampling_of(config, len(y)).window(None, epoch, 0, steps, b"")
        order = torch.from_numpy(drawn.ids).long()
        for number, ids in enumerate(order.split(config.training.batch_size)):
            if number % window == 0:
                met = [copy.deepcopy(bottom) for bottom in bottoms]
            optimizer.zero_grad()
            h = torch.cat([bottom(x[m][ids]) for m, bottom in enumerate(met)], dim=1)
            functional.cross_entropy(top(h), y[ids]).backward()
            for bottom, at in zip(bottoms, met, strict=True):
                for p, q in zip(bottom.parameters(), at.parameters(), strict=True):
                    p.grad, q.grad = q.grad, None
                for b, c in zip(bottom.buffers(), at.buffers(), strict=True):
                    b.copy_(c)
            optimizer.step()
    named = {"top": top, "party-0": bottoms[0], "party-1": bottoms[1]}
    return {name: model_arrays(model) for name, model in named.items()}


@pytest.mark.one_by_day
@pytest.mark.parametrize("window", [1, 4])
def test_batchnorm_towers_are_trained_as_if_they_were_joined(window: int, run: Start) -> None:
    keys = {**DIGITS, **MOMENTUM, "window": window, "epochs": 3, "model-args": "width=2"}
    keys |= {"eval-every": 3}
    finished = run(2, keys)
    assert finished.summary["steps"] == 69
    for name, expected in centralised(keys, window).items():
        found = finished.parameters(name)
        assert list(found) == list(expected)
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, atol=1e-5, err_msg=f"{name}.{key}")
    assert finished.parameters("party-0")["layers.0.norm.num_batches_tracked"] == 69


SYSTEMS: dict[str, dict[str, Any]] = {
    "first-order": {},
    "momentum, windows": {**MOMENTUM, "window": 4},
    "its own mini-batches": {"strategy": "vafl", "window": 3},
    "shared labels": {"strategy": "ef-vfl", "labels": "shared", "local-steps": 2, "window": 2},
    "one-sided pairs": {"strategy": "cascaded", "window": 4},
    "two-sided pairs": {"strategy": "cascaded", "differences": "two-sided", "window": 4},
    "a top model by pairs": {
        **{"strategy": "asyrevel", "top-model": f"{TOWERS}:Top", "window": 4},
        **{"top-args": "norm=true drop=0.2"},
    },
    "a top model of one's own": {
        **{"top-model": f"{TOWERS}:Top", "top-args": "norm=true drop=0.2", "window": 2}
    },
}


def forgetful(message: Message, context: Context) -> Message:
    """Serve a message as a party would in a new process."""
    between.live.clear()
    return client_app.app(message, context)


FORGETFUL: Any = forgetful
BY_DAY = ("momentum, windows", "two-sided pairs", "a top model of one's own")


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", [name if name in BY_DAY else nightly(name) for name in SYSTEMS])
def test_a_process_that_has_forgotten_all_repeats_what_was_random(name: str, run: Start) -> None:
    keys = own("Normal", **{"model-args": "drop=0.3", **SYSTEMS[name]})
    one, other = run(2, keys), run(2, keys, client=FORGETFUL)
    assert_equal_runs(one, other, parties=2)
    tracked = "layers.0.norm.num_batches_tracked"
    parties = (one.parameters(f"party-{party}") for party in range(2))
    assert sum(each[tracked] for each in parties) == 2 * 2 * 8  # mini-batches, each of them once


# --- what is kept -------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "cascaded", nightly("vafl")])
def test_parameters_that_are_frozen_stay_and_are_kept(strategy: str, run: Start) -> None:
    keys = own("Half", **{"strategy": strategy})
    found = run(2, keys).parameters("party-0")
    x = torch.from_numpy(load_features(resolve(keys), 0, 2).train)
    model = build_bottom(resolve(keys), 0, x[0], 4)
    for name, values in model_arrays(model).items():
        if "fixed" in name or ("unused" in name and strategy != "cascaded"):
            np.testing.assert_array_equal(found[name], values)
        else:
            assert (found[name] != values).any(), name
    config = resolve(keys).estimator
    assert Directions(config, b"", model).size == 6 * 4 + 4 + 3


def test_a_state_has_what_the_module_keeps_and_no_more() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("constant", torch.ones(2), persistent=False)
    assert kept(model).keys() == model.state_dict().keys()
    with pytest.raises(VflError, match=r"'0.weight' has \(3, 2\), but \(2, 2\) in the saved model"):
        load_model(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), model_arrays(model))
    with pytest.raises(VflError, match=r"'1\.weight' has .*, but nothing in the saved model"):
        load_model(model, {k: v for k, v in model_arrays(model).items() if k[0] == "0"})
    with pytest.raises(VflError, match="has nothing, but"):
        load_model(nn.Sequential(nn.Linear(2, 2)), model_arrays(model))


# --- passes -------------------------------------------------------------------------------------


def test_a_window_is_normalised_step_by_step_and_learned_once() -> None:
    config, x = resolve(own("Normal")), torch.randn(12, 3)
    model = build_bottom(config, 0, x[0], 4)
    twin = copy.deepcopy(model)
    _, hs = passes.window(model, x, [5, 7])
    for h, part in zip(hs, x.split([5, 7]), strict=True):
        torch.testing.assert_close(h, twin(part))
    passes.window(model, x, [5, 7], learns=False)
    for found, expected in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_evaluation_by_parts_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((600, 3)).astype(np.float32)
    for name in (f"{TOWERS}:Normal", "mlp"):
        config = resolve({**CANCER, "bottom-model": name, "embedding-activation": "none"})
        party = Party(config, 0, 2, 1, FeatureBlock(rows, rows, ""))
        party.learner.model.eval()
        whole = party.learner.model(torch.from_numpy(rows)).detach()
        monkeypatch.setattr("vfl_flower.party.learner._AT_ONCE", 60)
        torch.testing.assert_close(party.learner.embeddings(rows), whole)
        ids = np.arange(0, 600, 2, dtype=np.int32)
        torch.testing.assert_close(party.learner.embeddings(rows, ids), whole[::2])
        assert party.learner.embeddings(rows[:0]).shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "stackable"), [("plain", True), ("Normal", False), ("Mixing", True), ("Half", True)]
)
def test_pairs_of_a_module_are_stacked_only_where_they_can_be(name: str, stackable: bool) -> None:
    config, x = resolve(own(name, **{"strategy": "cascaded"})), torch.randn(12, 3)
    model = build_bottom(config, 0, x[0], 4)
    assert model.stackable is stackable
    dropping = resolve(own("Normal", **{"model-args": "drop=0.1"}))
    assert not build_bottom(dropping, 0, x[0], 4).stackable
    directions = Directions(config.estimator, b"key", model)
    assert values_of_pairs(model, x, [5, 7], directions)[1] is None
    pair, u = values_of_pairs(model, x, [6, 6], directions)
    assert (u is not None) is stackable
    model.stackable = False
    other, _ = values_of_pairs(model, x, [6, 6], directions)
    for found, expected in zip(pair, other, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class Rows(source.Rows):
    """Samples of two tensors by name."""

    def __init__(self, rows: int) -> None:
        self.places = np.arange(rows)
        generator = np.random.default_rng(0)
        self.samples: dict[str, Any] = {
            "words": generator.integers(0, 10, (rows, 5)),
            "numbers": generator.standard_normal((rows, 3)).astype(np.float32),
        }

    def __getitem__(self, rows: Any) -> Any:
        return {name: array[rows] for name, array in self.samples.items()}


@pytest.mark.parametrize(
    "keys", [{}, MOMENTUM, {"strategy": "cascaded"}, {"strategy": "cascaded", "window": 1}], ids=str
)
def test_samples_by_name_go_through_all_that_a_party_does(keys: dict[str, Any]) -> None:
    config = resolve(own("Named", **keys))
    rows = Rows(128)
    party = Party(config, 0, 2, 1, FeatureBlock(rows, rows, ""))
    assert party.describe(DescribeOrder(outputs=1)).columns == 8
    before = {name: each.clone() for name, each in kept(party.learner.model).items()}
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=2, coordinated=True)
    upload = party.train(order)
    feedback: dict[str, Any] = {"gradient": np.ones((128, 4), np.float32)}
    if "strategy" in keys:
        feedback = {"difference": np.ones(2, np.float32)}
    else:
        model = build_bottom(config, 0, samples.first(rows), 4)
        window = sampling_of(config, 128).window(None, 0, 0, 2, b"")
        ids = window.index
        x = {name: torch.from_numpy(array)[ids] for name, array in rows.samples.items()}
        np.testing.assert_allclose(upload.arrays["embedding"], model(x).detach(), atol=1e-6)
    h = party.evaluate(EvaluateOrder(exchange=2, arrays=feedback)).arrays["embedding"]
    assert h.shape == (128, 4)
    assert all((each != before[name]).any() for name, each in kept(party.learner.model).items())


# --- who names it -------------------------------------------------------------------------------

WORDS: list[dict[str, Any]] = [
    {"model": f"{TOWERS}:plain", "model-args": "hidden=7 bias=false", "embedding-size": 3},
    {"model": f"{TOWERS}:Normal", "embedding-size": 9},
    {"model": "linear"},
]


def test_parties_have_different_models_and_embedding_sizes(tmp_path: Path) -> None:
    keys = {**CANCER, "epochs": 8, "eval-every": 8, "optimizer": "sgd"}
    finished = run_local(3, {**keys, "out": str(tmp_path / "run")}, node_configs=WORDS)
    assert finished.summary["test_accuracy"] > 0.85
    shapes = {
        name: finished.parameters(f"party-{party}")[name].shape
        for party, name in enumerate(("layers.0.0.weight", "layers.0.last.weight"))
    }
    assert shapes == {"layers.0.0.weight": (7, 10), "layers.0.last.weight": (9, 10)}
    assert finished.parameters("top")["layers.0.weight"].shape == (8, 3 + 9 + 4)
    file = predict_local({"model": str(finished.folder)}, WORDS)
    figures = json.loads(file.with_suffix(".json").read_text())
    assert figures["accuracy"] == pytest.approx(finished.summary["test_accuracy"])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["local-only", "centralised", "frozen"])
def test_baselines_have_the_models_that_parties_name(strategy: str, tmp_path: Path) -> None:
    keys = {**CANCER, "strategy": strategy, "epochs": 40, "out": str(tmp_path / "run")}
    assert run_local(3, keys, node_configs=WORDS).summary["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"top-model": "sum", "embedding-size": "auto"}, "does not fit top-model = 'sum'"),
        ({"combine": "mean"}, "Party 0 has embeddings of size 3, and the run configuration"),
        ({"strategy": "ef-vfl", "labels": "shared"}, "Party 0 has embeddings of size 3"),
    ],
)
def test_sizes_are_alike_where_embeddings_are_added_up_or_sent_on(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(VflError, match=said):
        run_local(3, {**CANCER, **keys, "out": str(tmp_path / "run")}, node_configs=WORDS)


def node(config: dict[str, Any], keys: dict[str, Any], simulated: bool = False) -> Context:
    node_config = {"partition-id": 1, "num-partitions": 2, "simulated": simulated, **config}
    return Context(1, 2, node_config, RecordDict(), keys)


def test_a_node_has_the_model_that_its_own_configuration_names() -> None:
    words = {"model": f"{TOWERS}:plain", "model-args": "hidden=7", "embedding-size": 3}
    keys = {"dataset": "breast-cancer", "bottom-hidden": 5}
    party = builder.begin(node(words, keys), DescribeOrder(outputs=1))
    assert party.describe(DescribeOrder(outputs=1)).embedding_size == 3
    shapes = [tuple(p.shape) for p in party.learner.model.parameters()]
    assert shapes == [(7, 15), (7,), (3, 7), (3,)]
    with pytest.raises(ConfigError, match="bottom-model names code, which a node does not take"):
        named = {**keys, "bottom-model": f"{TOWERS}:plain"}
        builder.begin(node(words, named), DescribeOrder(outputs=1))


def test_code_of_the_label_holder_is_loaded_by_no_party(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import pathlib\n\npathlib.Path(__file__ + '.ran').touch()\n")
    place = f"{tmp_path / 'own.py'}:NAME"
    keys = {"dataset": "breast-cancer", "top-model": place, "loss": place, "metrics": place}
    builder.begin(node({}, {**keys, "observer": place}), DescribeOrder(outputs=1))
    assert not (tmp_path / "own.py.ran").exists()
    with pytest.raises(ConfigError, match="labels = 'shared' has parties use the top model"):
        builder.begin(node({}, {**keys, "labels": "shared"}), DescribeOrder(outputs=1))
    assert not (tmp_path / "own.py.ran").exists()


REFUSED = {
    "Nope": " = 'tests.towers:Nope' cannot be loaded",
    "TABLE": " .*cannot be loaded",
    "no_module": " .* is not a torch module, but a function",
    "fixed": " .* has no parameter to train",
    "double": " .* trains parameters of torch.float64",
    "Conv": r" .* cannot be built from a sample of shape \(15,\), \d+: ValueError",
    "Sparse": r" .* cannot read samples of shape \(15,\): NotImplementedError",
    "Step": " .* has no gradient, but strategy",
}
PLAIN = f"{TOWERS}:plain"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(({"model": f"{TOWERS}:{name}"}, f"model{said}") for name, said in REFUSED.items()),
        ({"model": 3}, "model = 3 must be a text in quotes"),
        ({"model": "no-such"}, "model = 'no-such' is not known: choose one of tabular-or-mlp"),
        ({"model": "nowhere.py:Nope"}, "model = 'nowhere.py:Nope' cannot be loaded"),
        ({"embedding-size": "3"}, "embedding-size = '3' must be a whole number"),
        ({"embedding-size": 0}, "embedding-size = 0 must be at least 1"),
        ({"model": f"{TOWERS}:infinite"}, "has a model .* that are not finite"),
        ({"model": f"{TOWERS}:Complex"}, "has a model .* that returns complex numbers"),
        ({"model": f"{TOWERS}:Silent"}, "has a model .* have no gradient. Correct"),
        ({"model": PLAIN, "model-args": "depth=5"}, ".* the arguments 'depth=5': got an unexpec"),
        ({"model": PLAIN, "model-args": "depth"}, ".* cannot be read. Write"),
        ({"model": PLAIN, "model-args": "x.toml"}, ".*'x.toml ' cannot be read"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_had_is_a_sentence_that_names_the_party(
    words: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^Party 1('s|) {said}") as error:
        builder.begin(node(words, {"dataset": "breast-cancer"}), DescribeOrder(outputs=1))
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


def test_arguments_are_for_models_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="and not for bottom-model = 'mlp'"):
        words = {"model": "mlp", "model-args": "depth=5"}
        builder.begin(node(words, {"dataset": "breast-cancer"}), DescribeOrder(outputs=1))


def test_what_code_says_of_its_data_is_told_to_its_owner_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    words, keys = {"model": f"{TOWERS}:unlucky"}, {"dataset": "breast-cancer"}
    with pytest.raises(CodeError, match="ValueError: the first number is") as told:
        builder.begin(node(words, keys), DescribeOrder(outputs=1))
    assert re.search(r"\(ValueError in unlucky, towers.py:\d+\)", told.value.outside)
    assert "the first number" not in told.value.outside
    for simulated in (False, True):
        with pytest.raises(VflError) as answered:
            asked(node(words, keys, simulated=simulated), DescribeOrder(outputs=1), Description)
        assert ("the first number" in str(answered.value)) == simulated
        assert str(Path(__file__).parent) not in str(answered.value)
        assert "the first number" in caplog.text  # which is the log of the code's owner


def test_a_black_box_of_ones_own_is_trained_by_pairs(run: Start) -> None:
    finished = run(2, own("Step", **{"strategy": "cascaded"}))
    assert finished.summary["failure"] is None
    with pytest.raises(ConfigError, match=r"bottom-model = 'tests\.towers:Step' has no"):
        resolve(own("Step"))


@pytest.mark.parametrize(
    ("what", "said"),
    [("shape", r"that returns \(64, 3\) for 64 rows"), ("nan", "values that are not finite")],
)
def test_what_a_model_makes_later_ends_the_run_and_loses_nothing(
    what: str, said: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    keys = own("Later", **{"model-args": f"what='{what}'", "out": str(out)})
    with pytest.raises(PartyError, match=f"Party 0.*{said}"):
        run_local(2, keys)
    assert (out / "party-1.npz").exists() and (out / "top.npz").exists()
    assert "Party 0" in json.loads((out / "summary.json").read_text())["failure"]


def test_a_model_that_differs_from_the_one_that_was_kept_is_refused(tmp_path: Path) -> None:
    keys = {**CANCER, "checkpoint-every": 4, "epochs": 3}
    words = [{"model": f"{TOWERS}:plain", "model-args": "hidden=7"}, {}]
    out = str(tmp_path / "run")
    whole = run_local(2, {**keys, "out": out}, node_configs=words)
    changed: list[tuple[dict[str, Any], str]] = [
        ({"model": f"{TOWERS}:plain", "model-args": "hidden=6"}, "tests.towers:plain"),
        ({"model": f"{TOWERS}:Half"}, "tests.towers:Half"),
        ({}, "tabular-or-mlp"),
    ]
    before = sorted(whole.folder.iterdir())
    for words_now, said in changed:
        then = "but the run began with 'tests.towers:plain'"
        with pytest.raises(PartyError, match=f"Party 0's model is '{said}', {then}"):
            predict_local({"model": out}, [words_now, {}])
    assert [path for path in sorted(whole.folder.iterdir()) if path.suffix != ".lock"] == before


# --- a module that is more than its state_dict ---------------------------------------------------


def try_out(name: str, how: str = "", **keys: Any) -> Party:
    """Build a party whose model passes the trial before training."""
    x = np.random.default_rng(0).standard_normal((64, 15)).astype(np.float32)
    keys = {"model-args": f"how='{how}'" if how else "", **keys}
    party = Party(resolve(own(name, **keys)), 0, 2, 1, FeatureBlock(x, x, ""))
    party.learner.try_out()
    return party


@pytest.fixture(autouse=True)
def _first_state() -> Iterator[None]:
    yield
    towers.Stateful.seen = 0
    towers.MEANS.clear()


OTHERWISE = (
    "would predict otherwise than it is tested: a copy rebuilt from its state_dict differs in"
)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("attribute", f"{OTHERWISE} 'mean'"),
        ("counter", f"{OTHERWISE} 'steps'"),
        ("hook", f"{OTHERWISE} 'steps'"),
        ("temporary", f"{OTHERWISE} 'mean'"),
        ("class", f"{OTHERWISE} 'seen'"),
        ("global", f"{OTHERWISE} 'global MEANS'"),
        ("own generator", f"{OTHERWISE} 'order'"),
        ("eval", "changes 'mean' in eval mode"),
        ("draws", "gives other outputs at a second pass over the same rows in eval mode"),
        ("growing", r"changes the shape of 'mean' after it is built: \(0,\), then \(2,\)"),
        ("none", r"changes the shape of 'mean' after it is built: none, then \(1,\)"),
        ("bfloat16", "has a tensor 'odd' of torch.bfloat16, which is not saved"),
        ("complex64", "has a tensor 'odd' of torch.complex64, which is not saved"),
        ("parameter", "replaces its parameter 'weight' in forward"),
    ],
)
def test_a_module_that_is_more_than_its_state_dict_is_refused(how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^Party 0's model 'tests.towers:Stateful' {said}"):
        try_out("Stateful", how)


@pytest.mark.parametrize(
    ("name", "mixes"), [("Mixing", True), ("OfBatch", True), ("Normal", False)]
)
def test_rows_that_come_together_do_not_change_each_other_s_outputs(name: str, mixes: bool) -> None:
    said = "Party 0's model .* gives a row other outputs in eval mode if other rows come with it"
    with pytest.raises(ConfigError, match=said) if mixes else nullcontext():
        try_out(name)


TAKEN = [("Stateful", how) for how in ("buffer", "integers", "numpy", "python")]
TAKEN += [(name, "") for name in ("Extra", "Averaged", "Normal", "Half", "lazy", "plain")]


@pytest.mark.parametrize(("name", "how"), TAKEN)
def test_a_module_that_is_its_state_dict_is_taken(name: str, how: str) -> None:
    """The control: also with extra states, lazy, tied and averaged layers, and rounding."""
    try_out(name, how, **({"precision": "bfloat16"} if name == "plain" else {}))


def test_an_extra_state_that_nobody_can_save_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a get_extra_state with a set, which is not saved"):
        try_out("Unsaved")
    with pytest.raises(ConfigError, match="has a get_extra_state, but no set_extra_state"):
        try_out("Unset")


def test_with_own_data_an_order_that_numpy_draws_is_refused() -> None:
    """Each process of such a party draws from another secret; a simulation repeats the draws."""
    with pytest.raises(ConfigError, match=f"{OTHERWISE} 'order'"):
        try_out("Stateful", "numpy", dataset="files:here.csv", **{"noise-seed": -1})


def test_a_trial_changes_neither_the_model_nor_random_numbers() -> None:
    x = np.zeros((64, 15), np.float32)
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    party = Party(resolve(own("Normal")), 0, 2, 1, FeatureBlock(x, x, ""))
    before = {name: each.copy() for name, each in model_arrays(party.learner.model).items()}
    party.learner.try_out()
    party.learner.check()
    for name, each in model_arrays(party.learner.model).items():
        np.testing.assert_array_equal(each, before[name])
    assert party.learner.model.training
    assert torch.equal(torch.get_rng_state(), generators[0])
    np.testing.assert_equal(np.random.get_state(), generators[1])
    assert random.getstate() == generators[2]


def test_a_repeated_pass_draws_the_same_by_numpy_and_python() -> None:
    model = build_bottom(resolve(own("Half")), 0, torch.zeros(15), 4)
    model.layers[0] = towers.Stateful(torch.zeros(15), 4, "draws")
    x = torch.randn(3, 15)
    first, again, other = (passes.one(model, x, 0, key=key) for key in (b"1", b"1", b"2"))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_passes_that_do_not_learn_leave_extra_states() -> None:
    model = build_bottom(resolve(own("Extra")), 0, torch.zeros(15), 4)
    x = torch.ones(3, 15)
    passes.one(model, x, 0, learns=False)
    assert model.layers[0].mean == 0
    assert not model.apart() and model.layers[0].mean == 0
    passes.one(model, x, 0)
    assert model.layers[0].mean > 0


def loss_of_predictions(folder: Path) -> float:
    """Predict as a new process would: with modules in their first state."""
    towers.Stateful.seen = 0
    towers.MEANS.clear()
    between.live.clear()
    file = predict_local({"model": str(folder)}).with_suffix(".json")
    return float(json.loads(file.read_text())["loss"])


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "cascaded", nightly("centralised")])
def test_extra_states_live_in_states_copies_and_predictions(strategy: str, tmp_path: Path) -> None:
    keys = own("Extra", **{"strategy": strategy, "validation-fraction": 0.2})
    for client in (None, FORGETFUL) if strategy != "centralised" else (None,):
        out = {"out": str(tmp_path / ("one" if client is None else "other"))}
        finished = run_local(2, {**keys, **out}, **({"client": client} if client else {}))
        expected = pytest.approx(finished.summary["test_loss"], abs=1e-6)
        assert loss_of_predictions(finished.folder) == expected


EXTRA = {"top-model": f"{TOWERS}:StatefulTop", "top-args": "how='numpy'"}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Extra", EXTRA),
        nightly("Normal", {"model-args": "drop=0.3", **SYSTEMS["momentum, windows"]}),
        nightly("Normal", {"model-args": "drop=0.3", **SYSTEMS["a top model by pairs"]}),
    ],
    ids=str,
)
def test_a_run_that_is_cut_short_goes_on_with_its_states_and_statistics(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    keys = own(name, **{"checkpoint-every": 4, **keys})
    whole = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", keys, after=1, parties=2)
    assert_equal_runs(whole, resumed(folder, parties=2), parties=2)
    expected = pytest.approx(whole.summary["test_loss"], abs=1e-6)
    assert loss_of_predictions(whole.folder) == loss_of_predictions(folder) == expected


@pytest.mark.parametrize(
    ("of", "name", "said"),
    [("bottom-", "Stateful", "Party 0's model"), ("top-", "StatefulTop", "top-model =")],
)
def test_state_that_matters_late_ends_the_run_at_its_next_figures(
    of: str, name: str, said: str, tmp_path: Path
) -> None:
    out, said = tmp_path / "run", f"{said} 'tests.towers:{name}'"
    arguments = {"bottom-": "model-args", "top-": "top-args"}[of]
    keys = {f"{of}model": f"{TOWERS}:{name}", arguments: "how='counter' after=10"}
    with pytest.raises(VflError, match=f"{said} {OTHERWISE} 'steps'"):
        run_local(2, {**CANCER, **keys, "checkpoint-every": 4, "out": str(out)})
    summary = json.loads((out / "summary.json").read_text())
    assert f"{said} would predict otherwise" in summary["failure"]
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert len(history) == 1 and (out / "party-1.npz").exists()
    loss_of_predictions(out)  # the checkpoint from before, whose model was as good as rebuilt


@pytest.mark.parametrize("how", ["counter", "numpy"])
def test_a_top_model_is_tried_out_as_a_bottom_model_is(how: str, tmp_path: Path) -> None:
    keys = {**CANCER, "top-model": f"{TOWERS}:StatefulTop", "top-args": f"how='{how}'"}
    if how == "counter":
        with pytest.raises(ConfigError, match=f"top-model = .* {OTHERWISE} 'steps'"):
            run_local(2, {**keys, "out": str(tmp_path / "run")})
        return
    finished = run_local(2, {**keys, "out": str(tmp_path / "run")})
    expected = pytest.approx(finished.summary["test_loss"], abs=1e-6)
    assert loss_of_predictions(finished.folder) == expected


# --- the label holder's -------------------------------------------------------------------------

OURS = {**CANCER, "top-model": "linear", "bottom-model": "linear", "embedding-activation": "none"}
TOP, NOISE = f"{TOWERS}:Top", {"strategy": "dpzv"}
OF_HOLDER = {
    **{"top-model": f"{TOWERS}:linear_top", "loss": f"{TOWERS}:loss"},
    **{"metrics": f"{TOWERS}:figures"},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        nightly({}, 1e-6),
        ({"window": 4, "dataset": "digits", "epochs": 1}, 1e-6),
        ({**MOMENTUM, "class-weights": "1,3"}, 1e-6),
        nightly({"strategy": "vafl", "server-update": "zeroth-order", "mu": 0.1}, 1e-4),
        nightly({"strategy": "cascaded", "mu": 0.1}, 1e-4),
        nightly({"strategy": "syn-zoo", "mu": 0.1, "perturbs": "all"}, 1e-4),
        ({"strategy": "dpzv", "noise-multiplier": 0.5, "mu": 0.1}, 1e-4),
    ],
    ids=str,
)
def test_a_top_model_and_loss_of_ones_own_are_ours_where_they_say_the_same(
    keys: dict[str, Any], tolerance: float, run: Start
) -> None:
    ours, theirs = run(2, {**OURS, **keys}), run(2, {**OURS, **keys, **OF_HOLDER})
    expected = ours.parameters("top")
    for key, values in theirs.parameters("top").items():
        same = key.replace("module", "layers.0")
        np.testing.assert_allclose(values, expected[same], atol=tolerance)
    for key, values in ours.parameters("party-0").items():
        np.testing.assert_allclose(theirs.parameters("party-0")[key], values, atol=tolerance)
    assert theirs.summary["test_loss"] == pytest.approx(ours.summary["test_loss"], abs=tolerance)
    rows = 114 if "dataset" not in keys else 360
    assert theirs.summary["test_hits"] == pytest.approx(rows * ours.summary["test_accuracy"])
    assert theirs.summary["test_nothing"] is None
    assert theirs.history[0]["test_hits"] > 0 and "test_hits" not in ours.history[0]


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"top-model": f"{TOWERS}:wide_top"}, r"returns \(3, 2\) for 3 rows, but outputs must be"),
        ({"top-model": f"{TOWERS}:Nope"}, "top-model = 'tests.towers:Nope' cannot be loaded"),
        ({"top-model": "no-such"}, "top-model = 'no-such' is not known: choose one of sum"),
        ({"top-model": TOP, "top-args": "depth=1"}, "does not take the arguments"),
        ({"top-args": "width=3"}, "top-args = 'width=3' are for a top model of your own"),
        ({"top-model": TOP, "combine": "mean"}, "combine = 'mean' is for the top models"),
        ({"loss": f"{TOWERS}:mean_loss"}, r"loss = .* returns \(\) for 8 rows"),
        ({"loss": f"{TOWERS}:wide_top"}, "loss = .* cannot read outputs"),
        ({"metrics": f"{TOWERS}:no_figures"}, "metrics must return a dictionary of numbers"),
        ({"metrics": f"{TOWERS}:wide_top"}, "metrics = .* cannot read"),
        ({"loss": f"{TOWERS}:loss", "privacy": "labels", "epsilon": 1.0}, "is not corrected for"),
        ({**NOISE, "loss": f"{TOWERS}:mixed_loss"}, "loss = .* affect another row's loss"),
        ({**NOISE, "top-model": TOP, "top-args": "norm=true"}, "top-model = .* lets one row aff"),
        ({**NOISE, "top-model": TOP, "top-args": "drop=0.5"}, "top-model = .* outputs, or drops"),
    ],
    ids=str,
)
def test_what_the_label_holder_cannot_use_is_a_sentence_before_training(
    keys: dict[str, Any], said: str, run: Start
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(2, {**CANCER, **keys})


def test_a_top_model_that_differs_from_the_one_that_was_kept_is_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", str(tmp_path / "run")
    text = "from torch import nn\n\n\ndef top(sizes, outputs):\n    return nn.Linear(8, {})\n"
    file.write_text(text.format("outputs"))
    run_local(2, {**CANCER, "top-model": f"{file}:top", "out": out})
    file.write_text(text.format("outputs, bias=False"))
    with pytest.raises(ConfigError, match=r"top-model = .* differs from the saved model"):
        predict_local({"model": out})


def test_rows_add_bounded_gradients_to_a_top_model_of_ones_own() -> None:
    config = resolve({**OURS, "top-model": f"{TOWERS}:Top"})
    top = build_top(config, [4, 4], 1)
    x, y = torch.randn(5, 8), torch.rand(5, 1)

    def gradient(z: Tensor, _: Tensor) -> Tensor:
        return z - y[: len(z)]

    _, _, bounded = top.passes(x, y, 1.0, gradient, False, True, bound=0.1)
    expected = [torch.zeros_like(p) for p in top.parameters()]
    for row in range(5):
        signal = lambda z, _, row=row: z - y[row : row + 1]  # noqa: E731
        _, _, each = top.passes(x[row : row + 1], y, 1.0, signal, False, True)
        norm = torch.cat([g.flatten() for g in each]).norm()
        for total, g in zip(expected, each, strict=True):
            total += g * min(1.0, 0.1 / float(norm))
    for found, total in zip(bounded, expected, strict=True):
        torch.testing.assert_close(found, total)


# --- noise --------------------------------------------------------------------------------------

NOISY = {"privacy": "perturbed-embedding", "embedding-noise": 1e-6, "embedding-bound": 0.01}


def test_noise_is_on_what_a_module_makes_which_is_clipped_before() -> None:
    x = np.random.default_rng(0).standard_normal((64, 15)).astype(np.float32)
    for noise in (1e-6, 1.0):
        config = resolve(own("plain", **{**NOISY, "embedding-noise": noise}))
        party = Party(config, 0, 2, 1, FeatureBlock(x, x, ""))
        norms = party.learner.embeddings(x).norm(dim=1)
        assert (norms.max() <= 0.0101) == (noise == 1e-6)
        assert noise == 1e-6 or norms.mean() > 1


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Normal", {}, "can mix a row into"),
        ("plain", {"inner-noise": 0.1}, "has no layers for inner-noise"),
    ],
)
def test_noise_asks_that_buffers_do_not_learn_and_has_no_place_inside(
    run: Start, name: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(PartyError, match=rf"Party 0's model .* {said}"):
        run(2, own(name, **NOISY, **more))


def test_with_noise_a_row_has_no_part_in_another_s_embedding() -> None:
    model = build_bottom(resolve(own("Mixing", **NOISY)), 0, torch.zeros(15), 4)
    x = torch.randn(8, 15, generator=torch.Generator().manual_seed(0))
    other = torch.cat([x[:1], -x[1:]])
    with torch.no_grad():
        assert not torch.allclose(model(x)[0], model(other)[0])  # the control
        both = [model(rows, lambda layer, z: z) for rows in (x, other)]
    assert torch.equal(both[0][0], both[1][0]) and both[0].shape == (8, 4)


def test_noise_takes_no_augmentation_that_could_mix_rows() -> None:
    x = np.zeros((64, 15), np.float32)
    for augment in (lambda rows, generator: rows, samples.none):
        block = FeatureBlock(x, x, "", augment=augment)
        if augment is samples.none:
            Party(resolve(own("plain", **NOISY)), 0, 2, 1, block)
            continue
        Party(resolve(own("plain")), 0, 2, 1, block)
        with pytest.raises(ConfigError, match="own augmentation can mix a row into"):
            Party(resolve(own("plain", **NOISY)), 0, 2, 1, block)


# --- what modules of one's own might do ----------------------------------------------------------


def test_layers_that_wait_for_rows_draw_from_the_party_s_secret() -> None:
    drawn = [
        build_bottom(resolve(own("lazy")), 0, torch.zeros(15), 4, secret=secret).state_dict()
        for secret in (b"one", b"one", b"other")
    ]
    name = next(iter(drawn[0]))
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])


def test_a_mini_batch_of_one_row_is_found_before_training() -> None:
    x = np.zeros((65, 15), np.float32)
    Party(resolve(own("Normal", **{"batch-size": 13})), 0, 2, 1, FeatureBlock(x, x, ""))
    with pytest.raises(ConfigError, match="cannot train on a mini-batch of one row"):
        Party(resolve(own("Normal", **{"batch-size": 32})), 0, 2, 1, FeatureBlock(x, x, ""))


def test_weights_may_lie_otherwise_in_memory() -> None:
    config = resolve(own("strided", **{"strategy": "cascaded"}))
    x = np.zeros((64, 15), np.float32)
    party = Party(config, 0, 2, 1, FeatureBlock(x, x, ""))
    party.train(TrainOrder(exchange=1, epoch=0, first=0, steps=1, coordinated=True))


def test_arguments_for_installed_code_are_the_party_s_own_affair() -> None:
    for words in ({"model-args": "hidden=7"}, {"model": "another"}):
        refusals._check_arguments(node(words, {}), "hidden=7")
    for words in ({}, {"model-args": "hidden=9"}):
        with pytest.raises(ConfigError, match="Party 1 refuses model-args = 'hidden=7' from oth"):
            refusals._check_arguments(node(words, {}), "hidden=7")


def test_an_evaluation_that_fails_leaves_the_model_as_it_was() -> None:
    x = np.zeros((64, 15), np.float32)
    party = Party(resolve(own("Normal")), 0, 2, 1, FeatureBlock(x, x, ""))
    with pytest.raises(IndexError):
        party.learner.embeddings(x, np.array([99], np.int32))
    assert party.learner.model.training


def test_a_loss_by_which_one_label_changes_all_is_refused_with_scalar_noise(run: Start) -> None:
    keys = {"strategy": "dpzv", "epsilon": 1.0, "loss": f"{TOWERS}:balanced"}
    with pytest.raises(ConfigError, match="lets one row affect another row's loss"):
        run(2, own("plain", **keys))
    run(2, own("plain", **{**keys, "loss": f"{TOWERS}:half"}))


# --- on real nodes ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_towers_that_nodes_name_give_over_streams_what_they_give_in_process(tmp_path: Path) -> None:
    towers = Path(__file__).parents[1] / "towers.py"  # a node's processes know no package `tests`
    words = {"model": f"{towers}:Conv", "model-args": "drop=0.2"}
    keys = {**DIGITS, **MOMENTUM, "top-model": f"{towers}:Top", "top-args": "norm=true"}
    keys |= {"epochs": 2, "transport": "stream", "metrics": f"{towers}:figures", "window": 8}
    keys.pop("bottom-model")
    with fleet(2, tmp_path, {**words, "noise-seed": 0}) as nodes:
        finished = nodes.finish(nodes.submit(keys))
        assert finished.summary["transport"] == "stream"
        said = tmp_path / "said.csv"
        predict = {"task": "predict", "model": str(finished.folder), "out": str(said)}
        log = tmp_path / "predict.log"
        assert nodes.superlink.submit(predict, 2, log).wait(300) == 0
    of_one = {**keys, "out": str(tmp_path / "here")}
    here = run_local(2, of_one, node_configs=[words] * 2)
    assert_equals(finished, here)
    for key in ("test_loss", "test_hits"):
        assert finished.summary[key] == pytest.approx(here.summary[key], abs=1e-5)
    expected = pd.read_csv(predict_local({"model": str(here.folder)}, [words] * 2))
    pd.testing.assert_frame_equal(pd.read_csv(said), expected, atol=1e-5)


@pytest.mark.one_by_day
@pytest.mark.parametrize("dataset", ["digits", "breast-cancer"])
def test_the_example_of_a_loss_serves_two_classes_and_more(
    dataset: str, tmp_path: Path, run: Start
) -> None:
    how_to = Path(__file__).parents[2] / "docs" / "how-to"
    page = (how_to / "own-models.md").read_text(encoding="utf-8")
    (example,) = (block for block in page.split("```python\n") if "def per_row" in block)
    place = tmp_path / "tops.py"
    place.write_text(example.partition("```")[0], encoding="utf-8")
    keys = {"top-model": f"{place}:Top", "top-args": "width=16", "loss": f"{place}:per_row"}
    summary = run(
        2, {"dataset": dataset, "epochs": 3, "metrics": f"{place}:figures", **keys}
    ).summary
    assert summary["test_accuracy"] > 0.6
    assert summary["test_top_3"] == 1 if dataset == "breast-cancer" else summary["test_top_3"] < 1


def test_a_loss_that_has_not_thought_of_two_classes_is_told_what_they_have(
    tmp_path: Path, run: Start
) -> None:
    place = tmp_path / "own.py"
    place.write_text(
        "from torch.nn import functional\n"
        "def per_row(outputs, labels):\n"
        "    return functional.cross_entropy(outputs, labels, reduction='none')\n"
    )
    with pytest.raises(ConfigError, match="two classes have one output, the logit of the second"):
        run(2, {"dataset": "breast-cancer", "epochs": 1, "loss": f"{place}:per_row"})
