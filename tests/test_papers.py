"""The papers' rows: what is kept of runs, how rates are chosen, what the page is made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.papers import page, tuning
from benchmarks.papers.__main__ import ROWS, Runs
from benchmarks.papers.results import Results, digest
from benchmarks.papers.rows import ACCURACY, Data, History, Job, Row, last
from benchmarks.papers.tuning import FACTORS

DATA = Data(
    mnist="npz:a/mnist.npz",
    credit="npz:a/credit.npz",
    credit_one_hot="npz:a/credit-one-hot.npz",
    cifar="hf:a/cifar",
    table="breast-cancer",
)
JOB = Job(2, {"dataset": "npz:a/mnist.npz", "party-lr": 0.1, "server-lr": 0.02, "epochs": 3})
LIKE = Job(2, {**JOB.keys, "privacy": "labels"}, like="first")
ROW = Row("two runs", lambda data: {"first": JOB, "second": LIKE}, ACCURACY, seeds=2, tuned=True)


def run(accuracy: float, loss: float = 1.0) -> History:
    measured = {"test_accuracy": accuracy, "validation_accuracy": accuracy, "validation_loss": loss}
    return [{"epoch": 1, **measured}]


def test_a_run_is_kept_and_found_by_its_keys_wherever_the_data_are(tmp_path: Path) -> None:
    kept = Results(tmp_path, "row", tmp_path)
    kept.put("first", 0, ROW, JOB.keys, run(0.5))
    kept.put("first", 1, ROW, JOB.keys, [])  # it has diverged
    with (tmp_path / "row.jsonl").open("a") as file:
        file.write('{"run": "first", "se')  # it was cut off
    again = Results(tmp_path, "row", tmp_path)
    assert (
        again.get("first", 0, ROW, JOB.keys) == run(0.5) and again.get("first", 2, ROW, {}) is None
    )
    assert again.get("first", 1, ROW, JOB.keys) == []
    moved = {**JOB.keys, "dataset": "npz:/elsewhere/mnist.npz"}
    assert digest(ROW, moved) == digest(ROW, JOB.keys)
    for other in ({"party-lr": 0.2}, {"dataset": "npz:a/fashion.npz"}):
        assert again.get("first", 0, ROW, {**JOB.keys, **other}) is None
    again.put("second", 0, ROW, JOB.keys, run(0.25))  # after the line that was cut off
    assert Results(tmp_path, "row", tmp_path).get("second", 0, ROW, JOB.keys) == run(0.25)


def test_the_best_trial_gives_the_rates_also_to_a_run_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, "row", ROW)
    asked = []

    def of(parties: int, keys: dict[str, object], training: str) -> History:
        asked.append(keys)
        return run(0.9 if (keys["party-lr"], keys["server-lr"]) == (0.3, 0.00667) else 0.1)

    monkeypatch.setattr("benchmarks.papers.__main__.history_of", of)
    monkeypatch.setattr("benchmarks.papers.__main__.ProcessPoolExecutor", Here)
    runs = Runs("row", DATA, "", {}, Results(tmp_path, "row", tmp_path))
    runs.tune()
    assert len(asked) == len(FACTORS) == 9  # of the first run alone
    assert all(keys["validation-fraction"] == 0.1 and keys["epochs"] == 3 for keys in asked)
    assert {keys["lr-schedule"] for keys in asked} == {"cosine"}
    found = runs.histories(2)
    assert [len(each) for each in found.values()] == [2, 2]
    for keys in asked[9:]:
        assert (keys["party-lr"], keys["server-lr"]) == (0.3, 0.00667)
        assert "validation-fraction" not in keys
    assert {keys["seed"] for keys in asked[9:]} == {0, 1} and len(asked) == 9 + 4
    again = Runs("row", DATA, "", {}, Results(tmp_path, "row", tmp_path))
    again.tune()
    assert again.histories(2) == found and len(asked) == 9 + 4  # nothing is run again


class Here:
    """An executor that runs at once, in this process."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: object, *arguments: object) -> object:
        from concurrent.futures import Future

        future: Future[object] = Future()
        future.set_result(call(*arguments))  # type: ignore[operator]
        return future


def test_a_trial_that_diverged_is_never_the_best() -> None:
    assert tuning.best([[], run(0.1), run(0.3), run(0.3), []]) == 2
    assert tuning.best([[], run(0.0)]) == 1 and tuning.best([run(0.3, 0.5), run(0.3, 0.4)]) == 1


def test_a_cell_has_the_95_percent_interval_of_the_mean() -> None:
    values = [0.5, 0.75, 1.0]
    text, figures = page.figure(last("test_accuracy"), [run(each) for each in values])
    low, high = stats.t.interval(0.95, 2, 0.75, stats.sem(values))
    assert text == f"0.75 ± {(high - low) / 2:.2g}" and figures["by_seed"] == values
    hundreds = page.figure(last("test_accuracy", 1000), [run(each) for each in (0.5, 0.75)])
    assert hundreds[0] == "625 ± 1600"  # and not 1.6e+03
    assert page.figure(last("test_accuracy"), [run(0.5), []]) == ("diverges", {})
    assert page.figure(last("test_accuracy"), []) == ("not run", {})


def test_the_page_is_what_its_template_and_the_kept_runs_give() -> None:
    """So no figure on it is typed by hand where the template has none."""
    text = page.TEMPLATE.read_text()
    named = set(re.findall(r"\{\{([\w-]+)", text))
    kept = {}
    for name in named:
        runs = Runs(name, DATA, "", {}, Results(page.KEPT, name, page.KEPT))
        runs.tune(missing=False)
        kept[name] = runs.histories(ROWS[name].seeds, missing=False)
        assert all(len(each) == ROWS[name].seeds for each in kept[name].values()), name
    assert page.PAGE.read_text() == page.render(text, ROWS, kept)
