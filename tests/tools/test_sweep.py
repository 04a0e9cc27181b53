"""`vfl sweep`: what is searched, how trials are chosen, stopped and gone on with, what is left."""

import json
import math
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.conftest import ALL_ROWS
from tests.fleet import until
from tests.organisations import cut, small
from tests.results.test_report import HOSTILE, Page
from vfl_flower.alignment import at_label_holder, reuse
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import KEYS, opened, pairs
from vfl_flower.label_holder.earlier_run import configured
from vfl_flower.results.figures import chosen_by
from vfl_flower.results.report import report
from vfl_flower.tools import sweep as sweeping
from vfl_flower.tools.cli import main
from vfl_flower.tools.sweep import study, sweep, trial
from vfl_flower.tools.sweep.study import Study, of_trial, search_of
from vfl_flower.tools.sweep.trial import run_trial, run_trials

Report = Callable[[float, int], bool]
BASE: dict[str, Any] = {"strategy": "split-nn", "dataset": "breast-cancer", "epochs": 8}
SEARCH = ["party-lr=1e-4..1:log window=1|8|64"]


# --- what is searched ---------------------------------------------------------------------------


def test_ranges_and_choices_have_the_key_s_type() -> None:
    texts = ["party-lr=1e-4..1:log window=1|8|64", "bottom-hidden=8..64 bottom-bias=true|false"]
    found = search_of([*texts, "optimizer=sgd|adam mu='1e-3'..0.1"], {})
    assert list(found.items()) == [
        ("party-lr", FloatDistribution(1e-4, 1.0, log=True)),
        ("window", CategoricalDistribution((1, 8, 64))),
        ("bottom-hidden", IntDistribution(8, 64)),
        ("bottom-bias", CategoricalDistribution((True, False))),
        ("optimizer", CategoricalDistribution(("sgd", "adam"))),
        ("mu", FloatDistribution(1e-3, 0.1)),
    ]
    assert study.NOT_SEARCHED - {"validation-fraction"} <= KEYS.keys()


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line that refuses a sweep of these arguments before anything starts."""

    def start(*arguments: str) -> str:
        out = tmp_path / "out"
        assert main(["sweep", *arguments, "--out", str(out)]) == 1 and not out.exists()
        sentence = capsys.readouterr().err
        assert sentence.count("\n") == 1
        return sentence

    return start


@pytest.mark.parametrize(
    ("search", "cause"),
    [
        ("", "names nothing"),
        ("party-lr", "'party-lr' cannot be read"),
        ("party-lr=", "cannot be read"),
        ("party-rate=0..1", "no option 'party-rate'"),
        ("party-lr=0.1..1 party-lr=1|2", "names party-lr twice"),
        ("server-lr=0.1..1", "server-lr is in -c and in --search"),
        ("party-lr=1..0.1", "write the lower number first"),
        ("party-lr=0..1:log", "let it begin above 0"),
        ("party-lr=a..b", "must be a number"),
        ("window=1.5..8", "must be a whole number"),
        ("window=8", "is one value"),
        ("window=1|8|1", "names a value twice"),
        ("window=0..8", "window = 0 must be at least 1"),
        ("party-lr=-1|1", "party-lr = -1.0 must be at least 0"),
        ("optimizer=sgd|none", "optimizer = 'none' is not known"),
        ("bottom-bias=yes|no", "must be true or false"),
        ("optimizer='sgd|adam", "left open"),
        *((f"{key}=1|2", "cannot be searched") for key in ("seed", "out", "test-fraction")),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    search: str, cause: str, refused: Callable[..., str]
) -> None:
    keys = ["-c", "dataset='breast-cancer' server-lr=0.1"]
    assert cause in refused("split-nn", "--search", search, *keys)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["nonsense"], "strategy = 'nonsense' is not known"),
        (["vafl", "-c", "strategy='dpzv'"], "leave strategy out of -c"),
        (["vafl", "-c", "dataset='npz:/none'"], "/none"),
        (["vafl", "-c", "task='predict'"], "task"),
        (["cascaded", "-c", "codec='nonsense' expert='bits=4'"], "codec = 'nonsense' is not known"),
        (["vafl", "-c", "expert='embedding-noise=1.0'"], "adds no noise with privacy = 'none'"),
        (["dpzv"], "privacy = 'scalar' has no validation rows"),
        (["vafl", "-c", "validation-fraction=0.0"], "Set validation-fraction"),
    ],
)
def test_what_no_trial_could_do_is_one_sentence_too(
    arguments: list[str], cause: str, refused: Callable[..., str]
) -> None:
    assert cause in refused(*arguments, "--search", SEARCH[0])


def test_noise_that_trials_share_is_not_for_trials_without_privacy() -> None:
    shared = {**BASE, "strategy": "vafl", "embedding-noise": 1.0}
    for privacy, noise in (("none", None), ("perturbed-embedding", 1.0)):
        keys = of_trial(shared, {"privacy": privacy})
        assert keys.get("embedding-noise") == noise and configured(keys)
    with pytest.raises(ConfigError, match="adds no noise"):  # the control
        configured({**shared, "privacy": "none"})


# --- the study, by trials that are made up ------------------------------------------------------


class KilledError(Exception):
    """The process that sweeps is gone."""


class Crew:
    """Trials whose figures follow from their keys: the nearer party-lr to 0.1, the better.

    One that is far from it has a curve that is the lower.
    """

    def __init__(self, number: int = 1, dies_after: float = math.inf) -> None:
        self.number = number
        self.ran: list[dict[str, Any]] = []  # keys of trials that came to an end
        self._left = dies_after

    def side_by_side(self, study: Study, job: Mapping[str, Any], jobs: int, log: Any) -> None:
        """Run trials in threads of this process, in place of processes."""
        failures = list[BaseException]()

        def work() -> None:
            try:
                run_trials(json.loads(json.dumps(job)))
            except BaseException as error:
                failures.append(error)

        with patch.object(trial, "run_trial", self.run_trial):
            threads = [Thread(target=work) for _ in range(self.number)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        if failures:
            raise failures[0]

    def run_trial(self, _: Any, keys: dict[str, Any], to: Path, report: Report) -> dict[str, Any]:
        outcome = self.outcome(keys, report)
        if "figure" in outcome:
            to.mkdir(parents=True, exist_ok=True)
            (to / "summary.json").write_text(json.dumps(keys))
            (to / "history.jsonl").touch()
        self.ran.append(keys)
        self._live()
        return outcome

    def outcome(self, keys: Mapping[str, Any], report: Report) -> dict[str, Any]:
        self._live()
        far = abs(math.log10(keys["party-lr"]) + 1)
        if keys["party-lr"] > 0.7:
            return {"failure": "It grew beyond all numbers."}
        for evaluation in range(1, 9):
            if report((1 - 0.2 * far) * evaluation / 8, evaluation):
                return {}
            self._live()
        judged = {"metric": "validation_accuracy", "figure": 1 - 0.2 * far, "deviation": None}
        return {**judged, "seconds": 1.0}

    def _live(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise KilledError


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, which takes most of the time."""
    monkeypatch.setattr(sweeping, "write_report", lambda _: None)
    monkeypatch.setattr(Study, "importance", lambda _: {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of thirty trials."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    swept(out, 30)
    return out


def in_(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())


def swept(out: Path, trials: int = 20, crew: Crew | None = None, **more: Any) -> dict[str, Any]:
    """A sweep of made-up trials: what is in sweep.json."""
    with patch.object(sweeping, "_side_by_side", (crew or Crew()).side_by_side):
        return in_(sweep(2, {**BASE, "out": str(out)}, SEARCH, trials, **more))


def test_the_best_is_found_and_what_falls_behind_is_stopped(folder: Path) -> None:
    found = in_(folder)
    trials = found["trials"]
    assert [each["number"] for each in trials] == list(range(30))
    states = {each["state"] for each in trials}
    assert states == {"finished", "stopped", "failed"}
    best = sweeping.best(found)
    assert best["figure"] == max(e["figure"] for e in trials if e["state"] == "finished")
    assert 0.05 < best["keys"]["party-lr"] < 0.2
    far = [abs(math.log10(each["keys"]["party-lr"]) + 1) for each in trials]
    assert fmean(far[15:]) < fmean(far[:10])  # it learns where to search
    assert next(iter(found["importance"])) == "party-lr" and found["importance"]["party-lr"] > 0.5
    for each in trials:  # only finished trials leave files, and these are whole
        own = folder / "trials" / str(each["number"])
        assert own.exists() == (each["state"] == "finished")
        if own.exists():
            assert {path.name for path in own.iterdir()} == {"summary.json", "history.jsonl"}
            assert each["keys"].items() <= json.loads((own / "summary.json").read_text()).items()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("crew", "after"), [(1, 0), (1, 9), (1, 40), (1, 75), (3, 3), (3, 20), (3, 50)]
)
def test_after_a_kill_no_trial_is_lost_and_none_comes_twice(
    tmp_path: Path, folder: Path, crew: int, after: int
) -> None:
    first, second = Crew(crew, dies_after=after), Crew(crew)
    with pytest.raises(KilledError):
        swept(tmp_path / "out", 12, first)
    found = swept(tmp_path / "out", 12, second)["trials"]
    assert [each["number"] for each in found] == list(range(12))
    assert len({json.dumps(each["keys"]) for each in found}) == 12
    assert crew > 1 or found == in_(folder)["trials"][:12]  # as if there had been no kill
    # Trials that ran at the kill ran again.
    assert 12 <= len(first.ran) + len(second.ran) <= 12 + crew


@pytest.mark.usefixtures("plain")
def test_a_kill_while_the_journal_is_written_costs_nothing(tmp_path: Path, folder: Path) -> None:
    whole = in_(folder)["trials"][:8]
    with pytest.raises(KilledError):
        swept(tmp_path / "out", 8, Crew(dies_after=30))
    journal = tmp_path / "out" / "study.journal"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines) + last[: len(last) // 2])
    assert swept(tmp_path / "out", 8)["trials"] == whole
    assert swept(tmp_path / "out", 8)["trials"] == whole


@pytest.mark.usefixtures("plain")
def test_a_sweep_runs_once_and_alone_and_more_trials_go_on(tmp_path: Path) -> None:
    class Alone(Crew):
        def side_by_side(self, *arguments: Any) -> None:
            with pytest.raises(ConfigError, match="Another run uses"):
                swept(tmp_path / "out", 3)
            super().side_by_side(*arguments)

    class Failing(Crew):
        def outcome(self, *arguments: Any) -> dict[str, Any]:
            return {"failure": "It grew."}

    found: list[list[Any]] = []
    for trials, ran in ((6, 6), (6, 0), (9, 3)):
        crew = Alone()
        found.append(swept(tmp_path / "out", trials, crew)["trials"])
        assert len(crew.ran) == ran
    assert found[0] == found[1] == found[2][:6]
    with pytest.raises(ConfigError, match="a sweep whose seeds differs: name another folder"):
        swept(tmp_path / "out", 9, seeds=2)
    with pytest.raises(VflError, match=r"come to its end\. The last one: It grew"):
        swept(tmp_path / "failing", 3, Failing())


@pytest.mark.usefixtures("plain")
def test_without_out_the_same_sweep_finds_its_folder(elsewhere: None, tmp_path: Path) -> None:
    with patch.object(sweeping, "_side_by_side", Crew().side_by_side):
        folders = [sweep(2, {**BASE, "seed": n}, SEARCH, 2) for n in (0, 0, 1)]
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].parent == tmp_path / "runs" and "split-nn" in folders[0].name
    assert set((tmp_path / "runs").iterdir()) == set(folders)  # a check leaves none


def test_without_optuna_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(VflError, match=r"pip install 'vfl-flower\[sweep\]'"):
        runpy.run_path(study.__file__)


# --- what is left -------------------------------------------------------------------------------


def test_any_configuration_can_be_pasted() -> None:
    keys = {"label": "it's $HOME", "dataset": 'csv:a "b".csv', "bottom-bias": False, "mu": 1e-05}
    node = {"file": "party's file.csv", "id": "x"}
    trial = {"number": 0, "state": "finished", "figure": 1.0, "keys": {"window": 8}}
    about = {"keys": keys, "node_configs": [node, node], "parties": 2, "seeds": 3}
    words = shlex.split(sweeping.line({**about, "trials": [trial]}))
    assert opened(pairs([words[3]], "-c")) == {**keys, "window": 8}
    assert words[4::2] == ["--node-config", "--node-config", "--seeds"]
    assert pairs([words[5]], "--node-config") == node and words[-1] == "3"


def test_table_and_page_show_trials_importance_and_the_line_that_runs_the_best(
    folder: Path,
) -> None:
    found = in_(folder)
    best = sweeping.best(found)
    head, first, *lines = sweeping.table(folder).splitlines()
    assert head.split()[:3] == ["trial", "party-lr", "window"]
    assert first.split()[0] == str(best["number"])
    assert any(line.startswith("30 trials: ") for line in lines)
    assert any(line.startswith("Importance: party-lr 0.") for line in lines)
    words = shlex.split(lines[-1])
    assert words[:3] == ["vfl", "run", "-c"] and words[-2:] == ["--parties", "2"]
    assert pairs([words[3]], "-c") == {**BASE, **best["keys"]}
    assert (folder / "report.html").read_text() == report([folder])
    page = Page(report([folder]))
    assert found["line"] in page.text and "30 trials: " in page.text
    shares = page.table("option", "importance")
    assert {key: row["importance"] for key, row in shares.items()} == {
        key: f"{share:.2f}" for key, share in found["importance"].items()
    }
    assert next(iter(page.table("trial", "party-lr"))) == str(best["number"])
    assert page.points("validation accuracy by trial")


def test_nothing_from_a_sweep_s_file_becomes_part_of_the_page_s_code(tmp_path: Path) -> None:
    trial = dict.fromkeys(("number", "state", "figure", "failure"), HOSTILE)
    hostile = dict.fromkeys(("metric", "line"), HOSTILE)
    other = {"keys": {HOSTILE: HOSTILE}, "number": 1, "figure": 0.5, "state": "finished"}
    more: dict[str, Any] = {"keys": {"strategy": HOSTILE}, "importance": {HOSTILE: HOSTILE}}
    for trials in ([], [HOSTILE], [trial, other]):
        (tmp_path / "sweep.json").write_text(json.dumps({**hostile, **more, "trials": trials}))
        page = Page(report([tmp_path]))
        assert not page.all("script") and page.text.count("alert('1')") >= 3


# --- trials -------------------------------------------------------------------------------------


def tried(tmp_path: Path, report: Report, keys: Any = (), seeds: int = 1) -> dict[str, Any]:
    """Run one real trial."""
    about: dict[str, Any] = {"parties": 2, "node_configs": [], "seeds": seeds}
    own = {**BASE, "epochs": 3, "window": 8, **dict(keys)}
    return run_trial(about, own, tmp_path / "trials" / "7", report)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trials make their folders."""
    place = tmp_path / "places"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_trial_tells_of_evaluations_and_leaves_its_files(tmp_path: Path, places: Path) -> None:
    told: list[tuple[int, float]] = []
    outcome = tried(tmp_path, lambda figure, at: bool(told.append((at, figure))))  # type: ignore[func-returns-value]
    own = tmp_path / "trials" / "7"
    history = [json.loads(line) for line in (own / "history.jsonl").read_text().splitlines()]
    summary = json.loads((own / "summary.json").read_text())
    assert told == [(n, entry[chosen_by(entry)]) for n, entry in enumerate(history, 1)]
    assert len(told) == 3 and outcome["metric"].startswith("validation_")
    assert summary["config"]["out"] == str(own) and len(list(own.iterdir())) == 2
    assert not list(places.glob("vfl-sweep-*"))


def test_a_trial_that_is_stopped_learns_no_more_and_leaves_nothing(
    tmp_path: Path, places: Path
) -> None:
    told: list[int] = []

    def report(figure: float, evaluation: int) -> bool:
        told.append(evaluation)
        assert list(places.glob("vfl-sweep-*"))
        return evaluation == 2

    assert tried(tmp_path, report, seeds=2) == {}
    assert told == [1, 2] and not list(places.glob("vfl-sweep-*"))
    assert not (tmp_path / "trials").exists()


@pytest.mark.nightly
def test_by_several_seeds_the_mean_counts_and_the_first_is_watched(tmp_path: Path) -> None:
    told: list[int] = []
    outcome = tried(tmp_path, lambda _, at: bool(told.append(at)), seeds=3)  # type: ignore[func-returns-value]
    assert told == [1, 2, 3]

    def last(folder: Path) -> Any:
        return json.loads((folder / "history.jsonl").read_text().splitlines()[-1])

    own = tmp_path / "trials" / "7"
    mean = fmean(last(own / f"seed-{seed}")["validation_accuracy"] for seed in range(3))
    assert last(own)["validation_accuracy"] == pytest.approx(mean)
    assert outcome["metric"] == chosen_by(last(own))


def test_auc_chooses_before_accuracy_and_that_before_r2() -> None:
    figures: dict[str, Any] = {"test_auc": 1.0}
    for key in ("r2", "accuracy", "auc"):
        figures[f"validation_{key}"] = 0.9
        others = dict.fromkeys(("validation_auc", "validation_accuracy"))
        assert chosen_by({**others, **figures}) == f"validation_{key}"


def test_a_trial_that_fails_or_has_no_validation_rows_says_why(
    tmp_path: Path, places: Path
) -> None:
    outcome = tried(tmp_path, lambda *_: False, {"party-lr": 1e9, "server-lr": 1e9})
    assert "Lower the learning rates" in outcome["failure"]
    with pytest.raises(VflError, match="Set validation-fraction"):
        tried(tmp_path, lambda *_: False, ALL_ROWS)
    assert not list(places.glob("vfl-sweep-*"))


@pytest.mark.nightly
@pytest.mark.usefixtures("plain")
def test_files_are_aligned_once_and_before_all_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    organisations = cut(tmp_path / "files", small())
    times: list[str] = []
    before = at_label_holder.align

    def align(*words: Any, **named: Any) -> Any:
        times.append("aligned")
        return before(*words, **named)

    def counted(*words: Any) -> Any:
        times.append("trial")
        return run_trial(*words)

    monkeypatch.setattr(reuse, "align", align)
    monkeypatch.setattr(trial, "run_trial", counted)
    monkeypatch.setattr(sweeping, "_side_by_side", lambda _, job, *__: run_trials(job))
    keys = {"strategy": "split-nn", "epochs": 1, "validation-fraction": 0.2}
    keys |= {**organisations.keys, "out": str(tmp_path / "out")}
    nodes = organisations.node_configs
    found = in_(sweep(2, keys, SEARCH, 3, node_configs=nodes))
    assert [each["state"] for each in found["trials"]] == ["finished"] * 3
    assert times == ["aligned", "trial", "trial", "trial"]
    words = shlex.split(found["line"])
    assert [pairs([each], "--node-config") for each in words[5::2]] == nodes


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_trials_run_side_by_side_in_processes(tmp_path: Path) -> None:
    keys = {**BASE, "epochs": 4, "out": str(tmp_path / "out")}
    before = signal.getsignal(signal.SIGTERM)
    folder = sweep(2, keys, SEARCH, 8, seeds=2, jobs=2)
    found = in_(folder)
    assert [each["number"] for each in found["trials"]] == list(range(8))
    for each in found["trials"]:
        own = folder / "trials" / str(each["number"]) / "seed-1"
        assert own.exists() == (each["state"] == "finished")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_was_ended_goes_on_where_it_was(tmp_path: Path, end: int) -> None:
    out, place = tmp_path / "out", tmp_path / "places"
    place.mkdir()
    keys = sweeping.pasted({k: v for k, v in {**BASE, "epochs": 4}.items() if k != "strategy"})
    command = [sys.executable, "-m", "vfl_flower.tools.cli", "sweep", "split-nn", "-c", keys]
    command += ["--search", SEARCH[0], "--trials", "10", "--jobs", "2", "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(place)}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: len(list(out.glob("trials/*"))) >= 2)
    first.send_signal(end)
    _, said = first.communicate(timeout=60)
    assert "Traceback" not in said
    if end != signal.SIGKILL:
        assert first.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[end]  # type: ignore[index]
    until(lambda: not list(place.glob("vfl-sweep-*")))  # workers end with who swept
    told = (out / "study.journal").read_bytes()
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert (out / "study.journal").read_bytes().startswith(told[: told.rfind(b"\n") + 1])
    found = json.loads((out / "sweep.json").read_text())
    assert [each["number"] for each in found["trials"]] == list(range(10))
    assert len({json.dumps(each["keys"]) for each in found["trials"]}) == 10


@pytest.mark.nightly
def test_a_script_without_a_main_guard_can_sweep(tmp_path: Path) -> None:
    script, keys = tmp_path / "script.py", {**BASE, "epochs": 1, "out": str(tmp_path / "out")}
    script.write_text(
        f"from vfl_flower.tools.sweep import sweep\nsweep(2, {keys!r}, {SEARCH!r}, 2, jobs=1)\n"
    )
    subprocess.run([sys.executable, str(script)], check=True)
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]) == 2


@pytest.mark.nightly
def test_a_process_that_ends_by_itself_or_cannot_be_judged_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where it leaves the folder of its trial
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    keys = {**BASE, "observer": f"{tmp_path / 'ends.py'}:Any", "out": str(tmp_path / "out")}
    with pytest.raises(VflError, match=r"has ended by itself.*workers\.log, lower --jobs"):
        sweep(2, keys, SEARCH, 3, jobs=1)
    monkeypatch.setattr(sweeping, "_check_ranked", lambda _: None)  # as with files
    keys = {**BASE, **ALL_ROWS, "out": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="test rows must not choose"):
        sweep(2, keys, SEARCH, 30, jobs=1)
