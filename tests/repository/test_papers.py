"""The papers' rows: what is kept of runs, how rates are chosen, what the page is made of."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.papers import data, label_privacy, page, results, tuning
from benchmarks.papers.__main__ import ROWS, Runs, main
from benchmarks.papers.data import NAMES
from benchmarks.papers.draw import through_ends
from benchmarks.papers.results import Results
from benchmarks.papers.rows import ACCURACY, Data, Histories, History, Job, Row, last
from benchmarks.papers.tuning import FACTORS
from tests.repository.test_benchmarks import Here
from vfl_flower.protocol.systems import resolve

JOB = Job(2, {"dataset": NAMES.mnist, "party-lr": 0.1, "server-lr": 0.02, "epochs": 3})
LIKE = Job(2, {**JOB.keys, "privacy": "labels"}, like="first")
ROW = Row("two runs", lambda data: {"first": JOB, "second": LIKE}, ACCURACY, seeds=2, tuned=True)


def run(accuracy: float, loss: float = 1.0) -> History:
    measured = {"test_accuracy": accuracy, "validation_accuracy": accuracy, "validation_loss": loss}
    return [{"epoch": 1, **measured}]


def test_a_run_is_kept_and_found_by_its_keys(tmp_path: Path) -> None:
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
    for other in ({"party-lr": 0.2}, {"dataset": "another"}):
        assert again.get("first", 0, ROW, {**JOB.keys, **other}) is None
    again.put("second", 0, ROW, JOB.keys, run(0.25))  # after the line that was cut off
    assert Results(tmp_path, "row", tmp_path).get("second", 0, ROW, JOB.keys) == run(0.25)


def saved(path: Path, labels: list[int]) -> str:
    path.parent.mkdir(exist_ok=True)
    np.savez(path, X=np.arange(8.0).reshape(4, 2), y=np.array(labels))
    return f"npz:{path}"


def test_a_data_set_is_known_by_its_labels_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(place: str) -> str:
        return data.names_of(replace(NAMES, credit=place), {place})[place]

    one = saved(tmp_path / "a/credit.npz", [0, 1, 1, 0])
    same = saved(tmp_path / "b/moved.npz", [0, 1, 1, 0])
    other = saved(tmp_path / "b/credit.npz", [0, 1, 0, 1])
    assert named(one) == named(same) != named(other)  # neither is the credit table
    assert NAMES.credit not in (named(one), named(other)) and "credit" in named(one)
    own = named(one).removeprefix("credit ")
    monkeypatch.setattr(data, "_LABELS", replace(data._LABELS, credit=own))
    assert named(one) == named(same) == NAMES.credit != named(other)


def test_a_run_on_moved_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(data: Data) -> dict[str, Job]:
        return {"first": Job(2, {**JOB.keys, "dataset": data.credit})}

    monkeypatch.setitem(ROWS, "row", Row("a run", row, ACCURACY, seeds=1))
    monkeypatch.setattr("benchmarks.papers.__main__.ProcessPoolExecutor", Here)
    asked: list[str] = []

    def of(parties: int, keys: dict[str, str], training: str, run_of: None) -> History:
        asked.append(keys["dataset"])
        return run(0.5)

    monkeypatch.setattr("benchmarks.papers.__main__.history_of", of)
    one = saved(tmp_path / "a/credit.npz", [0, 1, 1, 0])
    moved = saved(tmp_path / "b/moved.npz", [0, 1, 1, 0])
    other = saved(tmp_path / "b/credit.npz", [0, 1, 0, 1])
    for place in (one, moved, other):
        kept = Results(tmp_path, "row", tmp_path)
        Runs("row", replace(NAMES, credit=place), "", {}, kept).histories(1)
    assert asked == [one, other]  # `moved` was found


def test_the_best_trial_gives_the_rates_also_to_a_run_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, "row", ROW)
    asked = []

    def of(parties: int, keys: dict[str, object], training: str, run_of: None) -> History:
        asked.append(keys)
        return run(0.9 if (keys["party-lr"], keys["server-lr"]) == (0.3, 0.00667) else 0.1)

    monkeypatch.setattr("benchmarks.papers.__main__.history_of", of)
    monkeypatch.setattr("benchmarks.papers.__main__.ProcessPoolExecutor", Here)
    runs = Runs("row", NAMES, "", {}, Results(tmp_path, "row", tmp_path))
    runs.tune()
    assert len(asked) == len(FACTORS) == 9  # of the first run alone
    assert all(keys["validation-fraction"] == 0.1 and keys["epochs"] == 3 for keys in asked)
    assert {keys["lr-schedule"] for keys in asked} == {"cosine"}
    histories = runs.histories(2)
    assert [len(each) for each in histories.values()] == [2, 2]
    for keys in asked[9:]:
        assert (keys["party-lr"], keys["server-lr"]) == (0.3, 0.00667)
        assert "validation-fraction" not in keys
    assert {keys["seed"] for keys in asked[9:]} == {0, 1} and len(asked) == 9 + 4
    again = Runs("row", NAMES, "", {}, Results(tmp_path, "row", tmp_path))
    again.tune()
    assert again.histories(2) == histories and len(asked) == 9 + 4  # nothing is run again


def test_missing_data_are_one_sentence_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.papers.__main__.data_of", None)
    rows = {"vafl-fig2": "mnist", "laser": "credit", "vafl-fig2-cifar": "cifar"}
    for row, option in rows.items():
        here = dict.fromkeys(rows.values(), tmp_path) | {option: tmp_path / "none"}
        words = [f"--{name}={place}" for name, place in here.items()]
        monkeypatch.setattr("sys.argv", ["papers", row, "--quick", *words])
        with pytest.raises(SystemExit, match=f"^--{option}: there is no .*none; give your own .*$"):
            main()


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
    some = page.figure(last("test_accuracy"), [run(0.5), []])
    assert some == ("0.5, 1 of 2 diverged", {"mean": 0.5, "by_seed": [0.5, None]})
    two = [run(0.5), run(0.75)], [run(0.25), run(0.5), run(0.5)]
    assert page.difference(last("test_accuracy"), *two) == "0.25 ± 0"
    assert page.figure(last("test_accuracy"), [[], []]) == ("diverges", {})
    assert page.figure(last("test_accuracy"), []) == ("not run", {})


def nudged(keys: Mapping[str, Any], towards: float) -> dict[str, Any]:
    """The keys as a machine that rounds otherwise computes them: one last bit off."""
    return {
        key: math.nextafter(value, towards) if isinstance(value, float) else value
        for key, value in keys.items()
    }


def found(name: str) -> tuple[Histories, dict[str, list[int]]]:
    """The kept runs of a row, and those that are not found."""
    runs = Runs(name, NAMES, "", {}, Results(page.KEPT, name, page.KEPT))
    runs.tune(missing=False)
    return runs.histories(runs.row.seeds, missing=False), runs.absent


@pytest.mark.parametrize("towards", [-math.inf, math.inf], ids=["below", "above"])
@pytest.mark.parametrize("name", ROWS)
def test_kept_runs_are_found_on_a_machine_that_rounds_otherwise(
    name: str, towards: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, absent = found(name)
    assert all(here.values()) and not absent
    row = ROWS[name]

    def jobs(data: Data) -> dict[str, Job]:
        made = row.jobs(data).items()
        return {each: replace(job, keys=nudged(job.keys, towards)) for each, job in made}

    with monkeypatch.context() as patch:  # before learning rates are tuned
        patch.setitem(ROWS, name, replace(row, jobs=jobs))
        assert found(name) == (here, {})
    of = results.digest
    monkeypatch.setattr(results, "digest", lambda row, keys: of(row, nudged(keys, towards)))
    assert found(name) == (here, {})
    monkeypatch.setattr(results, "_lasting", lambda value: value)  # the control
    made = row.jobs(NAMES).items()
    assert found(name)[1].keys() >= {each for each, job in made if nudged(job.keys, 0) != job.keys}


def test_a_page_of_all_kept_runs_says_nothing_and_names_runs_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {template: tmp_path / f"{template.stem}.md" for template in page.PAGES}
    before = {template: made.read_text() for template, made in page.PAGES.items()}
    monkeypatch.setattr(page, "PAGES", pages)
    monkeypatch.setattr(page, "PICTURES", tmp_path)
    monkeypatch.setattr("benchmarks.papers.__main__.draw", lambda *given: None)
    monkeypatch.chdir(tmp_path)  # where no data set is
    monkeypatch.setattr("sys.argv", ["papers", "page"])
    main()
    assert capsys.readouterr().err == ""
    assert {template: made.read_text() for template, made in pages.items()} == before
    lines = (page.KEPT / "laser.jsonl").read_text().splitlines()
    (tmp_path / "laser.jsonl").write_text("\n".join(lines[1:]) + "\n")
    gone = json.loads(lines[0])
    monkeypatch.setattr("sys.argv", ["papers", "page", "--resume", str(tmp_path)])
    main()
    said = capsys.readouterr().err
    assert f"lacks runs of laser, so the page has none of them:\n  {gone['run']}: seeds 0\n" in said
    for name, row in ROWS.items():
        assert f"lacks runs of {name}," in said
        if name != "laser":
            assert all(f"  {job}: seeds 0" in said for job in row.jobs(NAMES))
    assert all("not run" in made.read_text() for made in pages.values())


@pytest.mark.parametrize("template", page.PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_its_template_and_the_kept_runs_give(template: Path) -> None:
    """So no figure on it is typed by hand where the template has none."""
    text = template.read_text()
    kept = {name: found(name)[0] for name in set(re.findall(r"\{\{([\w-]+)", text))}
    for name, of in kept.items():
        jobs = ROWS[name].jobs(NAMES)
        for job, histories in of.items():
            assert len(histories) == (jobs[job].seeds or ROWS[name].seeds), (name, job)
    assert page.PAGES[template].read_text() == page.render(text, ROWS, kept)


def test_a_curve_goes_through_the_ends_of_jobs_and_leaves_out_those_without_the_figure() -> None:
    def ended(epsilon: float | None, *accuracies: float) -> list[History]:
        early: dict[str, float | None] = {"epsilon": 9.0, "test_accuracy": 0.0}
        return [[early, {"epsilon": epsilon, "test_accuracy": each}] for each in accuracies]

    histories = {
        "none | labels | epsilon 1": ended(1.0, 0.5, 0.75),
        "none | labels | epsilon 2": ended(2.0, 0.625, 0.875),
        "none | labels | no noise": ended(None, 1.0, 1.0),
        "none | scalars | epsilon 1": ended(1.0, 0.25, 0.25),
    }
    made = through_ends(histories, "epsilon")
    assert list(made) == ["none | labels", "none | scalars"]
    points = [[(e["epsilon"], e["test_accuracy"]) for e in each] for each in made["none | labels"]]
    assert points == [[(1.0, 0.5), (2.0, 0.625)], [(1.0, 0.75), (2.0, 0.875)]]


def test_the_difference_of_two_runs_is_over_pairs_of_seeds() -> None:
    one, other = ([run(each) for each in of] for of in ((0.75, 0.875, 1.0), (0.5, 0.75, 0.75)))
    points = [25.0, 12.5, 25.0]
    half = stats.t.interval(0.95, 2, 0, stats.sem(points))[1]
    assert label_privacy.difference(one, other) == f"+20.8 ± {half:.1f}"
    assert label_privacy.difference(other, one) == f"-20.8 ± {half:.1f}"


def test_our_runs_on_privacy_draw_noise_from_a_secret_so_that_an_epsilon_holds() -> None:
    jobs = label_privacy.runs(NAMES)
    without = {name for name in jobs if name.endswith("no noise")}
    assert len(without) == 8 and len(jobs) - len(without) == 4 * 12
    for job in jobs.values():
        keys = label_privacy.without_noise_seed({**job.keys, "noise-seed": 0, "seed": 1})
        assert keys["seed"] == 1 and resolve(keys).privacy.noise_seed == -1
        assert resolve(keys).privacy.calibration == "known"


def test_the_verdict_on_label_privacy_is_what_the_kept_runs_say() -> None:
    lines = label_privacy.refused({})
    assert len(lines) == 2 + 4
    assert all("'first-order' does not answer by scalars" in line for line in lines[2:])
    kept, _ = found("label-privacy")
    fewer: dict[str, set[bool]] = {}
    for (pair, epsilon), (labels, scalars) in label_privacy.pairs(kept).items():
        gained = label_privacy.points(labels, scalars)
        decided = sum(gained) / 3 > page.half_interval(gained)
        assert sum(gained) > 0 and decided == (epsilon >= 1), (pair, epsilon)
        ours, theirs = (label_privacy.megabytes([each]) for each in (labels, scalars))
        assert max(ours) < min(theirs) or min(ours) > max(theirs)
        fewer.setdefault(pair, set()).add(max(ours) < min(theirs))
    assert fewer.pop("top-k, asynchronous") == {False}
    assert list(fewer.values()) == [{True}] * 3
    (half,) = (line for line in label_privacy.extremes(kept) if line.startswith("| 0.5 "))
    assert "| -" in half
