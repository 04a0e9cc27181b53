"""Train on data in memory: `train`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, Signature, signature
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack, overload

from vfl_flower.api import own_code
from vfl_flower.api.arguments import handed_over, listed
from vfl_flower.api.keywords import Options
from vfl_flower.api.model import Features, Model, quiet
from vfl_flower.config import errors
from vfl_flower.config.errors import ConfigError, Interrupted, Terminated
from vfl_flower.config.names import named
from vfl_flower.config.plugins import ENGINES
from vfl_flower.config.run_config import KEYS, RunConfig
from vfl_flower.data.memory import held, node_configs_of
from vfl_flower.data.survey import surveyed
from vfl_flower.label_holder import checkpoint, earlier_run
from vfl_flower.label_holder.progress import shown


@overload
def train(
    features: Features = (),
    labels: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Model: ...


@overload
def train(
    config: Mapping[str, Any] | None, features: Features = (), labels: Any = None, **more: Any
) -> Model: ...


def train(*given: Any, **options: Any) -> Model:
    """Train a model: ``train(features, labels, strategy="vafl", epochs=20)``.

    Without features, train on the data set that option ``dataset`` names. The order
    ``train(config, features, labels)`` works too.

    Parameters
    ----------
    features : for each party an array or tensor [N, ...], a pandas frame, or a torch data set with
        one sample per item. All parties have the same N rows, unless ``id`` is given. A mapping
        names the parties, as in ``{"bank": bank, "shop": shop}``.
    labels : array, list or Series of N labels; or a frame with a label column (``label``) and
        features of the label holder.
    config : options under the names that `vfl list` prints, such as ``{"party-lr": 0.1}``.
    id : name of the id column of all frames. Training uses the rows that all frames have.
    parties : number of parties that share a data set such as "digits".
    engine : runtime: "local", "ray" or "supernodes". Features in memory need "local". Ctrl-C or
        SIGTERM or SIGHUP keeps a checkpoint, and `KeyboardInterrupt` or `SystemExit` names its
        folder. ``train(features, labels, resume=FOLDER)`` continues the run.
    out : results folder. By default, a temporary folder that Python deletes with the model. If
        training fails, a note on the error names the folder.
    progress : True prints a line per epoch. None shows progress in terminals and notebooks only.
    **options : options of `vfl list` in snake_case, such as ``party_lr=0.1``. None stands for the
        default. ``strategy`` also takes a `System`. ``estimator``, ``codec``, ``downlink_codec``,
        ``bottom_model``, ``top_model``, ``loss``, ``metrics``, ``privacy``, ``augment`` and
        ``observer`` also take classes and functions; ``observer`` also a `Callback`. The values
        of ``config`` may be the same objects. ``expert`` takes settings
        that are no options, such as ``expert={"mu": 1e-4}``.

    Returns
    -------
    Model
        The trained model, with the halves of all parties.

    Raises
    ------
    ConfigError
        If an option is unknown, is given twice, has a wrong value, or contradicts the data.
    PartyError
        If a party fails.
    TypeError
        If there are more than three positional arguments, or one is also a keyword argument.

    Examples
    --------
    >>> import numpy as np
    >>> import vfl_flower
    >>> rows = np.random.default_rng(0).normal(size=(400, 6))
    >>> labels = (rows[:, 0] + rows[:, 5] > 0).astype(int)
    >>> model = vfl_flower.train([rows[:, :3], rows[:, 3:]], labels, strategy="vafl", epochs=5)
    >>> model.predict([rows[:, :3], rows[:, 3:]]).shape
    (400,)
    """
    order = ["features", "labels"]
    if len(given) == 3 or (given and isinstance(given[0], Mapping | None) and not _is_data(given)):
        order = ["config", *order]
    if len(given) > len(order):
        raise TypeError(f"train() takes at most 3 positional arguments: {len(given)} were given.")
    if twice := [name for name, _ in zip(order, given, strict=False) if name in options]:
        advice = " Give the parties' features as one list." * (twice == ["labels"])
        raise TypeError(f"train() got multiple values for argument {twice[0]!r}.{advice}")
    return _train(**dict(zip(order, given, strict=False)), **options)


def _is_data(given: Sequence[Any]) -> bool:
    """Return whether a mapping has features by the names of parties, and no options."""
    mapping = given[0] or {}
    if any(getattr(v, "ndim", 0) > 1 or hasattr(v, "columns") for v in mapping.values()):
        return True
    return KEYS.keys().isdisjoint(str(name).replace("_", "-") for name in mapping) and any(
        hasattr(each, "__getitem__") and not isinstance(each, str | type | Mapping)
        for each in mapping.values()
    )


def _train(
    features: Features = (),
    labels: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
    progress: bool | None = None,
    **options: Any,
) -> Model:
    for name, value in {"engine": engine, "out": out, "id": id}.items():
        if not isinstance(value, str | Path | None):
            columns = " Join several columns of ids to one." * (name == "id")
            raise ConfigError(f"{name} = {errors.shown(value)} must be one text.{columns}")
    if not isinstance(parties, Integral):
        raise ConfigError(f"parties = {errors.shown(parties)} must be a whole number.")
    keys, more = own_code.values_of(config, options)
    _check_engine(engine, keys, more)
    to = out or keys.get("out") or keys.get("resume", "")
    temporary = None if to else tempfile.TemporaryDirectory()
    folder = Path(temporary.name, "run") if temporary else Path(to)
    keys["out"] = str(folder.expanduser().absolute())
    node_configs: list[dict[str, Any]] = []
    there = features if isinstance(features, Mapping) else listed(features)[0]
    if labels is not None and not there:
        raise ConfigError("Labels are given and no features: give features of each party.")
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(shown(progress))
        if there:
            _check_features(engine, keys, labels, id)
            node_configs = stack.enter_context(_held(keys, features, labels, id))
            parties = len(node_configs)
        try:
            start = ENGINES.load(engine)
            with surveyed(RunConfig.of(keys), node_configs):
                finished = start(parties, keys, node_configs=node_configs, **more)
        except BaseException as error:
            if temporary:
                _keep(folder, error)
                temporary.cleanup()
            raise
    return Model(finished.folder, temporary)


@contextmanager
def _held(
    keys: dict[str, Any], features: Features, labels: Any, id: str
) -> Iterator[list[dict[str, Any]]]:
    """Hold features and labels for a run, complete its options, and yield node configurations."""
    id = id or keys.get("id", "")
    before = keys.get("resume") or keys.get("grow")  # a run whose options hold
    data = (earlier_run.configured(keys) if before else RunConfig.of(keys)).data
    kind, _, then = data.dataset.partition(":") if keys.get("resume") else ("memory", "", "")
    if kind != "memory":
        raise ConfigError(
            f"The run in {keys['resume']} used dataset = {data.dataset!r}. Leave features and "
            "labels out."
        )
    earlier = checkpoint.load(before) if before else None
    listing, called = listed(features, *((earlier.names, earlier.parties) if earlier else ()))
    with named(called), held(*handed_over(listing, labels, data, id), name=then) as name:
        keys |= {"dataset": f"memory:{name}", **({"id": id} if id else {})}
        as_named = before or data.match or data.split == "time"
        keys.setdefault("align", data.align if as_named else "ids")
        yield node_configs_of(name, len(listing), called)


_options = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=each.__forward_arg__)
    for name, each in Options.__annotations__.items()
]
_shown = [*signature(_train).parameters.values()][:-1] + _options
# Notebooks complete keywords by this signature.
train.__signature__ = Signature(_shown, return_annotation="Model")  # type: ignore[attr-defined]


def _check_engine(engine: str, keys: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if another process would need an object of this one."""
    if engine == "local":
        return
    if more:
        raise ConfigError(
            f"observer = {type(more['observers'][0]).__name__} is an object of this process, which "
            f"engine = {engine!r} cannot reach: give an observer by its import path."
        )
    for option, name in own_code.without_path(keys).items():
        raise ConfigError(
            f"{option} = {name} has no import path, which engine = {engine!r} needs: define {name} "
            "in a module (a .py file) that can be imported."
        )


def _check_features(engine: str, keys: Mapping[str, Any], labels: Any, id: str) -> None:
    """Raise `ConfigError` if an option or argument contradicts features in memory."""
    beside = [name for name in ("dataset", "task") if name in keys]
    beside += ["align"] * (keys.get("align", "any") != "any")
    if beside:
        raise ConfigError(
            f"{beside[0]} = {keys[beside[0]]!r} is not for features that are handed over: leave "
            "out the option, or the features."
        )
    if labels is None:
        raise ConfigError("Labels are missing: give train one for each row.")
    if engine != "local":
        raise ConfigError(
            f"engine = {engine!r} cannot reach data of this process: use engine = 'local', or "
            "files and `vfl run`."
        )
    if id and keys.get("id", id) != id:
        raise ConfigError(
            f"id = {id!r} contradicts id = {keys['id']!r} in config: leave one of them out."
        )


def _keep(folder: Path, error: BaseException) -> None:
    """Keep the training before an error, and note its folder on the error."""
    history, model = folder / "history.jsonl", folder / checkpoint.FILE
    if model.exists() or (history.exists() and history.stat().st_size):
        place = Path(tempfile.mkdtemp(prefix="vfl-flower-"), "run")
        shutil.move(folder, place)
        if isinstance(error, Interrupted | Terminated):
            error.folder = str(place)
        use = ", and vfl_flower.load reads it" if (place / checkpoint.FILE).exists() else ""
        error.add_note(f"The training so far is kept in {place}{use}.")
