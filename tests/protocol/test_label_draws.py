"""Labels that are exported, changed and drawn again: one draw each, or a sum that is printed."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.full_disk import full_after
from tests.releases import learned_from
from vfl_flower.config.errors import VflError
from vfl_flower.config.files import write_sealed
from vfl_flower.data.at_label_holder import load_labels, load_own_labels, own_table
from vfl_flower.data.ids import by_id
from vfl_flower.data.labels import Labels, digest_of_labels
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.split import Alignment
from vfl_flower.protocol.privacy import draws
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.protocol.systems import resolve
from vfl_flower.records.ledger import Ledger, opened

ROWS = 400
NOISY = {"privacy": "labels", "epsilon": 1.0, "strategy": "split-nn", "columns": "none"}
ONE_DRAW = np.e / (1 + np.e)  # of two classes at epsilon 1, the share of labels that are kept


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "home"


def people(classes: int = 2, rows: int = ROWS) -> pd.DataFrame:
    labels = np.random.default_rng(0).integers(0, classes, rows)
    return pd.DataFrame({"id": np.arange(1000, 1000 + rows), "y": labels})


def drawn(
    path: Path, keys: Mapping[str, Any] | None = None, as_read: Callable[[Labels], Labels] = replace
) -> tuple[dict[int, Any], float]:
    """Each person's label with noise, as a run on this file has it, and the epsilon printed."""
    config = resolve(
        {**NOISY, "dataset": f"files:{path}", "id": "id", "label": "y", **(keys or {})}
    )
    own = own_table(config.data)
    alignment = Alignment("a" * 32, by_id(own.ids))
    labels = as_read(load_own_labels(config.data, own, alignment))
    noisy, spent = learned_from(config, labels)
    assert labels.places is not None and spent is not None
    names = np.asarray(own.id_column)[labels.places].tolist()
    values = labels.classes or noisy.train.tolist()
    told = noisy.train.tolist() if labels.classes else range(len(noisy.train))
    found = {name: str(values[label]) for name, label in zip(names, told, strict=True)}
    return found, spent


def drawn_of(table: pd.DataFrame, path: Path, **keys: Any) -> tuple[dict[int, Any], float]:
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return drawn(path, keys)


# --- one draw -----------------------------------------------------------------------------------


def sorted_anew(table: pd.DataFrame, day: int) -> pd.DataFrame:
    return table.sample(frac=1, random_state=day)


def appended(table: pd.DataFrame, day: int) -> pd.DataFrame:
    more = pd.DataFrame({"id": range(5000, 5000 + day), "y": [new % 2 for new in range(day)]})
    return pd.concat([table, more])


def dropped(table: pd.DataFrame, day: int) -> pd.DataFrame:
    return table.drop(index=day)


def as_texts(table: pd.DataFrame, day: int) -> pd.DataFrame:
    return sorted_anew(table.astype({"y": [int, float, str][day % 3]}), day)


def by_order(labels: Labels) -> Labels:
    """As if rows had no ids: the noise follows from all labels in their order."""
    assert labels.places is not None
    whole = digest_of_labels("", False, labels.train[np.argsort(labels.places)])
    return replace(labels, people=None, whole=whole)


def majority(
    tmp_path: Path,
    export: Callable[[pd.DataFrame, int], pd.DataFrame],
    as_read: Callable[[Labels], Labels],
    days: int = 31,
) -> tuple[float, set[float]]:
    """The share of labels that a vote over daily exports tells, and each epsilon printed."""
    table = people()
    votes: dict[int, list[bool]] = {}
    printed = set()
    for day in range(days):
        path = tmp_path / f"labels-2026-10-{day + 1:02}.parquet"
        export(table, day).to_parquet(path)
        noisy, epsilon = drawn(path, None, as_read)
        printed.add(epsilon)
        for name, label in noisy.items():
            votes.setdefault(name, []).append(float(label) == 1)
    true = dict(zip(table["id"], table["y"] == 1, strict=True))
    told = [np.mean(votes[name]) > 0.5 for name in votes if name in true]
    return float(np.mean(np.equal(told, [true[n] for n in votes if n in true]))), printed


@pytest.mark.parametrize(
    "export",
    [
        sorted_anew,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (appended, dropped, as_texts)),
    ],
)
def test_a_vote_over_daily_exports_tells_no_more_than_one_draw(
    tmp_path: Path, export: Callable[[pd.DataFrame, int], pd.DataFrame]
) -> None:
    told, printed = majority(tmp_path, export, replace)
    assert printed == {1.0}
    assert told == pytest.approx(ONE_DRAW, abs=5 * 0.023)  # five deviations


def test_without_ids_such_a_vote_tells_all_and_each_draw_is_printed(tmp_path: Path) -> None:
    # The control: noise that follows from the order of the rows.
    told, printed = majority(tmp_path, sorted_anew, by_order)
    assert told > 0.97
    assert printed == {float(day + 1) for day in range(31)}


def test_other_rows_and_another_order_change_no_draw(tmp_path: Path) -> None:
    table = people()
    before, _ = drawn_of(table, tmp_path / "labels.csv")
    for number, export in enumerate((sorted_anew, appended, dropped, as_texts)):
        after, epsilon = drawn_of(export(table, 7), tmp_path / f"labels-{number}.parquet")
        both = before.keys() & after.keys()
        assert epsilon == 1.0 and len(both) > ROWS / 2
        assert all(float(before[name]) == float(after[name]) for name in both)


def test_ids_that_become_texts_are_the_same_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id with a letter in it makes texts of a whole column."""
    before, _ = drawn_of(people(), tmp_path / "a.csv")
    texts = pd.concat([people(), pd.DataFrame({"id": ["X9"], "y": [1]})])
    after, epsilon = drawn_of(texts, tmp_path / "b.csv")
    both = before.keys() & {int(name) for name in after if str(name) != "X9"}
    assert len(both) > ROWS / 2 and epsilon == 1.0
    assert all(before[name] == after[str(name)] for name in both)  # type: ignore[index]
    # The control: by ids with their kind, each person would be another one, and be drawn again.
    monkeypatch.setattr(OwnFile, "people", OwnFile.names)
    again, epsilon = drawn_of(texts, tmp_path / "b.csv")
    assert epsilon == 1.0 and any(after[name] != again[name] for name in after)


def test_the_order_of_classes_changes_no_draw(tmp_path: Path) -> None:
    # As numbers they are 2, 10, 11; as texts 10, 11, 2.
    table = people(classes=12)
    numbers, _ = drawn_of(table, tmp_path / "numbers.parquet")
    texts, epsilon = drawn_of(table.astype({"y": str}), tmp_path / "texts.parquet")
    both = numbers.keys() & texts.keys()
    assert epsilon == 1.0 and {*numbers.values()} == {*texts.values()} == {*map(str, range(12))}
    assert all(numbers[name] == texts[name] for name in both)


def test_numbers_of_people_have_one_draw(tmp_path: Path) -> None:
    table = people().astype({"y": float})
    table["y"] += np.linspace(0, 1, ROWS)
    keys = {"target": "regression", "label-range": "0,3"}
    before, _ = drawn_of(table, tmp_path / "a.csv", **keys)
    after, epsilon = drawn_of(appended(sorted_anew(table, 1), 3), tmp_path / "b.csv", **keys)
    both = before.keys() & after.keys()
    assert epsilon == 1.0 and len(both) > ROWS / 2
    assert all(before[name] == after[name] for name in both)


# --- another draw, which is counted -------------------------------------------------------------


def test_a_label_that_changes_is_a_second_draw_of_that_person_alone(tmp_path: Path) -> None:
    table = people()
    keys = {"test-fraction": 0.0}
    before, _ = drawn_of(table, tmp_path / "a.csv", **keys)
    changed = table.copy()
    changed.loc[7, "y"] = 1 - changed.loc[7, "y"]
    after, epsilon = drawn_of(changed, tmp_path / "b.csv", **keys)
    assert epsilon == 2.0
    assert all(before[name] == after[name] for name in before.keys() - {1007})
    assert drawn_of(changed.drop(index=7), tmp_path / "c.csv", **keys)[1] == 1.0
    assert drawn_of(table, tmp_path / "d.csv", **keys)[1] == 2.0  # the label of before, again


def test_another_epsilon_and_another_set_of_classes_are_draws_of_everybody(tmp_path: Path) -> None:
    table = people()
    assert drawn_of(table, tmp_path / "a.csv")[1] == 1.0
    assert drawn_of(table, tmp_path / "a.csv", epsilon=0.5)[1] == 1.5
    more = pd.concat([table, pd.DataFrame({"id": range(9000, 9040), "y": [2] * 40})])
    assert drawn_of(more, tmp_path / "b.csv")[1] == 2.5
    assert drawn_of(table, tmp_path / "a.csv")[1] == 2.5


def test_two_labels_of_one_person_have_different_noise(tmp_path: Path) -> None:
    table = people().assign(other=lambda frame: frame["y"])
    one, _ = drawn_of(table, tmp_path / "a.csv")
    other, epsilon = drawn_of(table, tmp_path / "a.csv", label="other")
    same = np.mean([one[name] == other[name] for name in one])
    kept = kept_share(1.0, 2)
    assert epsilon == 2.0
    assert same == pytest.approx(kept**2 + (1 - kept) ** 2, abs=5 * 0.025)


def test_draws_without_ids_count_for_everybody_but_in_scikit_learns_data_sets(
    tmp_path: Path,
) -> None:
    def of(dataset: str) -> float:
        config = resolve({**NOISY, "columns": "", "dataset": dataset})
        labels = load_labels(config)
        _, spent = learned_from(config, labels)
        assert spent is not None
        return spent

    table = people().assign(x=np.arange(ROWS)).rename(columns={"y": "label"})
    table.to_csv(tmp_path / "a.csv", index=False)
    sorted_anew(table, 1).to_csv(tmp_path / "b.csv", index=False)
    table.to_csv(tmp_path / "same.csv", index=False)
    assert of(f"csv:{tmp_path}/a.csv") == of(f"csv:{tmp_path}/same.csv") == 1.0
    assert of(f"csv:{tmp_path}/b.csv") == 2.0
    assert drawn_of(people(), tmp_path / "c.csv")[1] == 3.0  # these could be the same people
    assert of(f"csv:{tmp_path}/a.csv") == 3.0
    assert of("breast-cancer") == of("digits") == of("breast-cancer") == 1.0


# --- the record ---------------------------------------------------------------------------------


def test_the_record_holds_no_label_and_no_id(tmp_path: Path, home: Path) -> None:
    table = people().astype({"id": str})
    table["id"] = "customer-" + table["id"]
    table["y"] = np.where(table["y"] == 1, "defaulted", "solvent")
    drawn_of(table, tmp_path / "a.csv")
    (second,) = (tmp_path / "state").rglob("*.count")
    path = home / "labels.draws"
    content = path.read_bytes()
    for word in (b"customer", b"defaulted", b"solvent"):
        assert word not in content + second.read_bytes()
    with opened(path) as ledger:
        assert ledger.secret in content
        assert ledger.secret not in second.read_bytes()
    assert {each.stat().st_mode & 0o777 for each in (path, second)} == {0o600}
    assert home.stat().st_mode & 0o777 == 0o700
    path.write_bytes(b"x" + content[1:])
    with pytest.raises(VflError, match=r"labels\.draws is damaged.*\.$"):
        drawn_of(table, tmp_path / "a.csv")


def spend_two(tmp_path: Path, home: Path) -> bytes:
    """Have two draws of everybody; the record after the first of them."""
    drawn_of(people(), tmp_path / "a.csv")
    kept = (home / "labels.draws").read_bytes()
    assert drawn_of(people(), tmp_path / "a.csv", epsilon=0.5)[1] == 1.5
    return kept


@pytest.mark.parametrize("lost", ["the file", "its folder"])
def test_a_record_that_is_deleted_counts_as_all_that_was_spent(
    tmp_path: Path, home: Path, lost: str
) -> None:
    spend_two(tmp_path, home)
    shutil.rmtree(home) if lost == "its folder" else (home / "labels.draws").unlink()
    assert drawn_of(people(), tmp_path / "a.csv")[1] == 2.5
    assert drawn_of(people(), tmp_path / "a.csv")[1] == 2.5  # which is said once
    (home / "labels.draws").unlink()
    assert drawn_of(people(), tmp_path / "a.csv")[1] == 3.5


def test_a_record_from_a_backup_counts_as_all_that_was_spent(tmp_path: Path, home: Path) -> None:
    kept = spend_two(tmp_path, home)
    (home / "labels.draws").write_bytes(kept)
    assert drawn_of(people(), tmp_path / "a.csv")[1] >= 1.5  # that draw is known to be among those
    assert drawn_of(people(), tmp_path / "a.csv", epsilon=0.25)[1] >= 1.75


def test_without_the_second_count_a_deleted_record_says_too_little(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control.
    monkeypatch.setattr(draws.Draws, "_heed", lambda *_: None)
    spend_two(tmp_path, home)
    (home / "labels.draws").unlink()
    assert drawn_of(people(), tmp_path / "a.csv")[1] == 1.0


def counted_in(second: Path) -> bytes:
    with opened(second) as ledger:
        return ledger.content("counted")


def test_a_second_count_that_is_damaged_or_cannot_be_written_is_one_sentence(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_of(people(), tmp_path / "a.csv")
    (second,) = (tmp_path / "state").rglob("*.count")
    content, counted = second.read_bytes(), counted_in(second)
    second.write_bytes(b"x" + content[1:])
    with pytest.raises(VflError, match=r"\.count is damaged"):
        drawn_of(people(), tmp_path / "a.csv")
    second.unlink()  # as after a kill before it was written
    assert drawn_of(people(), tmp_path / "a.csv")[1] == 1.0
    assert counted_in(second) == counted
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(VflError, match="cannot be written"):
        drawn_of(people(), tmp_path / "a.csv")


@pytest.mark.parametrize("which", ["home", "state"])
def test_a_record_that_another_user_can_change_is_refused(tmp_path: Path, which: str) -> None:
    shared = tmp_path / which
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(VflError, match="Other users can change .*/" + which):
        drawn_of(people(), tmp_path / "a.csv")
    assert not list(shared.rglob("labels*"))


def test_draws_of_a_version_without_people_are_refused(tmp_path: Path, home: Path) -> None:
    home.mkdir(mode=0o700)
    write_sealed(home / "labels.draws", b'{"secret": "ab", "draws": []}')
    with pytest.raises(VflError, match="is of an older version, which counted no draws by person"):
        drawn_of(people(), tmp_path / "a.csv")


def as_earlier(path: Path, second: Path) -> None:
    """Write both files as the earlier version did."""
    with opened(path) as ledger, opened(second) as count:
        about = {"secret": ledger.secret.hex(), "number": ledger.count("number")}
        text = json.dumps(about | json.loads(ledger.content("about"))).encode()
        kinds = {"people": "<u8", "draws": "<u8", "epsilons": "<f8"}
        arrays = {name: np.frombuffer(ledger.content(name), kind) for name, kind in kinds.items()}
        counted = count.content("counted")
    content = BytesIO()
    np.savez(content, text=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]
    path.unlink()
    second.unlink()
    write_sealed(path, content.getvalue())
    write_sealed(second, counted)


def test_a_record_of_an_earlier_version_is_read_once(tmp_path: Path, home: Path) -> None:
    path, table = home / "labels.draws", people()
    before, _ = drawn_of(table, tmp_path / "a.csv")
    older = spend_two(tmp_path, home)
    (second,) = (tmp_path / "state").rglob("*.count")
    as_earlier(path, second)
    for _ in range(2):
        after, epsilon = drawn_of(table, tmp_path / "a.csv")
        assert (after, epsilon) == (before, 1.5)
        assert all(each.read_bytes().startswith(b"SQLite") for each in (path, second))
    as_earlier(path, second)
    earlier = path.read_bytes()
    with full_after(100), pytest.raises(VflError, match="cannot be written"):
        drawn(tmp_path / "a.csv")
    assert path.read_bytes() == earlier
    assert drawn_of(table, tmp_path / "a.csv", epsilon=0.25)[1] == 1.75
    path.write_bytes(older)  # restored from a backup
    assert drawn_of(table, tmp_path / "a.csv")[1] >= 1.75


@pytest.mark.parametrize("which", ["the record", "the second count"])
def test_a_record_of_a_later_version_is_refused_and_stays(
    tmp_path: Path, home: Path, which: str
) -> None:
    drawn_of(people(), tmp_path / "a.csv")
    (second,) = (tmp_path / "state").rglob("*.count")
    path = home / "labels.draws" if which == "the record" else second
    later = sqlite3.connect(path)
    later.execute("PRAGMA application_id = 0x56464C32")
    later.close()
    content = path.read_bytes()
    with pytest.raises(VflError, match="another version wrote it"):
        drawn_of(people(), tmp_path / "a.csv")
    assert path.read_bytes() == content


def test_a_kill_between_record_and_second_count_counts_a_draw_once(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_of(people(), tmp_path / "a.csv")
    save = Ledger._save

    def killed(ledger: Ledger, connection: sqlite3.Connection) -> None:
        if ledger.content("counted"):
            raise KeyboardInterrupt
        save(ledger, connection)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Ledger, "_save", killed)
        drawn_of(people(), tmp_path / "a.csv", epsilon=0.5)
    with opened(home / "labels.draws") as ledger:
        assert ledger.count("number") == 2  # the control: the record has it
    assert drawn_of(people(), tmp_path / "a.csv", epsilon=0.5)[1] == 1.5
