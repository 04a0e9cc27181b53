"""Training, predicting, saving and loading from Python, with what is in memory."""

import copy
import inspect
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import vfl_flower
from strategies.papers.vafl import VAFL
from tests import options, towers
from tests.conftest import ALL_ROWS
from vfl_flower.api import model as api
from vfl_flower.api import own_code
from vfl_flower.api.keywords import Options
from vfl_flower.config import logs
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.data import memory
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.codecs.top_k import TopK

CANCER: pd.DataFrame = load_breast_cancer(as_frame=True).frame
Y = CANCER.pop("target")
X = CANCER.to_numpy()
PARTS = [X[:, :10], X[:, 10:20], X[:, 20:]]
FRAMES = [CANCER.iloc[:, :10], CANCER.iloc[:, 10:20], CANCER.iloc[:, 20:]]
KEYS = {**ALL_ROWS, "epochs": 5, "batch-size": 64}
ONCE = {**ALL_ROWS, "epochs": 1}
ORDER = np.random.default_rng(0).permutation(len(X))
TWICE = pd.DataFrame(np.stack([Y, Y], 1), columns=["label", "label"])
WITH_GAP = TensorDataset(torch.tensor(np.where(np.arange(569)[:, None] == 7, np.nan, PARTS[0])))


class Stream(IterableDataset[Any]):
    """A torch data set whose items have no numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(PARTS[0])


class Spoilt(Dataset[Any]):
    """A torch data set that fails, by an error or by what it gives, after so many items."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.error = error
        self.left = 3 * len(X)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> Any:
        self.left -= 1
        if self.left < 0 and self.error:
            raise self.error
        return PARTS[0][row] / 1000 if self.left >= 0 else np.full(10, np.nan)


@pytest.fixture(scope="module")
def model() -> vfl_flower.Model:
    return vfl_flower.train(ONCE, PARTS, Y)


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards() -> Any:
    yield
    assert memory._held == {}


NAMES = [f"row {number}" for number in range(len(X))]
HELD: dict[str, tuple[Any, Any]] = {
    "mixed": (
        [PARTS[0], FRAMES[1], torch.tensor(PARTS[2])],
        Y.set_axis(pd.RangeIndex(600, 600 + len(X))),
    ),
    "named rows": ([frame.set_axis(NAMES) for frame in FRAMES], Y.set_axis(NAMES)),
    "lists": (tuple(part.tolist() for part in PARTS), Y.tolist()),
}


@pytest.mark.parametrize("kind", HELD)
def test_whatever_holds_numbers_gives_the_same_model(model: vfl_flower.Model, kind: str) -> None:
    found = vfl_flower.train(ONCE, *HELD[kind])
    assert found.history[-1]["test_loss"] == model.history[-1]["test_loss"]


def test_what_is_predicted_is_in_the_order_of_the_rows(model: vfl_flower.Model) -> None:
    said, shuffled = model.predict(PARTS), model.predict([part[ORDER] for part in PARTS])
    np.testing.assert_array_equal(said[ORDER], shuffled)
    chances = model.predict_proba(PARTS)
    assert chances.shape == (len(X), 2) and np.allclose(chances.sum(1), 1)
    np.testing.assert_array_equal(chances.argmax(1), said)
    figures = model.evaluate(PARTS, Y)
    assert figures["accuracy"] == pytest.approx((said == Y).mean())
    assert {"loss", "accuracy", "auc", "gini", "ks", "brier"} <= figures.keys()


def test_frames_with_ids_are_aligned_and_answered_by_id() -> None:
    generator = np.random.default_rng(1)
    ids = generator.permutation(100_000)[: len(X)]
    known = [generator.permutation(len(X))[:500] for _ in FRAMES]
    frames = [f.iloc[rows].assign(k=ids[rows]) for f, rows in zip(FRAMES, known, strict=True)]
    labels = pd.Series(Y.to_numpy(), index=ids)
    model = vfl_flower.train(KEYS, frames, labels, id="k")
    assert model.summary["parties"] == 3
    said = model.predict(frames, id="k")
    assert set(said.index) == set.intersection(*(set(ids[rows]) for rows in known))
    assert said.index.name == "k" and (said == labels[said.index]).mean() > 0.9
    named = vfl_flower.train({**KEYS, "id": "k"}, frames, labels, id="")
    assert named.summary["config"]["id"] == "k"
    assert named.history[-1]["test_loss"] == model.history[-1]["test_loss"]


@pytest.mark.nightly
def test_columns_of_the_label_holders_own_take_part() -> None:
    own = CANCER.iloc[:, 20:].assign(label=Y)
    with_own = vfl_flower.train(KEYS, PARTS[:1], own)
    without = vfl_flower.train(KEYS, PARTS[:1], Y)
    assert with_own.history[-1]["test_loss"] < without.history[-1]["test_loss"]
    said = with_own.predict(PARTS[:1], own=own.drop(columns="label"))
    assert (said == Y).mean() > 0.95


@pytest.mark.nightly
def test_images_and_torch_data_sets_are_features_too() -> None:
    digits = load_digits()
    halves = [digits.images[:, :, :4], digits.images[:, :, 4:]]
    model = vfl_flower.train({"epochs": 4, "bottom-model": "cnn"}, halves, digits.target)
    assert model.evaluate(halves, digits.target)["accuracy"] > 0.5
    scaled = torch.tensor(digits.data / 16 - 0.3, dtype=torch.float32)
    datasets = [TensorDataset(scaled[:, :32]), TensorDataset(scaled[:, 32:])]
    model = vfl_flower.train({"epochs": 10}, datasets, digits.target)
    assert model.evaluate(datasets, digits.target)["accuracy"] > 0.9


def test_a_model_that_is_saved_and_loaded_says_the_same(tmp_path: Path) -> None:
    model = vfl_flower.train(ONCE, PARTS, Y, out=tmp_path / "kept")
    model.save(tmp_path / "copy")
    for folder in ("kept", "copy"):
        loaded = vfl_flower.load(tmp_path / folder)
        np.testing.assert_array_equal(loaded.predict_proba(PARTS), model.predict_proba(PARTS))
        assert loaded.history == model.history
    assert pickle.loads(pickle.dumps(model)).folder == tmp_path / "kept"
    with pytest.raises(ConfigError, match="exists already"):
        model.save(tmp_path / "copy")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        vfl_flower.load(tmp_path)


def test_a_figure_of_held_out_rows_is_of_rows_that_were_not_trained_on() -> None:
    half, every = (
        vfl_flower.train({**KEYS, "epochs": 2, "test-fraction": share}, PARTS, Y)
        for share in (0.5, 0)
    )
    assert half.history[-1]["steps"] == 2 * -(-len(X) // 2 // 64)
    assert every.history[-1]["steps"] == 2 * -(-len(X) // 64)
    assert every.evaluate(PARTS, Y)["accuracy"] == pytest.approx(every.history[-1]["test_accuracy"])


@pytest.mark.parametrize(
    ("features", "labels", "more", "said"),
    [
        ([PARTS[0], PARTS[1][:9]], Y, {}, "Party 1 has 9 rows, and there are 569 labels"),
        ([PARTS[0][:, 0]], Y, {}, "at least two dimensions"),
        ([PARTS[0].astype(str)], Y, {}, "Give numbers"),
        ([FRAMES[0].assign(k=1)], Y, {"id": "k"}, "that repeat the id"),
        (PARTS, np.eye(2)[Y], {}, "labels have shape (569, 2). Give one label for each row"),
        (PARTS, 3, {}, "labels have shape ()"),
        ([FRAMES[0].assign(ill=Y)], Y.rename("ill"), {}, "column of the labels' name, 'ill'"),
        ([], Y, {}, "Labels are given and no features"),
        ((part for part in PARTS), Y, {}, "features is of type generator. Give a list"),
        (CANCER, Y, {}, "features is of type DataFrame. Give a list"),
        (None, Y, {}, "features is of type NoneType. Give a list"),
        ([Stream(), PARTS[1]], Y, {}, "party 0 are of type Stream, whose items cannot be counted"),
        ([[[1, 2], [3]]], [0, 1], {}, "party 0 are lists of different lengths"),
        ([FRAMES[0].set_axis(["a"] * 10, axis=1)], Y, {}, "party 0 have two columns 'a'"),
        (PARTS, TWICE, {}, "labels have two columns 'label'"),
        ([X[:, :0], PARTS[1]], Y, {}, "party 0 have no columns"),
        ([part[:0] for part in PARTS], Y[:0], {}, "features have no rows"),
        ([FRAMES[0].assign(k=range(569))], Y.set_axis(Y.index + 600), {"id": "k"}, "No 'k' is in"),
        (FRAMES, Y[::-1], {}, "indexes of labels and the features of party 0 differ"),
        ([PARTS[0], FRAMES[1].iloc[ORDER]], Y, {}, "labels and the features of party 1 differ"),
        ([FRAMES[0], FRAMES[1].iloc[ORDER]], Y.tolist(), {}, "of party 0 and the features of p"),
        ([WITH_GAP], Y, {}, "Item 7 of party 0's data set has missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_data_are_a_sentence(
    features: Any, labels: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(VflError) as error:
        vfl_flower.train(KEYS, features, labels, **more)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert "memory:" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("vafl", "config = 'vafl' must be a mapping"),
        ({"dataset": "digits"}, "dataset = 'digits' is not for features that are handed over"),
        ({"align": "psi"}, "align = 'psi' is not"),
        ({"task": "predict"}, "task = 'predict' is not"),
        ({"resume": "run"}, "run is not a folder. Name the results folder"),
        ({"id": "there"}, "id = 'here' contradicts id = 'there'"),
        ({"label": 3}, "label = 3 must be a text"),
    ],
    ids=str,
)
def test_keys_that_features_contradict_are_a_sentence(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vfl_flower.train(config, PARTS, Y, id="here")


def test_a_column_of_any_name_is_a_feature() -> None:
    frame, own = FRAMES[0], FRAMES[1].assign(label=Y)
    named = [each.set_axis(["row", "id", *each.columns[2:]], axis=1) for each in (frame, own)]
    models = vfl_flower.train(ONCE, [named[0]], named[1]), vfl_flower.train(ONCE, [frame], own)
    assert len({model.history[-1]["test_loss"] for model in models}) == 1


def test_a_copied_model_outlives_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = vfl_flower.train(ONCE, PARTS, Y)
    said, first = model.predict_proba(PARTS), model.folder
    copied = copy.deepcopy(model)
    del model
    assert not first.parent.exists()
    again, second = pickle.loads(pickle.dumps(copied)), copied.folder
    del copied
    assert not second.exists()
    np.testing.assert_array_equal(again.predict_proba(PARTS), said)
    assert again.history[-1]["epoch"] == 1
    third = again.folder
    del again
    assert not third.parent.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.one_by_day
@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
@pytest.mark.parametrize("keys", [{}, {"checkpoint-every": 5}], ids=["at-the-end", "often"])
def test_what_was_trained_before_an_error_is_kept_and_found(
    error: Any, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error or VflError) as raised:
        vfl_flower.train({**KEYS, **keys}, [Spoilt(error), PARTS[1]], Y)
    (kept,) = tmp_path.glob("*/run")
    assert f"is kept in {kept}" in raised.value.__notes__[0]
    assert len((kept / "history.jsonl").read_text().splitlines()) >= 1
    if keys:
        assert "vfl_flower.load reads it" in raised.value.__notes__[0]
        assert len(vfl_flower.load(kept).predict([Spoilt(None), PARTS[1]])) == len(X)


def test_an_early_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(VflError, match="at least two classes") as raised:
        vfl_flower.train(KEYS, PARTS, np.ones(len(X)))
    assert not hasattr(raised.value, "__notes__") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda m: m.predict(PARTS[:2]), "has 3 parties, and features of 2 are given"),
        (lambda m: m.predict([*PARTS, X]), "has 3 parties, and features of 4 are given"),
        (lambda m: m.predict(), "has 3 parties, and features of 0 are given"),
        (lambda m: m.predict(PARTS, id="x"), "party 0 are not a frame with a column 'x' of ids"),
        (lambda m: m.predict([part[:0] for part in PARTS]), "features have no rows"),
        (lambda m: m.predict([PARTS[0], PARTS[1][:9], PARTS[2]]), "9 rows, and party 0 569. Give"),
        (lambda m: m.predict(PARTS, own=Y), "own is of type Series: give a frame"),
        (lambda m: m.evaluate(iter(PARTS), Y), "features is of type list_iterator"),
        (lambda m: m.predict([PARTS[0][:, :9], *PARTS[1:]]), "has 9 columns, and its model was"),
        (lambda m: m.evaluate(PARTS), "Labels are missing"),
        (lambda m: m.evaluate(PARTS, FRAMES[0]), "Labels are missing"),
    ],
)
def test_what_a_model_cannot_use_is_a_sentence(
    model: vfl_flower.Model, use: Callable[[vfl_flower.Model], Any], said: str
) -> None:
    with pytest.raises(VflError, match=said):
        use(model)


def test_a_model_of_a_divided_data_set_takes_no_features() -> None:
    model = vfl_flower.train({"dataset": "breast-cancer", **ONCE}, parties=3)
    assert model.evaluate()["accuracy"] > 0.5
    with pytest.raises(ConfigError, match="from breast-cancer, which was divided"):
        model.predict(PARTS)


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["centralised", "intersection-only"])
@pytest.mark.parametrize("keys", [{}, {"privacy": "labels", "epsilon": 4.0}])
def test_a_centralised_model_predicts_as_measured(strategy: str, keys: dict[str, Any]) -> None:
    """Its own figures are of embeddings that no party made; predictions are of the parties'."""
    keys = {"strategy": strategy, "dataset": "breast-cancer", "epochs": 2, **keys}
    model = vfl_flower.train(keys, parties=3)
    measured = {name: model.summary[f"test_{name}"] for name in ("loss", "accuracy", "auc")}
    found = model.evaluate()
    assert {name: found[name] for name in measured} == pytest.approx(measured, rel=1e-5)
    assert measured["accuracy"] > 0.8  # so that untrained parties would not do


def test_a_centralised_model_predicts_rows_that_it_has_not_seen() -> None:
    model = vfl_flower.train({**ONCE, "strategy": "centralised"}, PARTS, Y)
    chances = model.predict_proba([part[:7] for part in PARTS])
    assert chances.shape == (7, len(model.classes))
    np.testing.assert_allclose(chances, model.predict_proba(PARTS)[:7], atol=1e-6)


@pytest.mark.parametrize(
    "keys", [{"strategy": "local-only"}, {"strategy": "centralised", "presence": 0.7}]
)
def test_baselines_say_that_they_keep_no_model(keys: dict[str, Any], tmp_path: Path) -> None:
    strategy = keys["strategy"]
    model = vfl_flower.train({**ONCE, "dataset": "breast-cancer", **keys}, parties=2)
    uses: list[Callable[[], Any]] = [lambda: model.predict(), lambda: model.classes]
    uses += [lambda: model.save(tmp_path / "copy"), lambda: vfl_flower.load(model.folder)]
    for use in uses:
        with pytest.raises(ConfigError, match=f"used {strategy}, a baseline that keeps no model"):
            use()


def test_flowers_logger_is_quiet_until_the_last_leaves() -> None:
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.INFO)
    try:
        one, other = api.quiet(), api.quiet()
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)  # as a thread that began first, and ends first
        assert log.level == logging.WARNING
        other.__exit__(None, None, None)
        assert log.level == logging.INFO
    finally:
        log.setLevel(before)


def test_from_python_too_a_larger_epsilon_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path))  # other tests draw noise for the same people
    said: list[str] = []
    monkeypatch.setattr(logs.notice, "warning", lambda text, *of: said.append(text % of))
    keys = {"privacy": "labels", "epsilon": 2.0, "epochs": 1}
    frames = [each.assign(k=range(569)) for each in FRAMES[:2]]
    named = Y.set_axis(frames[0]["k"])
    once = vfl_flower.train(keys, frames, named, id="k")
    assert (once.summary["epsilon"], said) == (2.0, [])
    other = vfl_flower.train(keys, frames, 1 - named, id="k")
    assert other.summary["epsilon"] == 4.0
    assert said[0].startswith("epsilon is 4 in all: 4 by draws of one person's label")


@pytest.mark.nightly
def test_keyword_options_equal_a_dict_in_either_order() -> None:
    rate = np.float64(0.05)
    once: dict[str, Any] = {name.replace("-", "_"): ONCE[name] for name in ONCE}
    models = [
        vfl_flower.train({**ONCE, "party-lr": 0.05}, PARTS, Y),
        vfl_flower.train(PARTS, Y, config=ONCE, party_lr=rate, keep=None),
        vfl_flower.train(ONCE, features=PARTS, labels=Y, party_lr=rate),
        vfl_flower.train(PARTS, Y, **{**once, "epochs": np.int64(1)}, party_lr=0.3),
    ]
    *equal, other = [model.history[-1]["test_loss"] for model in models]
    assert len(set(equal)) == 1 and other not in equal
    assert models[3].summary["config"].items() >= ONCE.items()


def test_the_keyword_options_are_the_options_of_the_sections() -> None:
    assert options.FILE.read_text() == options.generated(), "run python -m tests.options"
    shown = inspect.signature(vfl_flower.train).parameters
    assert {*own_code.KEYWORDS, "features", "labels", "config"} <= shown.keys()
    assert set(Options.__annotations__) == set(own_code.KEYWORDS)


def test_expert_settings_are_given_in_config_as_a_mapping_or_as_a_text() -> None:
    ways: list[dict[str, Any]] = [{"config": {**ONCE, "labels": "shared"}}]
    ways += [{"config": ONCE, "expert": each} for each in ({"labels": "shared"}, "labels=shared")]
    for way in ways:
        model = vfl_flower.train([part[:100] for part in PARTS[:2]], Y[:100], **way)
        assert model.summary["config"]["labels"] == "shared"


def test_numbers_with_many_values_are_not_taken_for_classes() -> None:
    parts, numbers = [part[:200] for part in PARTS], np.arange(200) % 30 * 1.0
    with pytest.raises(ConfigError, match=r"numbers with 30 values.*Set target='regression'"):
        vfl_flower.train(parts, numbers, epochs=1)
    model = vfl_flower.train(parts, numbers, epochs=1, target="regression")
    assert model.classes == [] and repr(model).startswith("Model(split-nn, test RMSE ")
    assert len(vfl_flower.train(parts, numbers.astype(int), epochs=1).classes) == 30


@pytest.mark.nightly
def test_components_with_an_import_path_are_kept_by_it(tmp_path: Path) -> None:
    own: Any = {"strategy": copy.deepcopy(VAFL), "codec": TopK, "metrics": towers.figures}
    models: Any = {"bottom_model": towers.plain, "top_model": towers.Top}
    model = vfl_flower.train(PARTS, Y, config={**ONCE, "loss": towers.loss}, **own, **models)
    kept, ours = model.summary["config"], {"strategy": "vafl", "codec": "top-k"}
    ours |= {"bottom-model": "tests.towers:plain", "top-model": "tests.towers:Top"}
    ours |= {"loss": "tests.towers:loss", "metrics": "tests.towers:figures"}
    assert kept.items() >= ours.items()
    model.save(tmp_path / "copy")
    again = vfl_flower.load(tmp_path / "copy")
    np.testing.assert_array_equal(again.predict_proba(PARTS), model.predict_proba(PARTS))


def test_a_component_from_a_file_is_kept_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(towers.__file__).read_text())
    place = f"{tmp_path / 'mine.py'}:plain"
    found = BOTTOMS.load(place)
    assert own_code.name_of(found, BOTTOMS) == place


class Watcher(Callback):
    def __init__(self) -> None:
        self.times = 0

    def evaluated(self, entry: dict[str, Any]) -> None:
        self.times += 1


@pytest.mark.nightly
def test_components_without_an_import_path_work_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tower(torch.nn.Linear):
        def __init__(self, sample: torch.Tensor, size: int) -> None:
            super().__init__(len(sample), size)

    mine, watcher = replace(VAFL, name="mine", about="a copy with its own rates"), Watcher()
    own: Any = {"strategy": mine, "bottom_model": Tower, "observer": watcher}
    own["loss"] = lambda outputs, labels: towers.loss(outputs, labels)
    model = vfl_flower.train(PARTS, Y, config=ONCE, **own, out=tmp_path / "run")
    assert watcher.times == len(model.history)
    assert len(model.predict(PARTS)) == len(X)
    assert model.evaluate(PARTS, Y) == vfl_flower.load(tmp_path / "run").evaluate(PARTS, Y)
    with pytest.raises(ConfigError, match=r"has no import path.*: define .* in a module"):
        model.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    monkeypatch.setattr(own_code, "_held", {})  # as in another process
    for use in (lambda: vfl_flower.load(tmp_path / "run"), lambda: model.predict(PARTS)):
        with pytest.raises(ConfigError, match=r"was defined in another process\. Define"):
            use()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"party_lrr": 0.1}, "party_lrr is not an option of train. Did you mean party_lr?"),
        ({"noise_seed": 0}, "It is an expert setting: write expert={'noise-seed': ...}."),
        ({"expert": {"mu": "x"}}, "mu = 'x' "),
        ({"party-lr": 0.1}, "party-lr is not an option of train. Did you mean party_lr?"),
        ({"task": "predict"}, "task is not an option of train"),
        ({"config": {"party-lr": 0.1}, "party_lr": 0.2}, "party_lr is given twice: 0.1 in"),
        ({"loss": 3}, "loss = 3 must be a name, a class or a function"),
        ({"strategy": towers.Top}, "is not a strategy: give a name of `vfl list`, or a System"),
        ({"codec": towers.Top}, "it has no 'uses'"),
        ({"bottom_model": lambda: 3}, "Party 0's model 'lambda' does not take the arguments of"),
        ({"epochs": towers.Top}, "must be a whole number"),
        ({"engine": "ray", "loss": lambda o, r: o}, "has no import path, which engine = 'ray'"),
        ({"engine": "ray", "observer": Watcher()}, "observer = Watcher is an object of this"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keyword_options_that_cannot_be_are_a_sentence(named: dict[str, Any], said: str) -> None:
    with pytest.raises(VflError) as error:
        vfl_flower.train(PARTS, Y, **named)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert "in_process" not in str(error.value)


def test_arguments_that_no_call_takes_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"multiple values for argument .labels.\."):
        vfl_flower.train(PARTS, Y, labels="shared")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="at most 3 positional arguments: 4"):
        vfl_flower.train({}, PARTS, Y, 3)  # type: ignore[call-overload]


@pytest.mark.nightly
def test_another_process_loads_a_model_by_the_import_paths(tmp_path: Path) -> None:
    model = vfl_flower.train(PARTS, Y, config=ONCE, bottom_model=towers.plain)
    model.save(tmp_path / "copy")
    code = (
        "import sys, numpy, vfl_flower\n"
        "from sklearn.datasets import load_breast_cancer\n"
        "x = load_breast_cancer().data\n"
        "model = vfl_flower.load(sys.argv[1])\n"
        "print(model.predict_proba([x[:, :10], x[:, 10:20], x[:, 20:]]).sum(0).tolist())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "copy")]
    root = Path(__file__).parents[2]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
    assert json.loads(said) == pytest.approx(model.predict_proba(PARTS).sum(0).tolist())
