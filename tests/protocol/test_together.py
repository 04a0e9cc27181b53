"""Several runs on the same people: the epsilon that is printed is that of all of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

from tests.results.test_report import Page
from tests.tools.test_sweep import Crew, KilledError, swept
from vfl_attacks.canary import _bound
from vfl_flower.launch.engines import Finished, run_local
from vfl_flower.protocol.privacy.together import Claim, in_words, of_several, together
from vfl_flower.results.figures import headline
from vfl_flower.results.report import report
from vfl_flower.tools import sweep
from vfl_flower.tools.seeds import mean, repeated
from vfl_flower.tools.sweep import table
from vfl_flower.tools.sweep.study import Study
from vfl_flower.tools.sweep.trial import run_trial

DELTA = 1e-5
QUICK: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 1, "window": 8}
LABELS = "labels of the training rows"


def composed(*epsilons: float, delta: float = DELTA) -> float:
    """The epsilon of Gaussian mechanisms that have these, by the sum of their squared mu."""
    squares = sum(float(get_sigma_gaussian(each, delta)) ** -2 for each in epsilons)
    return float(get_epsilon_gaussian(squares**-0.5, delta))


def claim(epsilon: float, protects: str = LABELS, delta: float = DELTA) -> Claim:
    mu = 1 / float(get_sigma_gaussian(epsilon, delta))
    return Claim(protects, epsilon, delta, mu)


def drawn(epsilon: float) -> Claim:
    return Claim(LABELS, epsilon, 0.0, drawn=True)


def test_three_runs_show_more_than_one_claims_and_no_more_than_they_claim_together() -> None:
    # A changed label moves a scalar by 2 C / U, here from -1 to 1, in each of the runs.
    trials, generator = 1_000_000, np.random.default_rng(0)
    deviation = 2 * float(get_sigma_gaussian(1.0, DELTA))
    shown = {}
    for runs in (1, 3):
        sent = [row + deviation * generator.standard_normal((runs, trials)) for row in (1.0, -1.0)]
        threshold = 3 * deviation * runs**0.5
        hits, alarms = (int((each.sum(0) > threshold).sum()) for each in sent)
        shown[runs] = _bound(hits, alarms, trials, DELTA, 0.9999)
    assert 0.5 < shown[1] < 1.0
    assert 1.0 < shown[3] < composed(1.0, 1.0, 1.0)


def test_gaussian_runs_compose_to_one_gaussian_mechanism() -> None:
    (of_three,) = together([claim(1.0)] * 3)
    assert (
        of_three.epsilon == pytest.approx(composed(1.0, 1.0, 1.0)) == pytest.approx(1.83, abs=0.01)
    )
    assert of_three.epsilon < 3 and of_three.runs == 3
    (of_five,) = together([of_three, claim(2.0), claim(0.5)])
    assert of_five.epsilon == pytest.approx(composed(1.0, 1.0, 1.0, 2.0, 0.5)) and of_five.runs == 5
    assert together([Claim(LABELS, 0.0, DELTA, 0.0)])[0].epsilon == 0.0  # nothing was released


def test_labels_are_drawn_once_and_other_noise_on_them_adds_up() -> None:
    assert together([drawn(1.0), drawn(1.5), drawn(1.5)])[0].epsilon == 1.5
    mixed, of_features = together([drawn(1.5), claim(1.0), claim(1.0), claim(2.0, "features")])
    assert mixed.epsilon == pytest.approx(1.5 + composed(1.0, 1.0)) and mixed.delta == DELTA
    assert of_features.epsilon == pytest.approx(2.0) and of_features.runs == 1


def test_releases_of_another_kind_add_up() -> None:
    # As summaries of earlier versions, which have no mu.
    (found,) = together([Claim(LABELS, 1.0, DELTA), Claim(LABELS, 2.0, DELTA), claim(1.0)])
    assert found.epsilon == pytest.approx(4.0) and found.delta == pytest.approx(3 * DELTA)
    assert found.mu is None


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"epsilon": None, "delta": None},
        {"epsilon": "1", "delta": DELTA},
        {"epsilon": 1.0, "delta": -1.0},
        {"epsilon": float("nan"), "delta": DELTA},
        {"epsilon": True, "delta": DELTA},
    ],
)
def test_a_summary_that_claims_nothing_is_in_no_sum(summary: dict[str, Any]) -> None:
    assert Claim.of(summary) is None
    assert of_several([summary, {"epsilon": 1.0, "delta": DELTA, "gaussian_mu": 0.1}]) == []


@pytest.mark.nightly
def test_seeds_print_the_epsilon_of_all_runs(tmp_path: Path) -> None:
    keys = {**QUICK, "strategy": "dpzv", "delta": DELTA}
    runs = repeated(run_local, 2, {**keys, "out": str(tmp_path / "out")}, (), 3)
    each = [Finished(runs.folder / f"seed-{seed}").summary for seed in range(3)]
    of_all = composed(*[one["epsilon"] for one in each])
    assert mean(each)["epsilon"] == pytest.approx(1.0)  # printed by earlier versions
    assert runs.summary["epsilon"] == pytest.approx(of_all) == pytest.approx(1.83, abs=0.01)
    assert "epsilon" not in runs.summary.get("deviation", {})
    assert "epsilon 1.83 at delta 1e-05 of all 3 runs" in headline(runs.summary)
    page = Page(report([runs.folder]))
    (spent,) = page.table("run", "epsilon").values()
    assert spent["epsilon"].startswith("1.83")
    other = tmp_path / "other"
    run_local(2, {**keys, "epsilon": 2.0, "out": str(other)})
    of_four = composed(1.0, 1.0, 1.0, 2.0)
    words = Page(report([runs.folder, other])).text
    assert f"4 runs together: epsilon {of_four:.3g} at delta 1e-05" in words


def test_seeds_of_noisy_labels_add_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    keys = {**QUICK, "privacy": "labels", "epsilon": 1.0}
    runs = repeated(run_local, 2, {**keys, "out": str(tmp_path / "out")}, (), 2)
    assert runs.summary["epsilon"] == 1.0 and "gaussian_mu" not in runs.summary


class Spending(Crew):
    def outcome(self, *arguments: Any) -> dict[str, Any]:
        return {**super().outcome(*arguments), "claims": [claim(1.0).as_json()] * 2}


def test_a_sweep_prints_the_epsilon_of_all_trials_those_stopped_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "importance", lambda _: {})

    found = swept(tmp_path / "out", 12, Spending())
    ended = {each["state"] for each in found["trials"]}
    assert "stopped" in ended or "failed" in ended
    (of_all,) = found["together"]
    assert of_all["runs"] == 24
    assert of_all["epsilon"] == pytest.approx(composed(*[1.0] * 24))
    assert f"24 runs together: epsilon {of_all['epsilon']:.3g}" in table(tmp_path / "out")
    assert "24 runs together: epsilon" in (tmp_path / "out" / "report.html").read_text()
    assert not swept(tmp_path / "other", 2)["together"]  # where nothing is claimed


def test_a_trial_cut_short_counts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "write_report", lambda _: None)
    monkeypatch.setattr(Study, "importance", lambda _: {})

    with pytest.raises(KilledError):
        swept(tmp_path / "out", 3, Spending(dies_after=4))  # in the first trial
    (of_all,) = swept(tmp_path / "out", 3, Spending())["together"]
    assert of_all["runs"] == 2 * 4


def test_a_trial_tells_what_its_runs_have_spent_also_if_it_is_stopped(tmp_path: Path) -> None:
    noise = {"privacy": "perturbed-embedding", "embedding-noise": 50.0}
    keys = {**QUICK, "strategy": "vafl", "epochs": 2, "validation-fraction": 0.2, **noise}
    about: dict[str, Any] = {"parties": 2, "node_configs": [], "seeds": 1}
    stopped, finished = (
        run_trial(about, keys, tmp_path / "trial", lambda *_, stop=stop: stop)
        for stop in (True, False)
    )
    assert "figure" not in stopped and "figure" in finished
    claims = [Claim(**each["claims"][0]) for each in (stopped, finished)]
    summary = json.loads((tmp_path / "trial" / "summary.json").read_text())
    assert claims[1] == Claim.of(summary) and claims[1].epsilon == summary["epsilon"]
    assert 0 < claims[0].epsilon < claims[1].epsilon
    assert "2 runs together" in in_words(together(claims)[0])
