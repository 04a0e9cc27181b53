"""`vfl sweep`: what is searched, how trials are chosen, stopped and gone on with, what is left."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from tests.conftest import ALL_ROWS
from tests.organisations import cut, small
from tests.test_report import HOSTILE, Page
from vfl_flower.alignment import at_label_holder, reuse
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import KEYS, opened, pairs
from vfl_flower.label_holder.earlier_run import configured
from vfl_flower.label_holder.figures import chosen_by
from vfl_flower.tools.cli import main
from vfl_flower.tools.report import report
from vfl_flower.tools.sweep import results, sweep
from vfl_flower.tools.sweep.search import Choice, Range, of_trial, search_of
from vfl_flower.tools.sweep.study import Study
from vfl_flower.tools.sweep.trial import Event, Stepper, run_trial
from vfl_flower.tools.sweep.workers import Actors, Processes, Workers

BASE: dict[str, Any] = {"strategy": "split-nn", "dataset": "breast-cancer", "epochs": 8}
SEARCH = ["party-lr=1e-4..1:log window=1|8|64"]


# --- what is searched ---------------------------------------------------------------------------


def test_ranges_and_choices_have_the_key_s_type() -> None:
    texts = ["party-lr=1e-4..1:log window=1|8|64", "bottom-hidden=8..64 bottom-bias=true|false"]
    assert search_of([*texts, "optimizer=sgd|adam mu='1e-3'..0.1"], {}) == [
        Range("party-lr", 1e-4, 1.0, True),
        Choice("window", (1, 8, 64)),
        Range("bottom-hidden", 8, 64, False),
        Choice("bottom-bias", (True, False)),
        Choice("optimizer", ("sgd", "adam")),
        Range("mu", 1e-3, 0.1, False),
    ]


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
    search: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    keys = ["-c", "dataset='breast-cancer' server-lr=0.1", "--out", str(out)]
    assert main(["sweep", "split-nn", "--search", search, *keys]) == 1
    sentence = capsys.readouterr().err
    assert cause in sentence and sentence.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["nonsense"], "strategy = 'nonsense' is not known"),
        (["vafl", "-c", "strategy='dpzv'"], "leave strategy out of -c"),
        (["vafl", "-c", "dataset='npz:/none'"], "/none"),
        (["vafl", "-c", "task='predict'"], "task"),
        (["vafl", "--engine", "supernodes"], "choose local or ray"),
        (["vafl", "--second", "time"], "--second = 'time' is not known"),
        (["vafl", "--second", "virtual-seconds"], "set delay"),
        (["cascaded", "-c", "codec='nonsense' expert='bits=4'"], "codec = 'nonsense' is not known"),
        (["vafl", "-c", "expert='embedding-noise=1.0'"], "adds no noise with privacy = 'none'"),
        (["dpzv"], "privacy = 'scalar' has no validation rows"),
        (["vafl", "-c", "validation-fraction=0.0"], "Set validation-fraction"),
    ],
)
def test_what_no_trial_could_do_is_one_sentence_too(
    arguments: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["sweep", *arguments, "--search", SEARCH[0], "--out", str(out)]) == 1
    sentence = capsys.readouterr().err
    assert cause in sentence and sentence.count("\n") == 1
    assert not out.exists()


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
        self._events: deque[tuple[int, Event]] = deque()
        self._jobs: dict[int, dict[str, Any]] = {}
        self._left = dies_after

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        if isinstance(message, dict):
            self._jobs[worker] = {**message, "evaluation": 1}
        elif message:
            self._end(worker, {"ended": "stopped"})
            return
        job = self._jobs[worker]
        keys, evaluation = job["keys"], job["evaluation"]
        far = abs(math.log10(keys["party-lr"]) + 1)
        if keys["party-lr"] > 0.7:
            self._end(worker, {"ended": "failed", "failure": "It grew beyond all numbers."})
        elif evaluation > 8:
            figure = 1 - 0.2 * far
            spent = 1e6 * keys["window"] * (1 + keys["party-lr"])
            judged = {"metric": "validation_accuracy", "figure": figure, "deviation": None}
            files = {"summary.json": json.dumps(keys), "history.jsonl": ""}
            event = {"ended": "finished", **judged, "seconds": 1.0, "second": spent}
            self._end(worker, {**event, "files": files})
        else:
            job["evaluation"] += 1
            figure = (1 - 0.2 * far) * evaluation / 8
            self._events.append((worker, {"evaluated": evaluation, "figure": figure}))

    def _end(self, worker: int, event: Event) -> None:
        self.ran.append(self._jobs[worker]["keys"])
        self._events.append((worker, event))

    def wait(self) -> Iterator[tuple[int, Event]]:
        self._left -= 1
        if self._left < 0:
            raise KilledError
        yield self._events.popleft()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, which takes most of the time."""
    for name in ("draw_shares", "draw_lines"):
        monkeypatch.setattr(results, name, lambda *_: None)
    monkeypatch.setattr(results, "write_report", lambda _: None)
    monkeypatch.setattr(Study, "importance", lambda _: {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of thirty trials."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    swept(out, 30)
    return out


def in_(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return found


def swept(out: Path, trials: int = 20, crew: Workers | None = None, **more: Any) -> dict[str, Any]:
    """A sweep of made-up trials: what is in sweep.json."""
    keys = {**BASE, "out": str(out)}
    workers: Callable[[Path], Workers] = lambda folder: crew or Crew()  # noqa: E731
    return in_(sweep(2, keys, SEARCH, trials, workers, **more))


def test_the_best_is_found_and_what_falls_behind_is_stopped(folder: Path) -> None:
    found = in_(folder)
    trials = found["trials"]
    assert [each["number"] for each in trials] == list(range(30))
    states = {each["state"] for each in trials}
    assert states == {"finished", "stopped", "failed"}
    best = results.best(found)
    assert best["figure"] == max(e["figure"] for e in trials if e["state"] == "finished")
    assert 0.05 < best["keys"]["party-lr"] < 0.2
    later = [abs(math.log10(e["keys"]["party-lr"]) + 1) for e in trials[15:]]
    first = [abs(math.log10(e["keys"]["party-lr"]) + 1) for e in trials[:10]]
    assert sum(later) / len(later) < sum(first) / len(first)  # it learns where to search
    assert next(iter(found["importance"])) == "party-lr" and found["importance"]["party-lr"] > 0.5


def test_only_finished_trials_leave_files_and_these_are_whole(folder: Path) -> None:
    for each in in_(folder)["trials"]:
        own = folder / "trials" / str(each["number"])
        assert own.exists() == (each["state"] == "finished")
        if own.exists():
            assert {path.name for path in own.iterdir()} == {"summary.json", "history.jsonl"}
            assert each["keys"].items() <= json.loads((own / "summary.json").read_text()).items()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("after", [0, 9, 40, 75])
def test_after_a_kill_it_goes_on_as_if_there_had_been_none(
    tmp_path: Path, folder: Path, after: int
) -> None:
    first, second = Crew(dies_after=after), Crew()
    with pytest.raises(KilledError):
        swept(tmp_path / "out", 12, first)
    assert swept(tmp_path / "out", 12, second)["trials"] == in_(folder)["trials"][:12]
    assert 12 <= len(first.ran) + len(second.ran) <= 13


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("after", [3, 20, 50])
def test_side_by_side_no_trial_is_lost_and_none_comes_twice(tmp_path: Path, after: int) -> None:
    first, second = Crew(3, dies_after=after), Crew(3)
    with pytest.raises(KilledError):
        swept(tmp_path / "out", 12, first)
    found = swept(tmp_path / "out", 12, second)
    assert [each["number"] for each in found["trials"]] == list(range(12))
    assert len({json.dumps(each["keys"]) for each in found["trials"]}) == 12
    assert 12 <= len(first.ran) + len(second.ran) <= 15  # trials that ran at the kill ran again


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
def test_a_sweep_that_is_complete_runs_nothing_and_more_trials_go_on(tmp_path: Path) -> None:
    first, again, more = (swept_by(tmp_path / "out", number) for number in (6, 6, 9))
    assert again == (first[0], 0) and more[0][:6] == first[0] and more[1] == 3


def swept_by(out: Path, trials: int) -> tuple[list[Any], int]:
    crew = Crew()
    return swept(out, trials, crew)["trials"], len(crew.ran)


@pytest.mark.usefixtures("plain")
def test_another_sweep_does_not_go_on_in_its_folder(tmp_path: Path) -> None:
    swept(tmp_path / "out", 3)
    with pytest.raises(ConfigError, match="a sweep whose seeds differs: name another folder"):
        swept(tmp_path / "out", 3, seeds=2)


@pytest.mark.usefixtures("plain")
def test_two_do_not_sweep_in_one_folder(tmp_path: Path) -> None:
    class Meanwhile(Crew):
        def __enter__(self) -> Self:
            with pytest.raises(ConfigError, match="Another run uses"):
                swept(tmp_path / "out", 3)
            return self

    swept(tmp_path / "out", 3, Meanwhile())


@pytest.mark.usefixtures("plain")
def test_without_out_the_same_sweep_finds_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [sweep(2, {**BASE, "seed": n}, SEARCH, 2, lambda _: Crew()) for n in (0, 0, 1)]
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].parent == tmp_path / "runs" and "split-nn" in folders[0].name


def test_a_second_objective_gives_a_pareto_front_and_stops_nothing(tmp_path: Path) -> None:
    found = swept(tmp_path / "out", 20, second="bytes")
    finished = [each for each in found["trials"] if each["state"] == "finished"]
    assert "stopped" not in {each["state"] for each in found["trials"]}
    for each in finished:
        beaten = any(
            other["figure"] >= each["figure"]
            and other["second"] <= each["second"]
            and (other["figure"], other["second"]) != (each["figure"], each["second"])
            for other in finished
        )
        assert (each["number"] in found["frontier"]) == (not beaten)
    assert len(found["frontier"]) > 1
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 5000
    page = Page(report([tmp_path / "out"]))
    front = page.points("validation accuracy against megabytes, up and down")
    assert max(map(len, front)) == len(found["frontier"])
    listed = page.table("trial", "party-lr")
    on_front = {number for number, row in listed.items() if row["Pareto"] == "front"}
    assert on_front <= {str(number) for number in found["frontier"]} and on_front


def test_if_all_fail_the_last_sentence_is_told(tmp_path: Path) -> None:
    class Failing(Crew):
        def send(self, worker: int, message: dict[str, Any] | bool) -> None:
            assert isinstance(message, dict)
            self._jobs[worker] = message
            self._end(worker, {"ended": "failed", "failure": "It grew."})

    with pytest.raises(VflError, match=r"come to its end\. The last one: It grew"):
        swept(tmp_path / "out", 3, Failing())


def test_without_optuna_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(VflError, match=r"pip install 'vfl-flower\[sweep\]'"):
        swept(tmp_path / "out", 3)


# --- what is left -------------------------------------------------------------------------------


def test_the_table_has_the_best_first_and_a_line_that_runs_it(folder: Path) -> None:
    found = in_(folder)
    head, first, *lines = results.table(folder).splitlines()
    assert head.split()[:3] == ["trial", "party-lr", "window"]
    best = results.best(found)
    assert first.split()[0] == str(best["number"])
    assert any(line.startswith("30 trials: ") for line in lines)
    assert any(line.startswith("Importance: party-lr 0.") for line in lines)
    words = shlex.split(lines[-1])
    assert words[:3] == ["vfl", "run", "-c"] and words[-2:] == ["--parties", "2"]
    assert pairs([words[3]], "-c") == {**BASE, **best["keys"]}


def test_any_configuration_can_be_pasted() -> None:
    keys = {"label": "it's $HOME", "dataset": 'csv:a "b".csv', "bottom-bias": False, "mu": 1e-05}
    node = {"file": "party's file.csv", "id": "x"}
    trial = {"number": 0, "state": "finished", "figure": 1.0, "keys": {"window": 8}}
    about = {"keys": keys, "node_configs": [node, node], "parties": 2, "seeds": 3}
    words = shlex.split(results.line({**about, "trials": [trial]}))
    assert opened(pairs([words[3]], "-c")) == {**keys, "window": 8}
    assert words[4::2] == ["--node-config", "--node-config", "--seeds"]
    assert pairs([words[5]], "--node-config") == node and words[-1] == "3"


def test_the_page_shows_trials_importance_and_the_line(folder: Path) -> None:
    found = in_(folder)
    assert (folder / "report.html").read_text() == report([folder])
    page = Page(report([folder]))
    assert found["line"] in page.text and "30 trials: " in page.text
    shares = page.table("option", "importance")
    assert {key: row["importance"] for key, row in shares.items()} == {
        key: f"{share:.2f}" for key, share in found["importance"].items()
    }
    best = results.best(found)
    assert next(iter(page.table("trial", "party-lr"))) == str(best["number"])
    assert page.points("validation accuracy by trial")
    assert (folder / "importance.png").stat().st_size > 3000


def test_nothing_from_a_sweep_s_file_becomes_part_of_the_page_s_code(tmp_path: Path) -> None:
    trial = dict.fromkeys(("number", "state", "figure", "second", "failure"), HOSTILE)
    hostile = dict.fromkeys(("metric", "second", "line", "frontier"), HOSTILE)
    other = {"keys": {HOSTILE: HOSTILE}, "number": 1, "figure": 0.5, "state": "finished"}
    more: dict[str, Any] = {"keys": {"strategy": HOSTILE}, "importance": {HOSTILE: HOSTILE}}
    for trials in ([], [HOSTILE], [trial, other]):
        (tmp_path / "sweep.json").write_text(json.dumps({**hostile, **more, "trials": trials}))
        page = Page(report([tmp_path]))
        assert not page.all("script") and page.text.count("alert('1')") >= 3


# --- trials -------------------------------------------------------------------------------------


def job(tmp_path: Path, **more: Any) -> dict[str, Any]:
    keys = {**BASE, "epochs": 3, "window": 8, **more.pop("keys", {})}
    about = {"parties": 2, "node_configs": [], "seeds": 1, "second": ""}
    return {**about, "keys": keys, "folder": str(tmp_path / "trials" / "7"), **more}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trials make their folders."""
    place = tmp_path / "places"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_trial_tells_of_evaluations_and_leaves_its_files_to_who_sweeps(
    tmp_path: Path, places: Path
) -> None:
    told: list[Event] = []
    event = run_trial(job(tmp_path, second="bytes"), lambda each: told.append(each) or False)  # type: ignore[func-returns-value]
    history = [json.loads(line) for line in event["files"]["history.jsonl"].splitlines()]
    summary = json.loads(event["files"]["summary.json"])
    assert [each["evaluated"] for each in told] == [1, 2, 3]
    assert [each["figure"] for each in told] == [e[chosen_by(e)] for e in history]
    assert event["ended"] == "finished" and event["metric"].startswith("validation_")
    assert event["second"] == summary["bytes_up"] + summary["bytes_down"]
    assert summary["config"]["out"] == str(tmp_path / "trials" / "7")
    assert not list(places.glob("vfl-sweep-*"))


def test_a_trial_that_is_stopped_learns_no_more_and_leaves_nothing(
    tmp_path: Path, places: Path
) -> None:
    told: list[Event] = []

    def tell(event: Event) -> bool:
        told.append(event)
        assert list(places.glob("vfl-sweep-*"))
        return len(told) == 2

    assert run_trial(job(tmp_path, seeds=2), tell) == {"ended": "stopped"}
    assert len(told) == 2 and not list(places.glob("vfl-sweep-*"))


@pytest.mark.nightly
def test_by_several_seeds_the_mean_counts_and_the_first_is_watched(tmp_path: Path) -> None:
    told: list[Event] = []
    event = run_trial(job(tmp_path, seeds=3), lambda each: told.append(each) or False)  # type: ignore[func-returns-value]
    assert [each["evaluated"] for each in told] == [1, 2, 3]
    of_seeds = [
        json.loads(event["files"][f"seed-{seed}/history.jsonl"].splitlines()[-1])
        for seed in range(3)
    ]
    mean = sum(each["validation_accuracy"] for each in of_seeds) / 3
    history = json.loads(event["files"]["history.jsonl"].splitlines()[-1])
    assert history["validation_accuracy"] == pytest.approx(mean)
    assert event["metric"] == chosen_by(history)


def test_without_validation_rows_test_rows_do_not_choose(tmp_path: Path) -> None:
    event = run_trial(job(tmp_path, keys=ALL_ROWS), lambda _: False)
    assert event["ended"] == "impossible" and "Set validation-fraction" in event["failure"]

    class Real(Crew):
        def send(self, worker: int, message: dict[str, Any] | bool) -> None:
            self._events.append((worker, event))

    with pytest.raises(ConfigError, match="test rows must not choose"):
        swept(tmp_path / "out", 3, Real())


@pytest.mark.parametrize(
    ("figures", "key"),
    [
        ({"validation_auc": 0.9, "validation_accuracy": 0.8}, "validation_auc"),
        ({"validation_auc": None, "validation_accuracy": 0.8}, "validation_accuracy"),
        ({"validation_accuracy": None, "validation_r2": 0.1}, "validation_r2"),
    ],
)
def test_auc_chooses_before_accuracy_and_that_before_r2(
    figures: Mapping[str, Any], key: str
) -> None:
    assert chosen_by({**figures, "test_auc": 1.0}) == key


def test_what_cannot_be_spent_is_no_second_objective(tmp_path: Path) -> None:
    event = run_trial(job(tmp_path, second="epsilon"), lambda _: False)
    assert event["ended"] == "impossible" and "these runs have no epsilon" in event["failure"]


def test_a_trial_that_fails_says_why(tmp_path: Path, places: Path) -> None:
    event = run_trial(job(tmp_path, keys={"party-lr": 1e9, "server-lr": 1e9}), lambda _: False)
    assert event["ended"] == "failed" and "Lower the learning rates" in event["failure"]
    assert not list(places.glob("vfl-sweep-*"))


def test_a_stepper_waits_for_answers(tmp_path: Path) -> None:
    stepper = Stepper()
    assert stepper.send(job(tmp_path))["evaluated"] == 1
    assert stepper.send(False)["evaluated"] == 2
    assert stepper.send(True) == {"ended": "stopped"}
    assert stepper.send(job(tmp_path))["evaluated"] == 1
    assert stepper.send(True) == {"ended": "stopped"}
    with pytest.raises(KeyError):
        stepper.send({})  # an error is not lost in its thread


class InHere(Crew):
    """One worker, in this process."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log, self._stepper = log, Stepper()

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        self._log += ["trial"] * isinstance(message, dict)
        self._events.append((worker, self._stepper.send(message)))


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

    monkeypatch.setattr(reuse, "align", align)
    keys = {"strategy": "split-nn", "epochs": 1, "validation-fraction": 0.2}
    keys |= {**organisations.keys, "out": str(tmp_path / "out")}
    nodes = organisations.node_configs
    found = in_(sweep(2, keys, SEARCH, 3, lambda _: InHere(times), node_configs=nodes))
    assert [each["state"] for each in found["trials"]] == ["finished"] * 3
    assert times == ["aligned", "trial", "trial", "trial"]
    words = shlex.split(found["line"])
    assert [pairs([each], "--node-config") for each in words[5::2]] == nodes


# --- processes and actors -----------------------------------------------------------------------


def anew(statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement in a new process: Ray keeps the way it authenticates for a process's life."""
    code = f"from pathlib import Path; from tests import test_sweep as tests; {statement}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_trials_run_side_by_side_elsewhere(tmp_path: Path, engine: str) -> None:
    done = anew(f"tests.trials_side_by_side(Path({str(tmp_path)!r}), {engine!r})")
    assert done.returncode == 0, done.stderr[-3000:]


def trials_side_by_side(tmp_path: Path, engine: str) -> None:
    def workers(folder: Path) -> Workers:
        return Actors(2) if engine == "ray" else Processes(2, folder / "workers.log")

    keys = {**BASE, "epochs": 4, "out": str(tmp_path / "out")}
    before = signal.getsignal(signal.SIGTERM)
    folder = sweep(2, keys, SEARCH, 8, workers, seeds=2)
    found = json.loads((folder / "sweep.json").read_text())
    assert [each["number"] for each in found["trials"]] == list(range(8))
    for each in found["trials"]:
        assert (folder / "trials" / str(each["number"]) / "seed-1").exists() == (
            each["state"] == "finished"
        )
    assert signal.getsignal(signal.SIGTERM) == before
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.nightly
def test_others_do_not_use_the_ray_that_a_sweep_starts() -> None:
    done = anew("tests.others_and_the_ray_of_a_sweep()")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly
def test_a_sweep_where_ray_was_loaded_without_a_token_is_refused_in_a_sentence() -> None:
    done = anew("import ray; tests.Actors(1).__enter__()")
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith(
            "Ray was loaded in this process without a token, so other users could use the "
            "sweep's Ray. Start the sweep in a new process, by `vfl sweep`."
        )
    )


def others_and_the_ray_of_a_sweep() -> None:
    with Actors(1):
        import ray

        address = ray.get_runtime_context().gcs_address
        said = f"import ray; ray.init(address={address!r}); print(ray.cluster_resources())"
        own = dict(os.environ)
        others = {key: value for key, value in own.items() if not key.startswith("RAY_AUTH")}
        codes = [
            subprocess.run([sys.executable, "-c", said], env=each, capture_output=True).returncode
            for each in (own, others)
        ]
    assert codes == [0, 1]


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_was_ended_goes_on_where_it_was(tmp_path: Path, end: int) -> None:
    out, place = tmp_path / "out", tmp_path / "places"
    place.mkdir()
    keys = results.pasted({k: v for k, v in {**BASE, "epochs": 4}.items() if k != "strategy"})
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


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.nightly
def test_a_script_without_a_main_guard_can_sweep(tmp_path: Path) -> None:
    script, keys = tmp_path / "script.py", {**BASE, "epochs": 1, "out": str(tmp_path / "out")}
    script.write_text(
        "from vfl_flower.tools.sweep import sweep\n"
        "from vfl_flower.tools.sweep.workers import workers_on\n"
        f"sweep(2, {keys!r}, {SEARCH!r}, 2, workers_on('local', 1))\n"
    )
    subprocess.run([sys.executable, str(script)], check=True)
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]) == 2


@pytest.mark.nightly
def test_a_process_that_ends_by_itself_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where it leaves the folder of its trial
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    keys = {**BASE, "observer": f"{tmp_path / 'ends.py'}:Any", "out": str(tmp_path / "out")}
    with pytest.raises(VflError, match=r"has ended by itself.*workers\.log, lower --jobs"):
        sweep(2, keys, SEARCH, 3, lambda folder: Processes(1, folder / "workers.log"))


def test_every_key_that_cannot_be_searched_is_a_key() -> None:
    from vfl_flower.tools.sweep.search import NOT_SEARCHED

    assert NOT_SEARCHED - {"validation-fraction"} <= KEYS.keys()
