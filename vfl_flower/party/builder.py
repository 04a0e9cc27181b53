"""The four ways to build a party, and the checks of each way.

A party begins a run (`begin`), or begins a run with the model of an earlier run (`grow`). In
another process, or after a restart, it continues from its state (`rebuild`). Or it predicts with a
model that it saved (`for_prediction`). Earlier, `refusals.check_order` has compared each
configuration of the message with the party's rules.
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from flwr.app import Context, RecordDict

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig, parse
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.source import Preparation, alike
from vfl_flower.models.training import load_model
from vfl_flower.party import about, state, state_file
from vfl_flower.party.about import About
from vfl_flower.party.inputs import load_block
from vfl_flower.party.limits import Limits
from vfl_flower.party.own_model import own_config
from vfl_flower.party.party import Party
from vfl_flower.party.refusals import check, told
from vfl_flower.party.transcript import Transcript
from vfl_flower.protocol.aggregation import aggregation_of, keys
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import DescribeOrder, GrowOrder, RejoinOrder
from vfl_flower.transport.node import index_and_parties, refused

CHECKS = {
    "begin": ("rules",),
    "grow": ("rules", "model", "weights"),
    "resume": ("parties", "data", "model", "weights", "training"),
    "rerun": ("rules", "parties", "data", "model", "weights", "training"),
    "predict": ("parties", "rows", "model", "weights"),
}
"""Checks of each way. `rules` are the party's own rules, now that its rows are known. The other
checks compare with the party's text about itself from when its model began.

With limits, every way that continues from earlier uploads needs their count (`_limit`).
"""


# --- the four ways ------------------------------------------------------------------------------


def begin(context: Context, order: DescribeOrder | RejoinOrder) -> Party:
    """Build the party of a new run, of a run whose state it has lost, or of a rerun."""
    given = parse(context.run_config)
    if given.get("resume") or given.get("grow"):
        raise VflError("has lost the state from which it continued.")
    config, way, text, transcript = resolve(context.run_config), "begin", "", Transcript()
    since = str(context.run_id)
    if isinstance(order, DescribeOrder) and order.run:
        saved = state_file.load(context, order.run, order.number).state
        way, text = "rerun", state.load_about(saved)
        config, transcript = about.read(text).config, _to_repeat(context, saved)
        since = str(state.load_scalars(saved)["origin"])  # uploads of both runs count as one
    read = partial(load_block, context, config, watched=True)
    party = _build(context, way, config, order.outputs, read, text, transcript=transcript)
    origin = party.origin
    origin.run, origin.counted_since = state_file.run_name(context, order.nonce), since
    if party.seal:
        party.seal.begin(origin.run)
    known = state.load_about(context.state) or state_file.is_there(context, origin.run)
    _limit(context, party, goes_on=isinstance(order, RejoinOrder) or bool(known))
    keys.forget(context)  # last, so that a refusal leaves the party's state unchanged
    state.forget_copies(context.state)
    state_file.keep_shares(context, party.inputs.block)
    return party


def _to_repeat(context: Context, saved: RecordDict) -> Transcript:
    """Return the transcript of a rerun of the run of this state."""
    if "transcript" not in saved:
        raise ConfigError(
            f"Party {context.node_config.get('partition-id')} has no transcript of that run, which "
            "an older version trained. Train anew."
        )
    then = Transcript.of(state.load_arrays(saved, "transcript"))
    return Transcript(again=bytes(then.entries), then=then.here)


def grow(context: Context, order: GrowOrder) -> Party:
    """Build the party of a run that begins with the models of an earlier run.

    A party of that run keeps its model, its preparation of columns, and its counts.
    """
    index, _ = index_and_parties(context)
    config = told(context, order.config)
    if not aggregation_of(config).may_grow:  # checked here too: the label holder may not check
        name = config.models.aggregation
        raise VflError(f"was asked to begin aggregation = {name!r} with an earlier model.")
    saved = state_file.load(context, order.run, order.number) if index < order.parties else None
    text = state.load_about(saved.state) if saved else ""
    preparation = about.read(text).preparation if text else None
    read = partial(load_block, context, config, preparation, watched=True)
    party = _build(context, "grow", config, order.outputs, read, text, grown=bool(text))
    origin, per_epoch = party.origin, party.sampling.per_epoch
    origin.run = state_file.run_name(context, order.nonce)
    origin.counted_since = str(context.run_id)
    if saved:
        load_model(party.learner.model, state.load_arrays(saved.state, "model"))
        scalars = state.load_scalars(saved.state)
        origin.counted_since, origin.exchange = scalars["origin"], scalars["exchange"]
        origin.checkpoint = saved.number
        # Round up: otherwise many runs with few rows would lose count.
        party.steps = math.ceil(round(scalars["epochs"] * per_epoch, 6))
    _limit(context, party, goes_on=saved is not None)
    if saved and party.limits:
        coming = 0 if party.learner.frozen else party.config.training.epochs * per_epoch
        party.limits.check_steps(party.steps + coming, per_epoch)
    state_file.keep_shares(context, party.inputs.block)
    return party


def rebuild(context: Context, text: str) -> Party:
    """Build a party from its text about itself; `context.resume` then loads its state."""
    then = about.read(text)
    read = partial(load_block, context, then.config, then.preparation if then.grown else None)
    return _build(context, "resume", then.config, then.outputs, read, text, then.grown)


def for_prediction(
    context: Context,
    saved: state_file.Saved,
    run: str,
    new_rows: Callable[[Preparation], FeatureBlock],
) -> Party:
    """Build a party with a model of ``run``, to predict ``new_rows``, or else its test rows."""
    text, scalars = state.load_about(saved.state), state.load_scalars(saved.state)
    then = about.read(text)
    read = partial(load_block, context, then.config)
    if then.preparation:
        read = partial(new_rows, then.preparation)
    party = _build(context, "predict", then.config, then.outputs, read, text)
    party.origin.counted_since = scalars.get("origin", run)
    _limit(context, party, goes_on=True)
    load_model(party.learner.model, state.load_arrays(saved.state, "model"))
    return party


# --- steps of all four ways ---------------------------------------------------------------------


def _build(
    context: Context,
    way: str,
    config: RunConfig,
    outputs: int,
    read: Callable[[], FeatureBlock],
    text: str = "",
    grown: bool = False,
    transcript: Transcript | None = None,
) -> Party:
    """Read a party's data, build its model, and run the checks of this way.

    ``text`` is about the party when its model began, in an earlier run if ``grown``; empty if new.
    """
    index, parties = index_and_parties(context)
    then, checks = about.read(text) if text else None, CHECKS[way]
    if then and "parties" in checks and then.parties != parties:
        raise ConfigError(
            f"The run has {then.parties} parties, and party {index}'s node configuration gives "
            f"num-partitions = {parties}. Start its SuperNode with num-partitions={then.parties}."
        )
    block, own = read(), own_config(context, config)
    party = Party(config, index, parties, outputs, block, own, grown, transcript)
    if "rules" in checks:  # a run begins
        check(context, config, party.inputs.rows)
        party.learner.try_out()
    if then:
        _compare(checks, index, then, about.read(party.about))
    return party


def _limit(context: Context, party: Party, goes_on: bool) -> None:
    """Apply the party's limits, which need a count of earlier uploads if the party ``goes_on``."""
    party.limits = limits_of(context, party)
    if party.limits:
        party.limits.go_on() if goes_on else party.limits.begin()


def limits_of(context: Context, party: Party) -> Limits | None:
    """Return the limits of the party's rules; a rerun sends only what was counted before."""
    rules = Rules.of(context.node_config)
    if party.transcript.repeats or (rules.max_epochs is None and rules.max_uploads is None):
        return None
    path = Path()  # without the rule max-uploads, nothing is counted
    if rules.max_uploads is not None:
        since = party.origin.counted_since
        path = state_file.place(context, run=since).with_suffix(".uploads")
    return Limits(rules, partial(refused, context), path)


def _compare(checks: Collection[str], index: int, then: About, now: About) -> None:
    """Raise an error if something has changed since the model began that must not change."""
    same_rows = now.ids == then.ids
    pair = [each.preparation and each.preparation.as_json() for each in (then, now)]
    if "data" in checks and not (same_rows and alike(*pair)):
        raise VflError(
            "does not have the data that this run began with: its file, or its `monotonic`, has "
            "changed. Restore the earlier one."
        )
    if "rows" in checks and not (same_rows or then.preparation):  # of own data, the rows are new
        raise ConfigError(
            f"Party {index} has other rows than its model was trained with. Restore the earlier "
            "data set."
        )
    if "model" in checks and now.model != then.model:
        raise ConfigError(
            f"Party {index}'s model is {now.model['name']!r}, but the run began with "
            f"{then.model['name']!r}: the name, arguments or parameters differ. "
            "Configure the earlier model."
        )
    if "weights" in checks and now.weights != then.weights:  # states do not hold frozen weights
        raise VflError(
            "has other weights in its model's folder than at the start of this run. Restore the "
            "earlier files."
        )
    trained, trains = ((each.training, each.augment) for each in (then, now))
    if "training" in checks and trains != trained:
        raise ConfigError(
            f"Party {index}'s node configuration trains its model otherwise than when the run "
            "began. Restore the earlier options."
        )
