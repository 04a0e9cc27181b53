"""The examples run as they stand."""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from vfl_flower.launch.engines import predict_local, run_supernodes

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_parties_train_their_own_towers(capsys: Any) -> None:
    model = load("own_tower").main(epochs=1)
    said = capsys.readouterr().out
    assert said.startswith("accuracy 0.9") and "among the first 3 0.9" in said
    assert len(model.predict()) == 360
    assert {"loss", "accuracy", "macro_auc", "top_3"} <= model.evaluate().keys()


@pytest.mark.nightly
def test_a_model_is_served_and_asked_for_scores_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    example, started = load("serve_scores"), []
    start = subprocess.Popen

    def noted(*words: Any, **more: Any) -> Any:
        started.append(start(*words, **more))
        return started[-1]

    monkeypatch.setattr(example.subprocess, "Popen", noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    example.main(requests=400, epochs=1)
    said = capsys.readouterr().out
    for step in ("1. Train", "2. Serve", "3. Ask for 400 scores", "4. Stop"):
        assert f"\n{step}" in f"\n{said}"
    found = dict(re.findall(r"(median|95 %|99 %|max) +([\d.]+) ms", said))
    times = [float(found[name]) for name in ("median", "95 %", "99 %", "max")]
    assert times[0] > 0 and times == sorted(times)
    assert re.search(r"id 0: digit \d, probability \d.\d{3}, from parties 0, 1, 2, 3\n", said)
    rate = re.search(r"rate +(\d+) requests/s", said)
    assert rate and 1 < float(rate[1]) < 2000 / times[0]
    assert [each.returncode for each in started] == [0]  # the service has ended by itself
    assert not list((tmp_path / "here").iterdir()) and not list(tmp_path.glob("vfl-*"))


def test_make_serve_demo_runs_the_example_and_its_latencies_are_quantiles() -> None:
    words = ["make", "--no-print-directory", "-n", "serve-demo"]
    said = subprocess.run(words, cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == ".venv/bin/python examples/serve_scores.py"
    found = load("serve_scores").figures(np.arange(1.0, 102.0))
    assert list(found.values()) == ["51.0 ms", "96.0 ms", "100.0 ms", "101.0 ms", "20 requests/s"]


@pytest.mark.nightly
def test_three_kinds_of_data_on_supernodes(tmp_path: Path) -> None:
    load("mixed_files").write(tmp_path)
    tower = f"{EXAMPLES / 'images/towers.py'}:ResNet20"
    bert = str(tmp_path / "bert")
    nodes: list[dict[str, Any]] = [
        {"images": str(tmp_path / "photographs"), "model": tower, "embedding-size": 16},
        {"file": str(tmp_path / "table.csv"), "id": "person", "model": "mlp"},
        {
            **{"file": str(tmp_path / "notes.csv"), "id": "person", "columns": "note"},
            **{"text": "tokens", "tokenizer": bert, "model": f"hf:{bert}"},
        },
    ]
    out = str(tmp_path / "run")
    keys: dict[str, Any] = {
        **{"dataset": f"files:{tmp_path / 'labels.csv'}", "id": "person", "out": out},
        **{"optimizer": "adamw", "party-lr": 0.003, "server-lr": 0.003, "epochs": 12},
        "noise-seed": 0,
    }
    run = run_supernodes(3, keys, nodes)
    assert run.summary["transport"] == "stream" and run.summary["test_accuracy"] > 0.85
    new = {"model": out, "dataset": f"files:{tmp_path / 'new.csv'}"}
    said = pd.read_csv(predict_local(new, nodes))
    due = pd.read_csv(tmp_path / "new.csv").set_index("person")["label"]
    assert len(due) - 60 < len(said) < len(due)  # each party lacks some
    assert (said["prediction"].to_numpy() == due[said["person"]].to_numpy()).mean() > 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["images/photographs", "text/notes"])
def test_photographs_notes_and_tables_are_learned_from_files(name: str) -> None:
    assert load(name).main() > 0.8
