"""The likeliest mistakes, in a shell and in Python: each is answered by a sentence that helps."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import vfl_flower
from tests.conftest import nightly
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.tools.cli import main

A, B = "file='a.csv' id='customer'", "file='b.csv' id='customer'"
RUN = "dataset='files:labels.csv' id='customer' label='default' epochs=1 expert='min-segment=1'"
"""A run that works. Each mistake changes one thing of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two parties and a label holder, and the run `trained` on them."""
    where = tmp_path_factory.mktemp("mistakes")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 4)).round(3)
    ids = pd.DataFrame({"customer": np.arange(1000, 1060)})
    ids.assign(a=x[:, 0], b=x[:, 1]).to_csv(where / "a.csv", index=False)
    ids.assign(c=x[:, 2], d=x[:, 3]).to_csv(where / "b.csv", index=False)
    labels = ids.assign(default=(x[:, 0] + x[:, 2] > 0).astype(int))
    labels.to_csv(where / "labels.csv", index=False)
    labels.assign(default=1).to_csv(where / "one.csv", index=False)
    labels.assign(customer=ids + 9000).to_csv(where / "others.csv", index=False)
    labels[:0].to_csv(where / "rowless.csv", index=False)
    (where / "nothing.csv").touch()
    (where / "table.xlsx").write_bytes(b"PK\x03\x04")
    (where / "own.py").write_text("value = 1 / 0\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(where)
        assert main([*BOTH, "--out", "trained"]) == 0  # the control: `RUN` works
    return where


def on_files(run: str, *nodes: str, command: str = "run") -> list[str]:
    """A command line with these options and node configurations."""
    return [command, "-c", run, *(word for each in nodes for word in node(each))]


def changed(old: str, new: str) -> list[str]:
    """The command line of `RUN` with one text changed."""
    assert old in RUN
    return on_files(RUN.replace(old, new), A, B)


def served(address: str) -> list[str]:
    return on_files(f"serve-address='{address}' dataset='files:labels.csv'", A, B, command="serve")


def node(words: str) -> list[str]:
    return ["--node-config", words]


BOTH, NOISE, NONE = on_files(RUN, A, B), "expert='embedding-noise=1'", ["--parties", "0"]
SHELL: dict[str, tuple[list[str], int, str]] = {
    # --- names of commands and options
    "another command": (["train"], 2, r"No such command 'train'. You may want `vfl run`"),
    "fit": (["fit"], 2, r"You may want `vfl run`"),
    "version": (["version"], 2, r"You may want `vfl --version`"),
    "a misspelled command": (["runn"], 2, r"Did you mean 'run', 'rerun'"),
    "resume": (["resume", "trained"], 2, r"You may want `vfl run -c \"resume='RUN'\"`"),
    "another language's command": (["trian"], 2, r"You may want `vfl run`"),
    "a misspelled flag": (["run", "--partys", "3"], 2, r"Did you mean '--parties'\?"),
    "an option as a flag": (["run", "--epochs", "3"], 2, r'-c, as in -c "epochs=5"'),
    "lr as a flag": (["run", "--lr", "1"], 2, r'Did you mean party-lr or server-lr\? .* -c "'),
    "a misspelled system": (["run", "vaffl"], 1, r"strategy = 'vaffl' .* did you mean 'vafl'\?"),
    "two systems": (["compare", "vafl,dpzv"], 1, r"did you mean 'vafl'\?"),
    "a misspelled option": (["run", "-c", "epoch=3"], 1, r"Did you mean epochs\?"),
    "an id column": (["run", "-c", "id_column='customer'"], 1, r"Did you mean id\?"),
    "a target column": (["run", "-c", "target_column='y'"], 1, r"Did you mean label\?"),
    "lr": (["run", "-c", "lr=0.1"], 1, r"Did you mean party-lr or server-lr\?"),
    "learning_rate": (["run", "-c", "learning_rate=1"], 1, r"party-lr or server-lr\?"),
    "an underscore": (["run", "-c", "batch_size=3"], 1, r"Did you mean batch-size\?"),
    "a misspelled value": (["run", "-c", "optimizer='adm'"], 1, r"did you mean 'adam'\?"),
    # --- quotes
    "no quotes": (["run", "-c", "strategy=vafl"], 1, r"""write "strategy='vafl'"\."""),
    "no quotes in some": (["run", "-c", "id=i seed=1"], 1, r"""write "id='i' seed=1"\."""),
    "options in two words": (["run", "-c", "epochs=1", "seed=2"], 1, r"'seed=2' stands outside"),
    "options without -c": (["run", "epochs=1"], 1, r"'epochs=1' stands outside of -c"),
    "two words too many": (["run", "vafl", "seed=2"], 2, r"in one pair of quotes after -c"),
    "curly quotes": (["run", "-c", "dataset=‘digits’"], 1, r"straight quotes"),
    "a comma": (["run", "-c", "epochs=1, seed=2"], 1, r"with spaces between pairs alone"),
    "spaces around =": (["run", "-c", "epochs = 1"], 1, r"with spaces between pairs alone"),
    "a colon": (["run", "-c", "epochs: 1"], 1, r"Write option=value pairs"),
    "a number in quotes": (["run", "-c", "epochs='3'"], 1, r"whole number\. Leave the quotes out"),
    "a file that is a node": (on_files(RUN, "a.csv", "b.csv"), 1, r"^vfl: --node-config 'a.csv' c"),
    "a TOML file without -c": (["run", "c.toml"], 1, r"name it after -c, as in -c c\.toml"),
    "a TOML file": (["run", "-c", "none.toml"], 1, r"there is no such file"),
    "a TOML file of a node": (["run", *node("n.toml")], 1, r"^vfl: --node-config 'n.toml' can"),
    "no value": (["run", "-c", "epochs"], 1, r"^vfl: -c 'epochs' cannot .* Write option=v"),
    "no value of a node": (["predict", "x", *node("id=")], 1, r"^vfl: --node-config 'id=' cannot"),
    "no value of one run": (["compare", "vafl epochs"], 1, r"^vfl: RUN 'epochs' cannot"),
    # --- values out of range
    "no epochs": (["run", "-c", "epochs=0"], 1, r"epochs = 0 must be at least 1"),
    "half an epoch": (["run", "-c", "epochs=0.5"], 1, r"must be a whole number"),
    "a negative rate": (["run", "-c", "party-lr=-1"], 1, r"must be at least 0"),
    "all rows test": (["run", "-c", "test-fraction=1.0"], 1, r"must be below 1"),
    "no parties": (["run", *NONE], 1, r"0 parties cannot train: name at least one"),
    "none to compare": (["compare", "vafl", *NONE], 1, r"0 parties cannot train"),
    "none to audit": (["audit", "--strategy", "vafl", *NONE], 1, r"0 parties cannot train"),
    "parties in words": (["run", "--parties", "two"], 2, r"'two' is not a valid integer"),
    "too large a quorum": (["run", "-c", "quorum=9"], 1, r"more than the 4 parties: lower it"),
    "no epsilon": (["run", "-c", "strategy='dpzv' epsilon=0"], 1, r"must be above 0"),
    "epsilon without noise": (["run", "-c", "epsilon=1"], 1, r"privacy = 'none'. Change `privacy`"),
    "noise without privacy": (["run", "-c", NOISE], 1, r"Set privacy = 'perturbed-embedding'"),
    "no GPU": (["run", "-c", "device='cuda'"], 1, r"'cuda' is not available here. Use cpu"),
    # --- files
    "no labels there": (changed("labels", "lables"), 1, r"lables.csv is not there"),
    "no prefix": (["run", "-c", "dataset='labels.csv'"], 1, r"did you mean 'csv:labels.csv'"),
    "another data set": (["run", "-c", "dataset='mnist'"], 1, r"use digits, .* files:PATH"),
    "no rows": (changed("labels", "rowless"), 1, r"has no rows. Name a file with rows"),
    "nothing": (changed("labels", "nothing"), 1, r"is empty: it has 0 bytes"),
    "another id": (changed("customer", "client"), 1, r"id = 'client', .* columns are customer"),
    "another label": (changed("'default'", "'dflt'"), 1, r"did you mean 'default'\?"),
    "no label": (changed(" label='default'", ""), 1, r"'label': set label='default'\.$"),
    "the ids as label": (changed("default", "customer"), 1, r"names the id column. Name"),
    "one class": (changed("labels", "one"), 1, r"needs at least two classes"),
    "nobody in common": (changed("labels", "others"), 1, r"Party 0 has none of the 60 ids"),
    "a party's file": (on_files(RUN, A, "file='c.csv' id='customer'"), 1, r"1's file is not there"),
    "a spreadsheet": (on_files(RUN, A, "file='table.xlsx' id='customer'"), 1, r"Party 1's file"),
    "a party's id": (on_files(RUN, A.replace("customer", "no"), B), 1, r"id='customer'\"$"),
    "a misspelled file": (on_files(RUN, A, "flie='b.csv'"), 1, r"Did you mean file\?"),
    "csv for file": (on_files(RUN, A, "csv='b.csv'"), 1, r"Did you mean file "),
    "a party without file": (on_files(RUN, A, "id='customer'"), 1, r"Party 1 has named no file"),
    "no nodes": (["run", "-c", RUN], 1, r"once for each party"),
    "two nodes for three": ([*BOTH, "--parties", "3"], 1, r"for 3 parties. Give one for each"),
    "nodes without labels": (["run", *node(A)], 1, r"runs with dataset = 'files:PATH'"),
    "the labels as features": (on_files(RUN, A.replace("a.", "labels."), B), 1, r"predict itself"),
    "nodes on Ray": ([*BOTH, "--engine", "ray"], 1, r"--engine supernodes"),
    "a misspelled engine": (["run", "--engine", "rai"], 1, r"--engine = 'rai' .* mean 'ray'\?"),
    "no engine": (["run", "--engine", "no.py:run"], 1, r"--engine = 'no.py:run' .* no such file"),
    "no module": (["run", "--engine", "no.such:run"], 1, r"--engine = 'no.such:run' cannot be loa"),
    "own code that fails": (["run", "-c", "bottom-model='own.py:value'"], 1, r"ZeroDivisionError"),
    "no own code": (["run", "-c", "bottom-model='m.py:Net'"], 1, r"there is no such file"),
    # --- folders
    "a file as folder": (["run", "--out", "a.csv"], 1, r"a file stands where a folder must be"),
    "a folder of a run": ([*BOTH, "--out", "trained"], 1, r"already holds a run"),
    "no run to predict": (["predict"], 2, r"'RUN'\. RUN is the results folder of a run"),
    "a missing run": (["predict", "runs/none"], 1, r"Name the results folder of a run"),
    "another folder": (["predict", "."], 1, r"Name the results folder of a run that saved"),
    "a prediction without files": (["predict", "trained"], 1, r"a file of each of the 2 parties"),
    "a bare new file": (["predict", "trained", "a.csv"], 2, r"Name the file by dataset='files:"),
    "a file as a flag": (["predict", "trained", "--file", "a.csv"], 2, r"Did you mean dataset\?"),
    "half a prediction": (["predict", "trained", *node(A)], 1, r"Give one for each"),
    "no new rows": (["predict", "trained", *BOTH[3:]], 1, r"new rows by dataset='files:PATH'"),
    "a finished run": (["run", "-c", "resume='trained'"], 1, r"Leave the option resume out"),
    "a report of nothing": (["report", "runs/none"], 1, r"does not exist: name a results folder"),
    "a missing log": (["audit-log", "verify", "none"], 1, r"none does not exist. Name the audit"),
    "no system to audit": (["audit"], 2, r"Missing option '--strategy'"),
    "no search": (["sweep", "vafl", "--search", "party-lr"], 1, r"write OPTION=a\.\.b"),
    "a word to list": (["list", "epoks"], 1, r"Did you mean epochs\?"),
    "an address": (["doctor", "--superlink", "host"], 1, r"is not HOST:PORT, such as"),
    "a port alone": ([*served("8080"), "trained"], 1, r"must be HOST:PORT, such as 127.0.0.1:8080"),
}


@pytest.mark.parametrize("mistake", SHELL)
def test_a_mistake_in_a_shell_is_answered_by_a_sentence_that_helps(
    mistake: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words, code, sentence = SHELL[mistake]
    assert main(words) == code
    error = capsys.readouterr().err
    assert re.search(sentence, " ".join(error.split())), error
    assert "Traceback" not in error and error.count("Did you mean") <= 1
    begins = "Error: " if code == 2 else "vfl: "  # a command to paste may follow
    assert any(line.startswith(begins) for line in error.splitlines()), error


@pytest.fixture
def taken() -> Iterator[str]:
    """An address on which another server listens."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_port_that_is_taken_is_named(
    folder: Path, taken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main([*served(taken), "trained"]) == 1
    assert re.search(rf"vfl: .*{taken}.*\. [A-Z].*\.$", capsys.readouterr().err.strip())


@pytest.mark.parametrize("words", [["--version"], nightly(["list"])])
def test_python_runs_the_package_as_the_command(words: list[str]) -> None:
    command = [sys.executable, "-m", "vfl_flower", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "vfl" in done.stdout and not done.stderr


# --- Python -------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(40, 4))
Y = (X[:, 0] > 0).astype(int)
TWO = [X[:, :2], X[:, 2:]]
FRAME = pd.DataFrame({"id": range(40), "x": X[:, 0]})
KNOWN, NOISY = FRAME.assign(label=Y), "embedding-noise"
train: Any = vfl_flower.train

PYTHON: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lr": (lambda: train(TWO, Y, lr=0.1), ConfigError, r"party_lr or server_lr\?"),
    "one array": (lambda: train(X, Y), ConfigError, r"Give a list with the features of each party"),
    "no labels": (lambda: train(TWO), ConfigError, r"Labels are missing"),
    "few labels": (lambda: train(TWO, Y[:9]), ConfigError, r"40 rows, and there are 9 labels"),
    "few rows": (lambda: train([X[:9], X], Y), ConfigError, r"Party 0 has 9 rows"),
    "one class": (lambda: train(TWO, 0 * Y), ConfigError, r"needs at least two classes"),
    "missing values": (lambda: train([TWO[0] / 0, X], Y), VflError, r"missing or infinite values"),
    "a system's case": (lambda: train(TWO, Y, strategy="VAFL"), ConfigError, r"mean 'vafl'\?"),
    "no system": (lambda: train(TWO, Y, strategy=3), ConfigError, r"give a name of `vfl list`"),
    "a text": (lambda: train(TWO, Y, epochs="3"), ConfigError, r"Leave the quotes out"),
    "a module": (lambda: train(TWO, Y, bottom_model=nn.ReLU()), ConfigError, r"the class ReLU"),
    "Ray": (lambda: train(TWO, Y, engine="ray"), ConfigError, r"cannot reach data of this process"),
    "no parties": (lambda: train(dataset="digits", parties=0), ConfigError, r"at least one"),
    "no run": (lambda: vfl_flower.load("runs/none"), ConfigError, r"Name the results folder"),
    "no ids": (lambda: train(TWO, Y, id="who"), ConfigError, r"column 'who' of ids"),
    "labels as features": (lambda: train([KNOWN, FRAME], KNOWN), VflError, r"predict itself"),
    "noise": (lambda: train(TWO, Y, expert={NOISY: 1.0}), ConfigError, r"adds no noise"),
    "epsilon": (lambda: train(TWO, Y, epsilon=1.0), ConfigError, r"Change `privacy`"),
    "a name as label": (lambda: train(TWO, "label"), ConfigError, r"Give one label for each row"),
}


@pytest.mark.parametrize("mistake", PYTHON)
def test_a_mistake_in_python_is_answered_by_a_sentence_that_helps(mistake: str) -> None:
    call, kind, sentence = PYTHON[mistake]
    with np.errstate(all="ignore"), pytest.raises(kind, match=sentence) as told:
        call()
    assert str(told.value).endswith(".") and len(str(told.value).splitlines()) == 1


def test_ids_that_predict_does_not_name_are_no_new_column() -> None:
    frames = [FRAME.rename(columns={"id": "who"}).assign(z=X[:, n]) for n in (1, 2)]
    model = train(frames, frames[0][["who"]].assign(label=Y), id="who", epochs=1)
    with pytest.raises(ConfigError, match="Give id='who'"):
        model.predict(frames)
    assert len(model.predict(frames, id="who")) == len(Y)
    model = train(TWO, Y, id=None, out=None, epochs=1)  # no id and no folder may be None
    assert len(model.predict(TWO, id=None)) == len(Y)
