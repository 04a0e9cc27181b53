"""What a party insists on, whatever orders come in whatever sequence; and what its secret hides."""

from __future__ import annotations

import copy
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from tests.organisations import ID, cut, kept_state, small, write
from vfl_flower import client_app, start
from vfl_flower.axes.batches import steps_per_epoch
from vfl_flower.data import alignment
from vfl_flower.data.blocks import own_source
from vfl_flower.errors import ConfigError, OutOfStepError, PartyError, VflError
from vfl_flower.files import unsealed
from vfl_flower.flower_internals import begin_task, state_from_bytes, state_to_bytes
from vfl_flower.holder import checkpoint, results
from vfl_flower.messages import (
    Arrays,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    Payload,
    Predicted,
    PredictOrder,
    RejoinOrder,
    ResumeOrder,
    SessionEnd,
    SessionOrder,
    TrainOrder,
    Upload,
)
from vfl_flower.models.bottoms import build_bottom, seeded
from vfl_flower.party import context as between
from vfl_flower.party import limits, rules, state, state_file
from vfl_flower.party.party import Party
from vfl_flower.party.rules import Rules
from vfl_flower.runtimes.stream import session
from vfl_flower.systems import resolve
from vfl_flower.wire import pack, read_reply, to_message

Array = NDArray[Any]

ROWS, BATCH = 60, 8  # of the party's file; 48 of the rows are trained on, in 6 mini-batches
KEYS: dict[str, Any] = {
    **{"dataset": "files:elsewhere.csv", "bottom-model": "linear", "embedding-size": 8},
    **{"embedding-activation": "none", "batch-size": BATCH, "party-lr": 0.0, "epochs": 4},
}
DESCRIBE = DescribeOrder(outputs=1)


@pytest.fixture(autouse=True)
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "draw_curves", lambda histories, path: None)


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    begin_task()
    between._skeletons.clear()
    yield
    between._skeletons.clear()


Node = Callable[..., Context]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A real node with a file of its own, aligned; its rules, and the keys of its run."""
    write(small(ROWS), tmp_path / "a.csv")

    def build(own: Mapping[str, Any] | None = None, run_id: int = 1, **keys: Any) -> Context:
        context = Context(
            run_id=run_id,
            node_id=2,
            node_config={
                **{"partition-id": 0, "num-partitions": 1, "states": str(tmp_path)},
                **{"file": str(tmp_path / "a.csv"), "id": ID},
                **(own or {}),
            },
            state=RecordDict(),
            run_config={**KEYS, **{key.replace("_", "-"): value for key, value in keys.items()}},
        )
        align(context)
        return context

    return build


def align(context: Context, rows: Array | None = None) -> None:
    """Tell a party which of its rows all have."""
    rows = np.arange(ROWS) if rows is None else rows
    digest = alignment._digest(own_source(context), rows)
    name = np.full(32, ord("a"), np.uint8)
    context.state["aligned"] = pack({"rows": rows, "digest": digest, "name": name})


def asked(context: Context, order: Order, kind: type[Payload] = Upload) -> Any:
    """A party's answer to an order, or the error that is told of it."""
    return read_reply(client_app.app(to_message(order, 2, 60), context), kind)


def train(exchange: int, steps: int = 6, epoch: int = 0, first: int = 0, **sent: Any) -> TrainOrder:
    """An order for some mini-batches; without more, for a whole pass."""
    place = {"epoch": epoch, "first": first, "steps": steps}
    return TrainOrder(exchange=exchange, coordinated=True, arrays=sent, **place)


def gradient(rows: int = 48) -> Array:
    return np.zeros((rows, 8), np.float32)


def restarted(context: Context, kept: bytes | None = None) -> None:
    """The process has ended, and its SuperNode too, if nothing but a state is kept."""
    between._skeletons.clear()
    context.state = RecordDict() if kept is None else state_from_bytes(kept)


# --- the first upload ---------------------------------------------------------------------------


def solved(embedding: Array, **keys: Any) -> Array:
    """The features behind embeddings [R, 8], by the linear model that the public seed gives."""
    model = build_bottom(resolve({**KEYS, **keys}), 0, (2,), 8)
    (layer,) = (each for each in model.modules() if isinstance(each, torch.nn.Linear))
    weight, bias = (each.detach().double().numpy() for each in (layer.weight, layer.bias))
    found: Array = np.linalg.lstsq(weight, (embedding - bias).T, rcond=None)[0].T
    return found


@pytest.mark.parametrize("permitted", [True, False])
def test_who_knows_the_seed_solves_a_first_upload_only_if_the_party_permits_it(
    node: Node, permitted: bool
) -> None:
    seed = {"noise-seed": 3} if permitted else {}
    context = node({**seed, "columns": "f0,f1"}, **seed)
    asked(context, DESCRIBE, Description)
    sent = asked(context, train(1)).arrays["embedding"]
    party = between._skeletons[0, 1][1]
    window = party._window(train(1))
    features = party.block.train[window.ids].astype(np.float64)
    found = solved(sent)
    if permitted:
        assert np.abs(found - features).max() < 1e-5
    else:
        assert 1 - np.square(features - found).sum() / np.square(features).sum() < 0.2


def test_divided_data_and_permitted_seeds_give_the_models_that_the_seed_gives() -> None:
    config = resolve({"dataset": "breast-cancer"})
    first, second = (Party(config, 0, 2, 1).model.state_dict() for _ in range(2))
    expected = build_bottom(config, 0, (15,), 32).state_dict()
    for name, value in expected.items():
        assert torch.equal(first[name], value) and torch.equal(second[name], value)


def test_a_model_follows_from_every_word_of_its_secret() -> None:
    """Torch's own seed has 32 bits: the state of its generator is NumPy's MT19937."""
    config, drawn = resolve({}), []
    for secret in (b"", b"one", b"one", b"other"):
        with seeded(config, 0, secret):
            words = torch.get_rng_state().view(torch.int64)[3:627].numpy().astype(np.uint32)
            drawn.append(torch.empty(700, dtype=torch.int64).random_(0, 2**31).numpy())
        same = np.random.RandomState()
        same.set_state(("MT19937", words, 624, 0, 0.0))
        expected = same.randint(0, 2**32, 1400, np.uint32)[1::2]  # two words for each number
        np.testing.assert_array_equal(drawn[-1], expected & np.uint32(2**31 - 1))
    assert (drawn[1] == drawn[2]).all()
    assert not (drawn[1] == drawn[3]).any() and not (drawn[1] == drawn[0]).any()


# --- what is refused ----------------------------------------------------------------------------

NOISY = {"privacy": "perturbed-embedding", "embedding-noise": 2.0}

BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    # the rule; keys that break it, and keys that keep to it; what is said
    "systems": (
        *({"systems": "vafl, ef-vfl"}, {}, {"strategy": "vafl"}),
        "strategy = 'split-nn': its rule is systems = 'vafl, ef-vfl'.",
    ),
    "a system in name only": (
        *({"systems": "cascaded"}, {"strategy": "cascaded", "estimator": "first-order"}),
        *({"strategy": "cascaded"}, "strategy = 'cascaded' with another estimator or labels than"),
    ),
    "labels for all": (
        *({"systems": "ef-vfl"}, {"strategy": "ef-vfl", "labels": "shared"}),
        *({"strategy": "ef-vfl"}, "strategy = 'ef-vfl' with another estimator or labels than"),
    ),
    "epochs": (
        *({"max-epochs": 3}, {"epochs": 4}, {"epochs": 3}),
        "epochs = 4: its rule is max-epochs = 3.",
    ),
    "no noise": (
        *({"min-embedding-noise": 2}, {"embedding-noise": 5.0}, NOISY),
        "privacy = 'none': its rule is min-embedding-noise = 2.",
    ),
    "little noise": (
        *({"min-embedding-noise": 2.0}, {**NOISY, "embedding-noise": 1.9}, NOISY),
        "embedding-noise = 1.9 at embedding-bound = 1: its rule is min-embedding-noise = 2 times",
    ),
    "noise that a bound makes little": (
        *({"min-embedding-noise": 2.0}, {**NOISY, "embedding-bound": 1e6}),
        *({**NOISY, "embedding-bound": 0.5}, "embedding-noise = 2 at embedding-bound = 1e"),
    ),
    "known noise": (
        *({}, {"noise-seed": 0}, {}),
        "noise-seed = 0, by which others know its noise and its first model: its own node "
        "configuration gives no noise-seed.",
    ),
    "another seed": (
        *({"noise-seed": 3}, {"noise-seed": 0}, {"noise-seed": 3}),
        "noise-seed = 0, .*: its own node configuration gives noise-seed = 3.",
    ),
    "data of no file": (
        *({}, {"dataset": "memory:x"}, {}),
        "dataset = 'memory:x', which others name: its own node configuration gives no dataset.",
    ),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the party's own log says."""
    lines: list[str] = []
    monkeypatch.setattr(rules.log, "warning", lambda text, *words: lines.append(text % words))
    return lines


@pytest.mark.parametrize(("own", "breaks", "keeps", "what"), BROKEN.values(), ids=list(BROKEN))
def test_a_run_that_breaks_a_rule_is_refused_at_both_ends_whatever_comes_first(
    node: Node,
    own: dict[str, Any],
    breaks: dict[str, Any],
    keeps: dict[str, Any],
    what: str,
    said: list[str],
) -> None:
    sentence = f"^failed: Party 0 refuses {what}"
    for order in (DESCRIBE, RejoinOrder(exchange=9, outputs=1)):
        context = node(own, **breaks)
        if isinstance(order, RejoinOrder):  # from who has lost all
            restarted(context)
        before = list(context.state)
        with pytest.raises(VflError, match=sentence) as raised:
            asked(context, order, Description)
        assert said.pop() == str(raised.value).removeprefix("failed: ") and not said
        assert list(context.state) == before  # it has begun nothing
        with pytest.raises(OutOfStepError, match="has no state of this run"):
            asked(context, train(1))
    served = node(own, **keeps)
    asked(served, DESCRIBE, Description)
    assert len(asked(served, train(1)).arrays) and not said


@pytest.mark.parametrize(("own", "breaks", "keeps", "what"), BROKEN.values(), ids=list(BROKEN))
def test_a_rule_holds_for_a_run_that_began_before_it(
    node: Node, own: dict[str, Any], breaks: dict[str, Any], keeps: dict[str, Any], what: str
) -> None:
    seed = {key: breaks[key] for key in ("noise-seed",) if key in breaks}
    if "dataset" in breaks:  # which no node has ever served
        return
    context = node(seed, **breaks)
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    state_file.save(context, 1)
    for key in seed:
        del context.node_config[key]
    context.node_config.update(own)
    context.run_config = {**KEYS, **keeps}  # what counts is the configuration that is used
    before = state_to_bytes(context.state)
    for order in (
        *(train(2, gradient=gradient()), EvaluateOrder(exchange=2)),
        *(EmbedOrder(exchange=2, arrays={"ids": np.zeros(1, np.int32)}),),
        *(RejoinOrder(exchange=5, outputs=1), PredictOrder(run="1", number=1)),
    ):
        with pytest.raises(VflError, match=f"^failed: Party 0 refuses {what}"):
            asked(context, order, Predicted if isinstance(order, PredictOrder) else Upload)
        assert state_to_bytes(context.state) == before
    later = node(own, run_id=2)
    with pytest.raises(VflError, match=f"^failed: Party 0 refuses {what}"):
        asked(later, ResumeOrder(run="1", number=1), Description)


def test_one_owner_needs_no_permission_unless_a_party_says_so(node: Node) -> None:
    one_owner = {"simulated": True}
    asked(node(one_owner, **{"noise-seed": 0}), DESCRIBE, Description)
    with pytest.raises(VflError, match=r"refuses noise-seed = 0, .* gives noise-seed = 3"):
        asked(node({**one_owner, "noise-seed": 3}, **{"noise-seed": 0}), DESCRIBE, Description)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("max-epoch", 5, "has a key 'max-epoch' that there is not: did you mean max-epochs?"),
        ("min-noise", 5, "has a key 'min-noise' that there is not: did you mean min-rows?"),
        ("privacy", "x", "has a key 'privacy' that there is not: rules are align, min-rows"),
        ("max-epochs", "5", "gives max-epochs = '5', where a whole number, at least 0, is due."),
        ("max-epochs", True, "gives max-epochs = True, where a whole number, at least 0, is due."),
        ("max-uploads", -1, "gives max-uploads = -1, where a whole number, at least 0, is due."),
        ("min-embedding-noise", "1", "where a number, at least 0, is due."),
        ("min-embedding-noise", float("nan"), "where a number, at least 0, is due."),
        ("systems", 3, "gives systems = 3, where a text in quotes is due."),
    ],
)
def test_a_rule_that_cannot_be_read_lets_nothing_pass(
    node: Node, key: str, value: Any, sentence: str
) -> None:
    context = node({key: value})
    session = SessionOrder(address="x", certificate="", token="", keep=False)
    for order in (DESCRIBE, train(1), session):
        with pytest.raises(VflError) as raised:
            asked(context, order)
        said = str(raised.value)
        assert said.startswith("failed: Party 0's node configuration ") and sentence in said


def test_a_source_has_keys_of_its_own_that_are_not_nearly_rules() -> None:
    assert Rules.of({"source": "waves:Waves", "share": 0.5, "rows": 9}) == Rules()
    with pytest.raises(ConfigError, match="did you mean max-epochs"):
        Rules.of({"source": "waves:Waves", "max-epoch": 5})


def test_the_label_holder_is_told_which_party_refuses_and_why(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(80))
    own: Any = {"max-epochs": 2}
    organisations.words = [{}, own]
    keys = {"bottom-hidden": 4, "embedding-size": 2, "top-hidden": 4}
    sentence = r"Party 1 refuses epochs = 3: its rule is max-epochs = 2\.$"
    with pytest.raises(PartyError, match=sentence):
        organisations.run("refused", {**keys, "epochs": 3})
    assert organisations.run("served", {**keys, "epochs": 2}).summary["failure"] is None


# --- paths --------------------------------------------------------------------------------------


@pytest.fixture
def other_node(tmp_path: Path) -> Callable[..., Context]:
    """A real node without a file, where others have one that is nobody else's business."""
    table = small(ROWS)
    values = table[["f0", "f1"]].to_numpy()
    np.savez(tmp_path / "private.npz", X=values, y=table["label"].to_numpy())
    table.drop(columns=ID).to_csv(tmp_path / "private.csv", index=False)

    def build(dataset: str, own: Mapping[str, Any] | None = None) -> Context:
        return Context(
            run_id=1,
            node_id=2,
            node_config={
                **{"partition-id": 0, "num-partitions": 1, "states": str(tmp_path)},
                **(own or {}),
            },
            state=RecordDict(),
            run_config={**KEYS, "dataset": dataset},
        )

    return build


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_node_reads_no_path_that_it_has_not_named_too(
    other_node: Callable[..., Context], tmp_path: Path, kind: str
) -> None:
    dataset = f"{kind}:{tmp_path}/private.{kind}"
    refused = {"no file": f"{kind}:/etc/none", "another": "npz:/etc/passwd", "text": f"{dataset} "}
    for text in (dataset, *refused.values()):
        with pytest.raises(
            VflError, match=r"Party 0 refuses dataset = '.*', which others name: .*"
        ):
            asked(other_node(text), DESCRIBE, Description)
    for text in refused.values():
        context = other_node(text, {"dataset": dataset})
        with pytest.raises(VflError, match="its own node configuration gives dataset = "):
            asked(context, DESCRIBE, Description)
    for own in ({"dataset": dataset}, {"simulated": True}):  # and these could be read
        context = other_node(dataset, own)
        assert asked(context, DESCRIBE, Description).train_rows == 48
        assert asked(context, train(1)).arrays["embedding"].shape == (48, 8)
    context.node_config["simulated"] = False
    with pytest.raises(VflError, match="Party 0 refuses dataset"):
        asked(context, train(2, gradient=gradient()))
    for text in ("digits", "breast-cancer"):
        asked(other_node(text), DESCRIBE, Description)


def test_parties_that_a_run_starts_itself_permit_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    class Started:
        def __init__(self, simulation: bool) -> None:
            pass

        @contextmanager
        def supernode(self, party: int, parties: int, own: dict[str, Any]) -> Iterator[None]:
            given.append(own)
            yield

        def __enter__(self) -> Started:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(start, "SuperLink", Started)
    monkeypatch.setattr(start, "_run_on", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", X=np.eye(20), y=np.arange(20) % 2)
    start.run_supernodes(2, {"dataset": "npz:data.npz", "noise-seed": 4, "out": "a"})
    path = f"npz:{tmp_path}/data.npz"
    assert given == [{"noise-seed": 4, "dataset": path}] * 2
    given.clear()
    start.run_supernodes(1, {"dataset": "digits", "out": "b"})
    own = {"file": f"{tmp_path}/f.csv", "noise-seed": 7}
    keys = {"dataset": "files:l.csv", "noise-seed": 4, "out": "c"}
    start.run_supernodes(1, keys, [own])
    assert given == [{}, {"align": "psi", **own}]  # what a party says itself stays


# --- how often, how long ------------------------------------------------------------------------


def counted(tmp_path: Path) -> Array:
    """Uploads of each row that the party has uploaded."""
    (path,) = tmp_path.glob("*.uploads")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    counts: Array = np.frombuffer(unsealed(path), "<u8").reshape(2, -1)[1]
    return counts


TOO_OFTEN = "^failed: Party 0 refuses to upload a row once more than it allows: .* max-uploads = 2"


def test_uploads_of_a_row_end_whatever_asks_for_them(node: Node, tmp_path: Path) -> None:
    context = node({"max-uploads": 2})
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    ids = np.array([3, 7], np.int32)
    asked(context, EmbedOrder(exchange=2, arrays={"ids": ids, "gradient": gradient()}))
    asked(context, EvaluateOrder(exchange=3))
    counts = counted(tmp_path)
    assert counts.sum() == 48 + 2 + 12 and len(counts) == ROWS and counts.max() == 2
    (path,) = tmp_path.glob("*.uploads")
    assert not any(str(who).encode() in path.read_bytes() for who in range(1000, 1000 + ROWS))
    before = state_to_bytes(context.state)

    def computes_nothing(*_: Any) -> Any:
        raise AssertionError("it was computed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", computes_nothing)
        for order in (train(4), EmbedOrder(exchange=4, arrays={"ids": ids[:1]})):
            with pytest.raises(VflError, match=TOO_OFTEN):
                asked(context, order)
    assert (counted(tmp_path) == counts).all() and state_to_bytes(context.state) == before
    asked(context, EvaluateOrder(exchange=4))
    with pytest.raises(VflError, match=TOO_OFTEN):
        asked(context, EvaluateOrder(exchange=5))
    without = np.setdiff1d(np.arange(48), ids).astype(np.int32)
    asked(context, EmbedOrder(exchange=5, arrays={"ids": without}))
    assert counted(tmp_path).min() == counted(tmp_path).max() == 2


def again_from_an_older_state(context: Context, kept: bytes) -> None:
    restarted(context, kept)


def again_from_the_start(context: Context, kept: bytes) -> None:
    asked(context, DESCRIBE, Description)


def again_in_another_order(context: Context, kept: bytes) -> None:
    align(context, np.arange(ROWS)[::-1])
    asked(context, DESCRIBE, Description)


def again_from_another_file(context: Context, kept: bytes) -> None:
    """Of the same people and some more, in another order."""
    path = Path(str(context.node_config["file"])).with_name("b.csv")
    write(small(ROWS + 20)[::-1], path)
    context.node_config["file"] = str(path)
    align(context, np.arange(20, 20 + ROWS))
    asked(context, DESCRIBE, Description)


@pytest.mark.parametrize(
    "again",
    [
        *(again_from_an_older_state, again_from_the_start),
        *(again_in_another_order, again_from_another_file),
    ],
)
def test_no_restart_makes_the_count_of_uploads_less(
    node: Node, again: Callable[[Context, bytes], None], tmp_path: Path
) -> None:
    context = node({"max-uploads": 2})
    asked(context, DESCRIBE, Description)
    kept = state_to_bytes(context.state)
    asked(context, train(1))
    asked(context, train(2, gradient=gradient()))
    again(context, kept)
    with pytest.raises(VflError, match=TOO_OFTEN):
        asked(context, train(1))
    context.node_config["max-uploads"] = 3
    asked(context, train(1))  # but for the rule, it would have been served


@pytest.mark.parametrize("lost", [False, True])
def test_a_party_without_a_state_goes_on_with_its_count_or_not_at_all(
    other_node: Callable[..., Context], tmp_path: Path, lost: bool
) -> None:
    context = other_node("breast-cancer", {"max-uploads": 2})
    asked(context, DESCRIBE, Description)
    asked(context, train(1, steps=2))
    asked(context, train(2, steps=2, gradient=gradient(16)))
    restarted(context)
    rejoin = RejoinOrder(exchange=9, outputs=1)
    if lost:
        next(tmp_path.glob("*.uploads")).unlink()
        with pytest.raises(VflError, match="since it has no count of its uploads until now"):
            asked(context, rejoin, Description)
        return
    asked(context, rejoin, Description)
    with pytest.raises(VflError, match=TOO_OFTEN):
        asked(context, train(10, steps=2))
    asked(context, train(10, steps=2, first=2))  # other rows


def test_runs_that_go_on_from_one_another_share_a_count(node: Node, tmp_path: Path) -> None:
    context = node({"max-uploads": 2})
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    state_file.save(context, 1)
    for run, after in ((2, None), (3, TOO_OFTEN)):  # both from the same checkpoint
        later = node({"max-uploads": 2}, run_id=run)
        described = asked(later, ResumeOrder(run="1", number=1), Description)
        assert described.exchange == 1
        if after is None:
            asked(later, train(2, gradient=gradient()))
            continue
        with pytest.raises(VflError, match=after):
            asked(later, train(2, gradient=gradient()))
    assert len(list(tmp_path.glob("*.uploads"))) == 1


def test_a_count_that_is_lost_or_damaged_or_was_never_made_ends_the_run(
    node: Node, tmp_path: Path
) -> None:
    context = node({"max-uploads": 2})
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    (path,) = tmp_path.glob("*.uploads")
    whole = path.read_bytes()
    for content in (b"", whole[:-4], whole[:-1], bytes(len(whole)), whole[:-1] + b"\7"):
        path.write_bytes(content)
        with pytest.raises(VflError, match="cannot keep count of what it gives away: its own log"):
            asked(context, train(2, gradient=gradient()))
    path.unlink()
    unknown = "refuses to go on, since it has no count of its uploads until now: its rule is max-up"
    with pytest.raises(VflError, match=unknown):
        asked(context, train(2, gradient=gradient()))
    before_the_rule = node(run_id=5)
    asked(before_the_rule, DESCRIBE, Description)
    asked(before_the_rule, train(1))
    before_the_rule.node_config["max-uploads"] = 100
    with pytest.raises(VflError, match=unknown):
        asked(before_the_rule, train(2, gradient=gradient()))


def test_a_pair_is_two_uploads_and_without_test_rows_evaluations_add_up(
    node: Node, tmp_path: Path
) -> None:
    context = node({"max-uploads": 3}, strategy="syn-zoo", **{"test-fraction": 0.0})
    asked(context, DESCRIBE, Description)
    asked(context, train(1, steps=8))
    assert (counted(tmp_path) == 2).all()
    difference = np.zeros(8, np.float32)
    asked(context, EvaluateOrder(exchange=2, arrays={"difference": difference}))
    assert (counted(tmp_path) == 3).all()
    with pytest.raises(VflError, match="max-uploads = 3"):
        asked(context, EvaluateOrder(exchange=3))


def test_a_disk_that_keeps_no_count_ends_the_run(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = node({"max-uploads": 2})
    asked(context, DESCRIBE, Description)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(limits, "whole", full)
    with pytest.raises(VflError, match="cannot keep count of what it gives away: its own log says"):
        asked(context, train(1))


def test_epochs_end_whatever_the_orders_say(node: Node) -> None:
    context = node({"max-epochs": 2}, epochs=2)
    asked(context, DESCRIBE, Description)
    of_epoch = steps_per_epoch(resolve(context.run_config), 48)
    assert of_epoch == 6
    asked(context, train(1))
    asked(context, train(2, gradient=gradient()))  # the same epoch again
    sentence = "refuses step 13, of 6 an epoch: its rule is max-epochs = 2"
    for order in (train(3, 1, gradient=gradient()), train(3, 1, epoch=1, gradient=gradient())):
        with pytest.raises(VflError, match=sentence):
            asked(context, order)
    asked(context, EvaluateOrder(exchange=3, arrays={"gradient": gradient()}))


@pytest.mark.parametrize("most", [0, 20, 60, None])
def test_predictions_are_counted_over_runs_and_restarts(
    node: Node, tmp_path: Path, most: int | None
) -> None:
    context = node()
    asked(context, DESCRIBE, Description)
    state_file.save(context, 1)
    own = {} if most is None else {"max-predictions": most}
    served = 0
    for run in range(2, 6):
        between._skeletons.clear()
        predicting = node(own, run_id=run)
        align(predicting, np.arange(20))
        try:
            order = PredictOrder(run="1", number=1)
            served += len(asked(predicting, order, Predicted).arrays["embedding"])
        except VflError as error:
            assert str(error) == (
                f"failed: Party 0 refuses to predict 20 rows: its rule is max-predictions = {most}."
            )
    assert served == (80 if most is None else most)
    if most:
        file = tmp_path / "party-0.predictions"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert np.frombuffer(unsealed(file), "<u8").tolist() == [0, most]


def test_predictions_by_a_model_are_uploads_of_its_run(node: Node) -> None:
    context = node({"max-uploads": 2})
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    state_file.save(context, 1)
    order = PredictOrder(run="1", number=1)
    asked(context, order, Predicted)
    for run in (1, 2):
        with pytest.raises(VflError, match=TOO_OFTEN):
            asked(node({"max-uploads": 2}, run_id=run), order, Predicted)


# --- a state that is older than what was served -------------------------------------------------

PERTURBED = {"privacy": "perturbed-embedding", "embedding-noise": 3.0, "embedding-bound": 1.0}


def in_session(context: Context, orders: list[Order], keep: bool = True) -> list[Any]:
    """What a party answers to orders that come over one stream."""
    replies: list[Any] = []

    def serve(app: Any, order: SessionOrder, context: Context, largest: Any) -> SessionEnd:
        replies.extend(asked(context, each) for each in orders)
        return SessionEnd(connected=True, served=len(orders), cause="")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "serve", serve)
        order = SessionOrder(address="x", certificate="", token="", keep=keep)
        asked(context, order, SessionEnd)
    return replies


def by_a_session(context: Context) -> Arrays:
    """The SuperNode has lost its state too, and the last file is read."""
    restarted(context)
    return in_session(context, [train(3, gradient=gradient())])[0].arrays  # type: ignore[no-any-return]


def by_a_session_of_the_same_supernode(context: Context) -> Arrays:
    """The process alone was killed, in whose SuperNode the state is that of its beginning."""
    restarted(context, state_to_bytes(context.state))
    return in_session(context, [train(3, gradient=gradient())])[0].arrays  # type: ignore[no-any-return]


def by_a_rejoin(context: Context) -> Arrays:
    restarted(context)
    # By who says that less was served than has been.
    with pytest.raises(VflError, match="was asked to go back"):
        asked(context, RejoinOrder(exchange=2, outputs=1), Description)
    restarted(context)
    state_file.place(context, 1).write_bytes(state_file.place(context, 0).read_bytes())
    asked(context, RejoinOrder(exchange=2, outputs=1), Description)
    arrays: Arrays = asked(context, train(3)).arrays
    return arrays


def by_a_resume(context: Context) -> Arrays:
    context.state, context.run_id = RecordDict(), 2
    between._skeletons.clear()
    asked(context, ResumeOrder(run="1", number=1), Description)
    arrays: Arrays = asked(context, train(3, gradient=gradient())).arrays
    return arrays


def as_it_was(context: Context) -> Arrays:
    """The control: the same state, as if nothing had happened."""
    arrays: Arrays = asked(context, train(3, gradient=gradient())).arrays
    return arrays


@pytest.mark.parametrize(
    "back",
    [
        *(by_a_session, by_a_session_of_the_same_supernode, by_a_rejoin, by_a_resume),
        as_it_was,
    ],
)
def test_noise_comes_never_twice_when_a_message_is_served_again(
    node: Node, back: Callable[[Context], Arrays]
) -> None:
    context = node({"columns": "f0,f1"}, **PERTURBED)
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    asked(context, train(2, gradient=gradient()))
    state_file.save(context, 1)
    saved = copy.deepcopy(context.state)
    first = asked(context, train(3, gradient=gradient())).arrays["embedding"]
    context.state = saved  # of the message before
    between._skeletons.clear()
    second = back(context)["embedding"]
    difference = (second - first).std()
    if back is as_it_was:
        assert difference == 0
    else:  # learning rate 0: nothing but the noise is another
        assert difference == pytest.approx(3 * 2**0.5, rel=0.2)


def test_a_window_that_awaits_feedback_keeps_the_secret_of_its_upload(node: Node) -> None:
    """Else it would be learnt from directions that nobody has gone along."""
    keys = {"strategy": "syn-zoo", "party-lr": 0.1, "optimizer": "sgd", "columns": "f0,f1"}
    context = node({"columns": keys.pop("columns")}, **keys)
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    feedback = {"difference": np.arange(1.0, 7, dtype=np.float32)}
    untouched = copy.deepcopy(context)
    expected = asked(untouched, EvaluateOrder(exchange=2, arrays=feedback)).arrays["embedding"]
    state_file.save(context)
    before = state.load_scalars(context.state)["secret"]
    restarted(context)
    (answer,) = in_session(context, [EvaluateOrder(exchange=2, arrays=feedback)])
    np.testing.assert_array_equal(answer.arrays["embedding"], expected)
    assert state.load_scalars(context.state)["secret"] != before


def test_a_permitted_seed_stays(node: Node) -> None:
    context = node({"noise-seed": 5}, **PERTURBED, **{"noise-seed": 5})
    asked(context, DESCRIBE, Description)
    asked(context, train(1))
    state_file.save(context, 1)
    first = asked(context, train(2, gradient=gradient())).arrays["embedding"]
    restarted(context)
    second = in_session(context, [train(2, gradient=gradient())])[0].arrays["embedding"]
    np.testing.assert_array_equal(first, second)


def test_a_run_on_files_goes_on_with_the_models_that_secrets_have_drawn(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(80))
    run = organisations.run("run", {"epochs": 2, "embedding-size": 4, "party-lr": 0.0})
    config = checkpoint.load(run.folder).config
    for party in range(2):
        kept = state_file.read(kept_state(run.folder, party))
        model, secret = state.load_arrays(kept, "model"), state.load_scalars(kept)["secret"]
        of_seed = build_bottom(config, party, (2,), 4).state_dict()
        of_secret = build_bottom(config, party, (2,), 4, secret).state_dict()
        for name, parameters in model.items():
            assert not np.allclose(parameters, of_seed[name])
            np.testing.assert_array_equal(parameters, of_secret[name])
    assert len(organisations.predict("run")) == 64


def test_before_rows_are_aligned_a_run_is_refused_that_would_be_afterwards(node: Node) -> None:
    context = node({"max-epochs": 3})
    with pytest.raises(ConfigError, match="Party 0 refuses epochs = 4: its rule is max-epochs = 3"):
        between.check_before_alignment(context)
    for keys in ({"epochs": 3}, {"task": "predict"}):
        context.run_config = {**KEYS, **keys}
        between.check_before_alignment(context)
    assert replace(Rules(), max_epochs=3) == Rules.of(context.node_config)
