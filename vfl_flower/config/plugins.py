"""Plugins: everything that a name can replace.

A name is built in, or an installed package declares it by an entry point of the group below. In
simulations it can also be the import path of your own code: ``file.py:NAME`` or
``package.module:NAME``. Nothing is imported before it is needed.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from typing import Any

from vfl_flower.config.errors import IN_PROCESS, CodeError, ConfigError, unknown

PLUGIN_MODULES = "vfl_flower_plugin_"
"""Prefix of the names of modules that `load_place` reads from files."""


class Registry:
    """Plugins of one kind by name, which option ``key`` names: import paths, or entry points.

    A plugin has all ``parts``, names with blanks between; by default, it is callable. ``of`` has
    functions of this project that make the plugin ``prefix:REST``.
    """

    def __init__(
        self, key: str, group: str, known: dict[str, str], parts: str = "__call__", **of: str
    ) -> None:
        self.key, self.group, self.known = key, f"vfl_flower.{group}", known
        self.parts, self.of = parts.split(), of

    @property
    def entries(self) -> EntryPoints:
        """The entry points of this kind. All are read anew only if a folder of packages changes."""
        # A place may be a wheel, too, or "" for whatever is the working directory.
        places = ((each, os.stat(each or ".")) for each in sys.path if os.path.exists(each or "."))
        found = _declared(tuple((each, at.st_ino, at.st_mtime_ns) for each, at in places))
        return found.select(group=self.group)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names, the built-in ones first."""
        return (*self.known, *(each.name for each in self.entries))

    def is_place(self, name: str) -> bool:
        """Return whether a name is an import path, or has a prefix of ``of``."""
        if name.partition(":")[0] in self.of:
            return True
        module, _, attribute = name.rpartition(":")
        parts = module.split(".")
        is_module = module.endswith(".py") or all(part.isidentifier() for part in parts)
        return is_module and attribute.isidentifier()

    def check(self, name: str, key: str = "") -> None:
        """Raise `ConfigError` unless a name is known, or is an import path."""
        # All entry points of a machine take long to read, so they come last.
        if name not in self.known and not self.is_place(name) and name not in self.names:
            raise unknown(key or self.key, name, self.names)

    def load(self, name: str, key: str = "") -> Any:
        """Return the plugin of this name. Errors name ``key``, by default the option."""
        own, key = bool(key), key or self.key
        self.check(name, key)
        if name in self.known:
            return load_place(self.known[name])
        prefix, _, rest = name.partition(":")
        if prefix in self.of:
            return load_place(self.of[prefix])(rest)
        place = name if ":" in name else self.entries[name].value
        # A party's own folder must not show in errors that others read.
        shown = name.rpartition("/")[2] if own else name
        called = IN_PROCESS.sub(r"\1", f"{key} = {shown!r}")
        found = load_place(place, called)
        found = _second(found) if _again.get() else found
        if missing := [part for part in self.parts if not hasattr(found, part)]:
            what = "cannot be called" if missing == ["__call__"] else f"has no {missing[0]!r}"
            raise ConfigError(f"{called} is not valid: it {what}. See CONTRIBUTING.md.")
        return found


@lru_cache(maxsize=1)
def _declared(places: tuple[tuple[str, int, int], ...]) -> Any:
    return entry_points()


def load_place(place: str, said: str = "") -> Any:
    """Return the object at an import path, or raise `ConfigError`, which begins with ``said``."""
    module, _, name = place.rpartition(":")
    if module.endswith(".py") and not Path(module).expanduser().is_file():
        raise ConfigError(
            f"{said or repr(place)} cannot be loaded: there is no such file. Correct its path."
        )
    try:
        return getattr(_of_file(module) if module.endswith(".py") else import_module(module), name)
    except Exception as error:  # user code may raise anything
        what = f"{said or repr(place)} cannot be loaded. Write FILE.py:NAME or PACKAGE.MODULE:NAME"
        raise CodeError(f"{what} of existing code", error) from error


def _of_file(place: str) -> Any:
    """Return the module in a file. Import each content once in a process."""
    path = Path(place).expanduser().absolute()
    content = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + content).hexdigest()[:16]
    name = f"{PLUGIN_MODULES}{path.stem}_{digest}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        if spec is None:
            raise ImportError(f"{path} is not a Python file")
        module = module_from_spec(spec)
        sys.modules[name] = module  # dataclasses in the module look it up
        try:
            # Compiled here: Python's cache takes a file of equal size and second for the same.
            exec(compile(content, path, "exec", dont_inherit=True), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


_READING = Lock()
_again: ContextVar[bool] = ContextVar("again", default=False)


@contextmanager
def read_again() -> Iterator[None]:
    """Load code of your own inside the context as a new process would: from a second module."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def _second(found: Any) -> Any:
    """Return the object of this name in a second module from the same file, if there is one."""
    first = sys.modules.get(str(getattr(found, "__module__", "")))
    place, name = getattr(first, "__file__", None), getattr(found, "__qualname__", "")
    if first is None or first.__name__ == "__main__" or not place or not name.isidentifier():
        return found
    copy = f"{first.__name__}__second"
    with _READING:
        if copy not in sys.modules:
            try:
                spec = spec_from_file_location(copy, place)
                sys.modules[copy] = module = module_from_spec(spec)  # type: ignore[arg-type]
                spec.loader.exec_module(module)  # type: ignore[union-attr]
            except Exception:  # its code cannot run twice
                sys.modules[copy] = first
    return getattr(sys.modules[copy], name, found)


SYSTEMS = Registry(
    "strategy",
    "systems",
    {
        "split-nn": "strategies.papers.split_nn:SPLIT_NN",
        "vafl": "strategies.papers.vafl:VAFL",
        "vafl-t": "strategies.papers.vafl:VAFL_T",
        "asyrevel": "strategies.papers.asyrevel:ASYREVEL",
        "synrevel": "strategies.papers.asyrevel:SYNREVEL",
        "cascaded": "strategies.papers.cascaded:CASCADED",
        "syn-zoo": "strategies.papers.cascaded:SYN_ZOO",
        "ef-vfl": "strategies.papers.ef_vfl:EF_VFL",
        "cvfl": "strategies.papers.ef_vfl:CVFL",
        "dpzv": "strategies.papers.dpzv:DPZV",
        "frozen": "strategies.baselines.systems:FROZEN",
        "local-only": "strategies.baselines.systems:ALONE",
        "centralised": "strategies.baselines.systems:JOINED",
        "intersection-only": "strategies.baselines.systems:COMMON",
    },
    "name about quorum defaults flower_strategy",
)
"""Published systems and baselines, `protocol.system.System`, in the order of `vfl list`."""

ESTIMATORS = Registry(
    "estimator",
    "estimators",
    {
        "first-order": "vfl_flower.protocol.estimators.first_order:FirstOrder",
        "zeroth-order": "vfl_flower.protocol.estimators.zeroth_order:ZerothOrder",
    },
    "check embed update read answer windows",
)
"""How parties learn from the label holder's answers: `protocol.estimators.base.Estimator`."""

OPTIMIZERS = Registry(
    "optimizer",
    "optimizers",
    {
        name: f"vfl_flower.models.optimizers:{name}"
        for name in ("sgd", "momentum", "nesterov", "adam", "adamw")
    },
)
"""Builders of optimizers from parameters, ``lr`` and ``weight_decay``: `models.optimizers`."""

SERVER_UPDATES = Registry(
    "server-update",
    "server_updates",
    {
        "first-order": "vfl_flower.protocol.server_update.gradient:ByGradient",
        "zeroth-order": "vfl_flower.protocol.server_update.gradient:ByDifferences",
    },
    "step by_differences",
)
"""How the top model learns: `protocol.server_update.base.ServerUpdate`."""

DIRECTIONS = Registry(
    "directions",
    "directions",
    {
        "gaussian": "vfl_flower.protocol.directions.base:DirectionSet",
        "sphere": "vfl_flower.protocol.directions.base:Sphere",
        "scaled-sphere": "vfl_flower.protocol.directions.base:ScaledSphere",
    },
    "fill length",
)
"""Distributions of zeroth-order directions: `protocol.directions.base.DirectionSet`."""

SAMPLINGS = Registry(
    "sampling",
    "samplings",
    {
        "shuffle": "vfl_flower.protocol.sampling.base:Sampling",
        "poisson": "vfl_flower.protocol.sampling.base:Poisson",
        "replacement": "vfl_flower.protocol.sampling.base:Replacement",
    },
    "draw divisors uploaded",
)
"""How to draw the rows of a step: `protocol.sampling.base.Sampling`."""

CODECS = Registry(
    "codec",
    "codecs",
    {
        "identity": "vfl_flower.protocol.codecs.halves:Identity",
        "top-k": "vfl_flower.protocol.codecs.top_k:TopK",
        "qsgd": "vfl_flower.protocol.codecs.qsgd:QSGD",
        "float16": "vfl_flower.protocol.codecs.halves:Float16",
        "bfloat16": "vfl_flower.protocol.codecs.halves:BFloat16",
    },
    "uses names encode decode",
)
"""How to encode a block of rows as arrays in a message: `protocol.codecs.channel.Codec`."""

BOTTOMS = Registry(
    "bottom-model",
    "bottoms",
    {
        name: f"vfl_flower.models.layers:{name.replace('-', '_')}"
        for name in (
            *("tabular-or-mlp", "tabular", "mlp", "linear", "cnn", "lstm"),
            *("binarised", "scorecard"),
        )
    },
    hf="vfl_flower.models.pretrained:pretrained",
)
"""Bottom models: builders of built-in layers, or of torch modules (`models.bottoms`)."""

TOPS = Registry(
    "top-model",
    "tops",
    {
        "sum": "vfl_flower.models.top_layers:no_layers",
        "linear": "vfl_flower.models.top_layers:one_layer",
        "mlp": "vfl_flower.models.top_layers:two_layers",
    },
)
"""Top models: widths of built-in layers, or builders of torch modules (`models.tops`)."""

AGGREGATIONS = Registry(
    "aggregation",
    "aggregations",
    {
        "plain": "vfl_flower.protocol.aggregation.base:Aggregation",
        "secure": "vfl_flower.protocol.aggregation.secure:Secure",
    },
    "tops check columns read seal",
)
"""How to combine embeddings: `protocol.aggregation.base.Aggregation`."""

LOSSES = Registry("loss", "losses", {"standard": "vfl_flower.models.losses:loss_per_row"})
"""Losses that training minimises, per row from outputs and labels (`models.losses`)."""

METRICS = Registry("metrics", "metrics", {"none": "vfl_flower.label_holder.metrics:no_more"})
"""Additional figures by name, from outputs and labels (`label_holder.metrics`)."""

DATASETS = Registry(
    "dataset",
    "datasets",
    {
        "digits": "vfl_flower.data.formats:shipped",
        "breast-cancer": "vfl_flower.data.formats:shipped",
        "npz": "vfl_flower.data.formats:npz",
        "csv": "vfl_flower.data.formats:table",
        "parquet": "vfl_flower.data.formats:table",
        "svmlight": "vfl_flower.data.formats:svmlight",
        "hf": "vfl_flower.data.formats:hugging_face",
    },
)
"""Partitioned data sets, `data.partitioned.PartitionedData`, by the prefix before a colon."""

SOURCES = Registry("source", "sources", {"memory": "vfl_flower.data.memory:of_party"})
"""Sources of a party's own data, `data.source.Source`, named in its node configuration."""

AUGMENTATIONS = Registry(
    "augment",
    "augmentations",
    {"none": "vfl_flower.data.samples:none", "crop-flip": "vfl_flower.data.samples:crop_flip"},
)
"""Augmentations of samples in training passes: `data.samples.Augment`."""

MECHANISMS = Registry(
    "privacy",
    "mechanisms",
    {
        "none": "vfl_flower.protocol.privacy.mechanism:NoNoise",
        "labels": "vfl_flower.protocol.privacy.labels:RandomisedLabels",
        "perturbed-embedding": "vfl_flower.protocol.privacy.embeddings:PerturbedEmbeddings",
        "scalar": "vfl_flower.protocol.privacy.scalars:NoisyScalars",
    },
    "check accountant release_log",
)
"""Privacy mechanisms: `protocol.privacy.mechanism.Mechanism`."""

OBSERVERS = Registry(
    "observer",
    "observers",
    {
        "none": "vfl_flower.label_holder.callbacks:Callback",
        "tensorboard": "vfl_flower.label_holder.tensorboard:TensorBoard",
        "prometheus": "vfl_flower.label_holder.prometheus:Prometheus",
    },
    "evaluated progressed failed ended began",
)
"""Observers of a run at the label holder: `label_holder.callbacks.Callback`."""

ENGINES = Registry(
    "--engine",
    "engines",
    {
        "local": "vfl_flower.launch.engines:run_local",
        "ray": "vfl_flower.launch.engines:run_ray",
        "supernodes": "vfl_flower.launch.engines:run_supernodes",
    },
)
"""Engines, which start a whole run and its parties: `launch.engines.Engine`."""
