"""Latency and processor time of one score with contributions and reasons; stability of reasons.

The service is a process of this machine, and so are its parties. The client asks for one id a
request, in turn with and without contributions, and with reasons by columns. On the credit table,
the reasons of some people are computed with two disjoint sets of reference rows.

    OMP_NUM_THREADS=1 python -m benchmarks.contributions
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.common import check_there, report
from examples.serve_scores import service, wait_for
from vfl_flower.client import Scores
from vfl_flower.data import split
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.tasks.inference import contribution_to_score, parts, predict
from vfl_flower.tasks.inference.party import reasons as at_party

KINDS: dict[str, dict[str, Any]] = {"all parties": {}, "any subset": {"subsets": "sampled"}}


def main() -> None:
    """Print a table of latencies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="of each kind")
    parser.add_argument("--parties", type=int, nargs="+", default=[2, 8, 10, 12], metavar="N")
    parser.add_argument("--npz", default="../shared/data/uci_credit_default.npz", metavar="FILE")
    parser.add_argument("--people", type=int, default=300, metavar="N", help="of the credit table")
    given = parser.parse_args()
    check_there("--npz", given.npz)
    figures: dict[str, Any] = {}
    for parties in given.parties:
        for kind, keys in KINDS.items():
            with tempfile.TemporaryDirectory(prefix="vfl-explain-") as folder:
                out = f"{folder}/run"
                run_local(parties, {"dataset": "breast-cancer", "epochs": 1, "out": out, **keys})
                found = latencies(Path(out), given.requests)
            said = ", ".join(f"{name} {each:.1f} ms" for name, each in found.items())
            print(f"{parties} parties, a model of {kind}: {said}")
            figures[f"{parties} {kind}"] = found
    figures["stability"] = stability(given.npz, given.people)
    print(figures["stability"])
    report("contributions", figures)


def latencies(run: Path, requests: int) -> dict[str, float]:
    """Return the latency and the processor time of each kind of request, in ms.

    A kind's requests come in ten blocks, in turn with the other kinds' blocks. The
    processor time is of the service's process, which has the label holder and all parties.
    """
    kinds: dict[str, bool | str] = {"plain": False, "explained": True, "with reasons": "columns"}
    took, used = ({kind: list[float]() for kind in kinds} for _ in range(2))
    block = -(-requests // 10)
    with service(run) as (url, process):
        wait_for(url, run, process)
        service_process = psutil.Process(process.pid)
        with Scores(url, run / "serve.token") as scores:
            for number in range(-1, 10):
                for kind, explain in kinds.items():
                    before = sum(service_process.cpu_times()[:2])
                    for each in range(block):
                        began = time.perf_counter()
                        (answer,) = scores.predict([each % 100], explain)
                        took[kind].append(1000 * (time.perf_counter() - began))
                        assert ("contributions" in answer) == bool(explain)
                    used[kind].append(sum(service_process.cpu_times()[:2]) - before)
                    if number < 0:  # the first ones warm the service up
                        took[kind].clear()
                        used[kind].clear()
    return {
        f"{kind} {name}": figure
        for kind in kinds
        for name, figure in (
            ("median", float(np.median(took[kind]))),
            ("99 %", float(np.percentile(took[kind], 99))),
            ("processor", 1000 * sum(used[kind]) / (10 * block)),
        )
    }


@contextmanager
def patched(number: int, people: int, watched: Any) -> Iterator[None]:
    """Compare with set ``number`` of the reference rows, and explain the first people only."""

    def rows(held_out: int, most: int = split.BACKGROUND) -> Any:
        drawn = np.random.default_rng(0).permutation(held_out)[number * most : (number + 1) * most]
        return np.sort(drawn)

    lines = predict._reasons
    with ExitStack() as patches:
        for where, what, new in (
            (contribution_to_score, "background_rows", rows),
            (at_party, "background_rows", rows),
            (parts.References, "split", watched),
            (predict, "_reasons", lambda *given: islice(lines(*given), people)),
        ):
            patches.enter_context(patch.object(where, what, new))
        yield


def parts_of(run: Path) -> list[dict[str, float]]:
    """Return the part of each column of each person, and remove the parties' files."""
    found: dict[str, dict[str, float]] = {}
    for party in range(2):
        (path,) = run.glob(f"party-{party}-*-reasons.jsonl")
        for line in map(json.loads, path.read_text().splitlines()):
            mine = {f"{party} {each['column']}": each["part"] for each in line["columns"]}
            found.setdefault(line["request"].rpartition(":")[2], {}).update(mine)
        path.unlink()
    return [found[person] for person in sorted(found)]


def stability(npz: str, people: int) -> dict[str, float]:
    """Return the share of people whose reasons stay, and how far parts miss a contribution.

    A miss is what `References.split` spreads, over the sum of all parts' sizes.
    """
    misses: list[float] = []
    drawn = []

    split = parts.References.split

    def watched(self: Any, sample: Any, some: Any, slopes: Any, total: float) -> Any:
        found = split(self, sample, some, slopes, total)
        mean = slopes.mean(0)[None]
        one = self.products(sample, slopes) - self.products(some, slopes)
        sums = one + self.products(some, mean) - self.products(self.mean[None], mean)
        misses.append(abs(float(sums.sum()) / len(some) - total) / float(np.abs(found[0]).sum()))
        return found

    with tempfile.TemporaryDirectory(prefix="vfl-reasons-") as name:
        out = f"{name}/run"
        run_local(2, {"dataset": f"npz:{Path(npz).absolute()}", "epochs": 5, "out": out})
        for number in range(2):
            with patched(number, people, watched):
                predict_local({"model": out, "explain": True, "out": f"{name}/{number}.csv"})
            drawn.append(parts_of(Path(out)))
    first, second = drawn
    tops = [[max(each, key=lambda k: abs(each[k])) for each in some] for some in (first, second)]
    same = [one == other for one, other in zip(*tops, strict=True)]
    return {
        "people": len(same),
        "same top reason": float(np.mean(same)),
        "median miss": float(np.median(misses)),
        "95 % miss": float(np.quantile(misses, 0.95)),
    }


if __name__ == "__main__":
    main()
