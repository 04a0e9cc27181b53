"""Attacks on explanations: a party's columns at the label holder, and labels at a hostile party."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from tests.ledgers import numbers_in
from tests.organisations import ID, Organisations, cut
from tests.tasks.test_explain import SHORT
from vfl_attacks import explanation as attack
from vfl_attacks.explanation import Cheat, figures
from vfl_flower.alignment import store
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import explain_local, run_local
from vfl_flower.party import limits
from vfl_flower.party.inputs import own_source
from vfl_flower.protocol.privacy.gaussian import epsilon_of, mu_of
from vfl_flower.records import ledger
from vfl_flower.tasks.inference import explain as at_label_holder
from vfl_flower.tasks.inference import explanation, told_figures
from vfl_flower.tasks.inference.importance import Score
from vfl_flower.tasks.inference.model import TrainedModel
from vfl_flower.tasks.inference.party import explain, explained_people
from vfl_flower.tasks.inference.party.model import forget
from vfl_flower.tasks.inference.told_figures import FiguresToTell, Noise
from vfl_flower.transport.explain_messages import Explained, ExplainOrder, PermuteOrder
from vfl_flower.transport.wire import pack, read_reply, to_reply

pytestmark = pytest.mark.xdist_group("explain-attacks")  # its tests share trained models

Array = NDArray[Any]
ROWS = 450
FEW = {**SHORT, "epochs": 6, "noise-seed": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(explanation, "_draw", lambda figures, features, path: None)
    monkeypatch.setattr(explain, "_draw", lambda table, order, path: None)
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))


# --- columns of a party ---------------------------------------------------------------------------


@dataclass
class Node:
    """Party 0 of two runs on the same people, as a real node with its default rules."""

    organisations: Organisations
    runs: list[Path]
    states: Path
    simulated: bool = False

    def context(self, people: Array, run: int = 0) -> Context:
        """Return a fresh process that has just aligned these rows of the party's file."""
        more = {"simulated": True} if self.simulated else {}
        node: dict[str, Any] = {**self.organisations.node_configs[0], **more}
        node |= {"partition-id": 0, "num-partitions": 2, "states": str(self.states)}
        context = Context(9, 2, node, RecordDict(), {"task": "explain"})
        own = own_source(context)
        aligned = {"rows": np.asarray(people), "digest": store.digest_of(own, people)}
        name = np.full(32, ord("a"), np.uint8)
        context.state["aligned"] = pack({**aligned, "name": name, "method": store.PSI})
        state = next(self.runs[run].glob("run-*-party-0-checkpoint-*.state"))
        self.states.mkdir(exist_ok=True)
        (self.states / state.name).write_bytes(state.read_bytes())
        return context

    def begin(
        self, people: Array, run: int = 0, asked: Any = None, repeats: int = 1
    ) -> tuple[Context, Explained]:
        context, found = self.context(people, run), checkpoint.load(self.runs[run])
        arrays = {} if asked is None else {"rows": np.asarray(asked, np.int32)}
        order = ExplainOrder(run=found.run, number=found.number, repeats=repeats, arrays=arrays)
        return context, explain.begin(context, order)

    def donors(self, people: Array, run: int = 0) -> dict[str, Array]:
        """Return by feature: whose value each of the people gets."""
        context, said = self.begin(people, run)
        assert not said.refused
        found = explain.current(context)
        forget(9)
        return {
            each.name: np.asarray(people)[found.permutation(number, 0)]
            for number, each in enumerate(found.features)
        }

    def changes(self, people: Array, repeats: int = 1) -> tuple[Array, Array, list[str]]:
        """Return embeddings as they are, changes [features, repeats, n, E], and names."""
        context, said = self.begin(people, repeats=repeats)
        found, plain = explain.current(context), said.arrays["embedding"]
        changes = []
        for repeat in range(repeats):
            numbers = {"first": 0, "count": said.features, "start": 0, "stop": len(plain)}
            given: dict[str, Any] = {"party": 0, "repeat": repeat, **numbers}
            order = PermuteOrder(**given)
            new = explain.permute(context, order).arrays["embedding"]
            changes.append(new.reshape(said.features, len(plain), -1) - plain)
        forget(9)
        return plain, np.stack(changes, 1), [each.name for each in found.features]


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    generator = np.random.default_rng(3)
    values = generator.standard_normal((ROWS, 20))
    label = (values[:, 0] + values[:, 12] + generator.standard_normal(ROWS) > 0).astype(int)
    table = pd.DataFrame(values, columns=[f"f{n}" for n in range(20)])
    table = table.assign(**{ID: 1000 + np.arange(ROWS), "label": label})
    made = cut(tmp_path_factory.mktemp("people"), table, known=1.0)
    for seed in (0, 1):
        keys = {**FEW, "embedding-size": 2, "bottom-model": "linear", "seed": seed}
        made.run(f"run-{seed}", {**keys, "embedding-activation": "none"})
    return made


@pytest.fixture
def node(organisations: Organisations, tmp_path: Path) -> Node:
    runs = [organisations.folder / f"run-{seed}" for seed in (0, 1)]
    return Node(organisations, runs, tmp_path / "states")


def test_a_real_party_explains_no_few_rows_and_permutes_each_feature_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = np.arange(ROWS)
    for asked in ([0, 1], np.arange(199)):
        _, said = node.begin(everybody, asked=asked)
        assert not said.features and "200 are needed" in said.refused
    _, said = node.begin(everybody, repeats=2)
    assert not said.features and "set repeats = 1" in said.refused
    monkeypatch.setattr(node.organisations, "words", [{"min-rows": 300}, {}])
    assert "300 are needed" in node.begin(everybody, asked=np.arange(299))[1].refused
    assert node.begin(everybody, asked=np.arange(300))[1].features == 10


def test_the_same_people_are_permuted_alike_in_every_run_and_order(node: Node) -> None:
    people = np.arange(250)
    first = node.donors(people)
    again = np.random.default_rng(0).permutation(people)
    for run, order in ((0, people), (1, people), (0, again), (1, again)):
        donors = node.donors(order, run)
        for name, found in donors.items():
            by_person = dict(zip(order.tolist(), found.tolist(), strict=True))
            assert by_person == dict(zip(people.tolist(), first[name].tolist(), strict=True))
    assert len({tuple(each) for each in first.values()}) == 10  # features do not share one


def test_people_of_one_explanation_are_in_no_other_set_for_30_days(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node.donors(np.arange(220))
    for people in (np.arange(219), np.arange(221), np.arange(2, 222), np.arange(100, 400)):
        _, said = node.begin(people, run=1)
        assert not said.features and "people of an explanation" in said.refused
    assert node.begin(np.arange(ROWS), asked=np.arange(220))[1].features == 10  # they are the same
    assert node.donors(np.arange(220, 440))
    now = ledger.today()
    for later, refused in ((-400, True), (29, True), (30, False)):
        monkeypatch.setattr(explained_people, "today", lambda days=later: now + days)
        assert bool(node.begin(np.arange(219))[1].refused) == refused
    monkeypatch.setattr(explained_people, "today", lambda: now + 100)
    again = node.donors(np.arange(220))  # the same set has its permutations for good
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_of_two_explanations_at_once_one_has_the_people(node: Node) -> None:
    contexts = [node.context(np.arange(start, start + 300)) for start in (0, 100)]
    numbers = [np.arange(start, start + 300).astype(np.uint64) for start in (0, 100)]

    def claim(which: int) -> bytes:
        try:
            with explained_people.claimed(contexts[which], numbers[which], 1) as secret:
                return secret
        except ConfigError:
            return b""

    with ThreadPoolExecutor(8) as pool:
        secrets = list(pool.map(claim, [0, 1] * 12))
    assert len({each for each in secrets if each}) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_an_error_inside_the_block_is_not_told_as_one_of_the_count(
    node: Node, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise VflError("The count of uploads is damaged.")

    people = np.arange(300, dtype=np.uint64)
    if not inside:  # the control
        monkeypatch.setattr(ledger, "opened", fail)
    said = "count of uploads" if inside else "cannot count the people"
    with (
        pytest.raises(VflError, match=said),
        explained_people.claimed(node.context(np.arange(300)), people, 1),
    ):
        fail()


@pytest.mark.parametrize(
    ("rule", "most", "file", "counted"),
    [("max-uploads", 20, "*.uploads", 1), ("max-predictions", 3299, "*.predictions", 300)],
)
def test_a_refused_explanation_has_no_people_and_counts_no_permutation(
    node: Node, rule: str, most: int, file: str, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row of 300 has 1 upload as it is, 20 with permuted features, and half as many predictions.
    monkeypatch.setattr(limits.Limits, "go_on", limits.Limits.begin)  # training had no such rule
    with monkeypatch.context() as patched:
        patched.setattr(node.organisations, "words", [{rule: most}, {}])
        _, said = node.begin(np.arange(300))
    assert not said.features and f"{rule} = {most}" in said.refused
    [counts] = node.states.glob(file)
    name = {"max-uploads": "uploads", "max-predictions": "rows"}[rule]
    assert set(numbers_in(counts, name).values()) == {counted}
    assert node.begin(np.arange(299))[1].features == 10
    assert not node.begin(np.arange(300))[1].features  # the control: these people are in a set


def test_a_party_that_cannot_count_people_explains_nothing(node: Node) -> None:
    node.donors(np.arange(300))
    path = node.states / "party-0.explained"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VflError, match="cannot count the people"):
        node.begin(np.arange(300))


def explained(node: Node, tries: list[Array], repeats: int) -> float:
    """Return mean R2 of the columns by all explanations that the party serves of these sets.

    The label holder knows no row. It adds up the changes of each row along the main direction of a
    feature, and decodes embeddings by these changes. The better one counts.
    """
    columns: Any = own_source(node.context(np.arange(2)))
    truth = dict(columns.raw_columns(np.arange(ROWS), columns.feature_names))
    sums: dict[str, Array] = {name: np.zeros(ROWS) for name in truth}
    counts, plain = np.zeros(ROWS), np.zeros((ROWS, 2))
    main: dict[str, Array] = {}
    for people in tries:
        if node.begin(people, repeats=repeats)[1].refused:
            continue
        plain[people], changes, names = node.changes(people, repeats)
        for name, change in zip(names, changes, strict=True):
            flat = change.reshape(-1, change.shape[2])
            main.setdefault(name, np.linalg.svd(flat, full_matrices=False)[2][0])
            sums[name][people] += (change @ main[name]).sum(0)
        counts[people] += repeats
    known = counts > 0
    found = []
    for name, total in sums.items():
        added = total[known] / counts[known]
        design = np.c_[plain[known], np.ones(known.sum())]
        decoded = design @ np.linalg.lstsq(design, added, rcond=None)[0]
        values = np.asarray(truth[name], float)[known]
        found.append(max(np.corrcoef(each, values)[0, 1] ** 2 for each in (added, decoded)))
    return float(np.mean(found))


def test_explanations_of_chosen_people_tell_no_more_than_one_explanation(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    tries = [np.sort(generator.permutation(300)[: 298 - n % 7]) for n in range(20)]
    honest = explained(node, [np.arange(300)], 1)
    node.states = node.states.with_name("attacked")
    attacked = explained(node, tries, 1)
    assert honest < 0.6 and attacked < 0.6  # one difference of two people tells half

    node.simulated, node.states = True, node.states.with_name("simulated")  # the control
    assert explained(node, tries, 1) > 0.9
    assert explained(node, [np.arange(300)], 20) > 0.9


# --- labels at a party ----------------------------------------------------------------------------


def outputs_of(kind: str, rows: int, generator: Any) -> tuple[Any, int, Any]:
    """Return labels, classes, and a function that draws outputs."""
    if kind == "r2":
        labels: Any = generator.standard_normal(rows).astype(np.float32) * 3
        return labels, 0, lambda: generator.standard_normal((rows, 1)).astype(np.float32) * 4
    classes = 2 if kind == "auc" else 3
    labels = np.arange(rows) % classes
    width = 1 if kind == "auc" else 3
    return labels, classes, lambda: generator.standard_normal((rows, width)).astype(np.float32)


def sums_of(labels: Any, classes: int, plain: Any, permuted: list[Any]) -> FiguresToTell:
    """Return the figures of outputs [repeats, features, R, C]."""
    fresh = np.ones(len(labels), bool)
    made = FiguresToTell(Score(labels, classes), plain, fresh, len(permuted[0]))
    for repeat, outputs in enumerate(permuted):
        made.add(0, np.asarray(outputs), repeat, len(permuted))
    return made


@pytest.mark.parametrize("kind", ["auc", "accuracy", "r2"])
def test_noise_covers_the_change_of_all_figures_by_one_label(kind: str) -> None:
    generator, most = np.random.default_rng(2), 0.0
    labels, classes, draw = outputs_of(kind, 40, generator)
    plain = draw()
    permuted = [[draw() for _ in range(5)] for _ in range(2)]
    made = sums_of(labels, classes, plain, permuted)
    for row in range(40):
        for new in range(classes) if classes else (-1e3, 1e3):
            changed = labels.copy()
            changed[row] = new
            other = sums_of(changed, classes, plain, permuted)
            assert other.sensitivity == pytest.approx(made.sensitivity, rel=1e-12)  # label-free
            most = max(most, float(np.linalg.norm(other._sums - made._sums)))
    assert 0.3 * made.sensitivity < most <= made.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["auc", "accuracy"])
def test_figures_without_noise_are_the_exact_falls(kind: str) -> None:
    generator = np.random.default_rng(1)
    labels, classes, draw = outputs_of(kind, 90, generator)
    plain, permuted = draw(), [[draw() for _ in range(3)] for _ in range(2)]
    score = Score(labels, classes)
    noise = Noise(score, np.ones(90, bool), 1, 1e6, 1e-5)
    told, margins, _ = sums_of(labels, classes, plain, permuted).told(noise)
    falls = [
        np.mean([score.shares(plain) - score.shares(each[n]) for each in permuted], 0)
        for n in range(3)
    ]
    np.testing.assert_allclose(told, [score.value(each) for each in falls], atol=0.02)
    assert (margins < 0.02).all()


def game(generator: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return mu that two worlds show, with equal noise: one label differs, parties are hostile."""
    labels = np.arange(300) % 2
    other = labels.copy()
    other[7] = 1 - other[7]
    plain = generator.standard_normal((300, 1)).astype(np.float32)
    hostile = np.repeat(plain[None], 6, 0)
    hostile[:, 7] = np.array([-9, 9, -9, 9, 9, 9])[:, None]  # every figure is about one row
    honest = generator.standard_normal((4, 300, 1)).astype(np.float32)
    views = []
    monkeypatch.setattr("secrets.token_bytes", lambda size: bytes([seed] * size))
    for world in (labels, other):
        noise = Noise(Score(world, 2), np.ones(300, bool), 2, 1.0, 1e-5)
        raw, deviations = [], []
        for uploads in (hostile, honest):
            made = sums_of(world, 2, plain, [list(uploads)])
            sums, deviation = noise.on(made._sums, made.sensitivity)
            raw.append(sums)
            deviations.append(np.full(len(sums), deviation))
        second = 300 / noise.unit
        count = (300 - math.sqrt(max(0.0, 300**2 - 4 * second))) / 2  # of the smaller class
        views.append(np.concatenate([*raw, [count]]))
        spread = np.concatenate([*deviations, [1 / (mu_of(1.0, 1e-5) * math.sqrt(0.1))]])
    return float(np.linalg.norm((views[0] - views[1]) / spread))


def test_figures_of_two_worlds_show_no_more_than_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is equal in both worlds, so the difference over its deviation is mu exactly."""
    shown = [game(np.random.default_rng(seed), seed, monkeypatch) for seed in range(5)]
    assert 0.4 < epsilon_of(max(shown), 1e-5) <= 1.001
    weaker = 3.0  # the control: a third of the noise
    monkeypatch.setattr(told_figures, "mu_of", lambda epsilon, delta: weaker * mu_of(1.0, 1e-5))
    loud = [game(np.random.default_rng(seed), seed, monkeypatch) for seed in range(5)]
    assert epsilon_of(weaker * max(loud), 1e-5) > 1.5


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 300 test rows, where party 0 has columns of noise."""
    folder, generator = tmp_path_factory.mktemp("noisy"), np.random.default_rng(5)
    y = generator.integers(0, 2, 1500)
    noise, useful = generator.normal(size=(2, 1500, 8))
    useful[:, 0] += 1.5 * (2 * y - 1)
    np.savez(folder / "data.npz", X=np.hstack([noise, useful]).astype(np.float32), y=y)
    keys = {**FEW, "dataset": f"npz:{folder}/data.npz", "validation-fraction": 0.0}
    return run_local(2, {**keys, "out": str(folder / "run")}).folder


@pytest.mark.nightly
def test_many_figures_of_chosen_groups_tell_no_labels(
    noisy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the party had claimed so many columns from training on."""
    y = load_labels(checkpoint.load(noisy).config).tested.test
    sides = np.random.default_rng(7).choice([-1, 0, 1], (900, len(y)))
    monkeypatch.setattr(at_label_holder, "_check_features", lambda answers, found: None)

    class Claims(Cheat):
        def __call__(self, message: Message, context: Context) -> Message:
            reply = super().__call__(message, context)
            if message.metadata.message_type != ExplainOrder.kind:
                return reply
            if context.node_config["partition-id"]:
                return reply
            said = read_reply(reply, Explained, 2**26)
            return to_reply(replace(said, features=len(sides)), message)

        def _moved(self, found: Any, order: PermuteOrder) -> Any:
            main = np.linalg.svd(found.plain - found.plain.mean(0), full_matrices=False)[2][0]
            moved = sides[order.first : order.first + order.count, order.start : order.stop]
            new = found.plain[order.start : order.stop] + 300 * moved[..., None] * main
            return new.reshape(-1, new.shape[2]).astype(np.float32)

    none = np.zeros(0, np.int64)
    exact, told = figures(noisy, Claims([], (none, none)))
    queries = sides - sides.mean(1, keepdims=True)

    def auc(values: Any) -> float:
        gram = queries.T @ queries + 90 * np.eye(len(y))
        found = np.linalg.solve(gram, queries.T @ (values - values.mean()))
        one = float(roc_auc_score(y, found))
        return max(one, 1 - one)  # which side is which class: one bit

    assert auc(exact) > 0.85  # the control
    assert auc(told) < 0.62


def as_on_real_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the label holder treat parties as real ones from here on."""

    embed = TrainedModel.embed

    def asked(model: Any, *kinds: Any, **fields: Any) -> Any:
        model.transport.simulated = False
        return embed(model, *kinds, **fields)

    monkeypatch.setattr(TrainedModel, "embed", asked)


def tables(folder: Path) -> list[Any]:
    return [pd.read_csv(folder / f"party-{party}-explanation.csv") for party in "01"]


def test_parties_get_figures_about_a_person_once_in_30_days(
    noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_on_real_nodes(monkeypatch)
    caplog.set_level("INFO")
    given = {"model": str(noisy), "out": str(tmp_path)}
    exact = explain_local(given)["parties"]["1"]["features"]
    assert "figures of 300 people with noise: epsilon 1" in caplog.text
    first = tables(noisy)
    told = first[1].set_index("feature")["value"].sort_index()
    falls = np.array([each["value"] for each in exact])
    assert told.argmax() == falls.argmax() and falls.max() > 0.2  # noise leaves what counts
    assert not np.allclose(told, falls, atol=1e-3)
    explain_local(given)
    assert told_figures.LATE in caplog.text
    assert all(map(pd.DataFrame.equals, first, tables(noisy)))
    now = ledger.today()
    monkeypatch.setattr(told_figures, "today", lambda: now + 30)
    explain_local(given)
    assert not any(map(pd.DataFrame.equals, first, tables(noisy)))


def test_the_option_epsilon_is_the_budget_of_the_figures(
    noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_real_nodes(monkeypatch)
    explain_local({"model": str(noisy), "out": str(tmp_path), "epsilon": 50.0})
    widths = tables(noisy)[1].eval("high - low")
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "another"))
    explain_local({"model": str(noisy), "out": str(tmp_path)})
    assert (tables(noisy)[1].eval("high - low") > 10 * widths).all()


def test_parties_get_no_figures_of_few_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_on_real_nodes(monkeypatch)
    caplog.set_level("INFO")
    keys = {**SHORT, "epochs": 1, "dataset": "breast-cancer", "out": str(tmp_path / "run")}
    said = explain_local({"model": str(run_local(2, keys).folder)})
    assert told_figures.FEW in caplog.text and said["rows"] == 114
    assert list(tables(tmp_path / "run")[0]) == ["feature", "name"]


def test_people_who_are_told_about_again_are_left_out_of_figures(tmp_path: Path) -> None:
    numbers = np.arange(500).astype(np.uint64)
    assert told_figures.claim(numbers[:300])
    assert not told_figures.claim(numbers[299:])
    assert told_figures.fresh(numbers).sum() == 200
    assert told_figures.claim(numbers[300:])


def test_a_party_has_no_more_features_than_it_had_columns(noisy: Path) -> None:
    found = checkpoint.load(noisy)
    assert [each["columns"] for each in found.strategy["seats"]] == [8, 8]

    def said(features: int) -> Any:
        return [Explained(party=0, parties=2, exchange=1, alignment="", features=features)]

    at_label_holder._check_features(said(8), found)
    with pytest.raises(PartyError, match="9 features to explain, and had 8 columns"):
        at_label_holder._check_features(said(9), found)
    for seat in found.strategy["seats"]:
        del seat["columns"]  # as in checkpoints of 0.2.0
    at_label_holder._check_features(said(9), found)


def test_columns_with_one_value_give_no_correlation() -> None:
    """A column of float32 with one value may have a deviation above 0, by rounding."""
    generator = np.random.default_rng(0)
    truth = np.column_stack([np.full(100, 0.1, np.float32), generator.random(100, np.float32)])
    assert truth[:, 0].std() > 0
    change = truth[:, 1:] - truth[::-1, 1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.1 < attack._alike(truth[:, 1:], change, truth) <= 1
