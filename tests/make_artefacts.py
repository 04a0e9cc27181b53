"""Write tests/artefacts: what this version leaves on disk, for later versions to load.

    python -m tests.make_artefacts [CASE ...]

Version 0.2.0 wrote the committed files; ``expected.json`` has the versions of its packages. Run
this only if a format changes on purpose, and say so in the commit. Without names it writes all
cases. `test_artefacts.py` loads them: it resumes runs, predicts, and goes on with counts.

A case is one archive, ``CASE.zip``. The folder ``run`` in it holds a run that was cut short, and
``done`` one that finished. ``home`` is its VFL_HOME, ``state`` its XDG_STATE_HOME. The data are not
in it, since `tests.organisations` makes the same files again. All secrets in an archive were drawn
for it, and protect nothing.

A checkpoint has the path of its results folder, which was a temporary folder.
"""

import argparse
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # another number of threads rounds otherwise

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.clientapp import ClientApp
from PIL import Image

from tests.golden import outcome, robust
from tests.ledgers import numbers_in
from tests.organisations import ID, Organisations, cancer, cut, read, write
from tests.secure import Parties
from tests.strategy.test_checkpoint import Cut, cut_after
from vfl_flower import client_app
from vfl_flower.config.provenance import versions
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import predict_local, run_local

FOLDER = Path(__file__).parent / "artefacts"
EXPECTED = FOLDER / "expected.json"
HERE = Path()  # runs name files without their folder, since later it is another one
SUMS = "sums"  # the archive of what parties of masked sums keep, which has no run

SHORT: dict[str, Any] = {
    **{"bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8, "batch-size": 16},
    **{"epochs": 3, "checkpoint-every": 9, "party-lr": 0.2, "server-lr": 0.2},
}
ADAM = {"optimizer": "adam", "party-lr": 0.03, "server-lr": 0.03}
LASTING: dict[str, Any] = {"alignment-days": 36500}
"""A rule of each party, since an archive becomes older than 30 days."""
COUNTED: dict[str, Any] = {"max-ids": 1000, "max-uploads": 100, "max-predictions": 1000}
"""Rules of each party of the case ``psi``, which then keeps counts."""
EACH_OTHER: dict[str, Any] = {"aggregation": "secure", "sum-peers": "first-seen"}
"""Rules of the parties of `SUMS`."""


@dataclass(frozen=True)
class Case:
    """A run that was cut short.

    keys : of its run configuration, besides `SHORT`.
    own : columns that the label holder has.
    known : share of the rows that each party has.
    divided : whether the parties share a data set, instead of having files.
    files : makes other files of the usual ones.
    rules : of each party.
    home : patterns of files in its home that are kept.
    without : parties that another prediction leaves out.
    evaluations : how many there are before it is cut short.
    random : whether a run that is resumed draws fresh noise, so that only counts are the same.
    """

    keys: Mapping[str, Any]
    parties: int = 2
    own: int = 1
    known: float = 0.9
    divided: bool = False
    files: Callable[[Organisations], None] = lambda organisations: None
    rules: Callable[[], dict[str, Any]] = LASTING.copy
    home: tuple[str, ...] = ()
    without: str = ""
    evaluations: int = 2
    random: bool = False


def _sequences_and_images(organisations: Organisations) -> None:
    """Party 0 gets sequences of numbers and an LSTM, and party 1 images and a CNN."""
    table, labels = read(organisations.files[0]), read(organisations.labels)
    values = [[each / 10] * (1 + row % 3) for row, each in enumerate(table.iloc[:, 0].tolist())]
    write(pd.DataFrame({ID: table[ID], "x": values}), organisations.files[0])
    photos = HERE / "photos"
    photos.mkdir(exist_ok=True)
    for each, label in zip(labels[ID], labels["label"], strict=True):
        pixels = np.random.default_rng(each).integers(0, 128, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels + np.uint8(100 * label)).save(photos / f"{each}.png")
    organisations.words[0] |= {"model": "lstm"}
    organisations.words[1] |= {"model": "cnn", "file": "", "images": str(photos)}


CASES: dict[str, Case] = {
    "psi": Case(
        {**ADAM, "validation-fraction": 0.2}, rules=lambda: {**LASTING, **COUNTED}, home=("*",)
    ),
    "any": Case(
        {"align": "any", "subsets": "laser", "combine": "mean", "window": 2},
        parties=3,
        known=0.7,
        home=("alignments/*",),
        without="2",
    ),
    "asynchronous": Case(
        {
            **{"strategy": "vafl-t", "quorum": 2, "max-delay": 5, "window": 4},
            **{"delay": "exponential", "optimizer": "momentum", "party-lr": 0.05},
            **{"server-lr": 0.05, "target": "regression", "label": "f0"},
        },
        parties=3,
    ),
    "surrogates": Case(
        {
            **{"strategy": "ef-vfl", "labels": "shared", "local-steps": 2},
            **{"downlink-codec": "top-k", "downlink-compression": "error-feedback"},
        },
        parties=3,
        own=0,
    ),
    "secure": Case(
        {"aggregation": "secure", "combine": "mean", "embedding-activation": "none"}, parties=3
    ),
    "dpzv": Case(
        {
            **{"strategy": "dpzv", "noise-multiplier": 1.5, "delta": 1e-3, "window": 4},
            **{"batch-size": 64, "party-lr": 0.01, "server-lr": 0.1, "checkpoint-every": 5},
        },
        divided=True,
        random=True,
    ),
    "zeroth-order": Case(
        {
            **{"strategy": "cascaded", "window": 4, "delay": "straggler", "noise-seed": 0},
            **{"batch-size": 64, "party-lr": 0.02, "mu": 0.1, "checkpoint-every": 5},
        },
        divided=True,
    ),
    "perturbed": Case(  # it evaluates seldom, since epsilon counts passes or evaluations
        {
            **{"strategy": "vafl", "privacy": "perturbed-embedding", "epochs": 4},
            **{"eval-every": 2.0, "checkpoint-every": 7},
        },
        evaluations=1,
        random=True,
    ),
    "labels": Case({"privacy": "labels", "epsilon": 2.25}, home=("labels.draws",)),
    "frozen": Case({"strategy": "frozen"}),
    "models": Case({"bottom-hidden": 3, "optimizer": "momentum"}, files=_sequences_and_images),
}


# --- what is done with a case, in its folder ----------------------------------------------------


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, and keep there what outlives a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VFL_HOME", str(folder / "home"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("FLWR_HOME", str(folder / "flower"))
        yield


def organisations_of(name: str) -> Organisations:
    """The same organisations each time, whose files are written here."""
    case = CASES[name]
    made = cut(HERE, cancer(columns=9, rows=120), case.parties, case.own, case.known)
    made.words = [case.rules() for _ in made.files]
    case.files(made)
    return made


_NONE: Mapping[str, Any] = {}


def started(
    name: str,
    keys: Mapping[str, Any],
    client: ClientApp = client_app.app,
    rules: Mapping[str, Any] = _NONE,
) -> Run:
    """A run of a case, whose parties may have further rules."""
    return run_local(CASES[name].parties, keys, client, _nodes(name, rules))


def _nodes(name: str, rules: Mapping[str, Any]) -> list[dict[str, Any]]:
    if CASES[name].divided:
        return []
    return [{**each, **rules} for each in organisations_of(name).node_configs]


def keys_of(name: str) -> dict[str, Any]:
    """The run configuration of a case, without a results folder."""
    case = CASES[name]
    data = {"dataset": "breast-cancer"} if case.divided else organisations_of(name).keys
    return {**SHORT, **data, **case.keys}


def resumed(name: str, rules: Mapping[str, Any] = _NONE) -> dict[str, Any]:
    """Figures of the run that was cut short, at its end."""
    found = robust(outcome(started(name, {"resume": "run"}, rules=rules)))
    counts = ("steps", "exchanges", "bytes_up", "bytes_down", "epsilon")
    return {key: found[key] for key in counts} if CASES[name].random else found


def grown() -> dict[str, Any]:
    """Figures of a run that begins by the models of the finished one."""
    keys = {**keys_of("psi"), "epochs": 1, "grow": "done", "out": "grown"}
    return robust(outcome(started("psi", keys)))


def predicted(
    name: str, run: str = "run", without: str = "", rules: Mapping[str, Any] = _NONE
) -> dict[str, Any]:
    """Predictions of a run's model in the order of ids, as texts, and the epsilon after them."""
    out = f"predictions-{len(list(HERE.glob('predictions-*.csv')))}.csv"
    keys = {"model": run, "out": out, "without": without}
    if not CASES[name].divided:
        keys["dataset"] = organisations_of(name).keys["dataset"]
    path = predict_local({k: v for k, v in keys.items() if v}, _nodes(name, rules))
    table = read(path)
    table = table.sort_values(table.columns[0])
    found = {"prediction": " ".join(f"{each:.8g}" for each in table["prediction"])}
    if "probability_1" in table:
        found["probability"] = " ".join(f"{each:.8f}" for each in table["probability_1"])
    return {**found, "epsilon": json.loads(path.with_suffix(".json").read_text()).get("epsilon")}


def draws_of_a_data_set(epsilon: float) -> float:
    """The epsilon of a run with noise on the labels of a data set without ids."""
    keys = {**SHORT, "dataset": "breast-cancer", "privacy": "labels", "epsilon": epsilon}
    run = run_local(2, {**keys, "epochs": 1, "out": tempfile.mkdtemp(dir=HERE)})
    return float(run.summary["epsilon"])


# --- archives -----------------------------------------------------------------------------------


def unpack(name: str, folder: Path) -> None:
    """Put the files of an archive into a folder, where only their owner can read them."""
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
        for place in archive.namelist():
            path = folder / place
            for above in reversed(path.relative_to(folder).parents[:-1]):
                (folder / above).mkdir(0o700, exist_ok=True)
            path.write_bytes(archive.read(place))
            path.chmod(0o600)
    for path in folder.glob("state/vfl-flower/labels-*.count"):
        # The path of the home is in the name of its second count.
        which = sha256(os.fsencode((folder / "home").resolve())).hexdigest()[:16]
        path.rename(path.with_name(f"labels-{which}.count"))


def _pack(folder: Path, name: str, kept: tuple[str, ...]) -> None:
    """Write the files of these patterns into an archive."""
    FOLDER.mkdir(exist_ok=True)
    with zipfile.ZipFile(FOLDER / f"{name}.zip", "w") as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = path.relative_to(folder).as_posix()
            if any(fnmatch(place, each) for each in kept):
                entry = zipfile.ZipInfo(place)  # without the time, so that equal files are equal
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


_OF_A_RUN = ("checkpoint.npz", "*.jsonl", "*.json", "*.journal", "*.state", "*.uploads")
_OF_FINISHED = (*_OF_A_RUN, "*.predictions", "top.npz")


def _patterns(name: str) -> tuple[str, ...]:
    in_home = [f"home/{each}" for each in CASES[name].home]
    of_run = [f"run/{each}" for each in _OF_A_RUN]
    return (*of_run, *(f"done/{each}" for each in _OF_FINISHED), *in_home, "state/*")


def _forget_older_states(folder: Path) -> None:
    """Leave of each party only its last checkpoint."""
    states = sorted(folder.glob("*.state"), key=lambda path: int(path.stem.rpartition("-")[2]))
    last = {path.stem.rpartition("-")[0]: path for path in states}
    for path in states:
        if path not in last.values():
            path.unlink()


# --- writing them -------------------------------------------------------------------------------


def _write(name: str) -> dict[str, Any]:
    """Write the archive of a case; what only its writer knows."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="vfl-") as place, inside(folder := Path(place)):
        keys = keys_of(name)
        try:
            with cut_after(CASES[name].evaluations):
                started(name, {**keys, "out": "run"})
            raise AssertionError("it was not cut short")
        except Cut:
            pass
        if name == "psi":  # which has two checkpoints of each party
            started(name, {**keys, "out": "done"})
            predicted(name, "done")  # which is counted
        else:
            _forget_older_states(folder / "run")
        if name == "perturbed":
            predicted(name)
        if name == "labels":
            draws_of_a_data_set(4.0)
        _pack(folder, name, _patterns(name))
        if CASES[name].random:
            whole = started(name, {**keys, "out": "whole"})
            found["epsilon of an uncut run"] = whole.summary["epsilon"]
    return found


def _expected(name: str) -> dict[str, Any]:
    """Figures that today's code gets from an archive."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vfl-") as place, inside(folder := Path(place)):
        unpack(name, folder)
        found["predicted"] = predicted(name)
        if name == "perturbed":  # by fresh noise
            found["predicted"] = {"epsilon": found["predicted"]["epsilon"]}
        if CASES[name].without:
            found["predicted without"] = predicted(name, without=CASES[name].without)
        found["figures"] = resumed(name)
        if name == "psi":
            found["predicted by the finished"] = predicted(name, "done")
            found["grown"] = grown()
            found["uploads"] = max(map(_most_uploads, folder.glob("run/*.uploads")))
    return found


def _most_uploads(path: Path) -> int:
    """The most uploads of a row."""
    return max(numbers_in(path, "uploads").values())


def _write_sums() -> dict[str, Any]:
    """Write the archive of what parties of masked sums keep; the public halves of their keys."""
    with tempfile.TemporaryDirectory(prefix="vfl-") as place, inside(Path(place)):
        parties = Parties(Path(place), own=EACH_OTHER)
        parties.begin()
        offers = parties.offers()
        parties.agree(offers)
        _pack(Path(place), SUMS, ("*/sums.key", "*/sums-peers-of-*.json", "*/*.sums"))
    return {"public": [each.tobytes().hex() for each in offers["identities"]]}


def _check_margin(found: Mapping[str, Any]) -> None:
    """See to it that no predicted class depends on rounding."""
    chances = np.array(found.get("probability", "").split(), float)
    assert (np.abs(chances - 0.5) > 2e-5).all(), "a class is nearly as probable as the other"


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("cases", nargs="*", help=f"of {', '.join([*CASES, SUMS])}")
    names = made.parse_args().cases or [*CASES, SUMS]
    for name in ("flwr", "flwr.notice"):
        logging.getLogger(name).disabled = True
    torch.set_num_threads(1)
    found = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name in names:
        if name == SUMS:
            found[name] = _write_sums()
            continue
        about, expected = _write(name), _expected(name)
        assert expected == _expected(name), f"{name} gives something else each time"
        _check_margin(expected["predicted"])
        found[name] = about | expected
    found["written by"] = {"vfl-flower": version("vfl-flower"), **versions()}
    EXPECTED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
