"""Explanations: importance of features as scikit-learn's, names that stay, refusals and counts."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.inspection import permutation_importance
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score

from tests.organisations import ID, cancer, cut, read, write
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import explain_local, run_local
from vfl_flower.models.bottoms import build_bottom, learn_bins
from vfl_flower.models.column_change import ColumnChange
from vfl_flower.models.training import load_model
from vfl_flower.protocol.privacy import noise
from vfl_flower.protocol.privacy.gaussian import epsilon_of
from vfl_flower.records.ledger import opened
from vfl_flower.results.report import features
from vfl_flower.tasks.inference import explain, explanation
from vfl_flower.tasks.inference.importance import Score
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.party import explain as party_explain
from vfl_flower.tasks.inference.party.explain import Explanation
from vfl_flower.tasks.inference.party.features import features_of
from vfl_flower.tasks.inference.releases import UploadCount
from vfl_flower.tools.cli import main
from vfl_flower.transport.explain_messages import PermuteOrder

pytestmark = pytest.mark.xdist_group("explain")  # its tests share a trained model

SHORT: dict[str, Any] = {
    **{"epochs": 3, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8},
    "validation-fraction": 0.0,
}
SECURE = {"aggregation": "secure", "combine": "mean"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Draw no pictures, except in the tests of them."""
    if "name_stays" not in request.node.name:
        monkeypatch.setattr(explanation, "_draw", lambda figures, features, path: None)
        monkeypatch.setattr(party_explain, "_draw", lambda table, order, path: None)


# --- equal to scikit-learn ----------------------------------------------------------------------


class Joined:
    """The models of a run as one estimator of joined columns, for scikit-learn."""

    def __init__(self, folder: Path, parties: int) -> None:
        self.found = checkpoint.load(folder)
        self.predictor = Predictor(self.found, 0)
        blocks = [load_features(self.found.config, party, parties) for party in range(parties)]
        self.test = np.concatenate([block.test[block.validation :] for block in blocks], axis=1)
        self.ends = np.cumsum([0, *(block.test.shape[1] for block in blocks)])
        self.bottoms = []
        for party, block in enumerate(blocks):
            size = self.predictor.sizes[party]
            model = build_bottom(self.found.config, party, torch.from_numpy(block.test[0]), size)
            with np.load(folder / f"party-{party}.npz") as file:
                load_model(model, dict(file))
            self.bottoms.append(model.eval())

    def fit(self, x: Any, y: Any) -> None:
        """Scikit-learn asks estimators for it."""

    @torch.no_grad()
    def outputs(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Outputs [R, C] of joined columns [R, F]."""
        ends = zip(self.ends, self.ends[1:], strict=False)
        parts = [np.ascontiguousarray(x[:, low:high]) for low, high in ends]
        made = [
            model(torch.from_numpy(part)) for model, part in zip(self.bottoms, parts, strict=True)
        ]
        none = np.zeros((len(x), 0), np.float32)
        everybody = np.ones((len(x), len(made)), bool)
        blocks = torch.cat(made, dim=1)
        return self.predictor.outputs(blocks, none, everybody).numpy()


METRICS: dict[str, Any] = {
    "breast-cancer": lambda y, out: roc_auc_score(y, out[:, 0]),
    "digits": lambda y, out: accuracy_score(y, out.argmax(1)),
    "numbers": lambda y, out: r2_score(y.astype(np.float64), out[:, 0].astype(np.float64)),
}


def as_in_scikit_learn(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Have parties permute as `permutation_importance` does with this seed.

    It shuffles every column alike, and shuffles a shuffled column again for the next repeat.
    """

    def permutation(self: Explanation, feature: int, repeat: int) -> Any:
        state = np.random.RandomState(seed)
        shuffled = np.random.RandomState(state.randint(np.iinfo(np.int32).max + 1))
        index, found = np.arange(self.rows), np.arange(self.rows)
        for _ in range(repeat + 1):
            shuffled.shuffle(index)
            found = found[index]
        return found

    monkeypatch.setattr(Explanation, "permutation", permutation)


@pytest.mark.one_by_day
@pytest.mark.parametrize("dataset", METRICS)
def test_importance_is_that_of_scikit_learn_on_joined_data_with_the_same_permutations(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {**SHORT, "bottom-model": "mlp", "dataset": dataset}
    if dataset == "digits":
        keys |= {"dataset": f"npz:{tmp_path}/digits.npz", "epochs": 10}
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        np.savez(tmp_path / "digits.npz", X=x[:600, 8:40], y=y[:600])
    if dataset == "numbers":
        keys |= {"dataset": f"npz:{tmp_path}/numbers.npz", "target": "regression"}
        x = np.random.default_rng(0).standard_normal((400, 6))
        np.savez(tmp_path / "numbers.npz", X=x, y=2 * x[:, 0] + np.sin(3 * x[:, 4]))
    run = run_local(2, {**keys, "out": str(tmp_path / "run")})
    joined = Joined(run.folder, 2)
    as_in_scikit_learn(monkeypatch, 5)
    said = explain_local({"model": str(run.folder), "repeats": 3})
    y = load_labels(joined.found.config).tested.test

    def score(estimator: Joined, x: Any, y: Any) -> float:
        return float(METRICS[dataset](y, estimator.outputs(x)))

    expected = permutation_importance(
        joined, joined.test, y, scoring=score, n_repeats=3, random_state=5
    )
    found = [each["value"] for party in "01" for each in said["parties"][party]["features"]]
    np.testing.assert_allclose(found, expected.importances_mean, rtol=0, atol=1e-9)
    assert np.abs(found).max() > 0.01
    assert said["baseline"] == pytest.approx(score(joined, joined.test, y), abs=1e-9)
    assert said["rows"] == len(y)
    for party, low in (("0", 0), ("1", int(joined.ends[1]))):
        table = pd.read_csv(run.folder / f"party-{party}-explanation.csv").set_index("name")
        for column, value in enumerate(table["value"].loc[[f"column {n}" for n in range(3)]]):
            assert value == pytest.approx(expected.importances_mean[low + column], abs=1e-9)


def test_a_tabular_model_with_one_changed_column_embeds_as_the_whole_model(tmp_path: Path) -> None:
    run = run_local(2, {**SHORT, "dataset": "breast-cancer", "out": str(tmp_path / "run")})
    found = checkpoint.load(run.folder)
    block = load_features(found.config, 0, 2)
    model = build_bottom(found.config, 0, torch.from_numpy(block.test[0]), 4).eval()
    learn_bins(model, block.train)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    assert ColumnChange.fits(model)
    rows, generator = torch.from_numpy(block.test), np.random.default_rng(0)
    values = rows[generator.permutation(len(rows)), 3:5]
    new = ColumnChange(model).embeddings(rows, [(slice(3, 5), values), (slice(0, 1), rows[:, :1])])
    changed = rows.clone()
    changed[:, 3:5] = values
    with torch.no_grad():
        torch.testing.assert_close(new[0], model(changed), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(new[1], model(rows), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(new[0], new[1], atol=1e-2)


# --- figures ------------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("dataset", ["digits", "breast-cancer"])
def test_the_metric_is_that_of_calibrated_predictions(dataset: str, tmp_path: Path) -> None:
    keys = {**SHORT, "epochs": 2, "calibrate": "isotonic", "validation-fraction": 0.3}
    run = run_local(2, {**keys, "dataset": dataset, "out": str(tmp_path / "run")})
    said = explain_local({"model": str(run.folder)})
    figures = run.summary["assessment"]["figures"]
    assert said["baseline"] == pytest.approx(figures[said["metric"]]["value"], abs=1e-9)
    assert said["baseline"] != pytest.approx(run.summary[f"test_{said['metric']}"], abs=1e-4)


def test_labels_without_a_metric_get_a_sentence() -> None:
    with pytest.raises(ConfigError, match="Only 1 of the 40 rows"):
        Score(np.eye(40, dtype=np.int64)[0], 2)
    with pytest.raises(ConfigError, match="All labels of the rows are equal"):
        Score(np.ones(5, np.float32), 0)


# --- all kinds of runs --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on breast-cancer."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return run_local(2, {**SHORT, "dataset": "breast-cancer", "out": str(folder)}).folder


def same_shuffles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every explanation draw the same permutations."""

    def permutation(self: Explanation, feature: int, repeat: int) -> Any:
        number = self.features[feature].number
        return np.random.default_rng([number, repeat]).permutation(self.rows)

    monkeypatch.setattr(Explanation, "permutation", permutation)


def test_masked_sums_give_the_same_importance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_shuffles(monkeypatch)
    said = {}
    for name, more in (("plain", {"embedding-activation": "none"}), ("secure", SECURE)):
        keys = {**SHORT, "dataset": "breast-cancer", "combine": "mean", "noise-seed": 0, **more}
        run = run_local(2, {**keys, "out": str(tmp_path / name)})
        said[name] = explain_local({"model": str(run.folder)})
    for party in "01":
        values = [
            [each["value"] for each in said[name]["parties"][party]["features"]] for name in said
        ]
        np.testing.assert_allclose(values[0], values[1], atol=2e-3)
    assert explanation.ranked(said["plain"])[0]["value"] > 0.005


@pytest.mark.nightly
def test_uploads_in_small_blocks_change_nothing(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_shuffles(monkeypatch)
    whole = explain_local({"model": str(plain), "repeats": 2})
    monkeypatch.setattr("vfl_flower.tasks.inference.explain._UPLOAD", 4 * 4 * 7 * 10)
    monkeypatch.setattr("vfl_flower.tasks.inference.explain._NUMBERS", 114 * 4)
    parts = explain_local({"model": str(plain), "repeats": 2})
    for one, other in zip(explanation.ranked(whole), explanation.ranked(parts), strict=True):
        assert one["value"] == pytest.approx(other["value"], abs=1e-3)


def test_a_model_of_any_subset_is_explained_where_parties_lack_rows(tmp_path: Path) -> None:
    keys = {**SHORT, "epochs": 1, "dataset": "breast-cancer", "presence": 0.7}
    run = run_local(3, {**keys, "out": str(tmp_path / "run")})
    said = explain_local({"model": str(run.folder)})
    assert [len(said["parties"][party]["features"]) for party in "012"] == [10, 10, 10]
    left = explain_local({"model": str(run.folder), "without": "1"})
    assert list(left["parties"]) == ["0", "2"]


def test_patches_of_images_and_signals_of_sequences_are_features() -> None:
    image = features_of(0, torch.zeros(8, 6, 3), None, False)
    assert len(image) == 16 and image[0].name == "rows 0-1, columns 0-0"
    pixels = np.zeros((1, 8, 6, 3), int)
    for each in image:
        pixels[each.index] += 1
    assert (pixels == 1).all()
    signals = features_of(0, torch.zeros(9, 2), None, True)
    assert [each.name for each in signals] == ["signal 0", "signal 1"]
    with pytest.raises(ConfigError, match="no columns to permute"):
        features_of(0, {"input_ids": torch.zeros(4)}, None, False)


# --- names, files, and what stays secret ----------------------------------------------------------


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Organisations whose first party has a text column that decides the label, and a run."""
    generator = np.random.default_rng(3)
    table = pd.DataFrame(generator.standard_normal((300, 6)), columns=[f"f{n}" for n in range(6)])
    label = generator.integers(0, 2, 300)
    letters = np.where(label == 1, "yes", "no").astype(object)
    letters[::9] = "perhaps"
    table.insert(0, "word", letters)
    table = table.assign(**{ID: 1000 + np.arange(300), "label": label})
    organisations = cut(tmp_path_factory.mktemp("people"), table)
    organisations.words = [{"text": "one-hot"}, {}]
    fast = {"bottom-model": "linear", "embedding-activation": "none", "optimizer": "adam"}
    organisations.run("run", {**SHORT, **fast, "party-lr": 0.05, "server-lr": 0.05, "epochs": 8})
    return organisations


@pytest.mark.nightly
def test_a_text_column_is_one_feature_and_its_name_stays_at_its_party(people: Any) -> None:
    folder = people.folder / "run"
    said = explain_local({"model": str(folder)}, people.node_configs)
    first, second = (said["parties"][party]["features"] for party in "01")
    assert [len(first), len(second)] == [4, 3]
    table = pd.read_csv(folder / "party-0-explanation.csv")
    assert sorted(table["name"]) == ["f0", "f1", "f2", "word"]
    assert table["name"][0] == "word" and table["value"][0] > 0.05
    by_number = table.set_index("feature")["value"]
    np.testing.assert_allclose([each["value"] for each in first], by_number.sort_index())
    assert set(pd.read_csv(folder / "party-1-explanation.csv")["name"]) == {"f3", "f4", "f5"}
    assert "word" not in json.dumps(said)
    for picture in ("explanation.png", "party-0-explanation.png", "party-1-explanation.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_the_label_holders_own_columns_are_explained_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mean in place of a permutation, so that a file can hold the same values."""
    generator = np.random.default_rng(3)
    table = pd.DataFrame(generator.standard_normal((300, 4)), columns=["a", "b", "c", "d"])
    table = table.assign(**{ID: np.arange(300), "label": (table["a"] + table["c"] > 0).astype(int)})
    organisations = cut(tmp_path, table, own=2, known=1.0)
    run = organisations.run("run", {**SHORT, "party-lr": 0.05, "server-lr": 0.05})
    given = {"model": str(run.folder), **organisations.keys}
    said = explain_local(given, organisations.node_configs)["parties"]["label holder"]["features"]
    own = [each["feature"] for each in said]
    assert len(own) == 2 and set(own) <= set("abcd")
    monkeypatch.setattr(explain, "_permuted", np.zeros_like)
    said = explain_local(given, organisations.node_configs)
    means = dict(
        zip(own, checkpoint.load(run.folder).about_labels["preparation"]["mean"], strict=True)
    )
    before = read(organisations.labels)
    for each in said["parties"]["label holder"]["features"]:
        name = each["feature"]
        write(before.assign(**{name: means[name]}), tmp_path / f"{name}.csv")
        found = organisations.predict(
            "run", tmp_path / f"{name}.csv", out=str(tmp_path / f"{name}-scores.csv")
        )
        truth = before.set_index(ID).loc[found[ID], "label"]
        auc = roc_auc_score(truth, found["probability_1"])
        assert each["value"] == pytest.approx(said["baseline"] - auc, abs=1e-6)
        assert each["low"] < each["value"] < each["high"]


def test_the_numbers_of_features_are_drawn_and_tell_no_order(
    people: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Reverses:
        def permutation(self, size: int) -> Any:
            return np.arange(size)[::-1]

    monkeypatch.setattr(party_explain, "secret_generator", lambda key: Reverses())
    explain_local({"model": str(people.folder / "run")}, people.node_configs)
    table = pd.read_csv(people.folder / "run" / "party-0-explanation.csv").set_index("feature")
    assert table["name"].sort_index().tolist() == ["word", "f2", "f1", "f0"]


def test_the_rows_are_the_test_rows_or_the_rows_of_another_file(people: Any) -> None:
    folder = people.folder / "run"
    summary = json.loads((folder / "summary.json").read_text())
    said = explain_local({"model": str(folder)}, people.node_configs)
    assert 40 < said["rows"] < 60  # a fifth of those that both parties know
    assert said["baseline"] == pytest.approx(summary["test_auc"], abs=1e-6)
    new = people.folder / "new.csv"
    table = read(people.labels)
    table["label"] = table["label"].where(np.arange(len(table)) % 4 > 0)
    write(table.iloc[:200], new)
    given = {"model": str(folder), "dataset": f"files:{new}"}
    more = explain_local(given, people.node_configs)
    assert 100 < more["rows"] < 150  # three quarters have labels, and both parties know 81 %
    with pytest.raises(ConfigError, match="The rows have no labels"):
        write(table[[ID]].iloc[:200], new)
        explain_local(given, people.node_configs)


def test_a_training_file_that_has_changed_has_no_test_rows(people: Any) -> None:
    before = people.labels.read_bytes()
    try:
        write(read(people.labels).iloc[::-1], people.labels)
        with pytest.raises(ConfigError, match="has changed since the model was trained"):
            explain_local({"model": str(people.folder / "run")}, people.node_configs)
    finally:
        people.labels.write_bytes(before)


def test_the_command_prints_a_table_and_names_its_folder(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    assert main(["explain", str(plain), "--repeats", "2", "-c", f"out='{folder}'"]) == 0
    said = capsys.readouterr().out
    assert "on 114 rows; each feature had 2 permutations." in said and "party 0, feature" in said
    assert said.endswith(f"explanation: {folder / explanation.FILE}\n")
    assert json.loads((folder / explanation.FILE).read_text())["repeats"] == 2


def test_a_party_that_cannot_write_its_table_leaves_the_figures_to_the_label_holder(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise VflError("The disk is full.")

    monkeypatch.setattr(party_explain, "write_csv", fail)
    with pytest.raises(PartyError, match="cannot write its table of features"):
        explain_local({"model": str(plain), "out": str(tmp_path)})
    assert explanation.ranked(json.loads((tmp_path / explanation.FILE).read_text()))


# --- rules and counts ----------------------------------------------------------------------------


def refusing(people: Any, more: dict[str, Any]) -> Any:
    """Explain, where party 1 has further rules."""
    nodes = [people.node_configs[0], {**people.node_configs[1], **more}]
    return explain_local({"model": str(people.folder / "run")}, nodes)


def test_a_party_can_refuse_and_the_others_are_explained(
    people: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said = refusing(people, {"refuse": "explain"})
    sentence = said["parties"]["1"]["refused"]
    assert sentence == "Party 1 refuses task 'explain': its rule is refuse = 'explain'."
    assert len(said["parties"]["0"]["features"]) == 4
    assert sentence in caplog.text


def test_a_terminal_repeats_no_refusal_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"feature": 3, "value": -1e-9, "low": -1e-7, "high": 0.02}
    refused = {"0": {"refused": "Party 0 refuses task 'explain'."}}
    parties = {**refused, "1": {"features": [one, *[{**one, "value": -1.0}] * 21]}}
    figures = {"metric": "auc", "baseline": 0.9, "rows": 200, "repeats": 1, "parties": parties}
    (tmp_path / "explanation.json").write_text(json.dumps(figures))
    assert "Without figures: Party 0 refuses" in features.in_terminal(tmp_path, "explanation")
    monkeypatch.setattr(features, "on_terminal", lambda: True)
    said = features.in_terminal(tmp_path, "explanation")
    assert "refuses" not in said
    assert f"The page of `vfl report {tmp_path}` has 2 more features." in said
    assert said.splitlines()[1].split()[-4:] == ["0.0000", "0.0000", "to", "0.0200"]


def test_under_masked_sums_a_party_that_insists_on_them_must_permit_it(tmp_path: Path) -> None:
    keys = {**SHORT, **SECURE, "epochs": 1, "dataset": "breast-cancer"}
    rule = {"aggregation": "secure", "sum-peers": "first-seen"}
    run = run_local(2, {**keys, "out": str(tmp_path / "run")}, node_configs=[rule, rule])
    for refusing, why in ((rule, "difference of two sums"), ({"refuse": "explain"}, "refuse = ")):
        said = explain_local({"model": str(run.folder)}, [refusing, {**rule, "refuse": "none"}])
        assert why in said["parties"]["0"]["refused"]
        assert len(said["parties"]["1"]["features"]) == 15


def test_uploads_and_predictions_are_counted_before_they_happen(
    people: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = explain_local({"model": str(people.folder / "run")}, people.node_configs)["rows"]
    enough = refusing(people, {"max-predictions": 4 * rows})  # as they are, and three features
    assert "features" in enough["parties"]["1"]
    (people.folder / "run" / "party-1.predictions").unlink()
    few = refusing(people, {"max-predictions": 4 * rows - 1})
    assert "max-predictions" in few["parties"]["1"]["refused"]
    assert "features" in few["parties"]["0"]
    (people.folder / "run" / "party-1.predictions").unlink()
    with pytest.raises(PartyError, match="max-predictions"):
        refusing(people, {"max-predictions": rows - 1})


@pytest.mark.nightly
def test_max_uploads_counts_each_permutation(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(4, 300))
    counted = [{**each, "max-uploads": 13} for each in organisations.node_configs]
    keys = {**organisations.keys, **SHORT, "epochs": 1, "out": str(tmp_path / "run")}
    run = run_local(2, keys, node_configs=counted)  # uploads test rows once or twice
    # 9 uploads: plain, and two features, twice, each of the row itself and of a row with its value.
    given = {"model": str(run.folder), "repeats": 2}
    first, second = (explain_local(given, counted)["parties"]["0"] for _ in range(2))
    assert "features" in first and "max-uploads = 13" in second["refused"]


def test_noise_on_embeddings_is_drawn_anew_and_counted(tmp_path: Path) -> None:
    noisy = {"privacy": "perturbed-embedding", "embedding-noise": 2.0, "dataset": "breast-cancer"}
    run = run_local(2, {**SHORT, **noisy, "epochs": 1, "out": str(tmp_path / "run")})
    with patch.object(UploadCount, "add", autospec=True, side_effect=UploadCount.add) as adds:
        assert explain_local({"model": str(run.folder)})["epsilon"] > 0
    assert adds.call_count == 2  # as they are, and all permutations at once
    with opened(run.folder / "predictions.journal") as ledger:
        assert ledger.count("uploads") == 1 + 2 * 15  # donors' rows are uploads of them too


def test_two_records_differ_in_no_more_uploads_than_epsilon_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise and the permutations are equal, so embeddings without noise show mu exactly."""
    sigma, uploads = 8.0, list[list[Any]]()
    before = noise.on_grid
    monkeypatch.setattr("secrets.token_bytes", lambda size=32: bytes([1] * size))

    def on_grid(value: Any, drawn: Any, bound: float) -> Any:
        uploads[-1].append(value.detach().numpy().copy())
        return before(value, drawn, bound)

    monkeypatch.setattr(noise, "on_grid", on_grid)
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((60, 4)).astype(np.float32), np.arange(60) % 2
    tested = np.random.default_rng(0).permutation(60)[:6]
    x[tested, :2], y[tested] = 0, [0, 1, 0, 1, 0, 1]
    keys: dict[str, Any] = {"dataset": f"npz:{tmp_path}/rows.npz", "epochs": 1}
    keys |= {"privacy": "perturbed-embedding", "embedding-noise": sigma, "bottom-model": "linear"}
    keys |= {"embedding-size": 4, "embedding-activation": "none", "validation-fraction": 0.0}
    keys |= {"test-fraction": 0.1}
    for sign in (1, -1):
        x[tested[2], :2] = sign * 1e6
        np.savez(tmp_path / "rows.npz", X=x, y=y)
        uploads.append([])
        run = run_local(2, {**keys, "out": str(tmp_path / f"run{sign}")})
        said = explain_local({"model": str(run.folder), "repeats": 5})
    squares = [np.square(one - other).sum() for one, other in zip(*uploads, strict=True)]
    delta = run.summary["delta"]
    shown = epsilon_of(float(np.sqrt(sum(squares))) / sigma, delta)
    once = epsilon_of(2 * np.sqrt(1 + 1 + 2 * 5) / sigma, delta)  # the control: own uploads only
    assert once < shown <= said["epsilon"]


def test_a_run_that_protects_labels_tells_parties_no_figures(tmp_path: Path) -> None:
    keys = {**SHORT, "epochs": 1, "privacy": "labels", "epsilon": 3.0, "dataset": "breast-cancer"}
    run = run_local(2, {**keys, "out": str(tmp_path / "run")})
    said = explain_local({"model": str(run.folder)})
    assert any(each["value"] for each in said["parties"]["0"]["features"])
    table = pd.read_csv(run.folder / "party-0-explanation.csv")
    assert list(table) == ["feature", "name"]
    assert not (run.folder / "party-0-explanation.png").exists()


# --- what a label holder may ask ------------------------------------------------------------------


def order(**values: Any) -> PermuteOrder:
    given = {"party": 0, "first": 0, "count": 2, "repeat": 0, "start": 0, "stop": 10}
    return PermuteOrder(**{**given, **values})


@pytest.fixture
def asked(plain: Path, monkeypatch: pytest.MonkeyPatch) -> Explanation:
    """A party's explanation, as it was at the end."""
    kept: list[Explanation] = []
    before = Explanation.embed

    def embed(self: Explanation) -> Any:
        kept.append(self)
        return before(self)

    monkeypatch.setattr(Explanation, "embed", embed)
    explain_local({"model": str(plain)})
    party = kept[0].party
    return Explanation(party, np.arange(20, dtype=np.int32), kept[0].features, 2)


def test_a_party_permutes_no_feature_of_a_row_twice(asked: Explanation) -> None:
    first = asked.permuted(order())
    assert first.shape == (20, 4)
    for again in (order(), order(start=5, stop=12), order(count=1), order(first=1, repeat=1)):
        with pytest.raises(VflError, match="twice"):
            asked.permuted(again)
    asked.permuted(order(start=10, stop=20))
    asked.permuted(order(repeat=1))
    asked.permuted(order(first=2))
    with pytest.raises(VflError, match="twice"):
        asked.permuted(order(repeat=1, start=10, stop=20))


@pytest.mark.parametrize(
    "wrong", [{"first": 14}, {"stop": 21}, {"start": 10}, {"repeat": 2}, {"first": 4000}]
)
def test_a_party_refuses_features_and_rows_that_it_does_not_have(
    asked: Explanation, wrong: dict[str, int]
) -> None:
    with pytest.raises(VflError, match=r"does not have|agreed to"):
        asked.permuted(order(**wrong))


def test_rows_as_they_are_are_repeated_no_more_often_than_permuted_rows(
    asked: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = asked.embed()
    assert np.array_equal(asked.repeated(order(party=1)), np.tile(plain[:10], (2, 1)))
    with pytest.raises(VflError, match="does not have"):
        asked.repeated(order(party=1, stop=21))
    monkeypatch.setattr("vfl_flower.tasks.inference.party.explain._AT_ONCE", 60)
    asked.repeated(order(party=1, count=3))
    with pytest.raises(VflError, match="agreed to"):
        asked.repeated(order(party=1, count=4))


def test_permutations_follow_from_a_secret_that_is_new_each_time(asked: Explanation) -> None:
    again = Explanation(asked.party, np.arange(20, dtype=np.int32), asked.features, 2)
    assert not np.array_equal(asked.permutation(0, 0), again.permutation(0, 0))
    assert not np.array_equal(asked.permutation(0, 0), asked.permutation(1, 0))
    np.testing.assert_array_equal(asked.permutation(1, 1), asked.permutation(1, 1))
