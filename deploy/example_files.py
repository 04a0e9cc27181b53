"""Cut a data set into files as organisations have them, to try out alignment and own files.

    python deploy/example_files.py FOLDER [--npz credit.npz] [--parties 2]

Three organisations, or more, share the columns of breast-cancer, or of a table X (or X_train and
X_test) with labels y. The label holder, a bank, has all labels and the first columns:
`bank/labels.csv` to train on, and `bank/new.csv` with a fifth of the people, who are held out. The
parties' files are `party-0/features.parquet`, `party-1/features.csv` and so on. Each person has a
random number. Each party knows nine tenths of the people, held-out people included, and lists them
in another order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

KNOWN = 0.9  # share of the people whom a party knows
HELD_OUT = 0.2


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files go; made if it is not there")
    parser.add_argument(
        "--npz", help="file with the arrays (default: scikit-learn's breast-cancer)"
    )
    parser.add_argument("--parties", type=int, default=2, help="(default: %(default)s)")
    options = parser.parse_args()
    rows, labels = read(options.npz)
    generator = np.random.default_rng(0)
    table = pd.DataFrame(rows, columns=[f"feature-{column}" for column in range(rows.shape[1])])
    ids = pd.Series(generator.permutation(10 * len(rows))[: len(rows)], name="person")
    blocks = np.array_split(table.columns, options.parties + 1)

    def file(place: str) -> Path:
        path: Path = options.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    people = generator.permutation(len(rows))
    new, known = np.split(people, [int(HELD_OUT * len(people))])
    bank = pd.concat([ids, pd.Series(labels, name="label"), table[blocks[0]]], axis=1)
    bank.iloc[known].to_csv(file("bank/labels.csv"), index=False)
    bank.iloc[new].to_csv(file("bank/new.csv"), index=False)
    for party, block in enumerate(blocks[1:]):
        some = generator.permutation(len(rows))[: int(KNOWN * len(rows))]
        own = pd.concat([ids, table[block]], axis=1).iloc[some]
        if party % 2:
            own.to_csv(file(f"party-{party}/features.csv"), index=False)
        else:
            own.to_parquet(file(f"party-{party}/features.parquet"), index=False)
    for path in sorted(options.folder.glob("*/*")):
        print(path)


def read(npz: str | None) -> tuple[np.ndarray, np.ndarray]:
    """All rows and labels of the data set."""
    if npz is None:
        rows, labels = load_breast_cancer(return_X_y=True)
        return rows, labels
    with np.load(npz, allow_pickle=False) as file:
        parts = [name for name in ("", "_train", "_test") if f"X{name}" in file.files]
        rows = np.concatenate([file[f"X{part}"] for part in parts])
        return rows, np.concatenate([file[f"y{part}"] for part in parts])


if __name__ == "__main__":
    main()
