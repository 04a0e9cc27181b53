"""A million people matched by the first seven rules of `match='person'`, against one column of ids.

Two tables have the same made-up people, but for one in ten of each. The second table has a typing
error in 5 % of each column's values. The people are matched twice, by one process each: by their
ids, in one private set intersection, and by the rules without ids. Both sides are in that process,
with messages in pieces between them. Processor seconds, over all cores, depend less
on other work of the machine than seconds. The peak of memory includes Python and its libraries, and
both sides' data. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.provenance import peak_memory_mb

RULES = 7
COLUMNS = "given_name surname birthdate postcode suburb"


def made_up(n: int) -> Any:
    """Return a table of n people. Some names are more frequent than others, as in a real place."""
    import pandas as pd

    random = np.random.default_rng(0)

    def names(distinct: int, letters: int) -> Any:
        alphabet = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        every = ["".join(word) for word in alphabet[random.integers(0, 26, (distinct, letters))]]
        which = (distinct ** random.random(n)).astype(int)  # the most frequent names come first
        return np.array(every, object)[which.clip(max=distinct - 1)]

    place = random.integers(0, 5000, n)
    born = pd.Timestamp("1940-01-01") + pd.to_timedelta(random.integers(0, 25_000, n), "D")
    columns = {
        "id": random.permutation(10 * n)[:n],
        "given_name": names(2000, 6),
        "surname": names(20_000, 8),
        "birthdate": born.strftime("%Y-%m-%d"),
        "postcode": (1000 + place).astype(str),
        "suburb": np.array([f"suburb {number}" for number in range(3000)], object)[place % 3000],
    }
    return pd.DataFrame(columns)


def write_tables(folder: Path, people: int) -> None:
    """Write the label holder's table and the party's, of so many people each."""
    from benchmarks.keys import with_errors

    every = made_up(people + people // 10)
    mine, theirs = every[:people], every[-people:].sample(frac=1, random_state=0)
    errors = with_errors(theirs[COLUMNS.split()], 0.05, 0).assign(id=theirs["id"])
    mine.assign(label=0).to_csv(folder / "labels.csv", index=False)
    errors.to_csv(folder / "party.csv", index=False)


def measured(folder: Path, by_rules: bool) -> dict[str, Any]:
    """Align both tables, and return the figures."""
    import pandas as pd

    from vfl_flower.alignment.at_label_holder import align
    from vfl_flower.alignment.store import saved_state
    from vfl_flower.client_app import app
    from vfl_flower.data.at_label_holder import own_table
    from vfl_flower.data.keys import parse
    from vfl_flower.protocol.systems import resolve
    from vfl_flower.transport.local import LocalGrid

    keys: dict[str, Any] = {"dataset": f"files:{folder / 'labels.csv'}"}
    node = {"file": str(folder / "party.csv")}
    if by_rules:
        rules = "; ".join(map(str, parse("person")[:RULES]))
        keys |= {"match": rules, "match-error": 1.0}
        node["match-columns"] = COLUMNS
    config = resolve(keys)
    grid = LocalGrid(app, 1, keys, config, [node])
    start, processor = time.perf_counter(), time.process_time()
    made = align(grid, config, own_table(config.data), str(grid.run_id), lasting=False)
    figures = {
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "peak_mb": round(peak_memory_mb()),
        "matched": len(made.rows),
    }
    (context,) = grid.contexts.values()
    rows = made.rows, saved_state(context)["rows"]
    ids = [
        pd.read_csv(folder / name, usecols=["id"])["id"].to_numpy()[some]
        for name, some in zip(("labels.csv", "party.csv"), rows, strict=True)
    ]
    return {**figures, "false": int((ids[0] != ids[1]).sum())}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--people", type=int, default=1_000_000, metavar="N", help="of each side")
    made.add_argument("--of", type=Path, help=argparse.SUPPRESS)  # this process measures once
    made.add_argument("--by", choices=["ids", "rules"], help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.of:
        print(json.dumps(measured(options.of, options.by == "rules")))
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), options.people)
        command = [sys.executable, "-m", "benchmarks.many_people", "--of", folder, "--by"]
        for by in ("ids", "rules"):
            done = subprocess.run([*command, by], check=True, stdout=subprocess.PIPE)
            figures[by] = json.loads(done.stdout.splitlines()[-1])
            print(by, figures[by], flush=True)
    ratios = {
        f"{name}_ratio": round(figures["rules"][name] / figures["ids"][name], 2)
        for name in ("seconds", "processor_seconds", "peak_mb")
    }
    from benchmarks.common import report

    report("many_people", {"people": options.people, "first_rules": RULES, **figures, **ratios})


if __name__ == "__main__":
    main()
