"""`vfl compare`: what it runs, the table it prints, and what it refuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

from vfl_flower.config.errors import ConfigError
from vfl_flower.label_holder.earlier_run import configured
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.tools.cli import main
from vfl_flower.tools.compare import compare, figures_of, table

COMMON: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 2, "noise-seed": 0, "window": 8}
BASELINES = ["frozen", "local-only", "centralised"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "out"
    runs: list[dict[str, Any]] = [
        {"strategy": "vafl", "party-lr": 0.1},
        {"strategy": "vafl", "party-lr": 0.0},
        {"strategy": "cascaded"},
    ]
    return compare(3, {**COMMON, "out": str(out)}, runs, target=0.9)


def test_every_system_and_baseline_runs_once_until_the_target_is_reached(folder: Path) -> None:
    figures = json.loads((folder / "compare.json").read_text())
    assert list(figures) == ["vafl party-lr=0.1", "vafl party-lr=0.0", "cascaded", *BASELINES]
    for name, each in figures.items():
        finished = Run(folder / name.replace(" ", "-"))
        assert finished.summary["test_accuracy"] == each["test_accuracy"]
        assert finished.summary["config"]["dataset"] == "breast-cancer"
    history = Run(folder / "vafl-party-lr=0.1").history
    reached = [e for e in history if e["validation_accuracy"] >= 0.9]  # not by test rows
    expected = (reached[0]["bytes_up"] + reached[0]["bytes_down"]) / 1e6 if reached else None
    assert figures["vafl party-lr=0.1"]["megabytes_to_target"] == expected
    with pytest.raises(ConfigError, match="already exists"):  # it is never written over
        compare(3, {**COMMON, "out": str(folder)}, [{"strategy": "vafl"}], 0.9)


@pytest.mark.parametrize("validates", [True, False])
def test_validation_rows_decide_when_a_target_is_reached(validates: bool, tmp_path: Path) -> None:
    """The control: without validation rows, test rows do."""
    history = [
        {"test_accuracy": 0.95, "validation_accuracy": 0.8, "bytes_up": 1e6, "bytes_down": 1e6},
        {"test_accuracy": 0.85, "validation_accuracy": 0.9, "bytes_up": 2e6, "bytes_down": 2e6},
    ]
    lines = [each if validates else {**each, "validation_accuracy": None} for each in history]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (tmp_path / "summary.json").write_text("{}")
    megabytes = figures_of(Run(tmp_path), 0.9)["megabytes_to_target"]
    assert megabytes == (4.0 if validates else 2.0)


def test_the_table_has_a_line_for_each_and_aligned_columns(folder: Path) -> None:
    lines = table(folder).splitlines()
    assert len({len(line) for line in lines[:7]}) == 1
    of_tests = [line.split("   ")[0] for line in lines[8:12]]  # local-only keeps no model
    first = "vafl-party-lr=0.1 above "
    others = ("vafl-party-lr=0.0", "cascaded", "frozen", "centralised")
    assert of_tests == [first + each for each in others]
    assert "MB to 0.9" in lines[0]
    accuracy = json.loads((folder / "compare.json").read_text())["cascaded"]["test_accuracy"]
    assert lines[3].split()[:2] == ["cascaded", f"{accuracy:.4f}"]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["nonsense"], "strategy = 'nonsense' is not known"),
        (["vafl", "vafl"], "given twice"),
        (["cascaded expert='mu=0.0'"], "mu = 0.0 must be above 0"),
        (["vafl party-lr"], "cannot be read"),
        ([" "], "name a system"),
        (["vafl strategy='cascaded'"], "names a strategy or out twice"),
        (["vafl", "-c", "strategy='cascaded'"], "leave strategy out of -c"),
        (["a: vafl", "a: cascaded"], "'a' is given twice"),
        (["1/40: vafl", "1 40: cascaded"], "choose titles that differ in those"),
        (["..: vafl"], "choose titles that differ in those"),
        (["frozen: vafl"], "'frozen' is the name of a baseline"),
        (["a: nonsense"], "strategy = 'nonsense' is not known"),
        (["vafl", "-c", "expert='embedding-noise=1.0'"], "adds no noise with privacy = 'none'"),
        (["vafl privacy='none' expert='inner-noise=0.1'"], "adds no noise with privacy = 'none'"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_runs(
    arguments: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", *arguments, "--out", str(out)]) == 1
    sentence = capsys.readouterr().err
    assert cause in sentence and sentence.count("\n") == 1
    assert not out.exists()


def test_noise_that_runs_share_is_not_for_runs_without_privacy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is allowed before any begins: the second would be refused after the first."""
    given: dict[str, Mapping[str, Any]] = {}

    def noted(start: Any, parties: int, keys: Mapping[str, Any], **_: Any) -> Run:
        given[keys["strategy"] + keys.get("privacy", "")] = keys
        configured(keys)
        return Run(tmp_path)

    monkeypatch.setattr("vfl_flower.tools.compare.repeated", noted)
    monkeypatch.setattr("vfl_flower.tools.compare._write", lambda *_: None)
    common = {**COMMON, "embedding-noise": 1.0}
    runs = [{"strategy": "vafl", "privacy": each} for each in ("perturbed-embedding", "none")]
    compare(2, {**common, "out": str(tmp_path / "out")}, runs, 0.9)
    assert given["vaflperturbed-embedding"]["embedding-noise"] == 1.0
    assert len(given) == 5 and sum("embedding-noise" in keys for keys in given.values()) == 1
    with pytest.raises(ConfigError, match="adds no noise"):  # the control
        configured({**common, **runs[1]})


def test_a_failing_run_leaves_the_results_of_those_before(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [{"strategy": "vafl"}, {"strategy": "cascaded", "party-lr": 1e6}]
    with pytest.raises(Exception, match="Lower the learning rates"):
        compare(3, {**COMMON, "out": str(tmp_path / "out")}, runs, 0.9)
    assert Run(tmp_path / "out" / "vafl").summary["test_accuracy"] > 0
    assert table(tmp_path / "out").splitlines()[1].startswith("vafl ")


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"privacy": "perturbed-embedding"}, BASELINES),
        ({"bottom-model": "scorecard", "mu": 0.5}, ["frozen"]),
        ({"privacy": "scalar", "epsilon": 5.0, "delta": 1e-3}, BASELINES),
        ({"perturbs": "all", "quorum": 2}, BASELINES),
    ],
)
def test_baselines_stand_beside_noise_and_black_boxes_as_far_as_they_can(
    keys: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    keys = {**COMMON, **keys, "epochs": 1, "out": str(tmp_path / "out")}
    folder = compare(2, keys, [{"strategy": "cascaded"}], 0.9)
    assert list(json.loads((folder / "compare.json").read_text())) == ["cascaded", *names]


@pytest.mark.nightly
def test_baselines_learn_from_the_noisy_labels_of_the_others_and_have_no_codec(
    tmp_path: Path,
) -> None:
    def configs(name: str, runs: list[dict[str, Any]], **keys: Any) -> dict[str, dict[str, Any]]:
        folder = compare(2, {**COMMON, **keys, "out": str(tmp_path / name)}, runs, 0.9)
        figures = json.loads((folder / "compare.json").read_text())
        return {name: each["config"] for name, each in figures.items()}

    noisy: dict[str, Any] = {"privacy": "labels", "epochs": 1}
    found = configs("a", [{"strategy": "vafl"}, {"strategy": "frozen"}], **noisy, epsilon=3.0)
    assert list(found) == ["vafl", *BASELINES]
    for each in found.values():
        assert (each["privacy"], each["epsilon"]) == ("labels", 3.0)
    # If the runs' epsilons differ, a baseline has no epsilon.
    found = configs("b", [{"strategy": "vafl", "epsilon": 3.0}], **noisy)
    assert [each["privacy"] for each in found.values()] == ["labels", *["none"] * 3]
    runs: list[dict[str, Any]] = [{"strategy": "split-nn"}]
    runs.append({"strategy": "frozen", "server-lr": 0.1})
    found = configs("c", runs, codec="top-k", labels="shared")
    codecs = {name: each["codec"] for name, each in found.items()}
    assert codecs == {"split-nn": "top-k", **dict.fromkeys(BASELINES, "identity")}


@pytest.mark.nightly
def test_below_the_table_stands_what_each_epsilon_is_of(tmp_path: Path) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 1, "window": 8, "out": str(tmp_path / "out")}
    runs: list[dict[str, Any]] = [
        {"strategy": "dpzv", "title": "one"},
        {"strategy": "dpzv", "epsilon": 2.0, "delta": 1e-6, "title": "other"},
        {"strategy": "vafl", "privacy": "perturbed-embedding"},
    ]
    folder = compare(2, keys, runs, 0.9)
    figures = json.loads((folder / "compare.json").read_text())
    head, *lines = table(folder).splitlines()
    columns = {line.split()[0]: line.split() for line in lines[:6]}
    assert head.split()[-3:] == ["seconds", "epsilon", "delta"]
    assert columns["one"][-2:] == ["1", "1e-05"] and columns["other"][-2:] == ["2", "1e-06"]
    assert columns["centralised"][-2:] == ["–", "–"]
    of_labels, of_features, in_all, without = lines[6:10]
    squares = sum(get_sigma_gaussian(each, delta) ** -2 for each, delta in ((1, 1e-5), (2, 1e-6)))
    both = get_epsilon_gaussian(squares**-0.5, 1e-6)  # of one Gaussian mechanism
    assert f": 2 runs together: epsilon {both:.3g} at delta 1e-06; it protects la" in in_all
    for name in ("one", "other"):
        assert figures[name]["epsilon_of_all_runs"] == pytest.approx(both)
        assert figures[name]["delta_of_all_runs"] == 1e-6
    assert "epsilon_of_all_runs" not in figures["vafl"]  # the only one of features
    assert without == "No epsilon holds for frozen, local-only, centralised."
    assert of_labels.startswith("one, other: epsilon protects: labels of the training rows. ")
    assert of_features.startswith("vafl: epsilon protects: features of one record ")
    for line, name in ((of_labels, "one"), (of_features, "vafl")):
        for key in ("epsilon_protects", "epsilon_relation", "epsilon_adversary"):
            assert figures[name][key] in line


@pytest.mark.nightly
def test_titles_name_runs_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    runs = ["keep = 0.5: ef-vfl keep=0.5", "both ways: vafl expert='downlink-codec=qsgd'"]
    keys = "dataset='breast-cancer' epochs=2 window=8 expert='eval-every=0.5'"
    assert main(["compare", *runs, "-c", keys, "--parties", "2", "--out", str(out)]) == 0
    names = list(json.loads((out / "compare.json").read_text()))
    assert names == ["keep = 0.5", "both ways", *BASELINES]
    assert Run(out / "keep-=-0.5").summary["config"]["keep"] == 0.5
    both, alone = (Run(out / name).summary["bytes_down"] for name in ("both-ways", "local-only"))
    assert both < alone
    assert capsys.readouterr().out.splitlines()[1].startswith("keep = 0.5 ")
