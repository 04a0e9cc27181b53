"""Altered uploads, orders and results by the thousand: each is refused by a sentence, or harmless.

A few of each always; all of them every night, where the counts are printed.
"""

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from strategies.enrolment import enrol
from strategies.history import History
from strategies.run import Run
from strategies.vertical import strategy_of
from tests.results.test_report import HOSTILE, Page, left
from vfl_flower import client_app
from vfl_flower.alignment.psi import Blinding
from vfl_flower.config.errors import VflError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.protocol.ends import Arrival
from vfl_flower.protocol.systems import resolve
from vfl_flower.results.report import report
from vfl_flower.transport import messages
from vfl_flower.transport.early_messages import AlignOrder, CommonOrder, ReuseOrder, SetOrder
from vfl_flower.transport.flower_internals import (
    from_bytes,
    set_message_id,
    state_from_bytes,
    state_to_bytes,
    to_bytes,
)
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import pack, to_message


def numbers(share: int, whole: int) -> pytest.MarkDecorator:
    """How many to try: a share of them always, all of them every night."""
    every = pytest.param(whole, id="all", marks=pytest.mark.nightly)
    return pytest.mark.parametrize("number", [pytest.param(share, id="a share"), every])


BASE = {"dataset": "breast-cancer", "batch-size": 8, "window": 3, "embedding-size": 4, "epochs": 2}
SYSTEMS: list[dict[str, Any]] = [
    {"strategy": "split-nn"},
    {"strategy": "vafl", "max-delay": 3},
    {"strategy": "ef-vfl", "downlink-codec": "qsgd", "downlink-compression": "error-feedback"},
    {"strategy": "ef-vfl", "labels": "shared"},
    {"strategy": "cvfl", "codec": "qsgd"},
    {"strategy": "cascaded", "codec": "top-k", "compression": "error-feedback"},
    {"strategy": "dpzv", "noise-multiplier": 1.0},
]


# --- what is altered ----------------------------------------------------------------------------

TEXTS = ["", "x", "x" * 200, "x" * 10**5, "\x1b[2J", "a\nb", "\x00", HOSTILE, "../../etc", "ü" * 64]
NO_NUMBERS = [math.nan, math.inf, -math.inf]
SCALARS: list[Any] = [
    *(-1, 0, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**32, 10**10, 2**53, 2**53 + 1, 2**63 - 1),
    *(-(2**63), 0.0, -0.0, 0.5, -1.5, *NO_NUMBERS, 1e300, 5e-324, True, False),
    *(b"", b"\x80\x04N.", *TEXTS, [], [1, 2], [math.nan], ["a"]),
]
VALUES = [*NO_NUMBERS, 1e30, -1e30, 1.1e6, -3e38, 1e-40, 0, -1, 2**31 - 1, -(2**31)]
DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", ">f4", "bool"]
NONSENSE = ["object", "O", "<U6", "f4,f4", "float33", "datetime64", "", "x" * 10**4, "__import__()"]
NAMES = ["", "\n", "x" * 500, "ids", "lengths", "embedding", "gradient", "labels", "a/b", "p-9/x"]


def altered_scalars(chance: random.Random, scalars: dict[str, Any]) -> None:
    name = chance.choice(list(scalars)) if scalars else "party"
    what = chance.randrange(6)
    if what == 0:
        scalars.pop(name, None)
    elif what == 1:
        scalars[chance.choice(NAMES) or "more"] = chance.choice(SCALARS)
    else:
        scalars[name] = chance.choice(SCALARS)


def altered_array(chance: random.Random, array: Array) -> Array:
    """Its values, its shape, its type, or its bytes."""
    what = chance.randrange(9)
    try:
        values = array.numpy().copy()
    except Exception:  # it has been altered before
        return array
    if what == 0 and values.size:  # one value, or some
        some = values.reshape(-1)[:: chance.choice((1, 3, values.size))]
        with np.errstate(all="ignore"):
            some[:] = np.asarray(chance.choice(VALUES)).astype(values.dtype)
    elif what == 1 and values.size:  # one value, far beyond all others
        values.reshape(-1)[chance.randrange(values.size)] = 120
    elif what == 2:
        with np.errstate(all="ignore"):
            values = values.astype(chance.choice(DTYPES))
    elif what == 3:
        changes: list[Callable[[Any], Any]] = [
            *(lambda v: v[:-1], lambda v: v[1:], lambda v: v.T, lambda v: v[None], np.ravel),
            *(lambda v: v[:0], lambda v: np.concatenate([v, v]), lambda v: v[..., :-1], np.flip),
        ]
        values = chance.choice(changes)(values) if values.ndim else values[None]
    elif what == 4:
        values = np.zeros((chance.choice((10**5, 10**6)), chance.choice((1, 4))), values.dtype)
    elif what == 5:
        shapes: list[Any] = [(-1,), (2**31, 2**31), (0,), (1,) * 70, (2**63,), (3, -1), ()]
        return Array(array.dtype, chance.choice(shapes), array.stype, array.data)
    elif what == 6:
        data = bytearray(array.data)
        for _ in range(chance.choice((1, 4))):
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        return Array(array.dtype, array.shape, array.stype, bytes(data))
    elif what == 7:
        cut = array.data[: chance.randrange(len(array.data))]
        return Array(array.dtype, array.shape, array.stype, chance.choice((cut, array.data + cut)))
    else:
        kind = chance.choice((array.dtype, *NONSENSE))
        return Array(kind, array.shape, chance.choice(("numpy.ndarray", "pickle", "")), array.data)
    return pack({"a": np.ascontiguousarray(values)})["a"]


def altered(chance: random.Random, content: RecordDict) -> RecordDict:
    """Another message, in one way or two."""
    parts: dict[str, Any] = {name: copy(record) for name, record in content.items()}
    for _ in range(chance.choice((1, 1, 2))):
        what = chance.randrange(10)
        scalars, arrays = parts.get("scalars"), parts.get("arrays")
        if what < 4 and isinstance(scalars, ConfigRecord):
            values = dict(scalars)
            altered_scalars(chance, values)
            parts["scalars"] = ConfigRecord(values)
        elif what < 8 and isinstance(arrays, ArrayRecord):
            found, record = dict(arrays), ArrayRecord()
            name = chance.choice(list(found)) if found else ""
            how = chance.randrange(8)
            if how == 0 or not found:
                found[chance.choice(NAMES)] = pack({"a": np.zeros(chance.choice((0, 1, 9)))})["a"]
            elif how == 1:
                del found[name]
            elif how == 2:
                found[chance.choice(NAMES)] = found.pop(name)
            else:
                found[name] = altered_array(chance, found[name])
            for key, each in found.items():
                record[key] = each
            parts["arrays"] = record
        elif what == 8:
            parts.pop(chance.choice(list(parts) or ["arrays"]), None)
        else:
            late = chance.choice((True, False, 1))
            cause = {"cause": chance.choice(SCALARS), "out-of-step": late}
            kind = chance.choice(("failure", "more", "scalars", "arrays"))
            parts[kind] = chance.choice((ConfigRecord(cause), ArrayRecord(), ConfigRecord()))
    return RecordDict(parts)


def carried(chance: random.Random, message: Message) -> Message:
    """As it comes from the wire; some with bytes that are not as they were sent."""
    if chance.randrange(4):
        return message
    body = bytearray(to_bytes(message))
    for _ in range(chance.choice((0, 0, 1, 3))):
        body[chance.randrange(len(body))] ^= chance.randrange(1, 256)
    return from_bytes(bytes(body))


class Counted:
    """Counts outcomes; forbidden ones are kept with the seed that reproduces them."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest = 0.0
        self._began = time.perf_counter()

    def tried(self, seed: str, attempt: Callable[[], str]) -> None:
        """``attempt`` says why what was accepted must not have been; or nothing."""
        at = time.perf_counter()
        try:
            wrong = attempt()
            self.counts["wrongly accepted" if wrong else "accepted"] += 1
        except VflError as error:
            said = str(error)
            plain = said.isprintable() and len(said) < 1000 and "raised " not in said
            wrong = "" if plain else f"the sentence {said[:300]!r}"
            self.counts["no sentence" if wrong else "refused"] += 1
        except Exception as error:
            wrong = f"{type(error).__name__}: {error!s:.300}"
            self.counts["tracebacks"] += 1
        if wrong:
            self.wrong.append(f"{seed}: {wrong}")
        self.longest = max(self.longest, time.perf_counter() - at)

    def tell(self) -> None:
        seconds = time.perf_counter() - self._began
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(self.counts.items()))
        print(
            f"{self.counts.total():,} {self.what}: {counts}; "
            f"{seconds:.1f} s, the longest {1000 * self.longest:.0f} ms"
        )
        assert not self.wrong, "\n".join(self.wrong[:10])


# --- uploads ------------------------------------------------------------------------------------


class Exchange:
    """A label holder that has sent an order, and the honest reply to it, to be altered."""

    def __init__(self, keys: dict[str, Any], kind: type[messages.Turn]) -> None:
        config = resolve(keys)
        labels, client = load_labels(config), client_app.app
        grid = LocalGrid(client, 2, keys, config)
        self.run = run = Run(grid, enrol(grid, config, labels), config, labels, History())
        self.seat = seat = run.records[0]
        holder, ids = run.holder, np.arange(0, 40, 3, dtype=np.int32)
        opening: dict[str, Any] = {"coordinated": run.schedule.coordinated}
        opening["arrays"] = holder.estimator.opening(holder, 0)
        fields: dict[type[messages.Turn], dict[str, Any]] = {
            messages.TrainOrder: {"epoch": 0, "first": 0, "steps": 3, **opening},
            messages.EvaluateOrder: {},
            messages.EmbedOrder: {"arrays": {"ids": ids}},
            messages.CheckpointOrder: {"number": 1},
        }
        order: Any = kind(exchange=1, **fields[kind])
        self.order = order
        self.message = run.messenger.message(seat, order)
        set_message_id(self.message, "message-1")
        context = grid.contexts[seat.node_id]
        self.honest = client(self.message, context).content
        uses: dict[type[messages.Turn], Callable[[Any], Any]] = {
            messages.TrainOrder: partial(holder.receive, 0, order),
            messages.EvaluateOrder: partial(holder.held_out.receive, 0, holder.links.digest(0)),
            messages.EmbedOrder: partial(holder.refresh, 0, ids),
            messages.CheckpointOrder: lambda upload: None,
        }
        self.use = uses[kind]
        self.rows = holder.table.rows.clone(), holder.held_out.table.rows.clone()
        self.was = dict(vars(seat))
        # A party's first upload says what is usual of it.
        self.take(Message(self.honest, reply_to=self.message))
        self.peaks = dict(holder.table.peaks)

    def take(self, reply: Message) -> str:
        """Why the reply must not have been accepted, if it was."""
        holder, seat = self.run.holder, self.seat
        vars(seat).update(self.was)
        holder.table.rows.copy_(self.rows[0])
        holder.held_out.table.rows.copy_(self.rows[1])
        if hasattr(self, "peaks"):
            holder.table.peaks = dict(self.peaks)
        self.run.messenger.out = {"message-1": (seat.node_id, 0.0)}
        kind = type(self.order)
        taken = list(self.run.messenger.take(kind, [reply], lambda _, __, sent: self.use(sent)))
        if not taken:  # the party said that it is out of step, and is asked to rejoin
            return ""
        ((_, used),) = taken
        return self._wrong(reply.content) or (self._unusable(used) if used else "")

    def _wrong(self, content: RecordDict) -> str:
        """Return what is wrong with an upload."""
        if set(content) != {"scalars", "arrays"}:
            return "other records"
        for name, record in self.honest.config_records.items():
            sent = content.config_records[name]
            kinds = {key: type(value) for key, value in sent.items()}
            if kinds.get("peak_memory_mb") is int:  # which becomes a float
                kinds["peak_memory_mb"] = float
            if kinds != {key: type(value) for key, value in record.items()}:
                return "other fields"
            if (sent["party"], sent["exchange"]) != (record["party"], record["exchange"]):
                return "another party or exchange"
            memory: Any = sent["peak_memory_mb"]
            if not 0 <= memory < 1e9 or sent["surrogates"] != record["surrogates"] != "":
                return "other figures"
        arrays, honest = content.array_records["arrays"], self.honest.array_records["arrays"]
        if set(arrays) != set(honest):
            return "other arrays"
        for name, array in arrays.items():
            if (array.dtype, len(array.shape)) != (honest[name].dtype, len(honest[name].shape)):
                return f"another kind of {name}"
        return ""

    def _unusable(self, used: Any) -> str:
        holder = self.run.holder
        for table in (holder.table, holder.held_out.table):
            if not (table.rows.abs() <= messages.LARGEST).all():
                return "values in the table"
        if isinstance(used, Arrival):
            ids, lengths = used.window.ids, used.window.lengths
            if len(lengths) != 3 or lengths.sum() != len(ids) or lengths.min() < 0:
                return "lengths"
            if len(ids) and not (ids.min() >= 0 and ids.max() < len(holder.labels)):
                return "ids"
            for h in used.reading.embeddings:
                if tuple(h.shape) != (len(ids), 4) or h.dtype != torch.float32:
                    return "a shape"
                if not (h.abs() <= 1.5 * messages.LARGEST).all():  # of pairs, by their difference
                    return "a value"
        return ""


def systems(number: int) -> list[dict[str, Any]]:
    """Those to try; for a share, a few."""
    return [{**BASE, **keys} for keys in (SYSTEMS if number > 1000 else SYSTEMS[::5])]


def exchanges(number: int) -> Iterator[Exchange]:
    for keys in systems(number):
        kinds = [messages.TrainOrder, messages.TrainOrder, messages.EvaluateOrder]
        if keys["strategy"] == "vafl":
            kinds += [messages.EmbedOrder, messages.CheckpointOrder]
        for kind in kinds:
            yield Exchange(keys, kind)


@numbers(300, 60_600)
def test_uploads_that_are_altered_are_refused_or_harmless(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counted, every = Counted("altered uploads"), list(exchanges(number))
    of_each = -(-number // len(every))
    for place, exchange in enumerate(every):
        for which in range(of_each):
            chance = random.Random(f"upload {place} {which}")

            def attempt(exchange: Exchange = exchange, chance: random.Random = chance) -> str:
                if chance.randrange(50) == 0:
                    error = Error(code=chance.choice((3, 0, -5)), reason=chance.choice(TEXTS))
                    reply = Message(error, reply_to=exchange.message)
                else:
                    content = altered(chance, exchange.honest)
                    reply = Message(content, reply_to=exchange.message)
                return exchange.take(carried(chance, reply))

            counted.tried(f"upload {place} {which}", attempt)
    with capsys.disabled():
        counted.tell()
    assert counted.counts["refused"] > 4 * counted.counts["accepted"] > 0


# --- orders -------------------------------------------------------------------------------------


class Recording:
    """The ClientApp, and what party 0 was sent in which state."""

    def __init__(self) -> None:
        self.orders: dict[str, list[tuple[bytes, bytes]]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        known = self.orders.setdefault(kind, [])
        if context.node_config["partition-id"] == 0 and len(known) < 3:
            known.append((to_bytes(message), state_to_bytes(context.state)))
        return client_app.app(message, context)


def recorded(keys: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Orders of a run to its party 0, and the states in which they came."""
    recording: Any = Recording()
    config = resolve(keys)
    strategy_of(config)(config, load_labels(config)).start(LocalGrid(recording, 2, keys, config))
    found: list[tuple[bytes, bytes]] = [each for kind in recording.orders.values() for each in kind]
    state = recording.orders["evaluate"][0][1]
    number = strategy_exchange(state)
    more: list[messages.Order] = [
        messages.RejoinOrder(exchange=number + 1, outputs=1),
        messages.CheckpointOrder(exchange=number + 1, number=1),
        messages.EmbedOrder(exchange=number + 1, arrays={"ids": np.arange(5, dtype=np.int32)}),
        messages.ResumeOrder(run="7", number=1),
        messages.GrowOrder(outputs=1, run="7", number=1, parties=1, config='{"grow": "runs/then"}'),
        messages.PredictOrder(run="7", number=1),
        # Where it may not connect to; what is altered is so in no address of this machine.
        SessionOrder(address="10.0.0.1:1", certificate="-----", token="0" * 64, keep=False),
    ]
    return found + [(to_bytes(to_message(each, 2, 60)), state) for each in more]


def strategy_exchange(state: bytes) -> int:
    scalars = state_from_bytes(state).config_records["scalars"]
    number: Any = scalars["exchange"]
    return int(number)


def aligning(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[tuple[bytes, bytes]]]:
    """Keys of a run on files, the node configuration of a party of it, and orders to it."""
    ids = np.arange(1000, 1060)
    lines = [f"{each},{each % 7},{each % 3}" for each in ids]
    (folder / "own.csv").write_text("\n".join(["id,a,b", *lines]) + "\n")
    keys = {**BASE, "dataset": f"files:{folder}/labels.csv"}
    node = {"file": str(folder / "own.csv"), "id": "id"}
    blinded = Blinding().of_ids([b"i:%d" % each for each in ids])
    align = AlignOrder(method="psi", arrays={"ids": blinded})
    context = party_of(keys, node, state_to_bytes(RecordDict()), folder)
    began = state_to_bytes(context.state)
    client_app.app(to_message(align, 2, 60), context)
    aligned = state_to_bytes(context.state)
    common = CommonOrder(arrays={"places": np.arange(60, dtype=np.int32)})
    recall = ReuseOrder(alignment="0" * 32, arrays={"proofs": np.zeros((2, 32), np.uint8)})
    sets = SetOrder(arrays={"names": np.zeros((30, 16), np.uint8), "proofs": blinded[:30]})
    orders: list[tuple[messages.Order, bytes]] = [(recall, began), (align, began)]
    orders += [(common, aligned), (sets, began), (replace(align, anew=False), began)]
    first = replace(align, more=True, arrays={"ids": blinded[:50]})
    client_app.app(to_message(first, 2, 60), context)
    later = replace(align, piece=1, arrays={"ids": blinded[50:]})
    orders.append((later, state_to_bytes(context.state)))
    orders.append((messages.DescribeOrder(outputs=1), aligned))
    return keys, node, [(to_bytes(to_message(each, 2, 60)), state) for each, state in orders]


def party_of(keys: dict[str, Any], node: dict[str, Any], state: bytes, folder: Path) -> Context:
    """Return a party on a new node, in this state."""
    config = {"partition-id": 0, "num-partitions": 2, "states": str(folder), **node}
    return Context(7, 2, config, state_from_bytes(state), dict(keys))


def wrong_answer(order: Message, honest: Message, reply: Message) -> str:
    """Why an order must not have been served, if it was."""
    if reply.has_error():
        raise VflError(str(reply.error.reason))
    if "failure" in reply.content:
        raise VflError(str(reply.content.config_records["failure"]["cause"]))
    sent, known = order.content, honest.content
    if set(sent) != set(known):
        return "other records"
    scalars, honest_scalars = sent.config_records["scalars"], known.config_records["scalars"]
    if {k: type(v) for k, v in scalars.items()} != {k: type(v) for k, v in honest_scalars.items()}:
        return "other fields"
    numbers = [value for value in scalars.values() if isinstance(value, int | float)]
    if not all(0 <= value <= 2**53 for value in numbers):
        return "a number that cannot be"
    if "steps" in scalars:
        epoch, first, steps = (int(str(scalars[each])) for each in ("epoch", "first", "steps"))
        if epoch >= 2 * 2 or first + steps > 57 or steps < 1:
            return "steps that there are not"
    names = set(sent.array_records["arrays"]) - set(known.array_records["arrays"])
    if names:
        return f"arrays {names}"
    for array in reply.content.array_records["arrays"].values():
        values = array.numpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return "an answer that is not finite"
    return ""


@numbers(150, 24_400)
def test_orders_that_are_altered_are_refused_or_harmless(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_runs: list[tuple[dict[str, Any], dict[str, Any], list[tuple[bytes, bytes]]]] = [
        (keys, {}, recorded(keys)) for keys in systems(number)
    ]
    of_runs.append(aligning(tmp_path))
    total = sum(len(orders) for _, _, orders in of_runs)
    counted = Counted("altered orders")
    of_each = -(-number // total)

    def attempt(keys: Any, node: Any, body: bytes, state: bytes, chance: random.Random) -> str:
        order, honest = from_bytes(body), from_bytes(body)
        order.content = altered(chance, order.content)
        order = carried(chance, order)
        order.metadata.__dict__["_message_type"] = honest.metadata.message_type
        context = party_of(keys, node, state, tmp_path)
        return wrong_answer(order, honest, client_app.app(order, context))

    for system, (keys, node, orders) in enumerate(of_runs):
        for place, (body, state) in enumerate(orders):
            for which in range(of_each):
                chance = random.Random(f"order {system} {place} {which}")

                this = partial(attempt, keys, node, body, state, chance)
                counted.tried(f"order {system} {place} {which}", this)
    with capsys.disabled():
        counted.tell()
    assert counted.counts["refused"] > counted.counts["accepted"] > 0


# --- pages --------------------------------------------------------------------------------------

SAID: list[Any] = [
    *(HOSTILE, "$\\frac$", "$", "\x1b[2J", "\ud800", "x" * 10**4),
    *("]]>", "<!--", "&#0;", "\x00\x0b"),
    *(None, True, -1, 0, 2**70, 1e308, -1e308, math.nan, math.inf, [], {}, [HOSTILE], {"a": {}}),
]


def altered_json(chance: random.Random, value: Any) -> Any:
    """The same with something else somewhere in it."""
    if chance.randrange(4) == 0 or not isinstance(value, dict | list) or not value:
        return chance.choice(SAID)
    if isinstance(value, list):
        place = chance.randrange(len(value))
        return [*value[:place], altered_json(chance, value[place]), *value[place + 1 :]]
    key = chance.choice(list(value))
    if chance.randrange(8) == 0:
        return {**value, chance.choice([HOSTILE, "$\\frac$", "\x00"]): chance.choice(SAID)}
    return {**value, key: altered_json(chance, value[key])}


@numbers(3, 1500)
def test_pages_of_altered_results_are_one_sentence_or_run_nothing(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole: dict[str, Any] = {"epsilon": 1.0, "epsilon_protects": "all", "code": "0" * 64}
    whole |= {"config": {"epochs": 3, "dataset": "digits", "privacy": "none"}}
    whole |= {"versions": {"python": "3"}, "engine": "local", "transport": "none"}
    of_party = {"party": 0, "exchanges": 3, "bytes_up": 5, "bytes_down": 4, "evaluation_bytes": 1}
    of_party["staleness"] = {"mean": 0.5, "most": 1.0}  # type: ignore[assignment]
    whole |= {"by_party": [of_party, of_party], "peak_memory_mb": 12.5, "failure": "It broke."}
    audit = {"attacks": [{"attack": "norms", "attacker": "x", "measure": "AUC", "success": 0.5}]}
    counted = Counted("pages of altered results")
    for which in range(number):
        chance = random.Random(f"page {which}")
        scale = chance.choice((0, 0, 1))  # curves take long to draw
        folder = left(tmp_path / f"{which}", chance.choice((1, 2)), scale, **whole)
        (folder / "audit.json").write_text(json.dumps(audit))
        for _ in range(chance.choice((1, 2, 5))):
            name = chance.choice(("summary.json", "summary.json", "history.jsonl", "audit.json"))
            lines = (folder / name).read_text().splitlines() or ["{}"]
            lines[0] = json.dumps(altered_json(chance, json.loads(lines[0])))
            (folder / name).write_text("\n".join(lines) + "\n")

        def attempt(folder: Path = folder) -> str:
            html = report([folder])
            page = Page(html)
            hostile = [each.tag for tag in ("script", "img", "iframe") for each in page.all(tag)]
            hostile += [k for each in page.root.iter() for k in each.attrib if k.startswith("on")]
            return f"{hostile} on the page" if hostile or "\x1b" in html else ""

        counted.tried(f"page {which}", attempt)
    with capsys.disabled():
        counted.tell()
    assert counted.counts["accepted"] > 0
