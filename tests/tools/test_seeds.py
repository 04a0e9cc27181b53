"""`--seeds`: means and standard deviations over runs that differ in their seeds."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.conftest import Capsys, of_words
from tests.results.test_report import Page, left
from vfl_flower.launch.engines import Finished, run_local
from vfl_flower.results.figures import headline, spread
from vfl_flower.results.report import report
from vfl_flower.tools.cli import main
from vfl_flower.tools.compare import compare, figures_of, table
from vfl_flower.tools.seeds import mean, repeated
from vfl_flower.tools.seeds import table as table_of_seeds

QUICK: dict[str, Any] = {"dataset": "breast-cancer", "window": 8, "epochs": 2, "seed": 3}


@pytest.fixture(scope="module")
def repeats(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("seeds") / "out"
    return repeated(run_local, 2, {**QUICK, "out": str(folder)}, (), 3)


@pytest.mark.nightly
def test_each_seed_has_a_folder_with_the_run_that_it_gives_alone(
    repeats: Finished, tmp_path: Path
) -> None:
    seeds = [Finished(repeats.folder / f"seed-{seed}").summary for seed in (3, 4, 5)]
    assert [each["seed"] for each in seeds] == repeats.summary["seeds"] == [3, 4, 5]
    alone = run_local(2, {**QUICK, "seed": 4, "out": str(tmp_path / "alone")}).summary
    assert seeds[1]["test_loss"] == alone["test_loss"] != seeds[0]["test_loss"]


def test_figures_are_means_and_deviations_of_the_seeds(repeats: Finished) -> None:
    runs = [Finished(repeats.folder / f"seed-{seed}") for seed in (3, 4, 5)]
    losses = [each.summary["test_loss"] for each in runs]
    summary, history = repeats.summary, repeats.history
    assert summary["test_loss"] == pytest.approx(fmean(losses))
    assert summary["deviation"]["test_loss"] == pytest.approx(stdev(losses))
    assert summary["exchanges"] == runs[0].summary["exchanges"]
    assert "exchanges" not in summary["deviation"]
    first = [each.history[0]["test_loss"] for each in runs]
    assert history[0]["test_loss"] == pytest.approx(fmean(first))
    assert history[0]["deviation"]["test_loss"] == pytest.approx(stdev(first))
    assert f"{summary['test_accuracy']:.4f} ± " in headline(summary)
    assert "3 seeds" in headline(summary)


def test_assessments_are_averaged_and_curves_have_one_length(repeats: Finished) -> None:
    each = [Finished(repeats.folder / f"seed-{seed}").summary["assessment"] for seed in (3, 4, 5)]
    found = repeats.summary["assessment"]
    for end in ("value", "low", "high"):
        due = fmean(one["figures"]["auc"][end] for one in each)
        assert found["figures"]["auc"][end] == pytest.approx(due)
    curves = [one["curves"]["roc"] for one in each]
    assert len({len(curve["x"]) for curve in curves}) > 1
    roc = found["curves"]["roc"]
    assert len(roc["x"]) == len(roc["y"]) == min(len(curve["x"]) for curve in curves)
    assert [roc[axis][at] for axis in ("x", "y") for at in (0, -1)] == [0, 1, 0, 1]
    assert found["confusion"]["classes"] == ["0", "1"]


def test_the_table_has_each_seed_and_then_mean_and_deviation(repeats: Finished) -> None:
    head, *lines = table_of_seeds(repeats.folder).splitlines()
    assert head.split()[:3] == ["run", "test", "accuracy"]
    names = [f"seed {seed}" for seed in (3, 4, 5)]
    summaries = [Finished(repeats.folder / f"seed-{seed}").summary for seed in (3, 4, 5)]
    summaries += [repeats.summary, repeats.summary["deviation"]]
    for name, line, summary in zip([*names, "mean", "deviation"], lines, summaries, strict=True):
        assert line.startswith(f"{name} ")
        assert line.removeprefix(name).split()[0] == f"{summary['test_accuracy']:.4f}"


def test_means_are_of_numbers_in_any_depth_and_names_stay_names() -> None:
    one = {"a": 1, "same": 5, "text": "x", "list": [{"party": 0, "b": 1.0}], "none": None}
    other = {"a": 2, "same": 5, "text": "y", "list": [{"party": 1, "b": 3.0}], "none": 1.0}
    found = mean([one, other])
    assert found["a"] == 1.5 and found["same"] == 5 and found["text"] is None
    assert found["none"] is None and found["deviation"] == {"a": stdev([1, 2])}
    assert found["list"] == [{"party": None, "b": 2.0, "deviation": {"b": stdev([1, 3])}}]
    assert mean([{"flag": True}, {"flag": False}]) == {"flag": None}


@of_words
def test_tables_of_the_page_have_deviations(repeats: Finished) -> None:
    page = Page(report([repeats.folder]))
    accuracy = f"{repeats.summary['test_accuracy']:.4f} ± "
    assert page.tiles["test accuracy"].startswith(accuracy)
    assert "means of 3 seeds" in page.text
    for row in page.table("epochs").values():
        assert " ± " in row["test loss"]  # the seeds may take equal milliseconds
    assert " ± " in page.table("party")["party 0"]["reply seconds, mean"]


def test_a_band_is_one_deviation_to_either_side(tmp_path: Path) -> None:
    folder = left(tmp_path / "a")
    assert not bands(Page(report([folder])))  # the control
    entries = [json.loads(each) for each in (folder / "history.jsonl").read_text().splitlines()]
    for entry in entries:
        entry["deviation"] = {"test_accuracy": 0.05}
    (folder / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    page = Page(report([folder]))
    (line,) = page.points("accuracy against exchanges")
    band = bands(page)[0]
    above, below = band[:3], band[3:6][::-1]
    per_accuracy = (line[2][1] - line[0][1]) / (1 / 3)  # accuracies are 0.5, 0.75, 0.833
    for (x, y), (x1, high), (x2, low) in zip(line, above, below, strict=True):
        assert x == pytest.approx(x1, abs=0.1) and x == pytest.approx(x2, abs=0.1)
        assert high - y == pytest.approx(y - low, abs=0.2)
        assert high - y == pytest.approx(0.05 * per_accuracy, abs=0.2)


def bands(page: Page, charts: str = " against epochs") -> list[list[tuple[float, float]]]:
    """The outlines of areas around curves, as points to the right and up.

    charts : what the titles of their charts have in them.
    """
    found = [each for each in page.all("figure") if charts in (each[0].text or "")]
    every = [path for chart in found for path in chart.iter("path")]
    paths = [each for each in every if each.get("fill", "").startswith("var(--s")]
    numbers = [
        [float(each) for each in path.attrib["d"].split() if each not in "MLz"] for path in paths
    ]
    return [[(x, -y) for x, y in zip(each[::2], each[1::2], strict=True)] for each in numbers]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {**QUICK, "epochs": 1, "out": str(tmp_path_factory.mktemp("compare") / "out")}
    vafl = {"strategy": "vafl", "party-lr": 0.2, "server-lr": 0.2}
    return compare(2, keys, [vafl], 0.2, seeds=2)


@pytest.mark.nightly
def test_a_comparison_of_seeds_has_deviations_and_the_same_runs(comparison: Path) -> None:
    figures = json.loads((comparison / "compare.json").read_text())
    assert list(figures) == ["vafl", "frozen", "local-only", "centralised"]
    for name, each in figures.items():
        of_seeds = [Finished(comparison / name / f"seed-{seed}").summary for seed in (3, 4)]
        assert each["test_loss"] == fmean(run["test_loss"] for run in of_seeds)
    lines = table(comparison).splitlines()
    assert spread(figures["vafl"], "test_accuracy", ".4f") in lines[1] and " ± " in lines[1]
    assert "Figures are means of 2 seeds ± standard deviations." in lines
    assert "means of 2 seeds" in Page(report([comparison])).text


@pytest.mark.nightly
def test_a_target_is_reached_if_every_seed_reaches_it(comparison: Path) -> None:
    runs = [Finished(comparison / "vafl" / f"seed-{seed}") for seed in (3, 4)]
    worse, better = sorted(run.history[-1]["validation_accuracy"] for run in runs)
    megabytes = fmean((run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6 for run in runs)
    both = figures_of(Finished(comparison / "vafl"), worse)
    assert both["megabytes_to_target"] == pytest.approx(megabytes) and worse < better
    assert figures_of(Finished(comparison / "vafl"), better)["megabytes_to_target"] is None


def test_the_command_leaves_a_folder_for_each_seed(tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    keys = "dataset='breast-cancer' epochs=1 window=8"
    assert main(["run", "-c", keys, "--seeds", "2", "--parties", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 seeds" in printed and printed.endswith(f"results: {out}\n")
    assert {each.name for each in out.iterdir() if each.is_dir()} == {"seed-0", "seed-1"}
    assert main(["run", "-c", keys, "--seeds", "2", "--out", str(out)]) == 1
    assert "already exists" in capsys.readouterr().err


def test_seeds_are_of_training_anew(elsewhere: None, tmp_path: Path, capsys: Capsys) -> None:
    for key in ("task='align'", "resume='runs/a'"):
        assert main(["run", "-c", key, "--seeds", "2", "--parties", "2"]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
