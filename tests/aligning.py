"""A node with its own file, and a label holder that sends the orders it is told to send."""

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from tests.ledgers import numbers_in
from tests.organisations import ID, small, write
from vfl_flower import client_app
from vfl_flower.alignment import blinded_ids, reuse
from vfl_flower.alignment.blinded_ids import IdSet
from vfl_flower.alignment.psi import Blinding, answer, match, outputs
from vfl_flower.config.node_rules import Rules
from vfl_flower.transport import early_messages
from vfl_flower.transport.flower_internals import begin_task
from vfl_flower.transport.messages import Introduction, Order
from vfl_flower.transport.wire import read_reply, to_message

IDS = [b"i:%d" % (1000 + row) for row in range(60)]  # of `small`
STRANGE = [b"i:%d" % (5000 + row) for row in range(60)]
NAME = "0" * 32
ROWS = np.arange(60, dtype=np.int32)


def asked(context: Context, order: Order, kind: Any = Introduction) -> Any:
    return read_reply(client_app.app(to_message(order, 2, 60), context), kind)


def node_in(folder: Path) -> Context:
    """A node that is not simulated, with a file of 60 rows, before any message."""
    begin_task()
    write(small().drop(columns="label"), folder / "a.csv")
    return Context(
        run_id=1,
        node_id=2,
        node_config={
            **{"partition-id": 0, "num-partitions": 1},
            **{"file": str(folder / "a.csv"), "id": ID, "states": str(folder)},
        },
        state=RecordDict(),
        run_config={"dataset": "files:elsewhere.csv"},
    )


def in_a_later_run(node: Context, **words: Any) -> Context:
    config = {**node.node_config, **words}
    run_config, state = node.run_config, RecordDict()
    return Context(node.run_id + 1, 2, config, state, run_config)


def count_of(node: Context) -> dict[str, int | None]:
    """Return a party's count of ids, and what its rules leave."""
    (path,) = Path(str(node.node_config["states"])).glob("*.ids")
    asked, served = numbers_in(path, "asked"), numbers_in(path, "served")
    rules, day = Rules.of(node.node_config), max(asked)
    per_day = rules.max_ids_per_day
    return {
        "asked": asked[0],
        "wrong": numbers_in(path, "wrong").get(0, 0),
        "left": max(0, rules.max_ids - asked[0]),
        "day": day,
        "that day": asked[day],
        "left that day": None if per_day is None else max(0, per_day - asked[day]),
        "served": served.get(0, 0),
        "served that day": served.get(day, 0),
    }


class LabelHolder:
    """A label holder that sends what it is told to, to one node."""

    def __init__(self, node: Context, ids: list[bytes]) -> None:
        self.node, self.ids, self.a = node, ids, Blinding()
        self.answer: Any = None
        self.question: Any = None

    def align(self) -> None:
        blinded = {"ids": self.a.of_ids(self.ids)}
        order = early_messages.AlignOrder(method="psi", arrays=blinded)
        self.answer = asked(self.node, order, early_messages.Aligned)
        own = self.answer.arrays["own"]
        found = outputs(self.ids, self.a.undone(self.answer.arrays["again"]))
        self.sent, self.places = match(found, own)

    def tell(self, places: NDArray[Any], sent: NDArray[Any]) -> None:
        order = early_messages.CommonOrder(arrays={"places": places.astype(np.int32)})
        asked_about = asked(self.node, order).arrays
        named = np.full(len(places), -1)
        named[places >= 0] = sent
        self.question = asked_about["question"]
        self.about = [self.ids[row] for row in named[asked_about["rows"]].astype(int).tolist()]

    def confirm(self, shown: NDArray[Any] | None = None) -> None:
        shown = answer(self.about, self.question) if shown is None else shown
        self.shown = shown[-1:]
        asked(self.node, early_messages.ConfirmOrder(alignment=NAME, arrays={"answer": shown}))

    def reuse(self, name: str = NAME) -> str:
        """In a later run, by what it has kept: what became of the alignment."""
        code = reuse.proof_of(self.shown, name, str(self.node.run_id))
        proofs = {"proofs": np.frombuffer(code, np.uint8)[None]}
        order = early_messages.ReuseOrder(alignment=name, arrays=proofs)
        return str(asked(self.node, order, early_messages.Reused).became)

    @property
    def kept(self) -> IdSet:
        arrays = {"points": self.answer.arrays["own"], "proof": self.shown}
        return IdSet(0.0, 0, arrays)

    def find(self, kept: IdSet, run: int | None = None) -> early_messages.SetKept:
        """Return the party's answer when it is asked for that set."""
        order = blinded_ids.set_order({0: (Path(), kept)}, str(run or self.node.run_id))
        return asked(self.node, order, early_messages.SetKept)

    def finds(self, kept: IdSet) -> bool:
        return "proof" in self.find(kept).arrays

    def blinded_by_party(self, points: NDArray[Any]) -> NDArray[Any]:
        """Points, as they come back in a set that was just found."""
        arrays = {"ids": points}
        order = early_messages.AlignOrder(method="psi", anew=False, arrays=arrays)
        self.answer = asked(self.node, order, early_messages.Aligned)
        return self.answer.arrays["again"]

    def all(self) -> None:
        self.align()
        self.tell(self.places, self.sent)
        self.confirm()
