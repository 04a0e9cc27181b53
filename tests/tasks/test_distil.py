"""Distilled models: they predict without parties, learn from scores, and see no hidden label."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score, roc_auc_score
from torch.nn import functional

from strategies import distilled
from tests.organisations import ID, Organisations, change, cut
from tests.serving import served
from vfl_flower import server_app
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished, distil_local, predict_local
from vfl_flower.models.losses import Loss, with_soft_targets
from vfl_flower.protocol.privacy.together import of_several
from vfl_flower.results.model_card import card
from vfl_flower.results.page import markdown
from vfl_flower.tasks.inference.contribution import contribution
from vfl_flower.tasks.inference.paired import paired
from vfl_flower.tools.cli import main

SHORT: dict[str, Any] = {"epochs": 2, "batch-size": 64}
HIDING = {
    "labels": {"privacy": "labels", "epsilon": 3.0},
    "scalars": {
        **{"strategy": "dpzv", "epsilon": 5.0, "batch-size": 64, "epochs": 2},
        **{"server-update": "zeroth-order", "quorum": 2},
    },
}


def table(rows: int = 400, noise: float = 1.0) -> pd.DataFrame:
    """Nine columns of three hidden ones, which decide the label."""
    generator = np.random.default_rng(3)
    hidden = generator.standard_normal((rows, 3))
    features = np.tile(hidden, 3) + 0.5 * generator.standard_normal((rows, 9))
    label = hidden.sum(1) + noise * generator.logistic(size=rows) > 0
    frame = pd.DataFrame(features, columns=[f"f{n}" for n in range(9)])
    return frame.assign(**{ID: 1000 + np.arange(rows), "label": label.astype(int)})


def organised(
    folder: Path, keys: dict[str, Any] | None = None, frame: pd.DataFrame | None = None
) -> Organisations:
    """A label holder with three columns, two parties, and a run of them."""
    found = cut(folder, table() if frame is None else frame, own=3, known=1.0)
    found.run("run", {**SHORT, **(keys or {})})
    return found


def distil(of: Organisations, out: str = "student", **keys: Any) -> Finished:
    given = {"model": str(of.folder / "run"), "out": str(of.folder / out), **SHORT, **keys}
    return distil_local(given, of.node_configs)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFL_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(distilled, "_DRAWS", 20)
        yield


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    found = organised(tmp_path_factory.mktemp("bank"))
    distil(found)
    return found


# --- a distilled model is a model without parties ------------------------------------------------


def test_a_distilled_model_predicts_and_serves_without_any_party(
    bank: Organisations, tmp_path: Path
) -> None:
    student = tmp_path / "moved"
    shutil.copytree(bank.folder / "student", student)  # without the parties' states and files
    given = {"model": str(student), "dataset": f"files:{bank.labels}"}
    scores = pd.read_csv(predict_local(given)).set_index(ID)["probability_1"]
    assert len(scores) == len(table())
    assert scores.std() > 0.001
    with served(student, tmp_path) as service:
        assert service.grid.contexts == {}
        (answer,) = service.ask(1007)
    assert answer["probabilities"]["1"] == pytest.approx(scores[1007], abs=1e-6)
    with pytest.raises(VflError):  # the run that it learned from needs its parties
        predict_local({**given, "model": str(bank.folder / "run"), "out": f"{tmp_path}/p.csv"})


def test_summary_and_card_compare_with_the_run_on_its_own_test_rows(bank: Organisations) -> None:
    then, now = (Finished(bank.folder / name).summary for name in ("run", "student"))
    found = now["distilled"]
    assert (now["parties"], now["exchanges"], found["people_without_label"]) == (0, 0, 0)
    assert now["data"]["ids"] == then["data"]["ids"]
    assert found["federation"] == pytest.approx(then["test_auc"], abs=1e-6)
    assert found["distilled"] == pytest.approx(now["test_auc"], abs=1e-6)
    losses = found["validation_losses"]
    assert len(losses) == len(distilled.MIXES)
    assert losses[str(found["mix"])] == min(losses.values())
    assert now["validation_loss"] == pytest.approx(min(losses.values()))
    paired([bank.folder / "run", bank.folder / "student"])
    (test, *_) = json.loads((bank.folder / "run" / "paired.json").read_text())["tests"]
    assert test["value"] == pytest.approx(found["federation"] - found["distilled"], abs=1e-6)
    text = markdown(card(now, {}, {}))
    assert "It needs no party." in text
    assert f"{found['federation']:.4f} the run" in text
    assert "needs every one" not in text
    assert "It needs no party." not in markdown(card(then, {}, {}))


def test_the_command_distils_into_the_folder_of_the_run(
    bank: Organisations, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [f"file='{path}' id='{ID}'" for path in bank.files]
    each = [part for node in nodes for part in ("--node-config", node)]
    assert main(["distil", str(bank.folder / "run"), "-c", "epochs=1", *each]) == 0
    said = capsys.readouterr().out
    assert "AUC on the test rows" in said
    assert "results:" in said
    assert checkpoint.load(bank.folder / "run" / "distilled").parties == 0
    with pytest.raises(ConfigError, match="Name the run that taught it"):
        contribution(bank.folder / "run" / "distilled")


@pytest.mark.parametrize(
    "keys",
    [
        {"target": "regression", "label": "f8"},
        {"label": "three"},
        {"aggregation": "secure", "combine": "sum", "embedding-activation": "none"},
        {"align": "any", "min-parties": 0, "class-weights": "balanced"},
        {"strategy": "cascaded"},
    ],
    ids=["numbers", "three classes", "masked sums", "partial rows", "zeroth order"],
)
def test_every_kind_of_run_has_a_student(tmp_path: Path, keys: dict[str, Any]) -> None:
    frame = table()
    frame = frame.assign(three=np.digitize(frame["f0"] + frame["f5"], (-1, 1)))
    label = keys.get("label", "label")
    frame = frame.assign(label=frame[label])[[*(f"f{n}" for n in range(8)), ID, "label"]]
    more = {name: value for name, value in keys.items() if name != "label"}
    bank = organised(tmp_path, more, frame)
    found = distil(bank).summary["distilled"]
    metric = {"f8": "r2", "three": "accuracy"}.get(label, "auc")
    assert found["metric"] == metric
    then = Finished(bank.folder / "run").summary
    assert found["federation"] == pytest.approx(then[f"test_{metric}"], abs=1e-5)
    given = {"model": str(tmp_path / "student"), "dataset": f"files:{bank.labels}"}
    assert len(pd.read_csv(predict_local(given))) == len(frame)


# --- what it learns from -------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_soft_targets_of_one_class_have_the_loss_of_a_label(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(7, 1 if classes == 2 else classes, generator=generator)
    labels = torch.arange(7) % classes
    weighted = Loss(torch.arange(1.0, 1.0 + classes))
    loss = with_soft_targets(weighted)
    one = torch.ones(7, 1)
    hard = torch.cat([functional.one_hot(labels), one], 1)
    torch.testing.assert_close(loss(z, hard), Loss().per_row(z, labels))
    torch.testing.assert_close(loss(z, labels), weighted.per_row(z, labels))
    even = torch.cat([torch.full((7, classes), 1 / classes), one], 1)
    at_zero = Loss(own=loss).gradient(torch.zeros_like(z), even)
    torch.testing.assert_close(at_zero, torch.zeros_like(z))  # the least loss is at the targets
    assert Loss(own=loss).gradient(torch.zeros_like(z), hard).abs().min() > 0.1


@pytest.mark.parametrize("kind", [1, 2, 3], ids=["numbers", "two classes", "three classes"])
def test_few_labels_have_their_share_of_the_loss_beside_many_scores(kind: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 3 if kind == 3 else 1, generator=generator, requires_grad=True)
    scores, labels = torch.rand(50, kind, generator=generator), torch.arange(5) % max(2, kind)
    scores, given = scores / scores.sum(1, keepdim=True), functional.one_hot(labels).float()
    if kind == 1:  # numbers [N]
        scores, given = torch.rand(50, generator=generator), (labels := labels.float())
    loss = with_soft_targets(Loss())

    def gradient(losses: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(losses.mean(), z)[0]

    alone = torch.cat([scores.reshape(50, -1), torch.ones(50, 1)], 1)
    of_scores, of_labels = gradient(loss(z, alone)), gradient(Loss().per_row(z[:5], labels))
    for mix in (0.25, 1.0):
        found = gradient(loss(z, distilled.mixed(mix, scores, given)))
        torch.testing.assert_close(found, mix * of_scores + (1 - mix) * of_labels)
    assert distilled.mixed(0.25, scores[:5], given)[:, -1].eq(1).all()  # everybody has a label


def test_people_without_a_label_teach_by_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distilled, "MIXES", (1.0,))
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))  # of the people who withdraw
    everybody = table(1200)
    bank = cut(tmp_path, everybody, own=3, known=1.0)
    change(bank.labels, lambda frame: frame.iloc[:100])
    bank.run("run", {"epochs": 15})
    file, outside = tmp_path / "everybody.csv", everybody.loc[100:, ID]
    asked = everybody[[ID, "f2", "f0", "f1", "label"]].astype({"label": "Int64"})
    asked.loc[100:, "label"] = pd.NA
    asked.sample(frac=1, random_state=0).to_csv(file, index=False)  # in another order
    distil(bank, "few", epochs=20)
    many = distil(bank, "many", dataset=f"files:{file}", epochs=20).summary
    assert many["distilled"]["people_without_label"] == len(outside)
    assert many["data"]["rows"]["training"] == 80 + len(outside)
    given = {"dataset": f"files:{file}"}
    chances = {}
    for name in ("run", "few", "many"):
        nodes = bank.node_configs if name == "run" else []
        found = pd.read_csv(predict_local({**given, "model": str(tmp_path / name)}, nodes))
        chances[name] = found.set_index(ID)["probability_1"][outside]
    apart = {n: np.square(chances[n] - chances["run"]).mean() for n in ("few", "many")}
    assert apart["many"] < 0.5 * apart["few"]  # 0.2 in a dozen runs
    tested = pd.read_csv(tmp_path / "many" / "test_rows.csv")
    assert roc_auc_score(tested["label"], tested["probability_1"]) == many["test_auc"]
    withdrawn = tmp_path / "ids.txt"
    withdrawn.write_text(f"{outside.iloc[0]}\n{outside.iloc[1]}\n{tested['id'][0]}")
    assert main(["forget", "--id-file", str(withdrawn), str(tmp_path)]) == 0
    found = {name: checkpoint.load(tmp_path / name).withdrawn for name in ("run", "few", "many")}
    assert found == {"run": (0, 80), "few": (0, 80), "many": (2, 80 + len(outside))}


def test_many_rows_teach_by_large_batches_unless_options_say_how(
    bank: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distilled, "MIXES", (0.0, 1.0))

    def sizes(least: int, **keys: Any) -> tuple[int, ...]:
        configs: list[int] = []
        init = distilled.Student.__init__

        def made(self: Any, config: Any, labels: Any) -> None:
            init(self, config, labels)
            configs.append(self.config.training.batch_size)

        with monkeypatch.context() as patch:
            patch.setattr(distilled, "_MANY", least)
            patch.setattr(distilled.Student, "__init__", made)
            given = {"model": str(bank.folder / "run"), "out": str(tmp_path / f"{least}{keys}")}
            distil_local({**given, **keys}, bank.node_configs)
        return tuple(configs)

    assert sizes(100) == (32, 256)  # the local-only model trains as ever
    assert sizes(100, epochs=2) == sizes(10_000, epochs=2) == (32, 32)


def test_the_share_of_the_gain_is_one_for_the_run_and_nought_for_local_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distilled, "_DRAWS", 20)
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(500, generator=generator) < 0.3).long()
    noise = torch.randn(500, 2, generator=generator)
    good, bad = (labels[:, None] + scale * noise[:, :1] for scale in (1, 4))
    good = good.round(decimals=1)  # ties
    known = {"federation": good, "local_only": bad}
    found = distilled.compared({**known, "distilled": good}, labels)
    assert found["federation"] == pytest.approx(roc_auc_score(labels, good[:, 0]))
    assert found["kept"] == pytest.approx({"value": 1, "low": 1, "high": 1})
    assert distilled.compared({**known, "distilled": bad}, labels)["kept"]["value"] == 0
    half = distilled.compared({**known, "distilled": good + bad}, labels)["kept"]
    assert 0 < half["low"] < half["value"] < half["high"]
    alike = {"federation": bad + 1e-3 * noise[:, 1:], "local_only": bad, "distilled": good}
    assert distilled.compared(alike, labels)["kept"] is None  # no gain that is clear of chance
    numbers = labels.float() + noise[:, 1]
    r2 = distilled.compared({"federation": good, "distilled": bad}, numbers)
    assert r2["federation"] == pytest.approx(r2_score(numbers, good[:, 0]), abs=1e-6)
    assert (r2["metric"], r2["kept"]) == ("r2", None)


# --- noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hiding", [*HIDING, "nothing"])
def test_no_hidden_label_changes_the_student(tmp_path: Path, hiding: str) -> None:
    bank = organised(tmp_path, HIDING.get(hiding))
    found = checkpoint.load(tmp_path / "run")
    before = distil(bank, "before", epochs=3)
    labels = distilled._labels(found, "run")
    assert labels.places is not None and labels.test_places is not None
    protected = [*labels.places, *labels.test_places[: labels.validation]]

    def other(frame: pd.DataFrame) -> pd.DataFrame:
        at = frame.columns.get_loc("label")
        frame.iloc[protected, at] = 1 - frame.iloc[protected, at]
        return frame

    change(bank.labels, other)
    after = distil(bank, "after", epochs=3)
    then, now = (checkpoint.load(run.folder).arrays for run in (before, after))
    equal = all(np.array_equal(then[name], now[name]) for name in then if name.startswith("top."))
    assert equal == (hiding != "nothing")
    of_run, of_student = (
        json.loads((tmp_path / n / "summary.json").read_text()) for n in ("run", "after")
    )
    assert of_student["epsilon"] == of_run["epsilon"]
    assert of_student["config"]["privacy"] == of_run["config"]["privacy"]
    assert of_student["distilled"]["local_only"] is None or hiding == "nothing"
    assert of_several([of_run, of_student]) == []  # one run's epsilon is not added to itself
    assert not checkpoint.load(after.folder).about_labels["labels"] or hiding == "nothing"


def test_noisy_embeddings_are_asked_for_once_and_never_for_a_local_score(tmp_path: Path) -> None:
    bank = organised(tmp_path, {"privacy": "perturbed-embedding", "embedding-noise": 8.0})
    run = Finished(tmp_path / "run").summary["epsilon"]
    student = distil(bank).summary["epsilon"]
    assert student > run
    given = {"model": str(tmp_path / "student"), "dataset": f"files:{bank.labels}"}
    said = json.loads(predict_local(given).with_suffix(".json").read_text())
    assert "epsilon" not in said
    assert distil(bank, "again").summary["epsilon"] > student  # the parties were asked once more


# --- what it refuses -----------------------------------------------------------------------------


def test_a_run_without_a_student_is_refused_before_parties_are_asked(
    bank: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(*given: Any) -> None:
        (given[-1].folder / "mine.txt").touch()
        raise ConfigError("Not now.")

    with pytest.raises(ConfigError, match="has no parties"):
        distil_local({"model": str(bank.folder / "student")}, [])
    bare = cut(tmp_path / "bare", table(60), own=0, known=1.0)
    bare.run("run", SHORT)
    with pytest.raises(ConfigError, match="no columns to score"):
        distil(bare)
    whole = organised(tmp_path / "whole", {"test-fraction": 0.0}, table(80))
    with pytest.raises(ConfigError, match="no test rows"):
        distil(whole)
    assert not (whole.folder / "student").exists()
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="Not now"):
        patch.setattr(server_app, "distil", spoil)
        distil(whole)
    assert [each.name for each in (whole.folder / "student").iterdir()] == ["mine.txt"]
    lacking = organised(tmp_path / "lacking", None, table(80))
    change(lacking.files[0], lambda frame: frame.iloc[1:])
    with pytest.raises(ConfigError, match="1 people of the run"):
        distil(lacking)
    change(lacking.labels, lambda frame: frame.iloc[::-1])
    with pytest.raises(ConfigError, match="has changed since"):
        distil(lacking)
