"""A party between two messages: how Flower's ``Context`` keeps and restores it.

Any process may serve any message, so ``Context.state`` holds everything that the next message
needs. A process builds a party's features and model once. As long as the process runs, the arrays
in the state share the model's memory. They become bytes when they leave the process.
"""

from __future__ import annotations

import weakref
from typing import Any

from flwr.app import ConfigRecord, Context

from vfl_flower.config.errors import OutOfStepError
from vfl_flower.config.node_rules import Rules
from vfl_flower.models.training import kept, optimizer_tensors
from vfl_flower.party import builder, state
from vfl_flower.party.party import Party
from vfl_flower.transport.flower_internals import config_record, contents
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.node import index_and_parties

_parties: dict[tuple[Any, Any], tuple[int, Party]] = {}
"""(index, number of parties) -> run and party that this process served last."""


def forget(run: int) -> None:
    """Drop the parties of a run that has ended, and free their memory."""
    for place, (of, _) in list(_parties.items()):  # a copy: other threads may add parties
        if of == run:
            _parties.pop(place, None)


def resume(context: Context) -> Party:
    """Return the party of a node, as the last message left it.

    Raises
    ------
    OutOfStepError
        If the node has no state of this run.
    ConfigError, VflError
        If the party's data, model or training have changed since the run began.
    """
    node = context.node_config
    place = node.get("partition-id"), node.get("num-partitions")
    run, party = _parties.get(place, (None, None))
    party = party if run == context.run_id else None
    records = contents(context.state)
    scalars = records.get("scalars")
    if not (
        party is not None
        and scalars is not None
        and party.in_process.scalars is scalars
        and party.in_process.model is not None
        and party.in_process.model() is records.get("model")
        and party.in_process.node_config == node
        and party.exchange == contents(scalars)["exchange"]
    ):
        about = state.load_about(context.state)
        if not about:
            raise OutOfStepError("has no state of this run.")
        index_and_parties(context)
        if party is None or party.about != about:
            party = builder.rebuild(context, about)
            _parties[place] = context.run_id, party
        _load(context, party)
    if party.limits:
        party.limits.go_on()
    party.in_process.scalars = None  # stays so if the message fails
    if party.seal:
        party.seal.load(context, state.load_scalars(context.state))
    return party


def _load(context: Context, party: Party) -> None:
    """Load the state of the last message into a party."""
    kept, here = context.state, party.in_process
    scalars = {"run": str(context.run_id), **state.load_scalars(kept)}
    party.load_state_dict({"scalars": scalars, "large": state.load_large(kept)})
    party.limits = builder.limits_of(context, party.origin.counted_since)
    here.stack = None
    model = here.model() if here.model else None
    if model is None or model is not kept.get("model"):
        if model is not None:  # the other Context keeps its own copy of this model
            state.settle(model)
        party.learner.trace = None
        groups = {name: state.load_arrays(kept, name) for name in ("model", "optimizer")}
        party.learner.load_state_dict(groups)
    here.node_config = dict(context.node_config)  # the rules that the state was checked with
    party.learner.learning()  # a failed message may have left another mode


def save(context: Context, party: Party) -> None:
    """Save everything that the next message needs."""
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
    here.scalars, here.model = records["scalars"], weakref.ref(records["model"])
    _parties[learner.index, learner.parties] = context.run_id, party


def break_off(context: Context, party: Party) -> None:
    """Restore the state before a failed message, except for what was learned.

    Models learn in place, by whole steps (`Estimator.update`). They keep these steps, and the
    party does not wait for the same feedback again.
    """
    party.learner.trace = party.in_process.scalars = None
    scalars = state.load_scalars(context.state)
    awaited = scalars.get("pending")
    changed: dict[str, Any] = {}
    if awaited and (party.pending is None or party.pending.order.exchange != awaited[0]):
        changed = {"pending": [], "pending-secret": b""}
    if party.seal and scalars:
        changed |= party.seal.fail(context)
    if changed:
        groups = {"scalars": {**scalars, **changed}, **party.learner.state_dict()}
        state.save_groups(context.state, party.about, groups)
        party.in_process.model = weakref.ref(context.state["model"])


def is_new(context: Context) -> bool:
    """Return whether the party has not trained yet."""
    return state.load_scalars(context.state).get("exchange") == 0


def rename(context: Context, run: str) -> None:
    """Rename the run of the state, when a run continues as another run."""
    scalars = dict(state.load_scalars(context.state))
    context.state["scalars"] = config_record({**scalars, "run": run})


def largest_order(context: Context) -> int:
    """Return the largest size in bytes of the arrays in the next order.

    Until the party has described its rows, the label holder may send ids.
    """
    scalars = contents(context.state).get("scalars")
    if isinstance(scalars, ConfigRecord):
        return int(str(contents(scalars)["largest"]))
    return SMALL + 32 * Rules.of(context.node_config).max_ids
