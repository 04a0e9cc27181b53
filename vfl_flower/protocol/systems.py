"""Resolve run configurations.

`resolve` makes the configuration of a run. It merges a user's options, the defaults of the system
that ``strategy`` names, and the general defaults. `sized` adds the values that depend on the number
of training rows.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import AGGREGATIONS, MECHANISMS
from vfl_flower.config.run_config import KEYS, RunConfig, opened, parse
from vfl_flower.data import labels
from vfl_flower.data.partitioned import code_of
from vfl_flower.models import bottoms, optimizers, tops
from vfl_flower.models.bottoms import has_gradient
from vfl_flower.protocol import aggregation, estimators, sampling
from vfl_flower.protocol.codecs import channel as codecs
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.privacy.mechanism import Mechanism, mechanism_of
from vfl_flower.protocol.system import BY_ROWS, RATE_KEYS, System, load_system
from vfl_flower.transport.stream import listen as streams


def resolve(raw: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration of a user's options, or raise `ConfigError`."""
    given = parse(raw)
    items = tuple(sorted(given.items()))
    code = bool(places(given))  # which may have changed since
    return _resolve.__wrapped__(items) if code else _resolve(items)


@lru_cache(maxsize=64)
def _resolve(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    given = dict(items)
    system = load_system(given.get("strategy", RunConfig.strategy))
    defaults = parse(system.defaults)
    of_system = defaults.get("privacy", "none")
    other_privacy = given.get("privacy", of_system) != of_system
    if {"epsilon", "noise-multiplier"} & given.keys() or other_privacy:
        defaults.pop("epsilon", None)
    named = {**defaults, **given}.get("aggregation")
    of_sums = AGGREGATIONS.load(named).defaults if named else {}
    if defaults.get("top-model") == "sum" and {**of_sums, **given}.keys() & _OF_TOP:
        del defaults["top-model"]
    defaults = {**of_sums, **defaults}
    defaults |= _by_what_it_learns_from({**defaults, **given})
    defaults |= _of_task(given)
    unknown = dict.fromkeys(BY_ROWS)
    config = mechanism_of(RunConfig.of({**unknown, **defaults, **given})).validated()
    estimators.check(config)
    codecs.check(config)
    estimator = estimators.choose(config)(config)
    coordinated = system.quorum.coordinates or config.schedule.quorum is not None
    aggregation.check(config, estimator.answers_by_scalars, bool(system.baseline), coordinated)
    labels.check(config.data)
    config.assessment.check(config.data)
    bottoms.check(config.models)
    tops.check(config.models)
    optimizers.check(config.training)
    streams.check(config.running)
    mechanism = mechanism_of(config)
    _check_task_options(config, mechanism)
    mechanism.check(estimator)
    sampling.check(config)
    _check_system(system, config, estimator, mechanism)
    return config


FEW = 1000  # below so many training rows an epoch has few steps, so more epochs are the default
RATES = {"sgd": 0.2, "momentum": 0.02, "adam": 0.002}
"""Learning rate of parties and top model by kind of optimizer, for systems without rates."""
_FEW_RATE = 0.1  # for sgd on few rows
_SMOOTH, _SMOOTHEST = 0.001, 0.0005  # for adam by first order; on few rows or noisy labels
_OF_LAYERS = ("linear", "mlp")
_OF_STEPS = {"optimizer", *RATE_KEYS}
_OF_TOP = {"combine", "embedding-size", "embedding-activation", "top-hidden", "top-args"}
"""Options that a sum of embeddings does not have."""


@lru_cache(maxsize=16)
def sized(config: RunConfig, rows: int) -> RunConfig:
    """Return the configuration with defaults of `BY_ROWS` for so many training rows."""
    training, values = config.training, config.values()
    left = [name for name in BY_ROWS if values[name] is None]
    if not left:
        return config
    steps_are_free = not mechanism_of(config).costs_by_step
    few = rows < FEW and steps_are_free  # else more steps would need more noise
    kind, noisy = optimizers.kind_of(training.optimizer), _learns_through_noise(values)
    rate = _FEW_RATE if few and kind == "sgd" else RATES[kind]
    smooth = kind == "adam" and config.estimator.kind == "first-order"
    if smooth:
        rate = _SMOOTHEST if few or noisy else _SMOOTH
    of_system = load_system(config.strategy).rates.get(kind, (rate, rate))
    chosen: dict[str, Any] = {"batch-size": 32, **dict(zip(RATE_KEYS, of_system, strict=True))}
    if noisy and kind == "adam":
        # The mean over a large mini-batch has less of the noise; smaller ones make enough steps.
        chosen["batch-size"] = min(512, max(32, 2 ** round(math.log2(max(rows, 1) / 100))))
    few |= config.data.partial and steps_are_free  # each party has only some of the rows
    chosen |= {"epochs": 60, "patience": 20.0} if few else {"epochs": 20, "patience": 10.0}
    if smooth and steps_are_free and not noisy and not config.data.partial:
        ends = few or config.data.validation_fraction != 0  # by validation, or soon
        # Over few rows the validation loss tells little, and a long search overfits to it.
        chosen |= {"epochs": 60 if ends else 20, "patience": 5.0 if few else 10.0}
    training = replace(training, **{KEYS[name].field: chosen[name] for name in left})
    if "epochs" in left:
        optimizers.check(training)
    return replace(config, training=training)


def _by_what_it_learns_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of zeroth-order runs, of partial rows, and of noise on labels.

    Partial rows and noise make gradients smaller. A mean of embeddings does not depend on how
    many are missing.
    """
    chosen: dict[str, Any] = {}
    by_differences = values.get("server-update") == "zeroth-order"  # of own columns' model
    if by_differences or values.get("estimator", "first-order") != "first-order":
        # Differences estimate fewer parameters better.
        chosen["bottom-model"] = values.get("bottom-model", "mlp")
    free, exact = not values.keys() & _OF_STEPS, _has_exact_gradients(values)
    partial = values.get("presence", 1.0) < 1 or values.get("align") == "any"
    if partial and exact:
        if "combine" not in values and values.get("top-model", "mlp") in _OF_LAYERS:
            chosen["combine"] = "mean"
        chosen["subsets"] = values.get("subsets", "laser")
        if free:
            decay = values.get("weight-decay", 0.05)
            return chosen | {"optimizer": "adamw", "weight-decay": decay}
    learns_by_adam = free and (exact or (_learns_through_noise(values) and not partial))
    if "optimizer" not in values:
        chosen["optimizer"] = "adam" if learns_by_adam else "sgd"
    return chosen


def _of_task(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of task "information": noise on labels, or none for exact counts."""
    if given.get("task") != "information":
        return {}
    if given.get("information") == "exact":
        return {"privacy": "none", "epsilon": None}
    return {"privacy": "labels", "epsilon": 1.0, "delta": None, "noise-multiplier": None}


def _learns_through_noise(values: Mapping[str, Any]) -> bool:
    """Return whether gradients, or differences of losses, go through noise on labels.

    The noise makes them smaller by a factor that no party knows, which Adam's steps ignore.
    """
    return MECHANISMS.load(values.get("privacy", "none")).learns_from_noise


_EXACT = ("identity", "float16", "bfloat16")


def _has_exact_gradients(values: Mapping[str, Any]) -> bool:
    """Return whether parties learn from gradients at nearly exact embeddings.

    On few rows, Adam follows the errors of zeroth order, and of direct compression (CVFL).
    """
    first_order = values.get("estimator", "first-order") == "first-order"
    fed_back = values.get("compression") == "error-feedback"
    return first_order and (fed_back or values.get("codec", "identity") in _EXACT)


def places(raw: Mapping[str, Any]) -> list[str]:
    """Return the options that name code by an import path, without loading the code."""
    named = [
        name
        for name, value in opened(raw).items()
        if (key := KEYS.get(name)) and key.registry and key.registry.is_place(str(value))
    ]
    return [*named, "dataset"] if code_of(str(raw.get("dataset", ""))) else named


_OF_LABEL_HOLDER = ("observer", "top-model", "loss", "metrics")
"""Options that name code for the label holder only."""


def refuse_places(raw: Mapping[str, Any]) -> None:
    """Refuse received options that would make a party load code by an import path."""
    named = [name for name in places(raw) if name not in _OF_LABEL_HOLDER]
    if named:
        raise ConfigError(
            f"{named[0]} names code, which a node does not take from others. Install a package "
            "at every party that declares the code as an entry point, or simulate."
        )


def _check_system(
    system: System, config: RunConfig, estimator: Estimator, mechanism: Mechanism
) -> None:
    name = config.strategy
    sends = config.uplink.codec != "identity" or config.downlink.codec != "identity"
    if system.baseline and (sends or estimator.broadcasts):
        raise ConfigError(
            f"strategy = {name!r} is a baseline, which has no codecs and no shared "
            "labels. Leave `codec`, `downlink-codec` and `labels` out."
        )
    if system.baseline:
        mechanism.check_baseline()
    _check_growth(system, config, estimator, mechanism)
    _check_calibration(config)
    check_gradient(config, "bottom-model")


def _check_growth(
    system: System, config: RunConfig, estimator: Estimator, mechanism: Mechanism
) -> None:
    """Raise `ConfigError` if a run cannot begin with the models of an earlier run."""
    grow, freeze = config.running.grow, config.training.freeze
    if freeze and not grow:
        raise ConfigError(
            "freeze is for the models of an earlier run. Name its results folder in grow, or leave "
            "freeze out."
        )
    if grow and system.baseline:
        raise ConfigError(
            f"strategy = {config.strategy!r} is a baseline, which cannot continue an earlier run. "
            "Leave grow out, or choose a system."
        )
    if grow and not mechanism.may_grow:
        raise ConfigError(
            f"privacy = {config.privacy.mechanism!r} counts the releases of one run, but grow "
            "continues an earlier run. Leave grow or privacy out."
        )
    if freeze and estimator.broadcasts:
        raise ConfigError(
            "freeze does not work with labels = 'shared', which sends the same answers to all "
            "parties. Leave one of them out."
        )


def check_gradient(config: RunConfig, key: str) -> None:
    """Raise `ConfigError` if the bottom model that option ``key`` names lacks a needed gradient."""
    system = load_system(config.strategy)
    needed = estimators.choose(config).gradients if system.gradients is None else system.gradients
    if not has_gradient(config.models.bottom, key) and needed:
        raise ConfigError(
            f"{key} = {config.models.bottom!r} has no gradient, but strategy = "
            f"{config.strategy!r} needs one. Choose a zeroth-order system, such as 'cascaded', "
            "or another model."
        )


def _check_task_options(config: RunConfig, mechanism: Mechanism) -> None:
    """Raise `ConfigError` if options contradict task "information"."""
    if config.task != "information":
        return
    privacy, exact = config.privacy.mechanism, config.information == "exact"
    if exact and privacy != "none":
        raise ConfigError(
            f"information = 'exact' answers exact counts, but privacy = {privacy!r}. Leave one of "
            "them out."
        )
    if not exact and not mechanism.learns_from_noise:
        raise ConfigError(
            f"task = 'information' draws noise on labels, but privacy = {privacy!r}. Leave privacy "
            "out."
        )
    if config.data.target != "classification":
        raise ConfigError(
            "task = 'information' needs labels of two classes, but target = "
            f"{config.data.target!r}. Give a label column that says whether the event happened."
        )


def _check_calibration(config: RunConfig) -> None:
    """Raise `ConfigError` if there is nothing to calibrate, or no row to calibrate by."""
    method, privacy = config.training.calibrate, config.privacy.mechanism
    if method == "none":
        return
    if config.data.target == "regression":
        raise ConfigError(
            f"calibrate = {method!r} is for probabilities of classes, and target = 'regression' "
            "has no classes. Leave calibrate out."
        )
    if config.data.validation_fraction == 0:
        covers = mechanism_of(config).covers_validation
        why = "validation-fraction = 0" if covers else f"privacy = {privacy!r}"
        raise ConfigError(
            f"calibrate = {method!r} needs validation rows, and with {why} there are none. Leave "
            "one of them out."
        )
