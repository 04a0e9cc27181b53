"""Segments by columns of parties: noisy cells out, counts of groups in, figures with intervals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, RecordDict

from tests.fleet import fleet
from tests.organisations import ID, Organisations, cut
from tests.tasks.test_information import Tap
from vfl_flower.alignment.store import PSI, digest_of, save_state
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.launch.engines import used
from vfl_flower.party import about, label_sets, state_file
from vfl_flower.party.inputs import own_source
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.records.ledger import opened
from vfl_flower.tasks.information import groups
from vfl_flower.tasks.information import party as at_party
from vfl_flower.tasks.information.groups import CELLS, of_groups
from vfl_flower.transport.explain_messages import GroupCounts, GroupsOrder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def people(rows: int = 1500) -> pd.DataFrame:
    """People whose label and score depend on their sex, and a region that few people have."""
    drawn = np.random.default_rng(0)
    sex, x = drawn.choice(["f", "m"], rows), drawn.standard_normal(rows)
    region = drawn.choice(["north", "south", "tiny"], rows, p=[0.6, 0.38, 0.02])
    z = drawn.standard_normal(rows) + (sex == "m")
    label = (x + z + drawn.standard_normal(rows) > 0.5).astype(int)
    columns = {"x": x, "z": z, "sex": sex, "region": region, "useless": drawn.standard_normal(rows)}
    return pd.DataFrame({ID: 10 * drawn.permutation(rows), "label": label, **columns})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """The label holder has x, party 0 z and sex, party 1 region and noise; a run in `run`."""
    organisations = cut(tmp_path_factory.mktemp("groups"), people(), own=1, known=1.0)
    organisations.words = [{"segments": "sex"}, {"segments": "region", "name": "shop"}]
    organisations.run("run", {"align": "ids", "epochs": 1, "test-fraction": 0.4})
    return organisations


@pytest.fixture
def run(trained: Organisations, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder / "run", tmp_path / "run"))


def asked(run: Path, trained: Organisations, tap: Any, words: Any = None, **keys: Any) -> Any:
    """Get segments by columns of parties; return the assessment of the summary."""
    nodes = [{**a, **b} for a, b in zip(trained.node_configs, words or [{}, {}], strict=True)]
    used("information", {"model": str(run), **keys}, nodes, tap)
    return json.loads((run / "summary.json").read_text())["assessment"]["segments"]


def rows_of(run: Path) -> pd.DataFrame:
    """The test rows with their flags, joined with everybody's columns."""
    tested = pd.read_csv(run / "test_rows.csv").drop(columns="label")
    joined = tested.merge(people(), how="left", left_on="id", right_on=ID)
    return joined.assign(flag=(joined["probability_1"] > 0.5).astype(int))


def drawn(seed: int, rows: int, kept: float) -> tuple[dict[str, Any], Any, Any]:
    """Counts of noisy cells in three groups of people, their true cells, and cells of all."""
    of = np.random.default_rng(seed)
    group, label = of.choice(3, rows, p=[0.5, 0.3, 0.2]), of.random(rows) < 0.4
    flag = of.random(rows) < np.where(label, 0.6, 0.15 + 0.1 * group)
    cells = 2 * flag + label
    noisy = np.where(of.random(rows) < kept, cells, (cells + of.integers(1, 4, rows)) % 4)
    both = [[np.bincount(c[group == g], minlength=CELLS) for g in range(3)] for c in (noisy, cells)]
    return dict(zip("abc", both[0], strict=True)), both[1], np.bincount(cells, minlength=CELLS)


def test_without_noise_figures_are_plain_shares() -> None:
    counts, _, every = drawn(0, 900, 1.0)
    found = of_groups(counts, every, 1.0)
    for name, (a, b, c, d) in counts.items():
        figures = found["figures"][name]
        flagged, rows = (c + d) / (a + b + c + d), a + b + c + d
        assert found["rows"][name] == rows
        assert figures["flagged"]["value"] == pytest.approx(flagged, abs=1e-12)
        assert figures["recall"]["value"] == pytest.approx(d / (b + d), abs=1e-12)
        assert figures["false_positives"]["value"] == pytest.approx(c / (a + c), abs=1e-12)
        error = np.sqrt(flagged * (1 - flagged) / rows)  # of a share of independent rows
        assert figures["flagged"]["error"] == pytest.approx(error, rel=1e-6)
    most = found["differences"]["demographic_parity"]
    assert (most["highest"], most["lowest"]) == ("c", "a")


def test_figures_are_unbiased_and_their_errors_are_honest() -> None:
    kept, off, naive, inside = kept_share(1.0, CELLS), [], [], []
    for seed in range(70):
        counts, _, every = drawn(seed, 1200, kept)
        found = of_groups(counts, every, kept)
        for at, name in enumerate("abc"):
            truth = {"recall": 0.6, "false_positives": 0.15 + 0.1 * at}
            for rate, true in truth.items():
                if each := found["figures"][name].get(rate):
                    off.append((each["value"] - true) / each["error"])
        most = found["differences"]["demographic_parity"]
        figures = of_groups(counts, every, 1.0)["figures"]  # the control: counts as they are
        low, high = (figures[name]["false_positives"]["value"] for name in "ac")
        naive.append(high - low)
        inside.append(most["low"] <= 0.12 <= most["high"])  # 0.6 of the 20 points between a and c
    assert abs(np.mean(off)) < 0.1 and 0.9 < np.std(off) < 1.1
    assert np.mean(inside) > 0.85 and np.mean(naive) < 0.1  # not the 20 points


def test_cells_of_all_groups_add_up_to_the_true_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_share(0.5, CELLS)
    counts, _, every = drawn(3, 2000, kept)
    monkeypatch.setattr(groups, "_LEAST", 0.0)
    found = of_groups(counts, every, kept)
    of = [(found["rows"][name], found["figures"][name]["flagged"]["value"]) for name in counts]
    assert sum(rows * share for rows, share in of) == pytest.approx(every[2:].sum(), abs=1e-6)


def test_the_label_holder_shows_the_figures(trained: Organisations, run: Path) -> None:
    tap = Tap()
    found = asked(run, trained, tap, epsilon=3.0)
    assert set(found) == {"party 0, sex", "party shop, region"}
    rows = rows_of(run)
    for name, of in rows.groupby("sex"):
        figures = found["party 0, sex"]["figures"][name]
        assert found["party 0, sex"]["rows"][name] == len(of)
        for rate, true in (("flagged", of.flag), ("recall", of.flag[of.label == 1])):
            assert abs(figures[rate]["value"] - true.mean()) < 4 * figures[rate]["error"]
    most = found["party 0, sex"]["differences"]["demographic_parity"]
    assert most["highest"] == "m" and most["low"] > 0
    # Few people live in tiny. Their group is one with the next larger one, and has no name.
    assert set(found["party shop, region"]["rows"]) == {"north", "other groups"}
    assert not any(b"tiny" in each or b"useless" in each for each in tap.raw)
    card = (run / "model_card.md").read_text()
    assert "share flagged differs between segments of party 0, sex" in card
    assert "m above f" in card and "Intervals cover their noise" in card


def test_a_party_guesses_labels_as_the_epsilon_says(trained: Organisations, run: Path) -> None:
    taps = [Tap() for _ in range(3)]
    found = [asked(run, trained, tap, epsilon=1.0) for tap in taps[:2]]
    found.append(asked(run, trained, taps[2], epsilon=2.0))
    cells, again, other = (tap.orders(GroupsOrder)[0].arrays["cells"] for tap in taps)
    assert np.array_equal(cells, again)  # so repeated runs average nothing away
    assert not np.array_equal(cells, other)
    assert [each["party 0, sex"]["spent"] for each in found] == [1.0, 1.0, 3.0]
    rows, sizes = rows_of(run), []
    for epsilon in (1.0, 30.0):  # the last one is the control: it hides nothing
        asked(run, trained, tap := Tap(), epsilon=epsilon)
        cells = tap.orders(GroupsOrder)[0].arrays["cells"]
        for what, said in (("label", cells % 2), ("flag", cells // 2)):
            right = [(said == rows[what])[rows[what] == each].mean() for each in (0, 1)]
            sizes.append(np.mean(right))
    most, error = np.e / (1 + np.e), 0.5 / np.sqrt(len(rows))
    assert max(sizes[:2]) < most and sizes[2:] == [1.0, 1.0]
    kept = kept_share(1.0, CELLS)
    assert sizes[:2] == pytest.approx([kept + (1 - kept) / 3] * 2, abs=4 * error)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"refuse": "information"}, "its rule is refuse = 'information'"),
        ({"segments": ""}, "names no segments"),
        ({"segments": "sax"}, "does not have the columns that `segments` names"),
    ],
)
def test_a_party_that_takes_no_part_is_left_out(
    trained: Organisations, run: Path, caplog: Any, words: dict[str, str], why: str
) -> None:
    found = asked(run, trained, Tap(), [words, {}], epsilon=3.0)
    assert set(found) == {"party shop, region"} and why in caplog.text


def test_only_fitting_runs_have_such_segments(trained: Organisations, run: Path) -> None:
    with pytest.raises(ConfigError, match="information = 'noisy'"):
        asked(run, trained, Tap(), information="exact")
    (run / "summary.json").unlink()  # as before a run has finished
    with pytest.raises(ConfigError, match="test rows"):
        asked(run, trained, Tap())


@pytest.mark.parametrize(
    "keys",
    [
        {"align": "any"},
        {"aggregation": "secure", "combine": "mean"},
        {"privacy": "labels", "epsilon": 4.0},
    ],
)
def test_partial_rows_masked_sums_and_noise_work(tmp_path: Path, keys: dict[str, Any]) -> None:
    known = 0.8 if "align" in keys else 1.0
    organisations = cut(tmp_path / "files", people(900), own=1, known=known)
    organisations.words = [{"segments": "sex"}, {"segments": "region"}]
    run = organisations.run("run", {"align": "ids", "epochs": 1, "test-fraction": 0.5, **keys})
    found = asked(run.folder, organisations, Tap(), epsilon=3.0)
    assert found["party 0, sex"]["spent"] == 3.0  # test rows had no draw before
    rows = rows_of(run.folder)
    assert len(rows) * known * 0.9 < sum(found["party 0, sex"]["rows"].values()) <= len(rows)
    assert (sum(found["party 0, sex"]["rows"].values()) == len(rows)) == (known == 1)


@pytest.mark.parametrize("sizes", [[400, 300, 60], [400, 49, 3], [400, 60, 3], [49, 3], [60]])
def test_no_small_group_is_told_or_follows_by_subtraction(sizes: list[int]) -> None:
    of = np.repeat(np.arange(len(sizes)), sizes)
    names, merged = at_party._without_small([f"g{n}" for n in range(len(sizes))], of, 50)
    told = dict(zip(names, np.bincount(merged).tolist(), strict=True))
    assert sum(told.values()) == sum(sizes)
    assert min(told.values()) >= 50 or len(told) == 1
    small = [size for size in sizes if size < 50]
    assert ("other groups" in told) == bool(small)
    for n, size in enumerate(sizes):
        assert told.get(f"g{n}", size) == size and not (size < 50 and f"g{n}" in told)


def test_a_group_with_the_name_of_small_ones_is_one_of_them() -> None:
    of = np.repeat([0, 1, 2, 3], [400, 300, 30, 30])
    names, merged = at_party._without_small(["other groups", "b", "c", "d"], of, 50)
    assert names == ["b", "other groups"] and np.bincount(merged).tolist() == [300, 460]
    names, _ = at_party._without_small(["other groups", "b"], of[of < 2], 50)
    assert names == ["other groups", "b"]


class Node:
    """A real node with a column of flags, whose label holder names people and their cells."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int = 800) -> None:
        self.flags, self.rows = np.random.default_rng(3).integers(0, 2, rows), rows
        file = folder / "flags.csv"
        pd.DataFrame({ID: np.arange(rows), "flag": self.flags}).to_csv(file, index=False)
        words: Any = {"states": str(folder / "node"), "file": str(file), "id": ID}
        words |= {"partition-id": 0, "num-partitions": 1, "segments": "flag"}
        self.context = Context(1, 2, words, RecordDict(), {})
        monkeypatch.setattr(state_file, "load", lambda *_: self.context)
        monkeypatch.setattr(at_party, "load_about", lambda state: "")
        monkeypatch.setattr(about, "read", lambda text: self)
        monkeypatch.setattr(at_party, "divide", lambda data, rows, held: (0, np.arange(rows), 0))
        self.config = self.data = self

    def ask(self, cells: Any, people: Any = None) -> GroupCounts:
        people = np.arange(self.rows) if people is None else people
        digest = digest_of(own_source(self.context), people)
        name = np.frombuffer(b"a" * 32, np.uint8)
        save_state(self.context, rows=people, name=name, digest=digest, method=PSI)
        arrays = {"cells": np.asarray(cells)[people].astype(np.uint8)}
        return at_party.count_groups(
            self.context, GroupsOrder(run="1", number=1, least=1, arrays=arrays)
        )


def test_two_runs_isolate_no_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch)
    cells = np.random.default_rng(0).permutation(node.rows) % CELLS
    counts = node.ask(cells).arrays["counts"]
    assert np.array_equal(counts, [np.bincount(cells[node.flags == n]) for n in (0, 1)])
    another = np.where(np.arange(node.rows) == 5, (cells + 1) % CELLS, cells)
    for question in (
        lambda: node.ask(another),
        lambda: node.ask((another + 1) % CELLS),  # and codes swapped
        lambda: node.ask(cells, np.delete(np.arange(node.rows), 5)),
    ):
        assert "differ in too few rows" in question().refused
    own: Any = own_source(node.context)
    order = GroupsOrder(run="1", number=1, least=1, arrays={"cells": np.zeros(2, np.uint8)})
    with pytest.raises(VflError, match="has none of the test rows"):
        at_party._counted(node.context, order, own, np.array([-1, -1]), {})
    one = np.where(np.arange(node.rows) == 5, 3, cells % 3)
    assert "fewer than 50 rows of a class" in node.ask(one).refused
    assert node.ask(cells, np.arange(node.rows)[::-1]).arrays["counts"].sum() == node.rows
    # The control: without the check, the difference of two answers shows this person's flag.
    monkeypatch.setattr(label_sets, "_told", lambda labels: 0.0)
    changed = np.abs(node.ask(another).arrays["counts"] - counts).sum(1)
    assert changed.argmax() == node.flags[5] and sorted(changed) == [0, 2]


@pytest.mark.parametrize(
    ("named", "counts"),
    [
        ("{", [[1, 2, 3, 4]]),
        ('["sex"]', [[1, 2, 3, 4]]),
        ('{"sex": ["f", "m"]}', [[1, 2, 3, 4]]),
        ('{"sex": ["f", "f"]}', [[1, 1, 3, 4], [0, 1, 0, 0]]),
        ('{"sex": ["f", "m"]}', [[2, 2, 3, 4], [-1, 0, 0, 0]]),
        ('{"sex": ["f"]}', [[1, 2, 3, 5]]),
        ('{"sex": []}', np.zeros((0, 4))),
    ],
)
def test_the_label_holder_refuses_what_does_not_fit(named: str, counts: Any) -> None:
    def read(named: str, counts: Any) -> Any:
        arrays = {"counts": np.array(counts, np.int64)}
        answer = GroupCounts(party=0, parties=1, groups=named, arrays=arrays)
        return groups._checked(answer, np.array([1, 2, 3, 4]))

    with pytest.raises(VflError):
        read(named, counts)
    fits = read('{"sex": ["f", "m"]}', [[1, 2, 0, 4], [0, 0, 3, 0]])
    assert set(fits["sex"]) == {"f", "m"}  # the control


@pytest.mark.nightly
def test_real_nodes_count_their_groups_and_the_sets(tmp_path: Path) -> None:
    organisations = cut(tmp_path / "files", people(), own=1, known=1.0)
    file = {"file": str(organisations.files[0]), "id": ID, "segments": "sex"}
    with fleet(2, tmp_path, file) as nodes:  # both have one file
        keys = {**organisations.keys, "epochs": 1, "test-fraction": 0.4}
        run = nodes.finish(nodes.submit(keys)).folder
        given = {"task": "information", "model": str(run), "epsilon": 3.0}
        assert nodes.superlink.submit(given, 2, tmp_path / "groups.log").wait(200) == 0
        with opened(nodes.superlink.home / "vfl-flower/party-0.information") as ledger:
            assert ledger.content("sets")  # in a simulation, no set is counted
    found = json.loads((run / "summary.json").read_text())["assessment"]["segments"]
    assert set(found) == {"party 0, sex", "party 1, sex"}
    assert found["party 0, sex"]["rows"] == found["party 1, sex"]["rows"]
