"""Services of deploy/compose.yaml, each in a sandbox like its container: tests.compose_here."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tests.compose_here import BWRAP, SERVES
from tests.containers import CHECKOUT
from tests.repository.test_deploy import NGINX
from vfl_flower.launch.engines import Finished as Run

IN_A_NETWORK = [str(BWRAP), "--dev-bind", "/", "/", "--unshare-net", "--die-with-parent"]


def why_not() -> str:
    """Return what is missing to run these tests; empty if nothing is."""
    if not NGINX:
        return "nginx is missing: apt install nginx-light"
    if not BWRAP:
        return "bwrap is missing: apt install bubblewrap"
    inner = [BWRAP, "--ro-bind", "/", "/", "--unshare-user", "--unshare-pid", "true"]
    if subprocess.run([*IN_A_NETWORK, *inner], capture_output=True).returncode:
        return "this machine permits no user namespaces"
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.xdist_group("containers")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of services that have done all that `tests.compose_here` has them do."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("containers")
    words = [*IN_A_NETWORK, sys.executable, "-m", "tests.compose_here", str(folder)]
    done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder


def outcomes(home: Path) -> dict[str, Any]:
    return yaml.safe_load((home / "outcomes.yaml").read_text())


def test_the_services_train_over_streams_and_predict(home: Path) -> None:
    run = Run(home / "volumes/bank-results/model")
    assert run.summary["failure"] is None
    assert (run.summary["engine"], run.summary["transport"]) == ("supernodes", "stream")
    assert run.summary["parties"] == 2 and run.summary["test_accuracy"] > 0.9
    assert "finished:completed" in (home / "trained.log").read_text()
    assert outcomes(home)["predict"] == 0
    assert len(pd.read_parquet(home / "volumes/bank-results/scores.parquet")) > 60


def test_a_later_start_trains_nothing_again_and_knows_the_parties(home: Path) -> None:
    assert outcomes(home)["train again"] == 0 and (home / "train.log").read_text() == ""
    assert (home / "setup.log").read_text().count("labels.csv") == 1
    assert outcomes(home)["predict again"] == 0
    scores = [home / f"volumes/bank-results/scores{each}.parquet" for each in ("", "-again")]
    pd.testing.assert_frame_equal(*map(pd.read_parquet, scores))
    assert "is not registered" not in (home / "label-holder.log").read_text()


def test_a_run_that_fails_or_is_stopped_ends_so(home: Path) -> None:
    assert outcomes(home)["failing"] == 1
    assert "finished:failed" in (home / "failing.log").read_text()
    assert outcomes(home)["stopped"] == 143
    text = (home / "list.log").read_text()
    found = [each["status"] for each in json.loads(text[text.index("{") :])["runs"]]
    of_runs = ["completed"] * 3 + ["failed"] + ["stopped"] * (3 if SERVES else 1)
    assert sorted(found) == sorted(f"finished:{each}" for each in of_runs)


@pytest.mark.skipif(not SERVES, reason="`vfl serve` is not there yet")
def test_the_service_answers_and_its_token_is_replaced_without_a_restart(home: Path) -> None:
    for log in ("asked", "asked-anew"):
        text = (home / f"{log}.log").read_text()
        assert text.count("prediction") >= 3, text
    assert outcomes(home)["retired"] != 0
    assert "HTTP Error 401" in (home / "retired.log").read_text()


def test_secrets_stay_with_their_owner_and_a_container_writes_its_volumes_alone(home: Path) -> None:
    assert outcomes(home)["root"] != 0 and outcomes(home)["data"] != 0
    assert (home / "root.log").read_text().count("Read-only file system") == 2
    volumes = home / "volumes"
    secret = {
        path.read_bytes(): path.parent.name
        for path in volumes.glob("*-secrets/*")
        if path.suffix in (".key", ".token")
    }
    assert len(secret) == 4  # of the label holder two, and of each party one
    for path in volumes.glob("*-secrets/*"):
        assert secret.get(path.read_bytes(), path.parent.name) == path.parent.name
        assert path.stat().st_mode & 0o077 == 0
