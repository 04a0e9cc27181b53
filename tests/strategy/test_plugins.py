"""A user's paper, codec, estimator, runtime, data and models: one file each."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from tests.conftest import Start
from tests.examples import EXAMPLES
from tests.party.nodes import DESCRIBE, asked
from tests.stepping import by_gradient
from tests.strategy.test_checkpoint import assert_equal_runs, interrupted, resumed
from vfl_flower import client_app
from vfl_flower.config import plugins
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.plugins import ENGINES, SYSTEMS, Registry
from vfl_flower.label_holder.results import results_folder
from vfl_flower.launch.engines import predict_local, prepare, run_local
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.directions import window
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.messages import Description, Predicted, Upload
from vfl_flower.transport.wire import read_reply

SMALL = {"dataset": "breast-cancer", "epochs": 2, "batch-size": 64, "bottom-hidden": 8}

PAPER, AGGREGATION = EXAMPLES["sixth.py"], EXAMPLES["clipped.py"]

SEALED = '''
"""A weighted sum of embeddings, which parties round to eighths before they leave."""

import numpy as np

from vfl_flower.models.top_layers import CombiningTop
from vfl_flower.protocol.aggregation.base import Aggregation, Seal


class WeightedSum(CombiningTop):
    def combined(self, blocks, h):
        blocks = blocks.view(len(blocks), self.blocks, -1)
        weights = 2.0 / (1 + np.arange(self.blocks))
        return sum(float(weight) * blocks[:, each] for each, weight in enumerate(weights))


class Rounding(Seal):
    def hide(self, arrays):
        return {name: np.float32(np.round(8 * rows) / 8) for name, rows in arrays.items()}


class Weighted(Aggregation):
    tops = WeightedSum, None
    defaults = {"combine": "sum"}

    def seal(self, party, parties):
        return Rounding()
'''


KINDS = {
    "codec": "signs.py:Signs",
    "aggregation": "clipped.py:Clipped",
    "estimator": "sign_rows.py:SignRows",
    "server-update": "twice.py:Twice",
    "directions": "rademacher.py:Rademacher",
    "sampling": "with_replacement.py:WithReplacement",
    "optimizer": "lion.py:Lion",
    "bottom-model": "tower.py:Tower",
    "dataset": "waves.py:open_waves",
}
"""Option -> the example of its kind."""
NEEDS: dict[str, dict[str, Any]] = {
    "directions": {"strategy": "cascaded"},
    "sampling": {"strategy": "vafl", "quorum": 1},
}
"""Options without which the example changes nothing."""


def write(folder: Path, name: str, text: str = "") -> str:
    """Write a file, or the example of this name; return its path."""
    place = folder / name
    place.write_text(text or EXAMPLES[name])
    return str(place)


@pytest.fixture
def clipped(tmp_path: Path) -> str:
    return f"{write(tmp_path, 'clipped.py')}:Clipped"


def test_a_sixth_paper_is_one_file_under_forty_lines(run: Start, tmp_path: Path) -> None:
    assert len(PAPER.splitlines()) < 40
    place = write(tmp_path, "sixth.py")
    summary = run(4, {**SMALL, "strategy": f"{place}:SIXTH", "window": 4}).summary
    assert (summary["schedule"], summary["quorum"]) == ("t-sync", 2)
    assert summary["config"]["codec"] == "qsgd"
    assert SYSTEMS.load(f"{place}:SIXTH").axes == (
        "t-sync · zeroth-order, two-sided · first-order server · qsgd, error feedback · no privacy"
    )
    assert summary["test_accuracy"] > 0.6


@pytest.mark.nightly
def test_a_codec_of_ones_own_serves_both_directions_with_and_without_feedback(
    run: Start, tmp_path: Path
) -> None:
    signs = f"{write(tmp_path, 'signs.py')}:Signs"
    whole = run(2, SMALL).summary
    for compression in ("direct", "error-feedback"):
        keys = {**SMALL, "codec": signs, "compression": compression, "epochs": 20}
        summary = run(2, {**keys, "downlink-codec": signs}).summary
        assert summary["bytes_up"] / 20 < whole["bytes_up"] / 2 / 25
        assert summary["bytes_down"] / 20 < whole["bytes_down"] / 2 / 25
        assert summary["test_accuracy"] > 0.8


def test_an_estimator_of_ones_own_trains(run: Start, tmp_path: Path) -> None:
    estimator = f"{write(tmp_path, 'sign_rows.py')}:SignRows"
    keys = {**SMALL, "party-lr": 0.05, "epochs": 5}
    whole, signs = run(2, keys).summary, run(2, {**keys, "estimator": estimator}).summary
    assert signs["bytes_down"] == whole["bytes_down"] / 4
    assert signs["test_accuracy"] > 0.85
    assert signs["test_loss"] != whole["test_loss"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("compression", ["direct", "error-feedback"])
@pytest.mark.parametrize("codec", ["identity", "top-k", "qsgd", "float16", "bfloat16"])
def test_an_estimator_of_ones_own_goes_with_every_codec(
    codec: str, compression: str, run: Start, tmp_path: Path
) -> None:
    estimator = f"{write(tmp_path, 'sign_rows.py')}:SignRows"
    whole = run(2, SMALL).summary
    keys = {"codec": codec, "compression": compression, "keep": 0.25 if codec == "top-k" else None}
    both = {f"{way}{key}": value for way in ("", "downlink-") for key, value in keys.items()}
    given = {key: value for key, value in both.items() if value is not None}
    summary = run(2, {**SMALL, **given, "estimator": estimator, "party-lr": 0.05}).summary
    assert summary["test_accuracy"] > 0.6
    assert summary["bytes_down"] < whole["bytes_down"] / 1.8
    assert (summary["bytes_up"] == whole["bytes_up"]) is (codec == "identity")


@pytest.mark.one_by_day
@pytest.mark.parametrize(("key", "file"), KINDS.items())
def test_each_kind_is_found_by_its_import_path(
    key: str, file: str, run: Start, tmp_path: Path
) -> None:
    name, _, attribute = file.partition(":")
    keys = {**SMALL, "optimizer": "adam", "epochs": 5, **NEEDS.get(key, {})}
    place = f"{write(tmp_path, name)}:{attribute}"
    ours, own = run(2, keys).summary, run(2, {**keys, key: place}).summary
    assert own["test_loss"] != ours["test_loss"]
    assert own["test_accuracy"] > 0.7


@pytest.mark.nightly
def test_each_kind_is_found_as_an_entry_point(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []
    for registry in vars(plugins).values():
        if isinstance(registry, Registry) and registry.key in KINDS:
            name, _, attribute = KINDS[registry.key].partition(":")
            write(tmp_path, f"packaged_{name}", EXAMPLES[name])
            module = f"packaged_{name.removesuffix('.py')}"
            groups.append(f"[{registry.group}]\nmine = {module}:{attribute}\n")
    assert len(groups) == len(KINDS)
    install(tmp_path, "packaged", "\n".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    keys = {**SMALL, "strategy": "cascaded", "window": 4, **dict.fromkeys(KINDS, "mine")}
    del keys["estimator"]  # which would be first order
    summary = run(2, keys).summary
    assert summary["config"].items() >= keys.items()
    assert 0 < summary["test_loss"] < 10
    assert run(2, {**SMALL, "estimator": "mine"}).summary["test_accuracy"] > 0.6


# --- server updates, directions, sampling schemes, optimizers -------------------------------------


def test_rademacher_directions_are_the_same_in_a_stack_and_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{write(tmp_path, 'rademacher.py')}:Rademacher"
    config = resolve({"strategy": "cascaded", "directions": place}).estimator
    model = torch.nn.Linear(9, 5)
    stacked = Directions(config, b"key", model).stack(3)
    assert set(stacked.unique().tolist()) == {-1.0, 1.0}
    monkeypatch.setattr(window, "_BLOCK", 7)
    for step in range(3):
        parts = [torch.zeros_like(p) for p in model.parameters()]
        Directions(config, b"key", model).add(step, parts, 1.0)
        assert torch.equal(torch.cat([part.view(-1) for part in parts]), stacked[step])


@pytest.mark.one_by_day
@pytest.mark.parametrize("quorum", [1, 2])
def test_rows_that_a_mini_batch_has_twice_are_trained_on_twice(
    quorum: int, run: Start, tmp_path: Path
) -> None:
    place = f"{write(tmp_path, 'with_replacement.py')}:WithReplacement"
    keys = {**SMALL, "strategy": "vafl", "quorum": quorum, "sampling": place, "window": 3}
    feedback = {"codec": "top-k", "compression": "error-feedback", "keep": 0.5}
    for more in ({}, feedback, {"max-delay": 6}):
        assert run(2, {**keys, **more, "epochs": 4}).summary["test_accuracy"] > 0.6


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "dpzv", "sampling": "with_replacement.py:WithReplacement"},
        {"strategy": "dpzv", "server-update": "twice.py:Twice"},
        {"strategy": "dpzv", "aggregation": "clipped.py:Clipped"},
        {"privacy": "perturbed-embedding", "sampling": "with_replacement.py:WithReplacement"},
    ],
    ids=str,
)
def test_noise_that_counts_releases_refuses_code_that_it_does_not_know(
    keys: dict[str, str], tmp_path: Path
) -> None:
    for key, value in keys.items():
        name, _, attribute = value.partition(":")
        if name in EXAMPLES:
            keys = {**keys, key: f"{write(tmp_path, name)}:{attribute}"}
    with pytest.raises(ConfigError, match=r"does not know|is for sampling = 'shuffle'"):
        resolve(keys)


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "Rprop"])
def test_an_optimizer_of_torch_trains_and_is_resumed(name: str, tmp_path: Path) -> None:
    keys = {**SMALL, "epochs": 3, "noise-seed": 0, "checkpoint-every": 6}
    keys["optimizer"] = f"torch.optim:{name}"
    assert sized(resolve(keys), 455).training.party_lr == 0.0005  # as of Adam
    whole = run_local(3, {**keys, "out": str(tmp_path / "whole")})
    assert_equal_runs(resumed(interrupted(tmp_path / "cut", keys, after=2, parties=3), 3), whole, 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch.optim:LBFGS", "cannot step on this model"),
        ("torch.optim:Muon", "cannot step on this model"),
        ("torch.nn:Linear", "cannot step on this model"),
        ("{folder}/own.py:Counting", "keeps 'steps' as int, which checkpoints cannot hold. Keep"),
        ("{folder}/own.py:Grouped", "changes 'steps' of a parameter group in a step, which"),
        ("{folder}/own.py:Odd", "has rates_like = 'odd'. Set it to one of sgd, momentum, adam."),
    ],
)
def test_an_optimizer_that_cannot_serve_is_a_sentence(
    name: str, said: str, run: Start, tmp_path: Path
) -> None:
    text = (
        "import torch\n\n\nclass Counting(torch.optim.SGD):\n"
        "    def step(self):\n        super().step()\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            self.state[p]['steps'] = self.state[p].get('steps', 0) + 1\n\n\n"
        "class Grouped(torch.optim.SGD):\n"
        "    def __init__(self, parameters, lr):\n"
        "        first, *others = parameters\n"
        "        groups = [{'params': [first]}, {'params': others}]\n"
        "        super().__init__(groups, lr=lr)\n"
        "    def step(self):\n        super().step()\n"
        "        group = self.param_groups[0]\n"
        "        group['steps'] = group.get('steps', 0) + 1\n\n\n"
        "class Odd(torch.optim.SGD):\n    rates_like = 'odd'\n"
    )
    write(tmp_path, "own.py", text)
    with pytest.raises(VflError, match=said) as error:
        run(2, {**SMALL, "optimizer": name.format(folder=tmp_path)})
    assert str(tmp_path) not in str(error.value) and "\n" not in str(error.value)


# --- an aggregation -----------------------------------------------------------------------------


def install(folder: Path, name: str, entry_points: str) -> None:
    """Make a distribution in a folder of `sys.path`, which declares entry points."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"strategy": "vafl"},
        {"strategy": "ef-vfl", "labels": "shared"},
        {"window": 4, "top-model": "linear"},
        {"strategy": "cascaded"},
        {"strategy": "syn-zoo", "perturbs": "all", "server-update": "first-order", "epochs": 25},
        {"strategy": "centralised"},
    ],
    ids=str,
)
def test_an_aggregation_of_ones_own_trains_and_predicts(
    keys: dict[str, Any], run: Start, clipped: str
) -> None:
    keys = {**SMALL, "epochs": 6, "optimizer": "adam", "aggregation": clipped, **keys}
    keys |= {"party-lr": 0.01, "server-lr": 0.01, "noise-seed": 0}
    finished = run(3, keys)
    assert finished.summary["config"]["combine"] == "mean"
    assert finished.summary["test_accuracy"] > 0.85
    plain = run(3, {**keys, "aggregation": "plain", "combine": "mean"}).summary
    assert finished.summary["test_loss"] != plain["test_loss"]
    sizes = [each["bytes_up"] / max(1, each["exchanges"]) for each in (finished.summary, plain)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)  # they may stop at other epochs
    file = predict_local({"model": str(finished.folder)})
    predicted = json.loads(file.with_suffix(".json").read_text())
    assert predicted["accuracy"] == finished.summary["test_accuracy"]
    assert predicted["loss"] == pytest.approx(finished.summary["test_loss"], rel=1e-5)


@pytest.mark.parametrize("own", [0, 2])
def test_gradient_rows_of_a_users_aggregation_equal_autograd(own: int, clipped: str) -> None:
    config = resolve({"aggregation": clipped, "bottom-model": "mlp", "embedding-size": 3})
    top = aggregation_of(config).build_top([3, 3, 3], 4, own)
    generator = torch.Generator().manual_seed(0)
    h = 3 * torch.randn(20, 9 + own, generator=generator)
    labels = torch.randint(4, (20,), generator=generator)
    assert 5 < int((h[:, :3].norm(dim=1) > 2).sum()) < 20  # some are clipped
    wanted = h.clone().requires_grad_()
    (due,) = torch.autograd.grad(torch.nn.functional.cross_entropy(top(wanted), labels), wanted)
    for optimizer in (None, build_optimizer(sized(resolve({}), 2000), top, 0.0)):
        rows, _ = by_gradient(top, optimizer, h, labels, [20], [20])
        torch.testing.assert_close(rows, due[:, :9], rtol=1e-4, atol=1e-7)
    first, second = torch.randn(2, 20, 3, generator=generator)
    (pair,) = top.pairs(h, [(slice(3, 6), first, second)], [20], b"")
    for (said,), block in zip(pair, (first, second), strict=True):
        replaced = h.clone()
        replaced[:, 3:6] = block
        torch.testing.assert_close(said, top(replaced))


@pytest.mark.nightly
def test_a_party_seals_its_blocks_and_goes_on_so(run: Start, tmp_path: Path) -> None:
    weighted = f"{write(tmp_path, 'weighted.py', SEALED)}:Weighted"
    uploads: list[Any] = []
    served = client_app.app

    class Listening(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            reply: Message = served(message, context)
            if message.metadata.message_type in ("train", "evaluate", "query.predict"):
                kind = Predicted if message.metadata.message_type == "query.predict" else Upload
                uploads.append(read_reply(reply, kind).arrays["embedding"])
            return reply

    keys = {**SMALL, "epochs": 5, "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01}
    finished = run(3, {**keys, "aggregation": weighted}, Listening())
    assert finished.summary["test_accuracy"] > 0.85
    assert len(uploads) > 50 and all((8 * each == np.round(8 * each)).all() for each in uploads)
    keys |= {"epochs": 3, "noise-seed": 0, "checkpoint-every": 6, "aggregation": weighted}
    whole = run_local(3, {**keys, "out": str(tmp_path / "whole")})
    assert_equal_runs(resumed(interrupted(tmp_path / "cut", keys, after=2), 3), whole, 3)
    with patch.object(client_app, "app", Listening()):
        uploads.clear()
        predict_local({"model": str(finished.folder)})
    assert len(uploads) == 3 and all((8 * each == np.round(8 * each)).all() for each in uploads)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"combine": "concat"}, "^aggregation = 'clipped' is a mean. Set combine = 'mean'."),
        ({"presence": 0.5}, "needs the embeddings of all parties. Leave out align, presence and"),
        ({"subsets": "sampled"}, "needs the embeddings of all parties. Leave out align, presence"),
        ({"top-model": f"{__name__}:Dropping"}, "Dropping' reads them side by side. Choose a bui"),
    ],
)
def test_what_does_not_go_with_an_aggregation_of_ones_own_is_a_sentence(
    keys: dict[str, Any], said: str, clipped: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve({"aggregation": clipped, **keys})


@pytest.mark.nightly
def test_an_aggregation_can_need_parties_that_step_together_and_models_that_begin_anew(
    run: Start, tmp_path: Path
) -> None:
    own = "    abreast = True\n    may_grow = False\n    defaults = "
    place = write(tmp_path, "abreast.py", AGGREGATION.replace("    defaults = ", own))
    keys = {**SMALL, "aggregation": f"{place}:Clipped"}
    with pytest.raises(ConfigError, match=r"needs parties that step together. Choose a synchro"):
        run(2, {**keys, "strategy": "vafl"})
    with pytest.raises(ConfigError, match=r"cannot start from an earlier run's models. Leave"):
        resolve({**keys, "grow": "earlier"})
    assert run(2, keys).summary["failure"] is None


def test_a_runtime_of_ones_own_gives_what_ours_do(run: Start, tmp_path: Path) -> None:
    threads = f"{write(tmp_path, 'threads.py')}:run_threads"
    finished = ENGINES.load(threads)(3, {**SMALL, "out": str(tmp_path / "threads")})
    ours = run(3, SMALL)
    assert finished.summary["engine"] == "threads"
    for name, values in ours.parameters("top").items():
        np.testing.assert_array_equal(finished.parameters("top")[name], values)


@pytest.mark.nightly
def test_a_source_of_ones_own_is_read_row_by_row(tmp_path: Path) -> None:
    ids = np.arange(150, 350)
    frame = pd.DataFrame({"id": ids, "label": (np.sin(5 * ids) > 0).astype(int), "own": ids % 7})
    frame.to_csv(tmp_path / "labels.csv", index=False)
    waves = {"source": f"{write(tmp_path, 'own_waves.py')}:Waves"}
    keys = {"dataset": f"files:{tmp_path / 'labels.csv'}", "epochs": 20, "batch-size": 16}
    summary = run_local(1, {**keys, "out": str(tmp_path / "run")}, node_configs=[waves]).summary
    assert summary["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("key", "name", "like"),
    [
        *(("strategy", "vafll", "vafl"), ("strategy", "VAFL-T", "vafl-t")),
        *(("codec", "topk", "top-k"), ("optimizer", "adamax", "adam")),
        *(("bottom-model", "lineer", "linear"), ("privacy", "label", "labels")),
        *(("dataset", "digit", "digits"), ("dataset", "file:a.csv", "files:a.csv")),
        ("dataset", "a.csv", "csv:a.csv"),
    ],
)
def test_a_name_that_is_misspelt_is_told_what_it_is_like(key: str, name: str, like: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(2, {key: name}, ())
    start = f"{key} = {name!r} is not known: did you mean {like!r}? "
    assert str(error.value).startswith(start) and str(error.value).count("?") == 1


NOWHERE = ("nowhere.py:A", "{folder}/sixth.py:SEVENTH", "no.such.module:A", "{folder}/wrong.py:X")


@pytest.mark.parametrize("place", NOWHERE)
def test_a_place_without_what_it_names_is_a_sentence(place: str, tmp_path: Path) -> None:
    write(tmp_path, "sixth.py")
    write(tmp_path, "wrong.py", "def (")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        resolve({"strategy": place.format(folder=tmp_path)})


def test_a_file_that_is_rewritten_is_loaded_anew(tmp_path: Path) -> None:
    place = write(tmp_path, "sixth.py")
    assert SYSTEMS.load(f"{place}:SIXTH").quorum.word == "t-sync"
    write(tmp_path, "sixth.py", PAPER.replace("HALF", "ONE"))
    assert SYSTEMS.load(f"{place}:SIXTH").quorum.word == "async"


@pytest.mark.parametrize("kind", ["folder", "here", "wheel"])
def test_a_package_that_comes_or_goes_while_a_process_runs_is_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place may be on the path before, or be the working directory, or a file."""
    monkeypatch.chdir(tmp_path)
    if kind != "wheel":
        monkeypatch.setattr(sys, "path", [str(tmp_path) if kind == "folder" else "", *sys.path])
    assert "later" not in SYSTEMS.names
    install(tmp_path, "later", "[vfl_flower.systems]\nlater = strategies.papers.vafl:VAFL\n")
    if kind == "wheel":
        shutil.make_archive(str(tmp_path / "later"), "zip", tmp_path, "later-1.0.dist-info")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "later.zip"), *sys.path])
    assert SYSTEMS.load("later") is SYSTEMS.load("vafl")
    shutil.rmtree(tmp_path / "later-1.0.dist-info")
    (tmp_path / "later.zip").unlink(missing_ok=True)
    assert "later" not in SYSTEMS.names


def test_a_data_set_of_an_installed_package_may_take_a_place_or_not(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "packaged_waves.py", EXAMPLES["waves.py"])
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("waves", "packaged_waves:open_waves", "vfl_flower.datasets")
    monkeypatch.setattr(plugins.Registry, "entries", EntryPoints([entry]))
    for name in ("waves", "waves:anything"):
        assert run(2, {"dataset": name, "epochs": 1}).summary["dataset"] == name


def test_results_of_what_is_ones_own_are_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper, waves = write(tmp_path, "sixth.py"), write(tmp_path, "waves.py")
    keys = {"strategy": f"{paper}:SIXTH", "dataset": f"{waves}:open_waves"}
    monkeypatch.chdir(tmp_path)
    folder = results_folder(resolve(keys))
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("sixth.py-SIXTH-waves.py-open_waves-")
    monkeypatch.setattr("vfl_flower.label_holder.results.time.strftime", lambda form: "now")
    with ThreadPoolExecutor(8) as pool:  # runs of the same second
        folders = set(pool.map(lambda _: results_folder(resolve(keys)), range(8)))
    assert len(folders) == 8 and all(each.is_dir() for each in folders)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("nn.Linear(len(sample), size + 1)", r"returns \(2, 33\) for 2 rows"),
        ("nn.Linear(len(sample) + 1, size)", r"cannot read samples of shape \(15,\): "),
    ],
)
def test_a_model_that_makes_no_embeddings_is_a_sentence_before_training(
    layer: str, said: str, run: Start, tmp_path: Path
) -> None:
    text = (
        "from torch import nn\n\n\nclass Tower(nn.Sequential):\n"
        f"    def __init__(self, sample, size):\n        super().__init__({layer})\n"
    )
    keys = {**SMALL, "bottom-model": f"{write(tmp_path, 'wrong.py', text)}:Tower"}
    with pytest.raises(PartyError, match=f"Party 0.*{said}"):
        run(2, keys)


class Dropping(torch.nn.Sequential):
    """A tower that is another one while it is trained."""

    def __init__(self, sample: torch.Tensor, size: int) -> None:
        super().__init__(torch.nn.Linear(len(sample), size), torch.nn.Dropout(0.5))


def test_who_else_is_told_is_told_of_all(run: Start, tmp_path: Path) -> None:
    text = (
        "from vfl_flower.label_holder.callbacks import Callback\n\n\n"
        "class Board(Callback):\n"
        "    def say(self, what):\n"
        f"        with open({str(tmp_path / 'said')!r}, 'a') as file:\n"
        "            file.write(what)\n\n"
        "    def evaluated(self, entry):\n        self.say('e')\n\n"
        "    def ended(self):\n        self.say('.')\n"
    )
    run(2, {**SMALL, "observer": f"{write(tmp_path, 'board.py', text)}:Board"})
    assert (tmp_path / "said").read_text() == "ee."


@pytest.mark.parametrize(
    ("key", "said"),
    [
        *(("strategy", "has no 'about'"), ("estimator", "has no 'check'")),
        *(("aggregation", "has no 'tops'"), ("codec", "has no 'uses'")),
        *(("server-update", "has no 'step'"), ("sampling", "has no 'draw'")),
        *(("privacy", "has no 'check'"), ("observer", "has no 'evaluated'")),
        *((key, "cannot be called") for key in ("bottom-model", "optimizer", "dataset")),
    ],
)
def test_what_is_something_else_is_a_sentence(
    key: str, said: str, run: Start, tmp_path: Path
) -> None:
    text = "class Other:\n    name = 1\n\n\nOTHER = Other()\n"
    place = write(tmp_path, "other.py", text)
    with pytest.raises(VflError, match=f"{key} = '.*other.py:OTHER' is not valid: it {said}"):
        run(2, {**SMALL, key: f"{place}:OTHER"})


def test_a_system_with_a_default_that_is_no_key_is_a_sentence(tmp_path: Path) -> None:
    paper = write(tmp_path, "sixth.py", PAPER.replace('"codec"', '"codek"'))
    with pytest.raises(ConfigError, match="no option 'codek'"):
        resolve({"strategy": f"{paper}:SIXTH"})


def test_annotations_in_a_file_are_types_as_in_an_import(tmp_path: Path) -> None:
    text = "class Settings:\n    rate: float\n\n\nRATE = Settings.__annotations__['rate']('0.5')\n"
    assert plugins.load_place(f"{write(tmp_path, 'typed.py', text)}:RATE") == 0.5


def test_every_name_of_ours_is_there() -> None:
    for each in vars(plugins).values():
        if isinstance(each, Registry):
            for name in each.known:
                assert callable(each.load(name)) or each is SYSTEMS


@pytest.mark.parametrize(("key", "file"), {**KINDS, "strategy": "sixth.py:SIXTH"}.items())
def test_a_node_runs_no_code_that_a_run_configuration_names(
    key: str, file: str, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    proof = f"\n\nimport pathlib\n\npathlib.Path({str(ran)!r}).touch()\n"
    name, _, attribute = file.partition(":")
    place = write(tmp_path, "own.py", EXAMPLES[name] + proof)
    keys = {"dataset": "breast-cancer", **NEEDS.get(key, {}), key: f"{place}:{attribute}"}
    for simulated in (False, True):
        node: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "simulated": simulated}
        run_config: Any = keys
        context = Context(1, 2, node, RecordDict(), run_config)
        if simulated:
            asked(context, DESCRIBE, Description)
            assert ran.exists()
            continue
        with pytest.raises(VflError, match=f"^failed: {key} names code"):
            asked(context, DESCRIBE, Description)
        assert not ran.exists()
