"""Rules that a party enforces, whatever orders come in whatever sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from tests.organisations import cut, small
from tests.party.nodes import (
    DESCRIBE,
    KEYS,
    Node,
    asked,
    begun,
    gradient,
    refused,
    restarted,
    train,
)
from vfl_flower.config import logs
from vfl_flower.config.errors import ConfigError, OutOfStepError, PartyError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.launch import engines
from vfl_flower.party import state_file
from vfl_flower.transport import messages
from vfl_flower.transport.stream.messages import SessionOrder

# --- what is refused ----------------------------------------------------------------------------

NOISY = {"privacy": "perturbed-embedding", "embedding-noise": 2.0}

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]
BROKEN: dict[str, Case] = {
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
        "noise-seed = 0, which reveals its noise and its first model: its own node "
        "configuration gives no noise-seed.",
    ),
    "another seed": (
        *({"noise-seed": 3}, {"noise-seed": 0}, {"noise-seed": 3}),
        "noise-seed = 0, .*: its own node configuration gives noise-seed = 3.",
    ),
    "data of no file": (
        *({}, {"dataset": "memory:x"}, {}),
        "dataset = 'memory:x' from others: its own node configuration gives no dataset.",
    ),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the lines of the party's own log."""
    lines: list[str] = []
    monkeypatch.setattr(logs.log, "warning", lambda text, *words: lines.append(text % words))
    return lines


@pytest.mark.parametrize("case", BROKEN.values(), ids=list(BROKEN))
def test_a_run_that_breaks_a_rule_is_refused_at_both_ends_whatever_comes_first(
    node: Node, case: Case, said: list[str]
) -> None:
    own, breaks, keeps, what = case
    sentence = f"^failed: Party 0 refuses {what}"
    for order in (DESCRIBE, messages.RejoinOrder(exchange=9, outputs=1)):
        context = node(own, **breaks)
        if isinstance(order, messages.RejoinOrder):  # the party has lost its state
            restarted(context)
        before = list(context.state)
        with pytest.raises(VflError, match=sentence) as raised:
            asked(context, order, messages.Description)
        assert said.pop() == str(raised.value).removeprefix("failed: ") and not said
        assert list(context.state) == before  # it has begun nothing
        with pytest.raises(OutOfStepError, match="has no state of this run"):
            asked(context, train(1))
    served = node(own, **keeps)
    asked(served, DESCRIBE, messages.Description)
    assert len(asked(served, train(1)).arrays) and not said


def test_one_owner_needs_no_permission_unless_a_party_says_so(node: Node) -> None:
    one_owner = {"simulated": True}
    asked(node(one_owner, **{"noise-seed": 0}), DESCRIBE, messages.Description)
    context = node({**one_owner, "noise-seed": 3}, **{"noise-seed": 0})
    refused(context, DESCRIBE, r"refuses noise-seed = 0, .* gives noise-seed = 3")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("max-epoch", 5, "has an unknown option 'max-epoch'. Did you mean max-epochs?"),
        ("min-noise", 5, "has an unknown option 'min-noise'. Did you mean min-rows?"),
        ("privacy", "x", "has an unknown option 'privacy'. Rules are align, min-rows"),
        ("max-epochs", "5", "gives max-epochs = '5', which must be a whole number."),
        ("max-epochs", True, "gives max-epochs = True, which must be a whole number."),
        ("max-epochs", None, "gives max-epochs = None, which must be a whole number."),
        ("max-uploads", -1, "gives max-uploads = -1, which must be at least 0."),
        ("min-embedding-noise", "1", "which must be a number."),
        ("min-embedding-noise", float("nan"), "which must be a finite number."),
        ("systems", 3, "gives systems = 3, which must be a text in quotes."),
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


def test_epochs_that_the_rows_decide_are_held_to_the_rule(node: Node) -> None:
    sentence = "^failed: Party 0 refuses epochs = 60: its rule is max-epochs = 59"
    refused(node({"max-epochs": 59}, epochs="auto"), DESCRIBE, sentence)
    told = json.dumps({**KEYS, "epochs": None})
    new = messages.GrowOrder(outputs=1, run="1", number=1, parties=0, config=told)
    refused(node({"max-epochs": 59}, epochs="auto"), new, sentence)
    began = begun(node({"max-epochs": 60}, run_id=2, epochs="auto"))
    state_file.save(began, 1)
    began.node_config["max-epochs"] = 59
    for order in (train(2, gradient=gradient()), messages.PredictOrder(run="2", number=1)):
        refused(began, order, sentence)


def test_a_source_may_read_options_whose_names_are_not_close_to_a_rule() -> None:
    assert Rules.of({"source": "waves:Waves", "share": 0.5, "rows": 9}) == Rules()
    with pytest.raises(ConfigError, match="Did you mean max-epochs"):
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


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_node_reads_no_path_that_it_has_not_named_too(
    other_node: Callable[..., Context], tmp_path: Path, kind: str
) -> None:
    dataset = f"{kind}:{tmp_path}/private.{kind}"
    others = {"no file": f"{kind}:/etc/none", "another": "npz:/etc/passwd", "text": f"{dataset} "}
    for text in (dataset, *others.values()):
        refused(other_node(text), DESCRIBE, r"Party 0 refuses dataset = '.*' from others: .*")
    for text in others.values():
        context = other_node(text, {"dataset": dataset})
        refused(context, DESCRIBE, "its own node configuration gives dataset = ")
    for own in ({"dataset": dataset}, {"simulated": True}):  # and these could be read
        context = other_node(dataset, own)
        assert asked(context, DESCRIBE, messages.Description).train_rows == 48
        assert asked(context, train(1)).arrays["embedding"].shape == (48, 8)
    context.node_config["simulated"] = False
    refused(context, train(2, gradient=gradient()), "Party 0 refuses dataset")
    for text in ("digits", "breast-cancer"):
        asked(other_node(text), DESCRIBE, messages.Description)


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

    monkeypatch.setattr(engines, "SuperLink", Started)
    monkeypatch.setattr(engines, "run_on", lambda *_: tmp_path)
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", X=np.eye(20), y=np.arange(20) % 2)
    engines.run_supernodes(2, {"dataset": "npz:data.npz", "noise-seed": 4, "out": "a"})
    path = f"npz:{tmp_path}/data.npz"
    assert given == [{"noise-seed": 4, "dataset": path}] * 2
    given.clear()
    engines.run_supernodes(1, {"dataset": "digits", "out": "b"})
    own = {"file": f"{tmp_path}/f.csv", "noise-seed": 7}
    keys = {"dataset": "files:l.csv", "noise-seed": 4, "out": "c"}
    engines.run_supernodes(1, keys, [own])
    assert given == [{}, {"align": "psi", **own}]  # a party's own options stay
