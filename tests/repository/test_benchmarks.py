"""Every benchmark's first seconds, as its user starts it, on made-up data of the right shapes."""

import io
import json
import math
import re
import runpy
import subprocess
import sys
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from torch.nn import functional

from benchmarks.common import trained
from benchmarks.papers import __main__ as papers
from benchmarks.papers.__main__ import ROWS
from benchmarks.papers.page import PAGES
from benchmarks.papers.rows import Data
from benchmarks.papers.training import Training
from benchmarks.peers import __main__ as peers
from tests.conftest import Start
from vfl_flower.api.training import train
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.launch.engines import Finished
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import flat
from vfl_flower.party import session
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized

CHECKOUT = Path(__file__).parents[2]
BENCHMARKS = sorted(
    path.stem
    for path in (CHECKOUT / "benchmarks").glob("*.py")
    if path.stem not in ("__init__", "common")
)
SMALL = {  # arguments of each benchmark: as few seconds as show that it works
    "clock": "--mnist {mnist} --epochs 2 --seeds 1 --target 0 --picture {picture}",
    "cluster": "--nodes 0 2 --parties 16 --steps 4 --supernodes 3 --kill 1 --party-timeout 15 "
    "--epochs 20 --settle 2",
    "before": "--tables wine --seeds 2",
    "calibration": "--data credit --credit {credit} --seeds 1 --epochs 1",
    "codecs": "--mnist {mnist} --repeats 1",
    "contributions": "--requests 5 --parties 2",
    "defaults": "--only breast-cancer --seeds 1 --trials 2 --systems split-nn",
    "delays": "--mnist {mnist} --seeds 1 --epochs 1 --delays 5",
    "distil": "--credit {credit} --mnist {mnist} --only table --seeds 1 --scale 0.1",
    "explain": "--rows 500 --columns 6",
    "gpu": "",
    "images": "--cifar {cifar} --epochs 1",
    "information": "--npz {credit} --draws 2 --epsilons 8",
    "many_people": "--people 400",
    "monotone": "--npz {credit} --seeds 1 --epochs 1 --pairs 100 --systems split-nn",
    "keys": "--febrl {febrl} --left-out 20 --seeds 1",
    "large_table": "--rows 3000 --columns 12 --both 3000",
    "losslessness": "--credit {credit} --trials 2 --epochs 1",
    "memory": "--hidden 50",
    "overhead": "--mnist {mnist} --repeats 1",
    "new_party": "--npz {credit} --seeds 1 --epochs 1 --more 1",
    "partial_bank": "--npz {credit}",
    "partial_defaults": "--dataset breast-cancer --parties 2 --seeds 2 --first 1 --kept 1 "
    "--epochs 2",
    "partial_rows": "--mnist {mnist} --epochs 1 --times 1",
    "privacy_utility": "--mnist {mnist} --credit {credit} --epochs 2 --epsilons 1 "
    "--picture {picture}",
    "afternoon": "--rows 10000 --parties 2 --ids 8000",
    "parties": "--parties 2 16 --steps 12 --ways together 1",
    "psi": "--ids 2000",
    "realign": "--ids 2000 --engines local",
    "runtimes": "--mnist {mnist} --engines ray ray-messages --windows 8",
    "scale": "--only window --most 400",
    "secure_sum": "--mnist {mnist} --repeats 1 --epochs 1 --seeds 1",
    "serve": "--people 1000 --requests 50 --seconds 0.5",
    "soak": "--people 1000 --seconds 1",
    "start": "--runs 1 --turns 1 --settle 0 --imports 1",
    "step": "",
    "streams": "--rounds 2 --arithmetic",
    "table2": "--mnist {mnist} --rows 200 --seeds 1 --rounds 2",
    "texts": "--sst2 {sst2} --seeds 1 --epochs 1",
    "untrusted": "--mnist {mnist} --credit {credit} --seeds 1 --epochs 1 --flag-rate 0.1 --few 5 "
    "--parties 2",
    "windows": "--mnist {mnist} --seeds 1 --epochs 1",
    "worth": "--seeds 1 --epochs 1",
    "zeroth_order": "--mnist {mnist} --rows 200 --repeats 1",
}

TRAINS = {  # these only train, so that they run in this process; the others measure or start some
    *("calibration", "clock", "contributions", "delays", "images", "information", "losslessness"),
    *("overhead", "partial_rows", "secure_sum", "texts", "windows", "worth", "zeroth_order"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data sets like MNIST and the credit-default table, of random numbers."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    images = random.integers(0, 256, (600, 28, 28), dtype=np.uint8)
    digits = random.integers(0, 10, 600)
    arrays: dict[str, Any] = {"X_train": images[:480], "y_train": digits[:480]}
    np.savez(folder / "mnist.npz", **arrays, X_test=images[480:], y_test=digits[480:])
    table, defaulted = random.standard_normal((300, 23)), random.integers(0, 2, 300)
    np.savez(folder / "credit.npz", X=table, y=defaulted)
    for name in ("cifar", "sst2", "febrl"):
        (folder / name).mkdir()
    febrl = ["rec_id,given_name,surname,date_of_birth,postcode,suburb,address_1,street_number"]
    febrl += [f"rec-{n}-org,ann{n},lee{n},19{n:02}0301,{n},town,road{n},{n}" for n in range(100)]
    for name in "ab":
        (folder / "febrl" / f"dataset4{name}.csv").write_text("\n".join(febrl))
    words = ["a", "film", "that", "is", "not", "good", "bad", "at", "all", "and", "we", "saw", "it"]
    for name in ("train", "test"):
        texts = [{"sentence": " ".join(random.choice(words, 8)), "label": n % 2} for n in range(60)]
        parquet.write_table(pa.Table.from_pylist(texts), folder / "sst2" / f"{name}.parquet")
        rows = [{"image": {"bytes": png(random), "path": ""}, "label": n % 10} for n in range(60)]
        parquet.write_table(pa.Table.from_pylist(rows), folder / "cifar" / f"{name}.parquet")
    return folder


def png(random: np.random.Generator) -> bytes:
    """A small picture of noise."""
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
    return file.getvalue()


def numbers(figures: Any) -> list[float]:
    """All numbers in what was read from JSON."""
    if isinstance(figures, dict | list):
        inner = figures.values() if isinstance(figures, dict) else figures
        return [number for each in inner for number in numbers(each)]
    return [figures] if isinstance(figures, int | float) else []


def files() -> dict[Path, int]:
    """Return the files of the checkout that a benchmark might write, and their times."""
    places = (CHECKOUT, CHECKOUT / "benchmarks", CHECKOUT / "runs")
    found = [path for place in places for path in place.glob("[!._]*")]
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in found}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_prints_figures_and_leaves_the_checkout_as_it_was(
    name: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture, before = tmp_path / "picture.png", files()
    places = {"mnist": data / "mnist.npz", "credit": data / "credit.npz"}
    places |= {"cifar": data / "cifar", "sst2": data / "sst2", "picture": picture}
    places["febrl"] = data / "febrl"
    words = [word.format(**places) for word in SMALL[name].split()]
    if name in TRAINS:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        printed = capsys.readouterr().out
    else:
        command = [sys.executable, "-m", f"benchmarks.{name}", *words]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    figures = json.loads(printed.splitlines()[-1])
    assert figures.pop("benchmark") == name
    found = numbers(figures)
    assert found and all(map(math.isfinite, found)), figures
    assert files() == before
    assert picture.exists() == ("--picture" in words)


# --- peers ----------------------------------------------------------------------------------------


def test_lines_of_user_code_are_those_that_hold_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "HERE", tmp_path)
    code = "import os\n\n# a comment\ndef f():\n    x = (\n        1,\n    )\n    return x\n"
    documented = code.replace("f():\n", 'f():\n    """It has\n\n    a text."""\n')
    (tmp_path / "one.py").write_text(code)
    (tmp_path / "two.py").write_text(f'"""A text."""\n\n{documented}')
    assert peers.lines_of_code("one") == peers.lines_of_code("two") == 6
    assert peers.lines_of_code("one", "two") == 12


def test_a_peer_that_cannot_be_installed_is_not_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> Path:
        raise subprocess.CalledProcessError(1, "pip", stderr="ERROR: there is\nno such package\n")

    monkeypatch.setattr(peers, "environment", refused)
    monkeypatch.setattr("shutil.which", lambda name: name)
    words = ["--mnist", str(data / "mnist.npz"), "--environments", str(tmp_path)]
    words += ["--only", "NVFlare, two sites"]
    monkeypatch.setattr(sys, "argv", ["peers", *words])
    peers.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == ("NVFlare, two sites cannot be installed here; pip said: no such package")
    assert json.loads(said[-1])["NVFlare, two sites"] == "not run"


@pytest.mark.nightly
def test_one_program_sends_the_bytes_of_its_tensors_alone(data: Path, tmp_path: Path) -> None:
    """Remote calls send each tensor once, with headers; a run in process sends nothing."""
    try:
        subprocess.run(["unshare", "--net", "--map-root-user", "ip", "link"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine permits no network of one's own")
    mnist, rows = str(data / "mnist.npz"), tmp_path / "rows.npz"
    tensors = peers.write_rows(mnist, rows)
    here = peers.ours("local", 8, mnist, 3, tmp_path / "here")
    calls = peers.theirs(Path(sys.executable), "with_rpc", rows, 3, tmp_path / "calls")
    assert here["wire_mb_an_epoch"] == 0
    assert tensors <= calls["wire_mb_an_epoch"] <= 1.3 * tensors
    assert calls["lines"] > here["lines"]


# --- the papers' rows -----------------------------------------------------------------------------


def test_every_benchmark_has_small_arguments_and_every_run_of_a_paper_is_accepted() -> None:
    assert sorted(SMALL) == BENCHMARKS
    one_hot = "npz:credit-one-hot.npz"
    data = Data(
        "npz:mnist.npz", "npz:credit.npz", one_hot, "hf:cifar", "breast-cancer", "npz:part.npz"
    )
    for name, row in ROWS.items():
        jobs = row.jobs(data)
        for job in jobs.values():
            assert sized(resolve({**job.keys, "noise-seed": 0}), 1000).training.epochs, name
        assert row.theirs.keys() <= jobs.keys(), name


def test_the_pages_of_results_name_all_rows_and_no_other_and_small_pictures() -> None:
    page = "\n".join(each.read_text() for each in PAGES.values())
    commands = set(re.findall(r"benchmarks\.papers ([\w-]+)", page))
    assert commands - {"ROW", "all", "page"} == set(ROWS)
    pictures = set(re.findall(r"\]\((?:\.\./papers/)?([\w-]+\.png)\)", page))
    there = CHECKOUT / "docs" / "papers"
    assert pictures == {path.name for path in there.glob("*.png")}
    assert all((there / each).stat().st_size < 200_000 for each in pictures)


def test_the_gradient_of_all_training_rows_is_what_a_full_step_goes_along() -> None:
    rate = 0.3
    keys: dict[str, Any] = {
        **{"dataset": "breast-cancer", "batch-size": 10**6, "window": 1, "optimizer": "sgd"},
        **{"party-lr": rate, "server-lr": rate, "bottom-hidden": 4, "embedding-size": 3},
    }

    def weights(epochs: int) -> tuple[torch.Tensor, float]:
        strategy, _, _ = trained(2, {**keys, "epochs": epochs}, lambda run: Training(run, True))
        parties = [session.live[party, 2].party.learner.model for party in range(2)]
        models = [*parties, strategy.run.holder.top]
        return torch.cat([flat(each) for each in models]), strategy.history.last["gradient_norm"]

    (before, norm), (after, _) = weights(1), weights(2)
    went = float((after - before).square().sum()) / rate**2
    assert norm == pytest.approx(went, rel=1e-3)


@pytest.mark.nightly
def test_parties_learn_by_differences_with_respect_to_their_embeddings() -> None:
    place = f"{CHECKOUT}/benchmarks/papers/czofo.py:Czofo"
    keys = {"dataset": "digits", "strategy": "vafl", "epochs": 2, "server-lr": 0.05}
    keys |= {"optimizer": "sgd", "batch-size": 64, "bottom-model": "linear", "top-model": "sum"}
    learned = train({**keys, "estimator": place, "party-lr": 0.05}, parties=4).summary
    still = train({**keys, "estimator": place, "party-lr": 1e-9}, parties=4).summary
    assert learned["test_accuracy"] > 0.6 > 0.3 > still["test_accuracy"]
    assert learned["bytes_down"] < learned["bytes_up"]


# --- FedBCD, a rival ------------------------------------------------------------------------------

BCD = f"{CHECKOUT}/benchmarks/papers/fedbcd.py:FedBcd"
BCD_KEYS: dict[str, Any] = {
    **{"dataset": "digits", "epochs": 2, "batch-size": 256, "window": 1, "optimizer": "sgd"},
    **{"bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8, "validation-fraction": 0.0},
    **{"party-lr": 0.1, "server-lr": 0.2},
}


def models_of(run: Finished, parties: int = 3) -> torch.Tensor:
    """All parameters of a run's models, as one vector."""
    names = [*(f"party-{number}" for number in range(parties)), "top"]
    arrays = [each for name in names for each in run.parameters(name).values()]
    return torch.cat([torch.from_numpy(each).flatten() for each in arrays])


@pytest.fixture
def tops(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The top model after each answer."""
    found: list[torch.Tensor] = []
    answer = LabelHolder.answer

    def answered(self: LabelHolder, arrivals: Any) -> Any:
        answers = answer(self, arrivals)
        found.append(flat(self.top).clone())
        return answers

    monkeypatch.setattr(LabelHolder, "answer", answered)
    return found


@pytest.mark.one_by_day
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_fedbcd_with_one_local_step_is_split_learning_after_every_step(
    optimizer: str, tops: list[torch.Tensor], run: Start
) -> None:
    keys = {**BCD_KEYS, "optimizer": optimizer}
    ours, theirs = run(3, {**keys, "estimator": BCD}), run(3, keys)
    half = len(tops) // 2
    assert half == 12
    for mine, other in zip(tops[:half], tops[half:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(models_of(ours), models_of(theirs), rtol=1e-6, atol=1e-6)
    for name in ("bytes_up", "bytes_down", "exchanges", "steps"):
        assert ours.summary[name] == theirs.summary[name]


@pytest.mark.one_by_day
@pytest.mark.parametrize(("q", "decay"), [(5, 0.0), (2, 0.01)])
def test_fedbcd_is_the_algorithm_of_the_paper_step_by_step(
    q: int, decay: float, tops: list[torch.Tensor], run: Start
) -> None:
    """Compare with plain torch: block coordinate descent with stale rows, in one place."""
    keys = {**BCD_KEYS, "estimator": BCD, "local-steps": q, "weight-decay": decay}
    finished, one_step = run(3, keys), run(3, {**keys, "local-steps": 1})
    config = resolve(keys)
    labels = load_labels(config)
    y = torch.from_numpy(labels.train)
    x = [torch.from_numpy(load_features(config, m, 3).train) for m in range(3)]
    bottoms = [build_bottom(config, m, x[m][0], 4) for m in range(3)]
    top = build_top(config, [4] * 3, labels.outputs)
    of_bottoms = [torch.optim.SGD(m.parameters(), 0.1, weight_decay=decay) for m in bottoms]
    of_top = torch.optim.SGD(top.parameters(), 0.2, weight_decay=decay)
    found = iter(tops)
    for epoch in range(2):
        ids = sampling_of(config, len(y)).window(None, epoch, 0, 6, b"").index
        for rows in ids.split(256):
            received = [bottoms[m](x[m][rows]).detach() for m in range(3)]  # the exchange
            h = torch.cat(received, 1).requires_grad_()
            loss = functional.cross_entropy(top(h), y[rows])
            sent = torch.autograd.grad(loss, h)[0].split(4, dim=1)
            for _ in range(q):  # the label holder, with labels and stale embeddings
                of_top.zero_grad()
                functional.cross_entropy(top(h.detach()), y[rows]).backward()
                of_top.step()
            for m, optimizer in enumerate(of_bottoms):  # a party, with stale gradient rows
                for _ in range(q):
                    optimizer.zero_grad()
                    bottoms[m](x[m][rows]).backward(sent[m])
                    optimizer.step()
            torch.testing.assert_close(next(found), flat(top).detach(), rtol=1e-5, atol=1e-5)
    expected = torch.cat([p.detach().flatten() for m in [*bottoms, top] for p in m.parameters()])
    torch.testing.assert_close(models_of(finished), expected, rtol=1e-5, atol=1e-5)
    assert (models_of(finished) - models_of(one_step)).norm() > 0.1
    for name in ("bytes_up", "bytes_down", "exchanges", "steps"):
        assert finished.summary[name] == one_step.summary[name]


def test_fedbcd_refuses_what_it_is_not(run: Start) -> None:
    keys = {**BCD_KEYS, "estimator": BCD, "local-steps": 5}
    for more, sentence in (
        ({"presence": 0.5}, "here parties may lack rows"),
        ({"labels": "shared"}, "labels = 'shared'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolve({**keys, **more})
    with pytest.raises(ConfigError, match="Choose a synchronous strategy"):
        run(3, {**BCD_KEYS, "estimator": BCD, "strategy": "vafl-t", "quorum": 2})


class Here(Executor):
    """Runs each call at once in this process, which has imported everything already."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, function: Any, /, *given: Any, **named: Any) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(function(*given, **named))
        return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_a_papers_row_prints_its_table_and_draws_its_pictures(
    name: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pictures = [tmp_path / f"{number}.png" for number in range(len(ROWS[name].pictures))]
    words = ["--quick", "--mnist", data / "mnist.npz", "--credit", data / "credit.npz"]
    words += ["--cifar", data / "cifar", *(["--picture", *pictures] if pictures else [])]
    monkeypatch.setattr(papers, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(sys, "argv", ["papers", name, *map(str, words)])
    papers.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.pop("benchmark") == f"papers {name}"
    assert all(path.exists() for path in pictures)


@pytest.mark.nightly
def test_a_papers_row_has_a_process_for_each_run(data: Path) -> None:
    words = [next(iter(ROWS)), "--quick", "--mnist", str(data / "mnist.npz"), "--processes", "2"]
    command = [sys.executable, "-m", "benchmarks.papers", *words]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == f"papers {words[0]}"
