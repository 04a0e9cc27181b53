"""The privacy audit: attacks succeed where they should, and use nothing but messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tests.conftest import ALL_ROWS, FASTER, Start, trained
from tests.strategy.test_faults import Fault, Misbehaving, answers_in_vain, refuses
from vfl_attacks import features as features_of
from vfl_attacks import labels as attacks
from vfl_attacks.audit import audit
from vfl_attacks.clients import Curious, Wiretap
from vfl_attacks.labels import Finding
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, PartyError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.protocol.system import baselines
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.cli import main

SHORT = {**ALL_ROWS, "epochs": 2, "window": 8, "noise-seed": 0}
DPZV = {**FASTER, "epochs": 2, "privacy": "scalar", "noise-multiplier": 1.0}  # as given
SECRET = {"sampling": "poisson", "calibration": "secret"}
FEEDBACK: dict[str, Any] = {"codec": "top-k", "keep": 0.3, "compression": "error-feedback"}
EIGHT = {"embedding_size": 8}
SUMMING = {**ALL_ROWS, "top-model": "sum", "epochs": 1, "noise-seed": 0}


def audited(folder: Path, parties: int = 4, **more: Any) -> dict[str, Finding]:
    keys = {key.replace("_", "-"): value for key, value in more.items()}
    findings, _, _ = audit(parties, {**SHORT, **keys, "out": str(folder / "out")})
    return {finding.attack: finding for finding in findings}


class Recorder(ClientApp):
    """The parties' ClientApp, whose messages are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[Message, Message]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        self.messages.append((message, reply))
        return reply


# --- what each attack finds ---------------------------------------------------------------------


@pytest.mark.nightly
def test_command_prints_a_row_for_each_attack_and_never_writes_over_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    command = ["audit", "--strategy", "vafl", "--out", str(folder)]
    command += ["-c", "epochs=2 window=8 party-lr=0.2 server-lr=0.2"]
    assert main(command) == 0
    *lines, of_success, _, last = capsys.readouterr().out.splitlines()
    assert of_success.startswith("A success near guessing") and last == f"results: {folder}"
    assert len({len(line) for line in lines}) == 1
    report = json.loads((folder / "audit.json").read_text())
    assert [line.split("  ")[0] for line in lines[1:]] == [a["attack"] for a in report["attacks"]]
    found = {each["attack"]: each for each in report["attacks"]}
    assert found["direct, designed queries*"]["success"] >= 0.99
    assert found["direct, uploads read*"]["success"] >= 0.99
    assert found["gradient directions"]["success"] > 0.8
    assert found["gradient norms"]["success"] < 0.2
    assert found["feature reconstruction"]["success"] > 0.7
    assert found["inversion, the seed's model"]["success"] > 0.6
    assert found["inversion, a secret's model"]["success"] < 0.1
    assert 0.10 < found["gradient norms"]["guessing"] < 0.11
    assert (folder / "reconstruction.png").stat().st_size > 1000
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert main(command) == 1
    assert "already holds a run" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "more", "features"),
    [("cascaded", {}, 0.7), ("dpzv", DPZV, 0.7), ("cascaded", FEEDBACK, 0.2)],
)
def test_scalars_hide_labels_from_an_eavesdropper_and_no_features(
    tmp_path: Path, strategy: str, more: dict[str, Any], features: float
) -> None:
    found = audited(tmp_path, strategy=strategy, **more)
    for name in ("direct, uploads read*", "direct, uploads guessed*", "gradient directions"):
        assert found[name].success == pytest.approx(found[name].guessing, abs=0.03)
    if more is not FEEDBACK:
        assert found["direct, designed queries*"].success == pytest.approx(0.11, abs=0.03)
    assert found["feature reconstruction"].success > features


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        *(("ef-vfl", {}), ("cvfl", {})),
        ("vafl-t", {"embedding_activation": "tanh", "combine": "mean", "quorum": 3, **EIGHT}),
    ],
)
def test_compression_and_a_users_configuration_hide_no_labels(
    tmp_path: Path, strategy: str, more: dict[str, Any]
) -> None:
    found = audited(tmp_path, strategy=strategy, **more)
    assert found["direct, uploads read*"].success >= (0.99 if more else 0.95)
    if not more:
        assert found["direct, designed queries*"].success >= 0.95
        assert found["gradient directions"].success > 0.7
        assert found["feature reconstruction"].success > 0.2


@pytest.mark.nightly
def test_two_classes_are_measured_by_auc(tmp_path: Path) -> None:
    found = audited(tmp_path, 3, strategy="vafl", dataset="breast-cancer")
    assert found["direct, designed queries*"].success == 1
    assert found["gradient directions"].success > 0.99
    assert found["inversion, the seed's model"].success > 0.95
    assert found["inversion, a secret's model"].success < 0.1
    assert {each.measure for each in found.values()} == {"AUC", "R2"}
    assert found["gradient norms"].guessing == 0.5
    assert not (tmp_path / "out" / "reconstruction.png").exists()


@pytest.mark.nightly
def test_masks_hide_one_party_and_not_the_sum(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": "breast-cancer", "combine": "mean", "batch_size": 64}
    keys["embedding_activation"] = "none"  # the default of masked runs
    plain = audited(tmp_path / "plain", 3, **keys)
    secure = audited(tmp_path / "secure", 3, aggregation="secure", **keys)
    for attack in ("feature reconstruction", "inversion, the seed's model"):
        assert plain[attack].success > 0.6
        assert secure[attack].success < 0.05
    assert secure["model completion, one party"].success == pytest.approx(0.5, abs=0.06)
    assert secure["model completion, sum"].success > 0.85
    for attack in ("feature reconstruction, sum", "model completion", "gradient directions"):
        assert secure[attack].success == pytest.approx(plain[attack].success, abs=0.01)
    assert "embeddings as outputs*" in plain and "embeddings as outputs*" not in secure


@pytest.mark.nightly
def test_equal_seeds_give_equal_audits(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"strategy": "asyrevel", "dataset": "breast-cancer", "epochs": 1}
    first, second = (audited(tmp_path / each, 2, **keys) for each in "ab")
    # Whoever explains a model permutes by chance that is its own, whatever the seed is.
    words = "by explanation", "as told", "by told reasons"
    by_chance = {name for name in first if any(word in name for word in words)}
    assert by_chance and len(first) > 2 * len(by_chance)
    for name in first.keys() - by_chance:
        assert first[name] == second[name], name


# --- how they work ------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("split-nn", {}),
        ("vafl", {"max-delay": 4, "window": 2, "delay": "exponential"}),
        ("cascaded", {}),
        ("dpzv", DPZV),
        ("dpzv", {**DPZV, **SECRET}),
        ("ef-vfl", {"downlink-codec": "qsgd", "downlink-compression": "error-feedback"}),
        ("cvfl", {"codec": "qsgd"}),
        ("cascaded", FEEDBACK),
        ("dpzv", {**DPZV, **FEEDBACK}),
        ("dpzv", {**DPZV, **SECRET, **FEEDBACK}),
    ],
)
def test_recorded_messages_are_all_that_a_wiretap_needs(
    run: Start, strategy: str, more: dict[str, Any]
) -> None:
    keys = {**SHORT, "strategy": strategy, **more}
    config = resolve(keys)
    recorder = Recorder()
    live = Wiretap(config, recorder)
    run(3, keys, live)
    replies = {id(message): reply for message, reply in recorder.messages}
    replayed: Any = lambda message, _: replies[id(message)]  # noqa: E731
    later = Wiretap(config, replayed)
    no_context: Any = None
    for message, _ in recorder.messages:
        later(message, no_context)
    assert np.array_equal(live.gradients, later.gradients)
    assert np.array_equal(live.embeddings, later.embeddings)
    secret = config.schedule.sampling == "poisson"
    share = 1 - np.exp(-2) if secret else 1  # of rows that are in a Poisson batch
    assert live.answered.mean() == pytest.approx(share, abs=0.02)
    assert (live.uploaded >= live.answered).all()


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["ef-vfl", "vafl", "cascaded", "dpzv"])
def test_a_wiretap_knows_what_the_label_holder_knows(strategy: str) -> None:
    keys = {**SHORT, **FEEDBACK, "strategy": strategy, **(DPZV if strategy == "dpzv" else {})}
    tap = Wiretap(resolve(keys))
    holder = trained(3, keys, tap)[0].run.holder
    assert np.array_equal(tap.embeddings, holder.table.of(0).numpy())
    assert tap.embeddings.any()


@pytest.mark.one_by_day
@pytest.mark.parametrize("fault", [refuses, answers_in_vain])
def test_a_wiretap_follows_a_party_that_comes_back(fault: Fault) -> None:
    keys = {**SHORT, **FEEDBACK, "epochs": 6, "on-party-failure": "continue", "strategy": "vafl"}
    broken: Any = Misbehaving(fault, party=0, number=5)
    tap = Wiretap(resolve(keys), broken)
    strategy, _ = trained(3, keys, tap)
    assert strategy.figures()["failed_parties"] == []
    assert np.array_equal(tap.embeddings, strategy.run.holder.table.of(0).numpy())


def test_a_wiretap_reads_a_run_that_goes_back_to_its_best_model(run: Start) -> None:
    keys = {"dataset": "breast-cancer", "validation-fraction": 0.3, "party-lr": 1.0, "patience": 1}
    keys["server-lr"] = 0.2
    found = run(2, {**keys, "epochs": 6}, Wiretap(resolve(keys)))
    assert found.summary["best_epoch"] < found.history[-1]["epoch"]


def test_gradient_rows_of_a_wiretap_equal_single_rows(run: Start) -> None:
    keys = {**SUMMING, "strategy": "split-nn", "batch-size": 100}  # the last batch is smaller
    tap = Wiretap(resolve(keys))
    run(2, keys, tap)
    label = load_labels(tap.config).train
    assert tap.answered.all()
    assert np.abs(tap.gradients.sum(1)).max() < 1e-5  # softmax less one at the label
    is_label = np.arange(10) == label[:, None]
    assert (tap.gradients[is_label] < 0).all() and (tap.gradients[~is_label] > 0).all()


@pytest.mark.parametrize("differences", ["one-sided", "two-sided"])
def test_a_curious_client_learns_from_batches_of_one_row(run: Start, differences: str) -> None:
    keys = {**SUMMING, "strategy": "cascaded", "batch-size": 1, "window": 64}
    keys |= {"differences": differences, "party-lr": 0.0}
    config = resolve(keys)
    tap = Wiretap(config, Curious(config))
    run(2, keys, tap)
    hits = tap.gradients.argmin(1) == load_labels(config).train
    assert hits.mean() > 0.17  # guessing: 0.10; batches of 64 hide most of the difference


def test_failure_of_a_party_is_told_as_ever(run: Start) -> None:
    def broken(message: Message, context: Context) -> Message:
        raise ValueError("out of order")

    client: Any = broken
    with pytest.raises(PartyError, match="failed: ValueError: out of order"):
        run(2, SHORT, Wiretap(resolve(SHORT), client))


def test_norms_and_directions_name_classes_that_differ_in_them() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(300) % 3
    axes = np.eye(3, 8)[labels] + 0.1 * generator.standard_normal((300, 8))
    known = np.arange(30)
    scores = attacks.by_direction(axes.astype(np.float32), known, labels[known])
    assert (scores.argmax(1) == labels).mean() > 0.95
    rows = (10.0 ** labels[:, None] * axes).astype(np.float32)
    assert (attacks.by_norm(rows, known, labels[known]).argmax(1) == labels).mean() > 0.95


def test_decoder_inverts_what_can_be_inverted() -> None:
    generator = np.random.default_rng(0)
    features = generator.standard_normal((600, 6)).astype(np.float32)
    embeddings = np.tanh(features @ generator.standard_normal((6, 16)) / 3).astype(np.float32)
    known = np.arange(200)
    decoded = features_of.reconstruct(embeddings, known, features[known])
    unexplained = np.square(decoded - features)[200:].sum() / np.square(features[200:]).sum()
    assert unexplained < 0.1
    noise = generator.standard_normal((600, 16)).astype(np.float32)
    decoded = features_of.reconstruct(noise, known, features[known])
    assert np.square(decoded - features)[200:].sum() > np.square(features[200:]).sum()


# --- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--known", "0"], "0 known rows per class are impossible"),
        (["--known", "200"], "the smallest class of digits has 1"),
        (["-c", "strategy='cascaded'"], "leave one out"),
        (["-c", "expert='mu=0'"], "mu = 0"),
        (["--strategy", "ef-vfl", "-c", "expert='labels=shared'"], "labels = 'shared'"),
        *((["--strategy", each], f"strategy = {each!r} is a baseline") for each in baselines()),
    ],
)
def test_what_cannot_be_audited_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    command = ["audit", "--strategy", "vafl", "--out", str(tmp_path / "out"), *arguments]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_too_few_rows_in_mini_batches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the run more epochs"):
        keys = {**SHORT, **DPZV, **SECRET, "strategy": "dpzv", "epochs": 1, "out": str(tmp_path)}
        audit(4, keys, known=110)
