"""A service's part in a party's limits: by day, by row, and half of the ids."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context

from tests.aligning import count_of, node_in
from tests.ledgers import numbers_in
from tests.party.nodes import Node
from vfl_flower.alignment import asked_ids
from vfl_flower.alignment.asked_ids import ServiceCount
from vfl_flower.alignment.psi import Points
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import Rules
from vfl_flower.party import limits
from vfl_flower.party.limits import Limits, PredictionBudget
from vfl_flower.records import budget

DAY = 86400
NOON = 20_000 * DAY + DAY / 2

Clock = Callable[[float], None]


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> Clock:
    def at(day: float) -> None:
        monkeypatch.setattr(time, "time", lambda: NOON + day * DAY)

    at(0)
    return at


def made_up(count: int, first: int = 0) -> Points:
    numbers = np.arange(first, first + count, dtype="<u8")
    return np.repeat(numbers[:, None], 4, 1).view(np.uint8)


def asked_until_refused(context: Context, first: int) -> int:
    """Ask about ids by alignments, until a rule forbids it."""
    rules, count = Rules.of(context.node_config), 0
    try:
        while True:
            asked_ids.count(context, rules, made_up(1, first + count))
            count += 1
    except ConfigError:
        return count


def session(context: Context) -> ServiceCount:
    return ServiceCount(context, Rules.of(context.node_config))


# --- ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_its_day", [True, False])
def test_a_service_gives_ids_back_to_the_day_on_which_it_counted_them(
    tmp_path: Path, days: Clock, to_its_day: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a service of each of five days gives back its ids to one day. The control does so."""
    context = node_in(tmp_path)
    context.node_config |= {"max-ids": 10_000, "max-ids-per-day": 20}
    monkeypatch.setattr(budget, "AHEAD", 5)
    begun = []
    for day in range(5):
        days(day)
        begun.append(session(context))
        begun[-1].count(made_up(1, day))
    days(5)
    asked = asked_until_refused(context, 1000)
    for number, each in enumerate(begun):
        if not to_its_day:
            each._budget._day = 20_005
        each.close()
        asked += asked_until_refused(context, 2000 + 100 * number)
    assert asked == (20 if to_its_day else 40)
    assert count_of(context)["asked"] == asked + 5


def test_an_id_counts_on_the_day_on_which_a_service_asks_about_it(
    tmp_path: Path, days: Clock
) -> None:
    """A service that counts ahead before midnight counts anew after it."""
    context = node_in(tmp_path)
    context.node_config |= {"max-ids": 10_000, "max-ids-per-day": 20}
    service = session(context)
    assert service.count(made_up(1))[0].all()
    days(1)
    assert service.count(made_up(10, 1))[0].sum() == 10
    assert service.count(made_up(1, 11))[0].sum() == 0  # half of 20 are for services
    days(0.9)  # nor does a clock that is set back help
    assert service.count(made_up(1, 11))[0].sum() == 0
    days(2)
    assert service.count(made_up(1, 11))[0].sum() == 1
    service.close()
    assert count_of(context)["asked"] == 12 and count_of(context)["that day"] == 1


@pytest.mark.parametrize("rule", ["max-ids", "max-ids-per-day"])
def test_services_leave_half_of_the_ids_to_alignments(
    tmp_path: Path, days: Clock, rule: str
) -> None:
    """Also over several services. The control: alignments alone may use all ids."""
    context = node_in(tmp_path)
    context.node_config |= {"max-ids": 10_000, rule: 40}
    asked = 0
    for number in range(3):
        service = session(context)
        allowed, why = service.count(made_up(15, 100 * number))
        asked += int(allowed.sum())
        assert (f"{rule} = 40" in why) == (not allowed.all())
        if number != 1:  # this process is killed
            service.close()
    assert asked == 20 and count_of(context)["served"] == 20
    assert asked_until_refused(context, 1000) == 20
    (tmp_path / "party-0.ids").unlink()
    assert asked_until_refused(context, 1000) == 40


def test_a_service_refuses_only_the_new_ids_beyond_a_rule(tmp_path: Path, days: Clock) -> None:
    context = node_in(tmp_path)
    context.node_config["max-ids"] = 8
    service = session(context)
    assert service.count(made_up(2))[1] == ""
    allowed, why = service.count(made_up(5))  # two are known, and two are left
    assert allowed.tolist() == [True, True, True, True, False]
    sentence = (
        "refuses to be asked about 1 more ids: its rule is max-ids = 8, half of it for services"
    )
    assert why == f"Party 0 {sentence}."
    assert service.count(made_up(4))[0].all()  # known ids are free


def test_an_owner_can_reset_the_count_while_a_service_runs(tmp_path: Path, days: Clock) -> None:
    """The service counted ahead in the deleted file, and makes no new count less."""
    context = node_in(tmp_path)
    context.node_config["max-ids"] = 2000
    service = session(context)
    service.count(made_up(5))
    (tmp_path / "party-0.ids").unlink()
    asked_ids.count(context, Rules.of(context.node_config), made_up(3, 100))
    service.close()
    assert count_of(context)["asked"] == 3


# --- predictions and uploads --------------------------------------------------------------------


def test_a_party_embeds_as_many_rows_as_its_rules_leave(node: Node, days: Clock) -> None:
    context = node({"max-predictions": 30, "max-predictions-per-day": 20})
    service = PredictionBudget(context, Rules.of(context.node_config))
    assert service.take_some(15) == (15, "")
    allowed, why = service.take_some(15)
    assert allowed == 5 and "its rule is max-predictions-per-day = 20" in why
    days(1)
    allowed, why = service.take_some(15)
    assert allowed == 10 and "its rule is max-predictions = 30" in why


def test_rows_that_one_rule_refuses_do_not_count_for_another(
    node: Node, days: Clock, tmp_path: Path
) -> None:
    """Else refused requests would use up all predictions of all days."""
    context = node({"max-predictions": 30, "max-predictions-per-day": 10})
    rules = Rules.of(context.node_config)
    for _ in range(3):
        with (
            pytest.raises(ConfigError, match="max-predictions-per-day = 10"),
            limits.counted_predictions(context, rules, 11),
        ):
            raise AssertionError("what is refused must not begin")
        with (
            pytest.raises(ConfigError, match="too many uploads"),
            limits.counted_predictions(context, rules, 10),
        ):
            raise ConfigError("too many uploads")  # by another rule: predictions are given back
    with limits.counted_predictions(context, rules, 10):  # the control
        pass
    service = PredictionBudget(context, rules)
    for _ in range(3):
        assert service.take_some(5)[0] == 0
    service.close()
    assert numbers_in(tmp_path / "party-0.predictions", "rows")[0] == 10


def test_rows_that_are_given_back_belong_to_the_day_on_which_they_were_counted(
    node: Node, days: Clock, tmp_path: Path
) -> None:
    context = node({"max-predictions-per-day": 1000})
    rules = Rules.of(context.node_config)
    begun = []
    for day in range(3):
        days(day)
        begun.append(PredictionBudget(context, rules))
        begun[-1].take(1)
    for each in begun:
        each.close()
    by_day = numbers_in(tmp_path / "party-0.predictions", "rows")
    assert by_day == {0: 3, 20_000: 1, 20_001: 1, 20_002: 1}
    days(-1)  # a clock that is set back starts no new day, also after a restart
    PredictionBudget(context, rules).take(999)
    with pytest.raises(ConfigError, match="max-predictions-per-day = 1000"):
        PredictionBudget(context, rules).take(1)
    days(3)
    PredictionBudget(context, rules).take(1000)  # the control


@pytest.mark.parametrize("together", [False, True])
def test_uploads_are_refused_by_row(tmp_path: Path, together: bool) -> None:
    path = tmp_path / "a.uploads"
    counted = Limits(Rules(max_uploads=2), path=path)
    rows = np.array([7, 5, 9])
    counted.count(np.array([5]), times=2)
    assert counted.count_each(rows, together).tolist() == [True, False, True]
    with pytest.raises(ConfigError, match="max-uploads = 2"):
        counted.count(rows)  # the control
    assert numbers_in(path, "uploads") == ({5: 2} if together else {5: 2, 7: 1, 9: 1})
    assert counted.count_each(np.array([8, 8, 8, 7]), False).tolist() == [False] * 3 + [True]
