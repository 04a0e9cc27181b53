"""A person who withdraws: `vfl forget` removes the person, and keeps the person out afterwards."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.fleet import fleet, until
from tests.organisations import ID, Organisations, cancer, cut, kept_state, read
from tests.serving import Served, served
from vfl_flower.alignment import store
from vfl_flower.alignment.blinded_ids import keyed_hashes
from vfl_flower.config import audit_chain
from vfl_flower.config.audit_chain import find
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import remove_older, unsealed
from vfl_flower.config.node_rules import Rules
from vfl_flower.data import withdrawn
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.at_party import prepared
from vfl_flower.data.ids import encoded
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.source import Preparation, Source
from vfl_flower.data.split import divide
from vfl_flower.data.withdrawn import numbers_of
from vfl_flower.label_holder import checkpoint
from vfl_flower.party import label_sets, state_file
from vfl_flower.party.state import load_arrays
from vfl_flower.records.ledger import opened
from vfl_flower.tasks.inference.rows import labels_of
from vfl_flower.tools import cli, forget

SHORT: dict[str, Any] = {"strategy": "ef-vfl", "epochs": 2, "batch-size": 16, "bottom-hidden": 8}
SHORT |= {"validation-fraction": 0.2, "embedding-size": 4, "top-hidden": 8}
RULES: Any = {"max-uploads": 10**6, "max-ids": 10**6, "max-predictions": 10**6}
KEPT = "withdrawn", "labels.csv", "party-0.parquet", "party-1.csv", "ids.txt"


@dataclass
class World:
    """A label holder and two parties in a folder, with a run, predictions and a service's files.

    people : one of the training rows, one of the held-out rows, and one that a party does not have.
    """

    folder: Path
    people: list[str]

    @property
    def organisations(self) -> Organisations:
        files = [self.folder / "party-0.parquet", self.folder / "party-1.csv"]
        return Organisations(self.folder, self.folder / "labels.csv", files, [RULES] * 2)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def forget(self, *more: str, people: list[str] | None = None) -> int:
        path = ids(self, *(people or self.people[:2]))
        return cli.main(["forget", "--id-file", str(path), str(self.run), *more])

    def serving(self, **keys: Any) -> AbstractContextManager[Served]:
        given = {"dataset": f"files:{self.folder / 'labels.csv'}", **keys}
        return served(self.run, self.run, given, self.organisations.node_configs)

    def holders(self, needles: dict[str, list[bytes]]) -> dict[str, set[str]]:
        """Return name of each needle -> names of the files that have one of its forms."""
        files = [each for each in self.folder.rglob("*") if each.is_file()]
        found: dict[str, set[str]] = {name: set() for name in needles}
        for path in (each for each in files if each.name not in KEPT):
            content = path.read_bytes()
            for name, forms in needles.items():
                if any(form in content for form in forms):
                    found[name].add(path.name)
        return found

    def needles(self) -> dict[str, list[bytes]]:
        """Return all forms in which files may hold the first two people."""
        found, ids = checkpoint.load(self.run), [encoded(one) for one in self.people[:2]]
        train, test, _ = divide(found.config.data, len(found.rows))
        table = replace(own_table(found.config.data), withdrawn=None)
        places = np.array([table.ids.index(one) for one in ids])
        rows = [int(np.flatnonzero(found.rows == at)[0]) for at in places]
        trained, held = np.flatnonzero(train == rows[0])[0], np.flatnonzero(test == rows[1])[0]
        state = state_file.read(kept_state(self.run, 0))
        surrogate = load_arrays(state, "large")["uplink"][trained]
        own = prepared(table, places, Preparation(**found.about_labels["preparation"]))
        listed = withdrawn.read(self.folder / "home/withdrawn")
        numbers = numbers_of([*ids, *(one[2:] for one in ids)])
        marks, points = list[bytes](), list[bytes]()
        for path in (self.folder / "home/sets").glob("*.npz"):
            kept: Any = store.load_as(dict, path, lambda _: True)
            arrays = kept["arrays"]
            mine = keyed_hashes(ids, arrays["key"])
            at = [int(np.flatnonzero((arrays["marks"] == one).all(1))[0]) for one in mine]
            marks += [one.tobytes() for one in mine]
            of_ids = arrays["blinded" if "blinded" in arrays else "points"]
            points += [of_ids[row].tobytes() for row in at]
        return {
            "id": [one.encode() for one in self.people[:2]],
            "number": [one.tobytes() for one in numbers],
            "tag": [one.tobytes() for one in listed.tags(numbers)],
            "mark": marks,
            "point": points,
            "embedding in training": [found.arrays["table.rows"][trained].tobytes()],
            "embedding held out": [found.arrays["test_table.rows"][held].tobytes()],
            "surrogate": [surrogate.tobytes()],
            "own row": [one.tobytes() for one in np.asarray(own[1:])],
        }


FOUND = {
    "id": {"predictions.csv", "test_rows.csv", "jsonl"},
    "number": {"state", "uploads", "drift-rows", "explained", "information", "explained-labels"},
    "tag": {"checkpoint.npz"},
    "mark": {"npz"},
    "point": {"npz"},
    "embedding in training": {"checkpoint.npz"},
    "embedding held out": {"checkpoint.npz"},
    "surrogate": {"checkpoint.npz", "state"},
    "own row": {"checkpoint.npz"},
}
"""Which kinds of files hold a needle before `vfl forget`."""


def kind(file: str) -> str:
    """Return the suffix of a file, or its name if others have the suffix too."""
    named = file in ("checkpoint.npz", "predictions.csv", "test_rows.csv", "explained-labels")
    return file if named else file.rpartition(".")[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], World]]:
    """Return what copies a world with a run, predictions and a service's files into a folder."""
    folder = tmp_path_factory.mktemp("withdrawal") / "world"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFL_HOME", str(folder / "home"))
        table = cancer(8, 200).assign(**{ID: lambda frame: "person-" + frame[ID].astype(str)})
        own = replace(cut(folder, table, own=2), words=[RULES] * 2)
        own.run("run", SHORT)
        own.predict("run")
        found = checkpoint.load(folder / "run")
        ids = read(own.labels)[ID].to_numpy()
        train, test, validation = divide(found.config.data, len(found.rows))
        content = (folder / "run/checkpoint.npz").read_bytes()
        uplink = load_arrays(state_file.read(kept_state(folder / "run", 0)), "large")["uplink"]
        of_all, held_out = found.arrays["table.rows"], found.arrays["test_table.rows"][validation:]
        both = [min(np.count_nonzero(row[:4]), np.count_nonzero(row[4:])) for row in of_all]
        # A form that others share, such as zeros, stays in files.
        trained, held = (
            int(np.argmax([many * (content.count(row.tobytes()) == 1) for many, row in each]))
            for each in (
                zip(both, uplink, strict=True),
                ((np.count_nonzero(r), r) for r in held_out),
            )
        )
        held += validation
        at = found.rows[[train[trained], test[held]]]
        lacking = np.setdiff1d(np.arange(len(ids)), found.rows)[0]
        world = World(folder, [str(one) for one in ids[[*at, lacking]]])
        with world.serving() as service:
            service.ask(*world.people)
        people = numbers_of([encoded(one)[2:] for one in ids])
        ledgers = {"party-0.explained": "set", "party-1.drift-rows": "day"}
        for name, entry in {**ledgers, "explained-labels": "day"}.items():
            with opened(folder / "home" / name) as ledger:  # as tasks of real nodes keep them
                ledger.put(entry, people, 20000)
        none, labels = label_sets._recent(b""), np.ones(200, np.uint8)
        known = label_sets._with(none, np.sort(people), labels, np.zeros(32, np.uint8))
        key = next(folder.rglob(audit_chain.KEY))
        hashes = audit_chain.hashes_of([encoded(str(one)) for one in ids], unsealed(key))
        written: dict[Path, list[Any]] = {  # as `vfl predict --explain` writes them
            folder / "run/predictions.reasons.jsonl": [{"id": str(one)} for one in ids],
            key.with_name("party-0-reasons.jsonl"): [{"person": [one]} for one in hashes],
        }
        for path, lines in written.items():
            path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        with opened(folder / "home/party-0.information") as ledger:
            file = BytesIO()
            np.savez(file, allow_pickle=False, **known)
            ledger.write("sets", file.getvalue())

    def copied(to: Path) -> World:
        copy = shutil.copytree(folder, to / "world")
        return World(copy, world.people)

    yield copied


@pytest.fixture
def world(
    trained: Callable[[Path], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> World:
    found = trained(tmp_path)
    monkeypatch.setenv("VFL_HOME", str(found.folder / "home"))
    return found


def test_no_file_holds_a_person_in_any_form_after_forget(world: World) -> None:
    needles = world.needles()
    before = world.holders(needles)
    assert all(any(form) for forms in needles.values() for form in forms)
    assert {name: {kind(file) for file in found} for name, found in before.items()} == FOUND
    lines = (world.run / "predictions.csv").read_text().splitlines()
    assert world.forget() == 0
    assert world.holders(needles) == {name: set() for name in needles}
    (reasons,) = world.folder.rglob("party-0-reasons.jsonl")
    assert len(reasons.read_text().splitlines()) == 198
    left = [each for each in lines if each.partition(",")[0] not in world.people]
    assert (world.run / "predictions.csv").read_text().splitlines() == left


def test_no_row_that_sets_limits_of_flags_holds_a_person_after_forget(world: World) -> None:
    found = checkpoint.load(world.run)
    _, held, validation = divide(found.config.data, len(found.rows))
    ids, before = read(world.folder / "labels.csv")[ID], found.arrays["compared.rows"]
    assert before.shape == (validation, 2)
    assert world.forget(people=[str(ids[found.rows[held[3]]])]) == 0
    after = checkpoint.load(world.run).arrays["compared.rows"]
    assert (after == before[3]).all(1).sum() == 0 < (after == after[3]).all(1).sum() - 1
    np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


def scores(world: World, *ids: str, **keys: Any) -> list[Any]:
    with world.serving(**keys) as service:
        return service.ask(*ids)


def test_scores_of_others_stay_equal_and_the_person_is_unknown(world: World) -> None:
    others = read(world.run / "predictions.csv").set_index(ID).drop(world.people[:2])
    stranger = "person-of-nowhere"
    before = scores(world, *others.index)
    world.forget()
    assert scores(world, *others.index) == before
    first, second, nobody = scores(world, *world.people[:2], stranger, **{"new-ids-per-day": 0})
    assert first | {"id": 0} == second | {"id": 0} == nobody | {"id": 0}
    assert first["prediction"] is None
    predicted = world.organisations.predict("run").set_index(ID)
    pd.testing.assert_frame_equal(predicted, others)


def test_a_service_learns_of_a_withdrawal_and_never_seeks_the_person(world: World) -> None:
    """The label holder's file has lost the person, and the parties still have the row."""
    one = world.people[0]
    with world.serving() as service:
        assert service.ask(one)[0]["prediction"] is not None
        withdrawn.add(world.folder / "home/withdrawn", numbers_of([encoded(one)]), 1)
        until(lambda: service.ask(one)[0]["missing"] == {"label holder": "unknown"})


def test_a_caller_cannot_tell_a_withdrawal_at_a_party_from_a_person_it_lacks(
    world: World, tmp_path: Path
) -> None:
    """Party 1 keeps another list, as a real node does; the label holder has the row."""
    one, lacking = world.people[0], world.people[2]
    with pytest.MonkeyPatch.context() as patch:
        at_party = tmp_path / "party/withdrawn"
        patch.setattr("vfl_flower.data.sources.place", lambda node_config: at_party)
        withdrawn.add(at_party, numbers_of([encoded(one)]), 1)
        first, second = scores(world, one, lacking)
    assert first["prediction"] is second["prediction"] is None
    assert set(first["missing"].values()) == set(second["missing"].values()) == {"unknown"}


def test_later_runs_align_and_train_without_the_person(world: World) -> None:
    rows = len(checkpoint.load(world.run).rows)
    world.forget()
    with pytest.raises(ConfigError, match="After a withdrawal"):
        labels_of(checkpoint.load(world.run))
    world.organisations.run("again", SHORT)
    again = checkpoint.load(world.folder / "again")
    assert len(again.rows) == rows - 2
    names = [encoded(one)[2:] for one in world.people[:2]]
    listed = withdrawn.read(world.folder / "home/withdrawn")
    tags = np.concatenate([again.arrays["tags.train"], again.arrays["tags.test"]])
    assert not listed.have(numbers_of([])).any() and listed.have(numbers_of(names)).all()
    assert not np.isin(tags, listed.tags(numbers_of(names))).any()


def test_a_killed_forget_is_repeated_and_ends_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before the checkpoint is replaced, and after several removals."""
    needles, leftovers = world.needles(), forget.leftovers
    given = ids(world, *world.people[:2]), [world.run], False

    def killed(stop: int, *arguments: Any) -> Iterator[forget.Leftover]:
        yield from islice(leftovers(*arguments), stop)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(checkpoint.Checkpoint, "save", lambda *_: 1 / 0)
        forget.forget(*given)
    assert world.holders(needles)["embedding held out"] == {"checkpoint.npz"}
    for stop in (1, 3, 6):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(forget, "leftovers", partial(killed, stop))
            forget.forget(*given)
        assert any(world.holders(needles).values())
    assert scores(world, world.people[0])[0]["missing"] == {"label holder": "unknown"}
    forget.forget(*given)
    assert world.holders(needles) == {name: set() for name in needles}
    assert checkpoint.load(world.run).withdrawn == (1, 103)


def test_a_dry_run_and_a_wrong_call_change_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def contents() -> dict[Path, bytes]:
        files = (each for each in world.folder.rglob("*") if each.is_file())
        return {each: each.read_bytes() for each in files if each.name != "ids.txt"}

    before = contents()
    assert world.forget("--dry-run") == 0
    said = capsys.readouterr().out
    assert "predictions.csv" in said and "Nothing was changed" in said
    assert not any(one in said for one in world.people)
    for wrong in ([str(world.folder / "nowhere")], ["--id-file", str(world.folder / "none.txt")]):
        assert world.forget(*wrong) == 1
    assert world.forget(people=[" "]) == 1
    assert contents() == before


def test_forget_waits_for_the_end_of_a_service_but_lists_the_person_first(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with world.serving():
        assert world.forget() == 1
    assert "End it, and repeat" in capsys.readouterr().err
    listed = withdrawn.read(world.folder / "home/withdrawn")
    assert listed.have_ids([encoded(one) for one in world.people]).tolist() == [True, True, False]


def test_the_audit_log_counts_people_and_names_none(world: World) -> None:
    world.forget()
    line = (world.folder / "home/audit.jsonl").read_text().splitlines()[-1]
    assert '"event":"forget","people":2,"files":' in line and "person-" not in line
    kept = list(find(world.run / "audit/audit.jsonl", [encoded(world.people[0])]))
    assert len(kept) == 1, "who asked about the person stays as evidence"


def test_only_its_owner_can_read_the_list_which_holds_no_number(world: World) -> None:
    world.forget()
    path = world.folder / "home/withdrawn"
    assert os.stat(path).st_mode & 0o777 == 0o600
    forms = [numbers_of([encoded(one)[skip:]]) for one in world.people[:2] for skip in (0, 2)]
    assert not any(form.tobytes() in path.read_bytes() for form in forms)


def test_the_model_says_how_many_have_withdrawn_and_ends_above_a_share(world: World) -> None:
    world.forget()
    assert "1 of 103 in training" in (world.run / "model_card.md").read_text()
    with world.serving(**{"max-withdrawn": 0.01}) as service:  # 1 of 103 is less
        assert service.http.get("/v1/model").json()["withdrawn"] == {"people": 1, "of": 103}
        assert service.ask(world.people[2])
    with world.serving(**{"max-withdrawn": 0.009}) as service:
        reply = service.http.post("/v1/predict", json={"ids": [world.people[2]]})
    assert reply.status_code == 503
    assert "1 of the 103 people who trained the model have withdrawn" in reply.text


def test_contributions_still_add_up_after_a_withdrawal(world: World) -> None:
    """A held-out row that stood for absent parties has become a copy of another's."""
    world.forget()
    one = str(read(world.run / "predictions.csv")[ID][0])
    with world.serving() as service:
        body = {"ids": [one], "explain": True}
        said = service.http.post("/v1/predict", json=body).json()["predictions"][0]
    chance = said["probabilities"]["1"]
    parts = sum(said["contributions"].values())
    assert said["base"] + parts == pytest.approx(np.log(chance / (1 - chance)), abs=1e-4)


def test_doctor_finds_leftovers(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    saved = (world.run / "predictions.csv").read_bytes()
    world.forget()
    capsys.readouterr()
    cli.main(["doctor", str(world.run)])
    assert "are in no file" in capsys.readouterr().out
    (world.run / "predictions.csv").write_bytes(saved)  # from a backup
    cli.main(["doctor", str(world.run)])
    assert "predictions.csv may hold people" in capsys.readouterr().out


def test_a_warm_start_counts_the_people_of_the_run_before(world: World) -> None:
    found, table = checkpoint.load(world.run), read(world.organisations.labels)
    train, *_ = divide(found.config.data, len(found.rows))
    trained = [str(one) for one in table[ID].iloc[found.rows[train]] if one != world.people[0]]
    world.forget(people=[world.people[2], *trained[:2]])
    world.organisations.run("grown", {"grow": str(world.run), "epochs": 1})
    grown = checkpoint.load(world.folder / "grown")
    assert grown.withdrawn[0] == found.withdrawn[0] + 2 == 2
    cli.main(["forget", "--id-file", str(ids(world, world.people[0])), str(world.folder)])
    assert checkpoint.load(world.folder / "grown").withdrawn[0] == 3


def ids(world: World, *people: str) -> Path:
    path = world.folder / "ids.txt"
    path.write_text("\n".join(people))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("repeats", ["refuse", "last", "mean"])
def test_a_table_reads_as_if_the_rows_were_not_there(
    tmp_path: Path, suffix: str, repeats: str
) -> None:
    frame = pd.DataFrame({"id": [7, 8, 9, 10], "x": [1.0, 2.0, 3.0, 4.0]})
    frame = pd.concat([frame] * (1 + (repeats != "refuse")))
    path, listed = tmp_path / f"all{suffix}", tmp_path / "withdrawn"
    (frame.to_csv if suffix == ".csv" else frame.to_parquet)(path, index=False)
    withdrawn.add(listed, numbers_of([b"i:8"]), 1)
    everybody = OwnFile(str(path), repeats=repeats, party=0)
    found = replace(everybody, withdrawn=listed)
    assert [*everybody.ids] == [b"i:7", b"i:8", b"i:9", b"i:10"]
    assert [*found.ids] == [b"i:7", b"i:9", b"i:10"]
    assert found.count == 3
    assert dict(found.raw_columns(np.arange(3)))["x"].tolist() == [1.0, 3.0, 4.0]


def test_people_without_ids_withdraw_by_their_normalised_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    table = {"last": ["Ångström", "Brown"], "born": ["2001-02-03", "1999-01-01"], "x": [1, 2]}
    path, people = tmp_path / "table.csv", tmp_path / "people.csv"
    pd.DataFrame(table).to_csv(path, index=False)
    people.write_text("surname,birthdate\nANGSTROM,2001-02-03\n")
    assert cli.main(["forget", "--id-file", str(people)]) == 0
    columns = "surname=last birthdate=born"
    own = OwnFile(str(path), match_columns=columns, party=0, withdrawn=withdrawn.place())
    assert own.count == 1 and own.keys.columns["surname"].tolist() == ["Brown"]


class Waves(Source):
    """Data of a party's own code."""

    id_column = np.array(["a", "b"])

    def rows(self, places: Any, preparation: Preparation) -> Any:
        return np.zeros((len(places), 1), np.float32)


def test_own_code_keeps_its_rows_and_no_id_names_the_person(tmp_path: Path) -> None:
    source = Waves({}, 0)
    source.withdrawn = tmp_path / "withdrawn"
    withdrawn.add(source.withdrawn, numbers_of([b"t:b"]), 1)
    assert [*source.ids] == [b"t:a", b"w:1"]
    assert [*Waves({}, 0).ids] == [b"t:a", b"t:b"]


def test_a_damaged_list_stops_all_work(tmp_path: Path) -> None:
    path, listed = tmp_path / "all.csv", tmp_path / "withdrawn"
    path.write_text("id,x\n1,2\n")
    listed.write_bytes(b"damaged")
    with pytest.raises(Exception, match="is damaged"):
        _ = OwnFile(str(path), party=0, withdrawn=listed).ids


def test_old_files_are_removed_and_new_ones_stay(world: World) -> None:
    state, old = kept_state(world.run, 0), world.run / "run-1-party-0-checkpoint-1.state"
    shutil.copy(state, old)
    other = shutil.copy(state, world.run / "run-1-party-11-checkpoint-1.state")
    for path in (old, Path(other)):
        os.utime(path, (1, 1))
    remove_older(world.run, "run-*-party-0[-.]*", 30)
    assert not old.exists() and state.exists() and Path(other).exists()
    assert Rules.of({"retention-days": 7}).alignment_days == 7
    assert Rules.of({"retention-days": 90}).alignment_days == 30
    counts = world.run / "predictions.journal"  # of what predictions have spent
    counts.touch()
    gone = [world.run / f"predictions.{kind}" for kind in ("csv", "json", "reasons.jsonl")]
    for path in (counts, *gone):
        os.utime(path, (1, 1))
    later: Any = {"retention-days": 30}
    world.organisations.predict("run", **later)
    (path,) = world.run.glob("predictions*.csv")
    assert path not in gone and len(read(path)) == 162
    assert not any(each.exists() for each in gone) and counts.exists()


@pytest.mark.nightly
def test_real_nodes_lose_a_person_and_train_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of this machine have one folder for their states, and one list."""
    monkeypatch.setenv("VFL_HOME", str(home := tmp_path / "home"))
    table = cancer(8, 200).assign(**{ID: lambda frame: "person-" + frame[ID].astype(str)})
    own = cut(tmp_path / "files", table, own=2, known=1.0, suffixes=(".parquet",))
    with fleet(2, tmp_path, {"file": str(own.files[0]), "id": ID}) as nodes:  # both have one file
        states = nodes.superlink.home / "vfl-flower"
        before = nodes.finish(nodes.submit({**own.keys, **SHORT})).folder
        found = checkpoint.load(before)
        one = str(read(own.labels)[ID][found.rows[0]])
        number = numbers_of([encoded(one)]).tobytes()

        def holders() -> set[str]:
            files = [f for top in (before, states, home) for f in top.rglob("*") if f.is_file()]
            forms = one.encode(), number
            return {f.name for f in files if any(form in f.read_bytes() for form in forms)}

        assert any(name.endswith((".csv", ".state", ".uploads")) for name in holders())
        (tmp_path / "ids.txt").write_text(one)
        given = "--id-file", str(tmp_path / "ids.txt"), str(before), str(states)
        assert cli.main(["forget", *given]) == 0
        assert holders() <= {withdrawn.FILE}
        again = checkpoint.load(nodes.finish(nodes.submit({**own.keys, **SHORT})).folder)
    assert len(again.rows) == len(found.rows) - 1
