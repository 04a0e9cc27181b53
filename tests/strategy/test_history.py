"""The history: what its entries say."""

import json
from typing import Any

import pytest

from strategies import vertical
from strategies.enrolment import enrol
from strategies.history import History
from strategies.turns import PartyRecord, StepBudget, Traffic
from tests.conftest import trained
from tests.strategy.parts import METRICS, SPENT


def test_an_entry_says_where_the_run_stands_and_how_the_model_does() -> None:
    history, budget = History(), StepBudget(epochs=4, per_epoch=7, parties=3)
    assert history.last == {}
    budget.answered = 10
    history.record(budget, 17, SPENT, None, None, METRICS)
    entry = history.last
    assert entry["epoch"] == round(10 / 21, 3) and entry["steps"] == 17
    assert entry["exchanges"] == 6 and entry["seconds"] == 1.5 and entry["train_loss"] is None
    of_test = {f"test_{name}": value for name, value in METRICS.figures().items()}
    assert of_test["test_accuracy"] == 0.75
    assert {name: entry[name] for name in entry if name.startswith("test_")} == of_test
    budget.answered = 21
    history.record(budget, 30, SPENT, 0.5, None, METRICS)
    assert history.last["epoch"] == 1 and history.entries[0] is entry


def test_what_a_run_has_spent_is_that_of_all_parties(now: list[float]) -> None:
    history = History()
    now[0] = 2.0
    records = [
        PartyRecord(0, 100, traffic=Traffic(5, 600, 70, 8)),
        PartyRecord(1, 101, traffic=Traffic(1, 2, 3)),
    ]
    assert history.spent(records, 4.0625) == {
        **{"exchanges": 6, "bytes_up": 602, "bytes_down": 73, "evaluation_bytes": 8},
        **{"seconds": 2.0, "virtual_seconds": 4.062},
    }


def test_a_history_goes_on_from_what_was_kept_of_it(now: list[float]) -> None:
    budget = StepBudget(epochs=4, per_epoch=10, parties=3)
    history = History()
    history.record(budget, 3, SPENT, 0.5, None, METRICS)
    history.recorded, now[0] = 1, 20.0
    kept = json.loads(json.dumps(history.state_dict()))
    now[0] = 1000.0  # the run was interrupted
    anew = History()
    anew.load_state_dict(kept)
    now[0] = 1003.0
    assert anew.entries == history.entries and anew.recorded == 1
    assert anew.seconds == 23.0
    anew.record(budget, 4, SPENT, 0.5, None, METRICS)
    assert len(kept["entries"]) == 1 and len(anew.entries) == 2


def test_seconds_count_from_before_the_parties_are_enrolled(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*given: Any) -> Any:
        now[0] += 50.0
        return enrol(*given)

    monkeypatch.setattr(vertical, "enrol", slowly)
    keys = {"dataset": "breast-cancer", "epochs": 1, "window": 15}
    strategy, _ = trained(2, keys)
    assert strategy.history.last["seconds"] == pytest.approx(50.0)
