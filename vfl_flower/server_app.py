"""The Flower ServerApp of the label holder: configuration in, results folder out."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from strategies.distilled import distil
from strategies.vertical import Vertical, strategy_of
from vfl_flower.alignment.at_label_holder import RowOrder
from vfl_flower.alignment.reuse import aligned
from vfl_flower.alignment.store import home
from vfl_flower.config import errors, logs, names
from vfl_flower.config.files import remove_older, write_json
from vfl_flower.config.logs import log, notice
from vfl_flower.config.plugins import OBSERVERS
from vfl_flower.config.provenance import code_digest, versions
from vfl_flower.config.run_config import RunConfig, given_to_flower, parse
from vfl_flower.data.at_label_holder import load_labels, load_own_labels, own_table
from vfl_flower.data.labels import Labels
from vfl_flower.data.split import Alignment, held_out_again, used_by
from vfl_flower.data.tables import Table
from vfl_flower.label_holder import checkpoint, earlier_run, progress
from vfl_flower.label_holder.about_data import of_people
from vfl_flower.label_holder.callbacks import Callback, listeners
from vfl_flower.label_holder.checkpoint import Checkpoint, Keeper
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.label_holder.results import Results, distilled_folder, in_use, results_folder
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.systems import sized
from vfl_flower.results.figures import coverage
from vfl_flower.results.summary import Summary
from vfl_flower.tasks.inference.explain import explain
from vfl_flower.tasks.inference.predict import predict
from vfl_flower.tasks.inference.serving.serve import lasting
from vfl_flower.tasks.inference.serving.serve import serve as serve_model
from vfl_flower.tasks.information.groups import segments
from vfl_flower.tasks.information.label_holder import information
from vfl_flower.transport.base import Transport, transport_of
from vfl_flower.transport.nodes.watch import watched
from vfl_flower.transport.shared_actor import SharedActors
from vfl_flower.transport.stream.grid import StreamGrid


def _distil(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Write the results folder of a student of an earlier run's model."""
    folder = distilled_folder(config)
    is_new = not folder.exists()
    with in_use(folder):
        results = Results(folder)
        try:
            student = distil(transport, config, given, run, Keeper(folder, run))
        except errors.VflError:
            if is_new and not (folder / checkpoint.FILE).exists():  # a saved student stays
                with suppress(OSError):  # as does a folder that has more in it
                    for name in ("history.jsonl", "run.lock"):
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()
            raise
        for entry in student.history.entries:
            results.evaluated(entry)
        summary = summarise(student.config, transport, student.figures(), None)
        own = own_table(student.config.data)
        results.write_tested(student.run.labels, student.tested, own)
        results.finish(summary, student.top_arrays())


_BY_MODEL = {"predict": predict, "serve": serve_model, "explain": explain, "distil": _distil}
"""Tasks with the model of an earlier run."""

logs.without_colours()

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do the configured task with the parties of the grid.

    Flower sends the text of an error to the SuperLink. So on real nodes it is one without text.
    """
    if transport_of(grid).engine != "supernodes":
        serve(grid, context)
        return
    try:
        with errors.terminating(signal.SIGINT):  # Flower's own handlers leave a run no time to save
            serve(grid, context)
    except errors.Terminated as error:
        notice.warning("%s", error)  # Flower takes it unless `flwr stop` has ended the run
        signal.raise_signal(error.number)  # now Flower tells its SuperLink
        raise
    except Exception as error:
        if not isinstance(error, errors.VflError):
            log.error("%s", errors.places(error))
        raise errors.VflError(_outside(error)) from None


def _outside(error: BaseException) -> str:
    """Say what ended a run, without a text that may quote data."""
    if isinstance(error, errors.VflError):
        return error.outside
    if isinstance(error, Exception):
        return f"The label holder's process {errors.raised(error)}"
    return errors.why(error)


def serve(grid: Grid, context: Context, callbacks: Sequence[Callback] = ()) -> None:
    """Do the configured task with the parties of the grid; callbacks are for training."""
    transport, run = transport_of(grid), str(context.run_id)
    of_flower = transport is not grid  # else this process may have other runs too
    about = partial(logs.described, lasting=of_flower, run=run, role="label holder")
    if of_flower:  # an option of an earlier run is no contradiction to a default
        context.run_config = given_to_flower(context.run_config, grid.run.override_config)
    with about(context.run_config.get("log-format")):
        config = earlier_run.configured(context.run_config)
        # A run to resume may have another format.
        watch = watched(transport) if transport.engine == "supernodes" else nullcontext()
        with about(config.running.log_format), names.named({}), watch:
            _serve(transport, config, context, callbacks)


def _serve(
    transport: Transport, config: RunConfig, context: Context, callbacks: Sequence[Callback]
) -> None:
    run, given = str(context.run_id), parse(context.run_config)
    if days := config.running.retention_days:
        for kind in ("alignments", "sets"):
            remove_older(home(kind), "of-*.npz", days)
        # Not predictions.journal, which counts what predictions have spent.
        for kind in ("csv", "parquet", "json*", "html") if config.model else ():
            remove_older(Path(config.model).expanduser(), f"predictions*.{kind}", days)
    of_model = config.task == "information" and config.model
    if config.task == "train":
        _train(transport, config, run, callbacks)
    elif by_model := segments if of_model else _BY_MODEL.get(config.task):
        if transport.medium == "messages":
            config = earlier_run.reached_as_before(config, given)
        once = of_model or config.task in ("predict", "distil")
        with _streams(transport, config if once else lasting(config)) as found:
            by_model(found, config, given, run)
    else:
        own = own_table(config.data) if config.data.own_data else None
        with _streams(transport, config) as found:
            if config.task == "align":
                _align(found, config, own, run)
            else:
                information(found, config, own, run, results_folder(config))


def _align(transport: Transport, config: RunConfig, own: Table | None, run: str) -> None:
    """Align rows without training, and write a summary with their number."""
    if own is None:
        raise errors.ConfigError(
            f"dataset = {config.data.dataset!r} is divided, and has no ids to align: name the "
            "label holder's file by dataset='files:PATH'."
        )
    folder = results_folder(config)
    with in_use(folder):
        common = aligned(transport, config, own, run)
        figures = {"alignment": common.name, "rows": len(common.rows)}
        figures |= {"coverage": _coverage(config, own, common)}
        summary = summarise(config, transport, figures, None)
        write_json(folder / "summary.json", summary)


def _train(
    transport: Transport, config: RunConfig, run: str, callbacks: Sequence[Callback]
) -> None:
    """Train the configured system in its results folder, unless another run uses it."""
    own = own_table(config.data) if config.data.own_data else None
    if own:
        own.check()
        if config.data.match and mechanism_of(config).hides_labels and not own.names_people:
            raise errors.ConfigError(
                f"Noise on labels counts people by their ids, and {own.path} has no column "
                f"{own.id!r}. Add a column of ids of your own, and name it by id."
            )
    else:
        load_labels(config)
    folder = results_folder(config)
    with in_use(folder):
        found = earlier_run.to_go_on_from(folder) if config.running.resume else None
        results = Results(folder, found.strategy["history"]["entries"] if found else None)
        if found and found.finished:  # the run ended before it had written its results
            figures, top = found.strategy["figures"], of_group("top", found.arrays)
            config = config if own else sized(config, len(load_labels(config).train))
            results.finish(summarise(config, transport, figures, None), top)
        else:
            begins = config.running.grow and not found
            earlier = checkpoint.load(config.running.grow) if begins else None
            again = earlier_run.to_repeat(config.running.rerun) if config.running.rerun else None
            keeper = Keeper(folder, run, found, earlier, again)
            _train_in(results, transport, config, own, keeper, callbacks)


def _train_in(
    results: Results,
    transport: Transport,
    config: RunConfig,
    own: Table | None,
    keeper: Keeper,
    callbacks: Sequence[Callback],
) -> None:
    """Train, and save the results, even if training fails."""
    found, before = keeper.found, keeper.found or keeper.earlier
    strategy: Vertical | None = None
    told: list[Callback] = []
    failure = None
    try:
        with _streams(transport, config, keeper.nonce) as transport:
            labels = _own_labels(transport, config, own, keeper) if own else load_labels(config)
            if config.data.split == "time":  # whole periods, so their share may differ
                config = config.with_values({"test-fraction": labels.share_tested})
            fixed = found or not own  # else there may be new rows
            if before and fixed and labels.differ_from(before.about_labels):
                raise errors.ConfigError(
                    f"{config.data.called} has other rows, classes or values than when the run in "
                    f"{config.running.resume or config.running.grow} began: put back the data of "
                    "that run."
                )
            named = OBSERVERS.load(config.running.observer)()
            shown = progress.of_run(results.folder)
            told = [results, named, *callbacks, *([shown] if shown else [])]
            labels.warn_of_few()
            mechanism_of(config).warn(labels)
            strategy = strategy_of(config)(config, labels, told, keeper)
            strategy.start(transport)
            results.write_tested(labels, strategy.tested, own)
    except BaseException as error:
        failure = _outside(error)
        raise
    finally:
        try:
            if not found or (strategy and strategy.ready):  # else the earlier results stay
                figures, top = (strategy.figures(), strategy.top_arrays()) if strategy else ({}, {})
                used = strategy.config if strategy else config
                results.finish(summarise(used, transport, figures, failure), top)
        except errors.VflError as error:
            if failure is None:
                raise
            log.warning("%s", error)  # the error that ended the run is raised
        finally:
            for hear in listeners(told)["written"]:
                hear()


@contextmanager
def _streams(transport: Transport, config: RunConfig, nonce: str = "") -> Iterator[Transport]:
    """Yield the transport of the run's messages, with streams and shared actors where needed."""
    streams = config.running.transport != "messages" and transport.medium == "messages"
    with StreamGrid(transport, config, nonce) if streams else nullcontext(transport) as found:
        if found.engine == "ray" and config.running.parties > len(list(found.get_node_ids())):
            found = SharedActors(found, config.running.parties)
        yield found


def _own_labels(transport: Transport, config: RunConfig, own: Table, keeper: Keeper) -> Labels:
    if config.data.align == "any" and not config.data.min_parties and not own.feature_names:
        raise errors.ConfigError(
            "min-parties = 0 needs columns at the label holder, which has none. Leave it out."
        )
    if not keeper.found:
        order = _as_then(config, own, keeper, keeper.earlier) if keeper.earlier else None
        common = aligned(transport, config, own, keeper.run, None, order)
        keeper.rows, keeper.present = common.rows, common.present
        if keeper.again and not np.array_equal(keeper.rows, keeper.again.rows):
            raise errors.ConfigError(
                "A rerun needs the alignment of the run to repeat. Ids or rules have changed, a "
                "side has lost it, or people have withdrawn. Restore it, or train anew."
            )
    elif len(own.ids) <= keeper.rows.max():
        raise errors.ConfigError(
            f"{own.path} has lost rows since the run in {config.running.resume} began. "
            "Restore its rows. After a withdrawal, train anew."
        )
    else:
        name = keeper.found.about_labels["alignment"]
        common = Alignment(name, keeper.rows, keeper.present)
    before = (keeper.found or keeper.earlier) if config.running.grow else None
    labels = load_own_labels(config.data, own, common, before.about_labels if before else None)
    then = keeper.found.about_labels.get("coverage") if keeper.found else None
    covered = then or _coverage(config, own, common, len(labels.tested.test))
    labels = replace(labels, coverage=covered)
    if keeper.earlier and config.data.test_fraction:
        tested = labels.tested.test_places
        assert tested is not None
        known = int(np.isin(tested, np.concatenate(keeper.used)).sum())
        if known:
            notice.warning(
                "%d of the %d test rows helped to train or choose the model with which the run "
                "begins: figures on them are too good.",
                *(known, len(tested)),
            )
    return labels


def _coverage(config: RunConfig, own: Table, common: Alignment, scored: int = 0) -> dict[str, Any]:
    """Return which people of the label holder's file a run covers."""
    rows, known = len(common.rows), common.known
    if not known and common.present is not None:
        known = dict(enumerate(common.present.sum(0).tolist()))
    lacks = "too few parties know them" if config.data.align == "any" else "a party lacks them"
    left_out = {lacks: len(own.ids) - rows}
    about = of_people(own, common.rows, config)
    return coverage(len(own.ids), rows, scored, left_out, known, rules=common.rules, **about)


def _as_then(config: RunConfig, own: Table, keeper: Keeper, earlier: Checkpoint) -> RowOrder | None:
    """Return how to hold out an earlier run's rows again, if their places are equal."""
    rows = earlier.rows
    if len(own.ids) <= rows.max() or own.digest(rows) != earlier.about_labels["ids"]:
        notice.warning(
            "%s does not begin with the rows that it had when the run in %s began. That run may "
            "have trained on rows that are held out now.",
            *(own.path, config.running.grow),
        )
        return None
    keeper.used = used_by(earlier.config.data, rows, earlier.used)
    return partial(held_out_again, config.data, rows, keeper.used)


def summarise(
    config: RunConfig, transport: Transport, figures: Mapping[str, Any], failure: str | None
) -> Summary:
    """Return ``summary.json``; figures are empty if the parties did not agree."""
    summary = {
        "strategy": config.strategy,
        "engine": transport.engine,
        "transport": transport.medium,
        "dataset": config.data.dataset,
        **figures,
        "seed": config.training.seed,
        "failure": failure,
        "config": config.values(),
        "versions": versions(),
        "code": code_digest(),
    }
    return cast(Summary, summary)
