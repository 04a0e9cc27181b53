"""Start the services of deploy/compose.yaml as processes of this machine.

    python -m tests.compose_here FOLDER

Bubblewrap runs each service as in its container: with its command, variables and user. The root
file system is read-only, and only volumes and /tmp can be written. Only two things differ. All
services share one network, so that party N listens on port 9094 + N, and `label-holder` is a name
of loopback. The image is the environment of this process.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.containers import CHECKOUT, SERVICES, command, health, in_order, mounts, stage_of
from tests.fleet import until
from vfl_flower.config.run_config import KEYS
from vfl_flower.launch.processes import stop
from vfl_flower.transport.flower_processes import app_of_this_package

BWRAP = shutil.which("bwrap")
STARTING = 300.0  # seconds that a service may take, on a machine that has much else to do
NODE_PORT = 9094
SERVES = "serve-address" in KEYS


class Here:
    """The services, their volumes in a folder, and their logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "pyproject.toml").write_text(app_of_this_package())
        (folder / "hosts").write_text("127.0.0.1 localhost label-holder\n")

    def volume(self, name: str) -> Path:
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def contained(self, name: str, words: list[str]) -> list[str]:
        """Return a command as a service's container would run it."""
        service = SERVICES[name]
        stage, port = stage_of(service), str(NODE_PORT)
        environment = {**stage.environment, **service.get("environment", {})}
        prefixes = sorted({sys.prefix, sys.base_prefix})
        environment["PATH"] = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        environment |= {key: os.environ[key] for key in _PASSED if key in os.environ}
        if name.startswith("party-"):
            port = str(NODE_PORT + int(name[-1]))
            environment["PORT"] = port
        user, _, group = stage.user.partition(":")
        found = [str(BWRAP), "--die-with-parent", "--unshare-user", "--unshare-pid"]
        found += ["--uid", user, "--gid", group, "--clearenv", "--chdir", stage.folder]
        found += [word for key, value in environment.items() for word in ("--setenv", key, value)]
        found += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        for place in ("/usr", "/etc", *prefixes, str(CHECKOUT), *paths):
            found += ["--ro-bind", place, place]
        for link in ("/bin", "/sbin", "/lib", "/lib64"):
            if Path(link).is_symlink():
                found += ["--symlink", str(Path(link).readlink()), link]
        found += ["--ro-bind", str(self.folder / "hosts"), "/etc/hosts"]
        found += ["--ro-bind", f"{CHECKOUT}/deploy", f"{stage.folder}/deploy"]
        found += ["--ro-bind", f"{self.folder}/pyproject.toml", f"{stage.folder}/pyproject.toml"]
        for path, (volume, read_only) in mounts(service).items():
            found += ["--ro-bind" if read_only else "--bind", str(self.volume(volume)), path]
        found += ["--remount-ro", "/", "--"]
        return found + [word.replace(f":{NODE_PORT}/", f":{port}/") for word in words]

    def start(self, name: str, words: list[str] | None = None, log: str = "") -> None:
        """Start a service, or another command in its container."""
        with (self.folder / f"{log or name}.log").open("ab") as output:
            self.running[log or name] = subprocess.Popen(
                self.contained(name, words or command(SERVICES[name])),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, name: str, words: list[str] | None = None, log: str = "") -> int:
        """Run a service to its end, or another command in its container."""
        self.start(name, words, log)
        return self.running.pop(log or name).wait(2 * STARTING)

    def is_healthy(self, name: str) -> bool:
        assert self.running[name].poll() is None, f"{name} has ended: {self.log(name)[-3000:]}"
        words = self.contained(name, health(SERVICES[name]))
        return subprocess.run(words, capture_output=True).returncode == 0

    def up(self) -> None:
        """Start all services, in the order and under the conditions of the compose file."""
        for name in in_order():
            if name == "serve" and not SERVES:
                continue
            waits = SERVICES[name].get("depends_on", {})
            for other, how in waits.items():
                if how["condition"] == "service_healthy":
                    until(partial(self.is_healthy, other), STARTING)
                else:
                    ended = self.running.pop(other)
                    assert ended.wait(2 * STARTING) == 0, self.log(other)[-3000:]
            self.start(name)

    def terminate(self, log: str) -> int:
        """Send SIGTERM to a command in its container, as an engine does; return its status."""
        process = self.running.pop(log)
        with suppress(psutil.NoSuchProcess, IndexError):
            [init] = psutil.Process(process.pid).children()
            init.children()[0].send_signal(signal.SIGTERM)
        try:
            return process.wait(60)
        finally:
            stop(process)

    def down(self) -> None:
        """End all services, those that depend on others first."""
        for log in reversed(list(self.running)):
            with suppress(subprocess.TimeoutExpired):
                self.terminate(log)


_PASSED = ("PYTHONPATH", "OMP_NUM_THREADS")


def run_options(**options: Any) -> list[str]:
    """Return the command that starts a run in the container of the label holder."""
    own = {"stream-address": "label-holder", "parties": 2, **options}
    words = " ".join(f"{key}={value!r}" for key, value in own.items())
    return ["deploy/run.sh", "/keys", words]


def main(folder: Path) -> None:
    """Train, predict, fail, stop and serve; `test_containers` looks at what is left."""
    here = Here(folder)
    try:
        here.up()
        outcomes = {"train": here.running.pop("train").wait(2 * STARTING)} if not SERVES else {}
        # --- serving --------------------------------------------------------------------------
        if SERVES:
            until(partial(here.is_healthy, "serve"), STARTING)
            outcomes["asked"] = here.run("train", ASK, "asked")
            secrets = here.volume("bank-secrets")
            (secrets / "serve.token").rename(secrets / "retired")
            (secrets / "new").touch(0o600)
            (secrets / "new").write_text("example a-new-token-of-enough-letters\n")
            (secrets / "new").rename(secrets / "serve.token")
            until(lambda: here.run("train", ASK, "asked-anew") == 0, 30.0)
            outcomes["retired"] = here.run("train", ASK_BY_RETIRED, "retired")
            outcomes["serve"] = here.terminate("serve")  # parties serve one run at a time
        # --------------------------------------------------------------------------------------
        outcomes |= {
            "root": here.run("train", ["touch", "/new"], "root"),
            "data": here.run("train", ["touch", "/data/new"], "root"),
            "predict": here.run("train", run_options(**NEW), "predict"),
            "failing": here.run("train", run_options(task="predict", model="/x"), "failing"),
        }
        here.start("train", run_options(**LONG), "stopped")
        history = here.volume("bank-results") / "long/history.jsonl"
        until(history.exists, STARTING)
        outcomes["stopped"] = here.terminate("stopped")
        here.down()
        (folder / "train.log").rename(folder / "trained.log")
        here.up()  # again, by the same volumes
        outcomes["train again"] = here.running.pop("train").wait(STARTING) if not SERVES else 0
        if SERVES:
            until(partial(here.is_healthy, "serve"), STARTING)
            outcomes["serve again"] = here.terminate("serve")
        outcomes["predict again"] = here.run("train", run_options(**NEW_AGAIN), "predict-again")
        runs = ["sh", "-c", "FLWR_HOME=/keys exec flwr list vfl --format json"]
        outcomes["list"] = here.run("train", runs, "list")
        (folder / "outcomes.yaml").write_text(yaml.safe_dump(outcomes))
    finally:
        here.down()


NEW = {"task": "predict", "model": "/results/model", "dataset": "files:/data/new.csv"}
NEW |= {"out": "/results/scores.parquet"}
NEW_AGAIN = {**NEW, "out": "/results/scores-again.parquet"}
LONG = {"dataset": "files:/data/labels.csv", "id": "person", "label": "label", "epochs": 100_000}
LONG |= {"patience": 0, "window": 1, "out": "/results/long"}
_ASK = """
import json, ssl, sys, urllib.request as u
trust = ssl.create_default_context(cafile='/run/secrets/superlink.crt')
token = open('/run/secrets/' + sys.argv[1]).read().split()[1]
ids = [int(line.split(',')[0]) for line in open('/data/labels.csv').readlines()[1:4]]
ask = u.Request('https://localhost:8443/v1/predict', json.dumps({'ids': ids}).encode(),
                {'Authorization': f'Bearer {token}', 'Content-Type': 'application/json'})
print(u.urlopen(ask, timeout=30, context=trust).read().decode())
"""
ASK = ["python", "-P", "-c", _ASK, "serve.token"]
"""Asks for three predictions, as the README's curl does."""
ASK_BY_RETIRED = [*ASK[:-1], "retired"]  # asks by a token that was replaced


if __name__ == "__main__":
    main(Path(sys.argv[1]))
