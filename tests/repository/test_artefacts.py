"""Files that an earlier version wrote: they load, resume, predict, and their counts go on."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message

from tests.conftest import of_words
from tests.make_artefacts import (
    CASES,
    EACH_OTHER,
    EXPECTED,
    SUMS,
    draws_of_a_data_set,
    grown,
    inside,
    keys_of,
    organisations_of,
    predicted,
    resumed,
    started,
    unpack,
)
from tests.organisations import ID, read, write
from tests.secure import Parties
from tests.serving import served
from vfl_flower import client_app
from vfl_flower.alignment import asked_ids
from vfl_flower.config.errors import VflError
from vfl_flower.config.files import unsealed, whole
from vfl_flower.records.ledger import opened
from vfl_flower.results.report import report
from vfl_flower.transport.wire import Call

THEN: dict[str, Any] = json.loads(EXPECTED.read_text())
NEAR = 1e-5  # relative error that another processor may cause
AGAIN, ANEW = ["query.recall"], ["query.align", "query.common", "query.confirm"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which archives are unpacked, and runs go on."""
    with inside(tmp_path):
        yield tmp_path


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of figures that differ by more than rounding."""
    return [
        name
        for name in then.keys() | now.keys()
        if name not in then or name not in now or not _alike(then[name], now[name])
    ]


def _alike(then: Any, now: Any) -> bool:
    if isinstance(then, str):
        then, now = ([float(each) for each in text.split()] for text in (then, now))
    return bool(now == pytest.approx(then, rel=NEAR, abs=1e-7))


# --- runs and models ----------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_cut_short_predicts_resumes_and_ends_with_the_same_figures(
    name: str, folder: Path
) -> None:
    if name != "perturbed":  # by fresh noise
        unpack(name, folder)
        assert not differences(THEN[name]["predicted"], predicted(name))
    if without := CASES[name].without:
        now = predicted(name, without=without)
        assert not differences(THEN[name]["predicted without"], now)
    unpack(name, folder)
    assert not differences(THEN[name]["figures"], resumed(name))


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", [name for name in CASES if name != "perturbed"])
def test_a_model_is_served_with_the_same_scores(name: str, folder: Path) -> None:
    unpack(name, folder)
    case = CASES[name]
    keys, nodes = dict[str, Any](), list[dict[str, Any]]()
    if not case.divided:
        made = organisations_of(name)
        keys, nodes = {"dataset": made.keys["dataset"]}, list(made.node_configs)
    (folder / "service").mkdir(0o700)
    with served(folder / "run", folder / "service", keys, nodes) as found:
        ids = sorted(found.loaded.rows.ids.tolist())
        scores = found.ask(*ids)
    now = {"prediction": " ".join(f"{each['prediction']:.8g}" for each in scores)}
    if scores[0].get("probabilities"):
        now["probability"] = " ".join(f"{each['probabilities']['1']:.8f}" for each in scores)
    then = {**THEN[name]["predicted"]}
    assert not differences({each: then[each] for each in now}, now)


@of_words
def test_a_finished_run_predicts_is_shown_and_is_grown_from(folder: Path) -> None:
    unpack("psi", folder)
    assert not differences(THEN["psi"]["predicted by the finished"], predicted("psi", "done"))
    assert not differences(THEN["psi"]["grown"], grown())
    assert "split-nn" in report([folder / "done", folder / "run"])
    with pytest.raises(VflError, match=r"has finished\. Leave the option resume out"):
        started("psi", {"resume": "done"})


def test_another_figure_would_be_found() -> None:
    """The control of the comparisons."""
    then = THEN["psi"]["figures"]
    assert differences(then, {**then, "steps": then["steps"] + 1}) == ["steps"]
    norms = {**then["norms"], "top": then["norms"]["top"] * (1 + 1e-4)}
    assert differences(then, {**then, "norms": norms}) == ["norms"]
    assert differences(then, {name: then[name] for name in then if name != "epsilon"})
    said = THEN["psi"]["predicted"]
    other = said["prediction"].replace("0", "1", 1)
    assert differences(said, {**said, "prediction": other}) == ["prediction"]


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the options in a checkpoint, as another version would have written them."""
    with np.load(BytesIO(unsealed(path)), allow_pickle=False) as file:
        arrays = dict(file)
    text = json.loads(arrays["text"].tobytes())
    change(text["config"])
    arrays["text"] = np.frombuffer(json.dumps(text).encode(), np.uint8)
    with whole(path, sealed=True) as new:
        np.savez(new, **arrays)


def test_an_option_that_an_older_version_did_not_have_is_its_default(folder: Path) -> None:
    unpack("psi", folder)
    rewrite(folder / "run/checkpoint.npz", lambda options: options.pop("lr-schedule"))
    assert not differences(THEN["psi"]["predicted"], predicted("psi"))
    assert not differences(THEN["psi"]["figures"], resumed("psi"))
    unpack("psi", folder)  # the control
    rewrite(folder / "run/checkpoint.npz", lambda options: options.pop("server-lr"))
    assert differences(THEN["psi"]["figures"], resumed("psi"))


def test_checkpoints_of_later_versions_and_of_0_1_0_are_refused(folder: Path) -> None:
    """Version 0.1.0 wrote no checksums."""
    path = folder / "run/checkpoint.npz"
    for version in ("later", "0.1.0"):
        unpack("psi", folder)
        if version == "later":
            rewrite(path, lambda options: options.update({"later-option": 3}))
        else:
            path.write_bytes(path.read_bytes()[:-32])
        for use in (resumed, predicted):
            with pytest.raises(VflError, match="is damaged, or another version wrote it") as raised:
                use("psi")
            assert "\n" not in str(raised.value)


# --- alignments ---------------------------------------------------------------------------------


class Orders:
    """The ClientApp, and what it was asked before the run began."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.blinded: list[int] = []  # ids that each party was sent

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind in (*AGAIN, *ANEW) and kind not in self.kinds:
            self.kinds.append(kind)
        if kind == "query.align":
            assert isinstance(message, Call) and message.payload is not None
            self.blinded.append(len(message.payload.arrays["ids"]))
        return client_app.app(message, context)


def begun(name: str, **keys: Any) -> Orders:
    """Orders that parties get when a new run of a case begins."""
    orders: Any = Orders()
    started(name, {**keys_of(name), "epochs": 1, "out": "new", **keys}, orders)
    assert isinstance(orders, Orders)
    return orders


@pytest.mark.parametrize("name", ["psi", "any"])
def test_a_kept_alignment_is_used_again_unless_it_is_damaged(name: str, folder: Path) -> None:
    unpack(name, folder)
    assert begun(name).kinds == AGAIN
    if name == "psi":
        for path in (folder / "home/alignments").iterdir():
            damage(path)
        orders = begun("psi", out="newer")
        assert orders.kinds == ANEW and orders.blinded == [0, 0]


@pytest.mark.parametrize("sound", [True, False])
def test_with_kept_blinded_ids_only_new_ids_are_asked_about(sound: bool, folder: Path) -> None:
    """The control. By the kept key ids are the same points, so a party counts three new ones."""
    unpack("psi", folder)
    assert [ids_asked(folder, party) for party in (0, 1)] == [120, 120]
    for path in [] if sound else (folder / "home/sets").iterdir():
        damage(path)
    orders = begun("psi", dataset=three_more_people())
    assert orders.kinds == ANEW and orders.blinded == ([3, 3] if sound else [123, 123])
    assert [ids_asked(folder, party) for party in (0, 1)] == [123, 123]


def ids_asked(folder: Path, party: int) -> int:
    """How many ids a party has been asked about."""
    with opened(folder / f"home/party-{party}.ids", asked_ids._earlier) as ledger:
        return ledger.count("asked")


def three_more_people() -> str:
    """The data set of a label holder whose file got three rows."""
    table = read(organisations_of("psi").labels)
    more = table[:3].assign(**{ID: [700_001, 700_002, 700_003]})
    write(pd.concat([table, more]), Path("more.csv"))
    return "files:more.csv"


# --- counts -------------------------------------------------------------------------------------


def test_releases_before_the_cut_and_predictions_are_counted_on(folder: Path) -> None:
    for name in ("dpzv", "perturbed"):  # a test above compares the epsilon of the resumed run
        assert THEN[name]["figures"]["epsilon"] > 1.1 * THEN[name]["epsilon of an uncut run"]
    unpack("perturbed", folder)
    second = predicted("perturbed")["epsilon"]
    assert second == pytest.approx(THEN["perturbed"]["predicted"]["epsilon"], rel=1e-6)
    unpack("perturbed", folder)
    (folder / "run/predictions.journal").unlink()
    shutil.rmtree(folder / "state")
    assert predicted("perturbed")["epsilon"] < second  # the control: as the first


def test_a_party_counts_on_how_often_it_uploaded_a_row_and_how_many_it_predicted(
    folder: Path,
) -> None:
    def upload(most: int) -> None:
        unpack("psi", folder)
        predicted("psi", rules={"max-uploads": most})
        resumed("psi", {"max-uploads": most})

    most = THEN["psi"]["uploads"]  # with uploads before the cut, and for predictions
    with pytest.raises(VflError, match=f"its rule is max-uploads = {most - 1}"):
        upload(most - 1)
    upload(most)
    rows = 2 * len(THEN["psi"]["predicted by the finished"]["prediction"].split())
    with pytest.raises(VflError, match=f"its rule is max-predictions = {rows - 1}"):
        predicted("psi", "done", rules={"max-predictions": rows - 1})
    predicted("psi", "done", rules={"max-predictions": rows})


def epsilon_of_labels(**keys: Any) -> float:
    """The epsilon that a new run with the same labels prints."""
    run = started("labels", {**keys_of("labels"), "epochs": 1, "out": f"run-{len(keys)}", **keys})
    return float(run.summary["epsilon"])


@pytest.mark.nightly
def test_labels_that_were_drawn_spend_nothing_more_and_another_epsilon_the_sum(
    folder: Path,
) -> None:
    unpack("labels", folder)
    assert epsilon_of_labels() == 2.25
    assert epsilon_of_labels(epsilon=1.5) == 2.25 + 1.5
    assert draws_of_a_data_set(4.0) == 4.0
    assert draws_of_a_data_set(1.0) == 4.0 + 1.0


def test_the_second_count_of_draws_knows_what_the_deleted_file_knew(folder: Path) -> None:
    unpack("labels", folder)
    (folder / "home/labels.draws").unlink()
    assert epsilon_of_labels() == 4.0 + 2.25  # the most that was spent, on the data set
    (folder / "home/labels.draws").unlink()
    for path in folder.rglob("*.count"):
        path.unlink()
    assert epsilon_of_labels(epsilon=1.5) == 1.5  # the control


# --- keys of masked sums ------------------------------------------------------------------------


def agreed(folder: Path, run: int) -> list[str]:
    """Have parties agree on keys in another run; the public halves of the keys that sign them."""
    parties = Parties(folder, own=EACH_OTHER, run=run)
    parties.begin()
    offers = parties.offers()
    parties.agree(offers)
    return [each.tobytes().hex() for each in offers["identities"]]


def test_parties_of_masked_sums_keep_their_keys_and_know_each_other(folder: Path) -> None:
    unpack(SUMS, folder)
    assert agreed(folder, 2) == THEN[SUMS]["public"]
    (folder / "party-1/sums.key").unlink()
    with pytest.raises(VflError, match=r"Party 0 refuses the key of party 1, .*sums-peers-of-0"):
        agreed(folder, 3)


# --- damage -------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "run/checkpoint.npz": ("psi", lambda _: resumed("psi"), "is damaged, or another"),
    "run/*-party-1-*.state": ("psi", lambda _: resumed("psi"), "Party 1 does not have"),
    "run/*-party-1.uploads": ("psi", lambda _: resumed("psi"), "cannot count what"),
    "done/party-1.predictions": (
        *("psi", lambda _: predicted("psi", "done"), "cannot count what it releases"),
    ),
    "home/party-1.ids": (
        *("psi", lambda _: begun("psi", dataset=three_more_people()), "cannot count the ids"),
    ),
    "run/releases.journal": ("dpzv", lambda _: resumed("dpzv"), "is damaged"),
    "run/predictions.journal": ("perturbed", lambda _: predicted("perturbed"), "is damaged"),
    "home/labels.draws": ("labels", lambda _: epsilon_of_labels(), "is damaged"),
    "state/*/*.count": ("labels", lambda _: epsilon_of_labels(), "is damaged"),
    "party-1/sums.key": (SUMS, lambda folder: agreed(folder, 2), "cannot use its key"),
    "party-1/*.sums": (SUMS, lambda folder: agreed(folder, 1), "cannot note how"),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("pattern", DAMAGED)
def test_a_damaged_byte_is_refused_in_one_sentence(pattern: str, folder: Path) -> None:
    name, use, sentence = DAMAGED[pattern]
    unpack(name, folder)
    for path in folder.glob(pattern):
        damage(path)
    with pytest.raises(VflError, match=sentence) as raised:
        use(folder)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


def test_every_archive_is_loaded() -> None:
    assert sorted(path.stem for path in EXPECTED.parent.glob("*.zip")) == sorted([*CASES, SUMS])
    assert THEN.keys() == {*CASES, SUMS, "written by"}
