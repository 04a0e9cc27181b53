"""A service that is left alone: kills, pauses and new secrets while callers ask.

Two parties, a label holder and a service run on nodes of this machine over TLS. At random moments
a party's node is killed or ended and started again, or its processes are paused, or the file of
tokens or the certificate is replaced. Each score is compared with `vfl predict` for the parties
that it names. Only party 1's node is ended, so that the processes of party 0 show what grows.

    python -m benchmarks.soak                # ten minutes
    python -m benchmarks.soak --seconds 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import ssl
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from benchmarks.serve import GOAL_BACK, NEW, Caller, Deployment, files
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.tasks.inference.serving.serve import PROCESS
from vfl_flower.transport.nodes.certificates import self_signed

CALLERS, PAUSE = 4, 0.05  # seconds between two requests of a caller
MINUTE = 60.0  # seconds between two looks at the memory of a process
QUIET = 5.0  # most seconds between two events


def main() -> None:
    """Print each event, and the figures as JSON in the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S")
    parser.add_argument("--people", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the events")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vfl-soak-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        os.environ["VFL_HOME"] = str(folder / "home")
        ids, keys, nodes = files(folder, given.people)
        run_local(
            2,
            {**keys, "subsets": "sampled", "epochs": 2, "out": f"{folder}/run"},
            node_configs=nodes,
        )
        tables = {}
        for without, parties in (("", (0, 1)), ("1", (0,)), ("0", (1,))):
            asked = {"dataset": f"files:{folder}/everyone.csv", "label": "label"}
            asked |= {"model": f"{folder}/run", "without": without}
            tables[parties] = pd.read_csv(predict_local(asked, nodes)).set_index("id")
        soak = Soak(folder, ids, tables)
        soak.new_certificate()
        soak.new_tokens()
        soak.deployed = Deployment(folder, keys, nodes, stack)
        print(json.dumps({"benchmark": "soak", **soak.run(given.seconds, given.seed)}))


class Soak:
    """A service, its callers, and what happens to them.

    Parameters
    ----------
    tables : parties of a score -> what `vfl predict` writes with these parties alone.
    """

    deployed: Deployment

    def __init__(self, folder: Path, ids: list[str], tables: dict[Any, pd.DataFrame]) -> None:
        self.folder, self.ids = folder, ids
        self.right = {of: table["probability_1"].to_dict() for of, table in tables.items()}
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.back: dict[str, list[float]] = {"killed": [], "ended": []}
        self.reloaded: list[float] = []
        self.memory: dict[psutil.Process, tuple[str, list[float]]] = {}
        self.began, self.ended, self.serial = time.monotonic(), threading.Event(), 0

    def run(self, seconds: float, seed: int) -> dict[str, Any]:
        """Let callers ask and events happen; return the figures."""
        threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(CALLERS)]
        threads.append(threading.Thread(target=self.measure))
        for each in threads:
            each.start()
        self.began = time.monotonic()
        chance, events = random.Random(seed), [self.kill, self.end, self.pause]
        events += [self.pause, self.renew_tokens, self.renew_certificate]
        try:
            while (time.monotonic() - self.began) < seconds:
                time.sleep(chance.uniform(0, QUIET))
                chance.choice(events)(chance)
            self.until_back()
        finally:
            self.ended.set()
            for each in threads:
                each.join()
        return self.figures()

    def figures(self) -> dict[str, Any]:
        """Return what the callers saw, the memory of each process, and the times of events."""
        grown = {name: mb for name, mb in sorted(self.memory.values()) if len(mb) > 1}
        return {
            **{each: self.counts[each] for each in ("scores", "flagged", "unscored", "wrong")},
            "statuses": dict(sorted(self.statuses.items())),
            "unanswered": self.counts["unanswered"],
            **{name: self.counts[name] for name in sorted(self.counts) if name.startswith("of ")},
            "back_seconds": {how: list(map(_rounded, took)) for how, took in self.back.items()},
            "back_goal": GOAL_BACK,
            "reload_seconds": list(map(_rounded, self.reloaded)),
            "memory_mb": grown,
        }

    # --- callers ----------------------------------------------------------------------------------

    def caller(self, name: str = "caller") -> Caller:
        """Return a caller who trusts each certificate so far."""
        made = Caller(self.folder, self.deployed.port, name)
        made.tls = ssl.create_default_context(cafile=f"{self.folder}/trusted.pem")
        return made

    def ask(self, number: int) -> None:
        """Ask for one to a hundred ids again and again, with a new connection now and then."""
        generator, mine = np.random.default_rng(number), self.caller()
        for asked in range(10**9):
            if self.ended.wait(PAUSE):
                return
            if asked % 200 == 199:
                mine = self.caller()
            many = generator.choice([1, 1, 1, 10, 100])
            least = len(self.ids) - NEW if generator.random() < 0.02 else 0  # new ids
            rows = generator.integers(least, len(self.ids), size=many)
            try:
                status, said = mine.ask([self.ids[row] for row in rows])
            except OSError as error:
                self.counts["unanswered"] += 1
                print(f"{self.at} no answer: {error!r}", flush=True)
                mine = self.caller()
                continue
            self.statuses[status] += 1
            for score in said.get("predictions", ()):
                self.check(score)

    def check(self, score: dict[str, Any]) -> None:
        """Count a score, and whether it is what `vfl predict` writes."""
        self.counts["scores"] += 1
        self.counts["flagged"] += bool(score["missing"])
        if score["prediction"] is None:
            self.counts["unscored"] += 1
            return
        due = self.right[tuple(score["parties"])][score["id"]]
        if abs(score["probabilities"]["1"] - due) > 1e-6:
            self.counts["wrong"] += 1
            print(f"{self.at} wrong: {score}, due {due}", flush=True)

    # --- events -----------------------------------------------------------------------------------

    @property
    def at(self) -> str:
        """Return the time of an event."""
        return f"{time.monotonic() - self.began:6.1f} s"

    def happens(self, event: str) -> None:
        """Print an event, and count it."""
        self.counts[f"of {event}"] += 1
        print(f"{self.at} {event}", flush=True)

    def kill(self, chance: random.Random) -> None:
        """Kill a party's node, and start it until Flower takes its key again."""
        self.happens("killed")
        self.deployed.kill(1)
        self.start_again("killed", chance)

    def end(self, chance: random.Random) -> None:
        """End a party's node by SIGTERM, and start it."""
        self.happens("ended")
        self.deployed.stacks[1].close()
        self.start_again("ended", chance)

    def start_again(self, how: str, chance: random.Random) -> None:
        """Start a party's node after a moment; note how long it takes until its scores are back."""
        time.sleep(chance.uniform(0, 5))
        self.deployed.start(1)
        began, first = time.monotonic(), time.monotonic()
        while not self.is_back():
            if self.deployed.process_of[1].poll() is not None:  # Flower refuses its key
                self.deployed.stacks[1].close()
                self.deployed.start(1)
                began = time.monotonic()
            if time.monotonic() > first + 200:
                raise SystemExit(f"The party is not back: {how}.")
            time.sleep(0.05)
        self.back[how].append(time.monotonic() - began)
        print(f"{self.at} back after {self.back[how][-1]:.1f} s", flush=True)

    def is_back(self) -> bool:
        """Return whether a score has both parties."""
        with suppress(OSError):
            status, said = self.caller().ask([self.ids[0]])
            return status == 200 and not said["predictions"][0]["missing"]
        return False

    def until_back(self) -> None:
        """Wait until scores have both parties, after the last event."""
        until = time.monotonic() + 30
        while not self.is_back() and time.monotonic() < until:
            time.sleep(0.1)

    def pause(self, chance: random.Random) -> None:
        """Stop a party's processes for some seconds."""
        party, seconds = chance.randrange(2), chance.uniform(0.2, 12)
        self.happens("paused")
        root = psutil.Process(self.deployed.process_of[party].pid)
        family = [*root.children(recursive=True), root]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(seconds)

    def new_tokens(self) -> str:
        """Write the file of tokens, with one more caller; return the caller's name."""
        self.serial += 1
        names = "caller", f"caller-{self.serial}"
        next_file = self.folder / "run" / "next.token"
        next_file.touch(0o600)
        next_file.write_text("".join(f"{name} {name}-{'x' * 20}\n" for name in names))
        next_file.rename(self.folder / "run" / "serve.token")
        return names[1]

    def new_certificate(self) -> None:
        """Write the files of the key and the certificate, after callers know it."""
        key, certificate = self_signed("127.0.0.1")
        with open(self.folder / "trusted.pem", "ab") as trusted:
            trusted.write(certificate)
        (self.folder / "key.pem").write_bytes(key)
        (self.folder / "cert.pem").write_bytes(certificate)

    def renew_tokens(self, chance: random.Random) -> None:
        """Replace the tokens, and wait until the new one is valid and the last one is not."""
        self.happens("new tokens")
        began, last = time.monotonic(), f"caller-{self.serial}"
        name = self.new_tokens()
        until = began + 30
        while time.monotonic() < until:
            statuses = [self.caller(each).ask([self.ids[0]])[0] for each in (name, last)]
            if statuses == [200, 401]:
                self.reloaded.append(time.monotonic() - began)
                return
            time.sleep(0.1)
        self.counts["of tokens that were not read"] += 1

    def renew_certificate(self, chance: random.Random) -> None:
        """Replace the certificate, and wait until the service shows it."""
        self.happens("new certificate")
        began = time.monotonic()
        self.new_certificate()
        alone = Caller(self.folder, self.deployed.port, "caller")  # trusts the new one alone
        while time.monotonic() < began + 30:
            with suppress(OSError):
                alone.http = None
                alone.ask([self.ids[0]])
                self.reloaded.append(time.monotonic() - began)
                return
            time.sleep(0.1)
        self.counts["of certificates that were not read"] += 1

    # --- memory -----------------------------------------------------------------------------------

    def measure(self) -> None:
        """Note the memory of each process at the end of each minute of its life."""
        while not self.ended.wait(1.0):
            for name, each in self.processes():
                with suppress(psutil.Error):
                    found = self.memory.setdefault(each, (name, []))[1]
                    if time.time() - each.create_time() > MINUTE * (len(found) + 1):
                        found.append(_rounded(each.memory_info().rss / 2**20))

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """Return the processes of the service and of the nodes, with names."""
        found = []
        with suppress(OSError, ValueError, psutil.Error):
            number = int((self.folder / "run" / PROCESS).read_text())
            found.append(("service", psutil.Process(number)))
        assert self.deployed.superlink._process
        roots = {"superlink": self.deployed.superlink._process.pid}
        roots |= {f"party {n}": each.pid for n, each in self.deployed.process_of.items()}
        for name, number in roots.items():
            with suppress(psutil.Error):
                root = psutil.Process(number)
                found.append((name, root))
                for each in root.children(recursive=True):
                    if each.pid != found[0][1].pid:
                        found.append((f"{name}: {each.name()} {each.pid}", each))
        return found


def _rounded(value: float) -> float:
    return round(value, 1)


if __name__ == "__main__":
    main()
