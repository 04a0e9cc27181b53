"""A party in this process, from one message to the next: its session.

Flower lets any process serve any message, so ``Context.state`` can hold all that the next message
needs. A session opens from that state. It lives as long as this process serves the party. Its
arrays share the model's memory with the state, and become bytes when they leave the process.

A party that stays in this process, as in the engine in process and on a stream, trains without
writing its counters after each message. `hand_over` writes them before anybody else reads them.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Context

from vfl_flower.alignment.pieces import PIECE
from vfl_flower.config.errors import OutOfStepError
from vfl_flower.config.node_rules import Rules
from vfl_flower.models.training import kept, optimizer_tensors
from vfl_flower.party import builder, state, state_file
from vfl_flower.party.party import Party, PendingWindow
from vfl_flower.transport import messages
from vfl_flower.transport.flower_internals import config_record, contents
from vfl_flower.transport.node import index_and_parties

O = TypeVar("O", bound=messages.Order)  # noqa: E741
A = TypeVar("A", bound=messages.Payload)


class Session:
    """A party and the ``Context`` whose state it continues.

    scalars : record of the state's scalars that the party agrees with; ``None`` after a failure.
    node_config : node configuration, with the rules that the party was made or loaded with.
    ahead : whether the party has served messages since it wrote the state.
    accepted : whether the party's rules permit the run of this state.
    is_current : whether it is known to continue the Context of the turn that comes now.
    before : exchange, steps, pending window and size of the transcript before the message that is
        being served.
    """

    def __init__(self, context: Context, party: Party) -> None:
        self.context, self.party = context, party
        self.scalars: Any = None
        self.node_config: Mapping[str, Any] = dict(context.node_config)
        self.ahead = self.accepted = self.is_current = False
        self.before: tuple[int, int, PendingWindow | None, int] | None = None

    def load(self, context: Context) -> None:
        """Load the state of the last message into the party."""
        party, records, here = self.party, context.state, self.party.in_process
        scalars = {"run": str(context.run_id), **state.load_scalars(records)}
        there = "transcript" in records  # not in states of older versions
        transcript = state.load_arrays(records, "transcript") if there else {}
        large = state.load_large(records)
        party.load_state_dict({"scalars": scalars, "large": large, "transcript": transcript})
        party.limits = builder.limits_of(context, party)
        here.stack = None
        model = here.model() if here.model else None
        shares = model is not None and model is records.get("model")
        if not shares:
            if model is not None:  # the other Context keeps its own copy of this model
                state.settle(model)
            party.learner.trace = None
            groups = {name: state.load_arrays(records, name) for name in ("model", "optimizer")}
            party.learner.load_state_dict(groups)
        party.learner.learning()  # a failed message may have left another mode
        self.context, self.ahead, self.accepted = context, False, False
        self.scalars = records["scalars"] if shares else None
        self.node_config = dict(context.node_config)

    def write(self) -> None:
        """Write everything that the next message needs into the Context's state."""
        context, party = self.context, self.party
        here, learner, groups = party.in_process, party.learner, party.state_dict()
        records = contents(context.state)
        model = here.model() if here.model else None
        shared = model is not None and model is records.get("model")
        if shared and learner.model.by_step:  # a module of your own may have made new tensors
            shared = state.shares_memory(model, kept(learner.model))
        if not shared:
            groups |= learner.state_dict()
        elif learner.optimizer.state:
            tensors = optimizer_tensors(learner.optimizer)
            if not state.shares_memory(records["optimizer"], tensors):
                groups["optimizer"] = tensors
        state.save_groups(context.state, party.about, groups)
        if party.seal:
            party.seal.keep(context)
        here.model = weakref.ref(records["model"])
        self.scalars, self.ahead = records["scalars"], False
        live[learner.index, learner.parties] = self

    def go_back(self) -> None:
        """Make the state as before the current message. The next message loads it."""
        party = self.party
        if self.ahead and self.before:
            party.exchange, party.steps, party.pending, size = self.before
            del party.transcript.entries[size:]
            self.write()
        party.learner.trace = self.scalars = self.before = None
        self.is_current = False

    def break_off(self) -> None:
        """Restore the state before a failed message, except for what was learned.

        The party does not wait for the same feedback again.
        """
        context, party = self.context, self.party
        awaits = party.pending
        self.go_back()
        scalars = state.load_scalars(context.state)
        awaited = scalars.get("pending")
        changed: dict[str, Any] = {}
        if awaited and (awaits is None or awaits.order.exchange != awaited[0]):
            changed = {"pending": [], "pending-secret": b""}
        if party.seal and scalars:
            changed |= party.seal.fail(context)
        if changed:
            groups = {"scalars": {**scalars, **changed}, **party.learner.state_dict()}
            state.save_groups(context.state, party.about, groups)
            party.in_process.model = weakref.ref(context.state["model"])


live: dict[tuple[Any, Any], Session] = {}
"""(index, number of parties) -> session of the party that this process served last."""


def forget(run: int) -> None:
    """End the sessions of a run that has ended, and free their memory."""
    for place, session in list(live.items()):  # a copy: other threads may add sessions
        if session.context.run_id == run:
            if session.ahead:
                session.write()
            live.pop(place, None)


def _live(context: Context) -> Session | None:
    node = context.node_config
    return live.get((node.get("partition-id"), node.get("num-partitions")))


def current(context: Context) -> Session | None:
    """Return the session that continues a Context, if this process has it."""
    session, records = _live(context), contents(context.state)
    if session is None or session.scalars is None:
        return None
    model = session.party.in_process.model
    continues = (
        session.scalars is records.get("scalars")
        and (session.context is context or not session.ahead)
        and session.context.run_id == context.run_id
        and session.node_config == context.node_config
        and model is not None
        and model() is records.get("model")
    )
    return session if continues else None


def resume(context: Context) -> Session:
    """Return the session of a node's party, as its last message left it."""
    session, node = _live(context), context.node_config
    if session and session.before:  # an interrupt has ended the last message
        session.go_back()
    if session is None or not (session.is_current or current(context)):
        about = state.load_about(context.state)
        if not about:
            raise OutOfStepError("has no state of this run.")
        place = index_and_parties(context)
        is_left = session and (session.context is not context or session.node_config != node)
        if session and session.ahead and is_left:
            session.write()  # for the other Context, or under the rules before
        same_run = session is not None and session.context.run_id == context.run_id
        if session is None or not same_run or session.party.about != about:
            session = live[place] = Session(context, builder.rebuild(context, about))
        session.load(context)
    if session.party.limits:
        session.party.limits.go_on()
    if session.party.seal:
        session.party.seal.load(context, state.load_scalars(context.state))
    party, session.is_current = session.party, False
    size = len(party.transcript.entries)
    session.before = party.exchange, party.steps, party.pending, size
    return session


def serve(
    method: Callable[[Party, O], A], context: Context, order: O, own: Session | None = None
) -> A:
    """Have a party serve an order, and keep what has changed, or what it has learned.

    By default the party is as its last message left it.
    """
    own = own or resume(context)
    try:
        party, payload = own.party, method(own.party, order)
        messages.refuse_unused(order.arrays, "was sent")
        # Orders of other kinds are rare, and some read the state. Masks serve one message each.
        trains = isinstance(order, messages.TrainOrder | messages.EmbedOrder)
        shares_memory = own.scalars is not None and party.in_process.model is not None
        if trains and shares_memory and not party.seal and not party.learner.arrays:
            own.ahead = True  # the state is written later
        else:
            own.write()
    except BaseException:
        own.break_off()
        raise
    own.before = None
    return payload


def hand_over(context: Context) -> None:
    """Write the state of a node's party, if it is older than the party."""
    session = _live(context)
    if session and session.context is context and session.ahead:
        session.write()


def save(context: Context, number: int | None = None, run: str = "") -> None:
    """Write the state of a node's party to its disk, as `state_file.save` does."""
    hand_over(context)
    state_file.save(context, number, run)


def is_new(context: Context) -> bool:
    """Return whether the party has not trained yet."""
    return state.load_scalars(context.state).get("exchange") == 0


def rename(context: Context, run: str) -> None:
    """Rename the run of the state, when a run continues as another run."""
    scalars = dict(state.load_scalars(context.state))
    context.state["scalars"] = config_record({**scalars, "run": run})


def largest_order(context: Context) -> int:
    """Return the largest size in bytes of the arrays in the next order.

    Until the party has described its rows, the label holder may send a piece of ids, and a place of
    each row.
    """
    scalars = contents(context.state).get("scalars")
    if isinstance(scalars, ConfigRecord):
        return int(str(contents(scalars)["largest"]))
    return messages.SMALL + 32 * PIECE + 4 * Rules.of(context.node_config).max_ids
