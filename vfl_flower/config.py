"""The run configuration: every key, its default and its meaning, read in this one place.

Flower's run configuration is a flat table of kebab-case keys. ``RunConfig`` is that table as a
validated dataclass; ``strategies.resolve`` fills it from the keys that a user gave, then from the
system that ``strategy`` names, then from the defaults below.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from vfl_flower.errors import ConfigError

AUTO = "auto"
"""Value of a key that the chosen system, the data or the runtime decides."""


def _key(
    default: Any, help: str, auto: str = "", choices: tuple[str, ...] = (), preset: bool = False
) -> Any:
    """A configuration key.

    ``auto`` says in words what "auto" means for a key without a default of its own; a ``preset``
    key is "auto" unless a user gives it, so that a system may have a default of its own for it.
    """
    return field(
        default=default,
        metadata={"help": help, "auto": auto, "choices": choices, "preset": preset},
    )


def _may_be_auto(spec: Any) -> bool:
    return spec.default is None or spec.metadata["preset"]


@dataclass(frozen=True)
class RunConfig:
    """One run. Field ``party_lr`` is key ``party-lr``; ``None`` stands for "auto"."""

    # What is done, on what
    task: str = _key(
        "train",
        "train a model; or predict: what the model of a run, `model`, says of new rows",
        choices=("train", "predict"),
    )
    model: str = _key("", "results folder of the run whose model predicts")
    strategy: str = _key("split-nn", "system or baseline to run; `vfl list` describes each")
    dataset: str = _key(
        "digits",
        "digits, breast-cancer, npz:PATH, csv:PATH, parquet:PATH, or hf:NAME_OR_DIR, divided among "
        "the parties; or files:PATH, the label holder's own csv or parquet file, where each party "
        "names its own in its --node-config",
    )
    label: str = _key("label", "label column of a csv, parquet or hf data set, or of files:")
    target: str = _key(
        "classification",
        "what labels are: classes, or numbers, of which the squared error is minimised",
        choices=("classification", "regression"),
    )
    class_weights: str = _key(
        "",
        "weights of the classes in the loss, in order of the classes, as in '1,5'; or "
        "balanced: inverse to their frequency; empty: all 1",
    )
    id: str = _key("id", "id column of the label holder's file, with files:")
    columns: str = _key(
        "", "feature columns of the label holder's file, with commas; empty: all others; none"
    )
    missing: str = _key(
        "refuse",
        "missing numbers in the label holder's columns: refuse them, or fill in the median",
        choices=("refuse", "median"),
    )
    text: str = _key(
        "refuse",
        "text in the label holder's columns: refuse it, or a 0/1 column for each value",
        choices=("refuse", "one-hot"),
    )
    align: str = _key(
        "psi",
        "with files: rows that all have are found by private set intersection; or ids: all must "
        "have the same ids, and compare digests",
        choices=("psi", "ids"),
    )
    test_fraction: float = _key(0.2, "share of rows held out, where the data has no test part")
    image_split: str = _key(
        "quadrants",
        "how images are divided among parties: a near-square grid of blocks, or bands of rows",
        choices=("quadrants", "rows"),
    )
    # Models
    bottom_model: str = _key(
        "mlp",
        "model of a party, from features to embedding; binarised and scorecard have no gradient",
        choices=("linear", "mlp", "cnn", "lstm", "binarised", "scorecard"),
    )
    bottom_hidden: int = _key(64, "hidden units (mlp, lstm) or channels (cnn) of the bottom model")
    embedding_size: int | None = _key(
        None, "length of a party's embedding", auto="the number of outputs for `sum`, else 32"
    )
    embedding_activation: str | None = _key(
        None,
        "activation on the embedding",
        auto="none for `sum`, else relu",
        choices=("none", "relu", "sigmoid", "tanh"),
    )
    bottom_bias: bool = _key(True, "whether linear layers of a bottom model have a bias")
    top_model: str = _key(
        "mlp",
        "model of the label holder; `sum` adds the embeddings up and has no parameters",
        choices=("sum", "linear", "mlp"),
    )
    top_hidden: int = _key(64, "hidden units of an mlp top model")
    combine: str = _key(
        "concat",
        "how a linear or mlp top model reads the parties' embeddings",
        choices=("concat", "mean", "sum"),
    )
    # Training
    epochs: int = _key(20, "passes over the training rows, for each party on average")
    batch_size: int = _key(
        32, "rows of a mini-batch; as many as there are, or more: full batch", preset=True
    )
    party_lr: float = _key(0.2, "learning rate of the parties", preset=True)
    server_lr: float = _key(0.2, "learning rate of the top model", preset=True)
    optimizer: str = _key(
        "sgd",
        "optimizer of parties and top model",
        choices=("sgd", "momentum", "adam"),
        preset=True,
    )
    regulariser: str = _key(
        "l2",
        "the party's own regulariser g: l2 is ||w||^2 / 2, nonconvex is AsyREVEL Eq. (22)",
        choices=("l2", "nonconvex"),
    )
    regulariser_weight: float = _key(0.0, "weight lambda of the party's own regulariser")
    # Estimators
    estimator: str = _key(
        "first-order",
        "how parties learn: by gradient rows, or by scalar loss differences",
        choices=("first-order", "zeroth-order"),
        preset=True,
    )
    server_update: str = _key(
        "first-order",
        "how the top model learns: by its gradient, or by loss differences of its own",
        choices=("first-order", "zeroth-order"),
        preset=True,
    )
    differences: str = _key(
        "one-sided",
        "points of a zeroth-order difference: w + mu u and w, or w + mu u and w - mu u",
        choices=("one-sided", "two-sided"),
        preset=True,
    )
    directions: str = _key(
        "gaussian",
        "directions u: standard normal, unit sphere, or sphere of radius sqrt(d)",
        choices=("gaussian", "sphere", "scaled-sphere"),
        preset=True,
    )
    mu: float = _key(1e-3, "smoothing parameter mu of zeroth-order differences", preset=True)
    # Schedule
    quorum: int | None = _key(
        None,
        "replies the label holder waits for: all parties is synchronous, 1 asynchronous",
        auto="the system's own",
    )
    window: int | None = _key(
        None,
        "steps of a party that one message exchange carries",
        auto="1 in process, 8 under Ray, 16 on SuperNodes; zeroth order 16, 64 and 64",
    )
    sampling: str = _key(
        "shuffle",
        "mini-batches: slices of a shuffled epoch, or each row by chance batch-size / rows",
        choices=("shuffle", "poisson"),
        preset=True,
    )
    max_delay: int = _key(
        0,
        "bound D on the age, in label-holder steps, of an embedding that is used; 0: no bound",
    )
    delay: str = _key(
        "none",
        "delay of an activation on the in-process engine's virtual clock: none, VAFL's "
        "appendix G, or one party 20 to 60 % slower than the others (AsyREVEL)",
        choices=("none", "poisson", "exponential", "straggler"),
        preset=True,
    )
    # Codecs
    codec: str = _key(
        "identity",
        "uplink: embeddings as they are, their largest entries, or quantized by chance",
        choices=("identity", "top-k", "qsgd"),
        preset=True,
    )
    keep: float | None = _key(None, "share of a mini-batch's entries that top-k keeps", auto="0.1")
    bits: int | None = _key(None, "qsgd has 2^bits levels", auto="4")
    compression: str = _key(
        "direct",
        "what the codec compresses: an embedding itself (CVFL), or its difference from a surrogate "
        "that both ends keep (EF21, EF-VFL)",
        choices=("direct", "error-feedback"),
        preset=True,
    )
    downlink_codec: str = _key(
        "identity",
        "downlink: codec of gradient rows, or with shared labels of the top model",
        choices=("identity", "top-k", "qsgd"),
    )
    downlink_keep: float | None = _key(None, "as `keep`, for the downlink", auto="0.1")
    downlink_bits: int | None = _key(None, "as `bits`, for the downlink", auto="4")
    downlink_compression: str = _key(
        "direct",
        "as `compression`, for the downlink",
        choices=("direct", "error-feedback"),
    )
    labels: str = _key(
        "private",
        "who knows the labels: the label holder alone, which sends gradient rows (EF-VFL Alg. 2), "
        "or the parties too, which get each other's embeddings and the top model (Alg. 1)",
        choices=("private", "shared"),
    )
    local_steps: int = _key(
        1, "steps Q that all take on a mini-batch, with shared labels (EF-VFL sec. 5.3)"
    )
    # Privacy
    privacy: str = _key(
        "none",
        "perturbed-embedding: noise on all that leaves a party (VAFL sec. 4); scalar: clipped "
        "differences and noise on the scalars that parties receive (DPZV)",
        choices=("none", "perturbed-embedding", "scalar"),
        preset=True,
    )
    embedding_noise: float = _key(1.0, "standard deviation c of the last layer's Gaussian noise")
    inner_noise: float = _key(0.0, "standard deviation of the inner layers' uniform noise")
    embedding_bound: float = _key(
        1.0, "norm R to which the last layer's output is clipped before its noise is added"
    )
    clip: float = _key(
        1.0, "bound C of a row's loss difference, which is clipped to [-C, C]", preset=True
    )
    epsilon: float | None = _key(
        None, "privacy budget of a run with scalar noise, at `delta`", auto="the system's, or none"
    )
    delta: float | None = _key(
        None, "delta at which epsilon is meant", auto="1e-5, where no budget is given"
    )
    noise_multiplier: float | None = _key(
        None,
        "deviation of the scalar noise over C / batch-size, what one row can change",
        auto="calibrated to epsilon, delta and the length of the run",
    )
    calibration: str = _key(
        "pld",
        "noise for a budget by dp-accounting's PLD accountant, or by DPZV's own formula",
        choices=("pld", "paper"),
    )
    noise_seed: int = _key(
        -1,
        "-1: secret noise, directions and Poisson batches; >= 0: repeatable ones, for "
        "experiments only",
    )
    # Running
    transport: str = _key(
        "auto",
        "on SuperNodes: a stream between label holder and parties, Flower's messages, or auto, a "
        "stream if every party can connect",
        choices=("auto", "stream", "messages"),
    )
    stream_address: str = _key(
        "127.0.0.1",
        "host name or IP by which parties reach the label holder; with :PORT, where a router or "
        "relay forwards that port to the one listened on",
    )
    stream_ports: str = _key(
        "9500-9599", "port that the label holder listens on, or the range to find a free one in"
    )
    session_seconds: float = _key(
        600.0, "seconds after which parties keep their state, and streams are opened anew"
    )
    parties: int = _key(0, "number of parties to wait for; 0: as many as there are nodes")
    party_timeout: float = _key(
        600.0, "seconds that a party may stay silent, or take to start and to align its ids"
    )
    on_party_failure: str = _key(
        "stop",
        "when a party fails: stop, or continue with its last embeddings (quorum below all)",
        choices=("stop", "continue"),
    )
    eval_every: float = _key(1.0, "epochs, or parts of one, between evaluations on the test rows")
    checkpoint_every: int | None = _key(
        None,
        "exchanges between two checkpoints, at the label holder and parties; 0: one at the end",
        auto="1000 on SuperNodes, else 0",
    )
    resume: str = _key("", "results folder of a run that was cut short, to go on with")
    seed: int = _key(0, "seed of models, batches and delays")
    device: str = _key("auto", "cpu, cuda, or auto: a GPU where there is one")
    out: str = _key("", "results folder; empty: runs/STRATEGY-DATASET-TIME")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            choices = spec.metadata["choices"]
            if choices and value is not None and value not in choices:
                raise ConfigError(
                    f"{_kebab(spec.name)} = {value!r} is not known: "
                    f"choose one of {', '.join(choices)}."
                )
        self._at_least(1, "bottom_hidden", "top_hidden", "epochs", "batch_size")
        self._at_least(1, "embedding_size", "quorum", "window", "local_steps")
        self._at_least(0, "max_delay", "parties", "party_lr", "server_lr", "regulariser_weight")
        self._at_least(0, "inner_noise", "noise_multiplier", "seed", "checkpoint_every")
        self._at_least(-1, "noise_seed")
        self._above(0, "party_timeout", "embedding_noise", "embedding_bound", "mu", "clip")
        self._above(0, "epsilon", "eval_every", "session_seconds")
        if self.mu < 1e-6:
            raise ConfigError(f"mu = {self.mu} is lost in 32-bit numbers: give at least 1e-6.")
        for name in ("test_fraction", "delta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{_kebab(name)} = {value} must lie between 0 and 1.")
        if self.top_model == "sum" and self.combine != "concat":
            raise ConfigError(
                "combine has no meaning for top-model = 'sum', which adds the embeddings itself: "
                "leave it out, or choose a linear or mlp top model."
            )
        self._check_scalar_privacy()
        self._check_codecs()
        _ = self.stream_host_and_port, self.stream_port_range  # parsed, to find what is wrong

    @property
    def stream_host_and_port(self) -> tuple[str, int | None]:
        """The parts of ``stream-address``; an IPv6 address has brackets where a port follows."""
        matched = re.fullmatch(
            r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+))(?::(\d+))?", self.stream_address
        )
        host = (matched[1] or matched[2]) if matched else self.stream_address
        port = int(matched[3]) if matched and matched[3] else None
        try:
            known = (matched is not None and matched[2]) or ipaddress.ip_address(host).version == 6
        except ValueError:
            known = False
        if known and (port is None or 1 <= port < 2**16):
            return host, port
        raise ConfigError(
            f"stream-address = {self.stream_address!r} is no address: give a host name or an IP, "
            "and after a colon a port if it is not the one listened on."
        )

    @property
    def stream_port_range(self) -> range:
        """The ports of ``stream-ports``."""
        matched = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", self.stream_ports)
        first = int(matched[1]) if matched else 0
        last = int(matched[2] or matched[1]) if matched else 0
        if not 1 <= first <= last < 2**16:
            raise ConfigError(
                f"stream-ports = {self.stream_ports!r} must be a port, or a range such as "
                "'9500-9599'."
            )
        return range(first, last + 1)

    @property
    def own_files(self) -> bool:
        """Whether every participant has a file of its own, and rows must be aligned."""
        return self.dataset.startswith("files:")

    @property
    def uplink_surrogates(self) -> bool:
        """Whether both ends keep surrogates of embeddings; unchanged numbers need none."""
        return self.compression == "error-feedback" and self.codec != "identity"

    @property
    def downlink_surrogates(self) -> bool:
        """Whether both ends keep surrogates of what the downlink carries."""
        return self.downlink_compression == "error-feedback" and self.downlink_codec != "identity"

    def _check_codecs(self) -> None:
        for prefix, codec in (("", self.codec), ("downlink_", self.downlink_codec)):
            keep, bits = getattr(self, f"{prefix}keep"), getattr(self, f"{prefix}bits")
            if keep is not None and not 0 < keep <= 1:
                raise ConfigError(
                    f"{_kebab(prefix)}keep = {keep} is no share: give one above 0, and at most 1."
                )
            if bits is not None and not 1 <= bits <= 16:
                raise ConfigError(f"{_kebab(prefix)}bits = {bits} must lie between 1 and 16.")
            for name, value, of in (("keep", keep, "top-k"), ("bits", bits, "qsgd")):
                if value is not None and codec != of:
                    raise ConfigError(
                        f"{_kebab(prefix)}{name} is for {_kebab(prefix)}codec = {of!r}, and not "
                        f"for {codec!r}: leave it out, or choose that codec."
                    )
        if self.target == "regression" and (self.labels == "shared" or self.class_weights):
            key = "labels = 'shared'" if self.labels == "shared" else "class-weights"
            raise ConfigError(
                f"{key} is for classes, and target = 'regression' has none: leave one of them out."
            )
        if self.local_steps > 1 and self.labels == "private":
            raise ConfigError(
                f"local-steps = {self.local_steps} needs labels = 'shared': without labels and top "
                "model, a party has a gradient for one step only."
            )
        if self.estimator == "zeroth-order":
            if self.labels == "shared":
                raise ConfigError(
                    "labels = 'shared' is for first-order parties, which then differentiate the "
                    "loss themselves: leave it out, or choose estimator = 'first-order'."
                )
            if self.downlink_codec != "identity":
                raise ConfigError(
                    "downlink-codec has nothing to compress under zeroth order, whose feedback is "
                    "one number a step: leave it out."
                )

    def _check_scalar_privacy(self) -> None:
        if self.epsilon is not None and self.delta is None:
            raise ConfigError(
                f"epsilon = {self.epsilon} says nothing without its delta: give delta too, well "
                "below one over the number of rows."
            )
        if self.privacy != "scalar":
            if self.epsilon is not None or self.noise_multiplier is not None:
                raise ConfigError(
                    "epsilon and noise-multiplier are for privacy = 'scalar': add it, or leave "
                    "them out (a perturbed embedding's epsilon follows from embedding-noise)."
                )
            return
        if self.estimator == "first-order":
            raise ConfigError(
                "privacy = 'scalar' adds noise to scalars, but first-order feedback is gradient "
                "rows: choose estimator = 'zeroth-order', or strategy = 'dpzv'."
            )
        if self.sampling != "poisson":
            raise ConfigError(
                "privacy = 'scalar' is accounted for Poisson sampling: set sampling = 'poisson'."
            )
        if self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError(
                "privacy = 'scalar' needs a budget, epsilon with delta, or a noise-multiplier."
            )

    def _above(self, bound: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= bound:
                raise ConfigError(f"{_kebab(name)} = {value} must be above {bound}.")

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{_kebab(name)} = {value} must be at least {least}.")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def keys() -> dict[str, Any]:
    """Key -> dataclass field, in the order in which `vfl list` prints them."""
    return {_kebab(spec.name): spec for spec in fields(RunConfig)}


def flower_defaults() -> dict[str, Any]:
    """The table ``[tool.flwr.app.config]`` of pyproject.toml: Flower accepts these keys only."""
    return {key: AUTO if _may_be_auto(spec) else spec.default for key, spec in keys().items()}


def parse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys as ``RunConfig`` arguments; "auto" values are left out.

    Raises
    ------
    ConfigError
        If a key is unknown, or a value has the wrong type.
    """
    known = keys()
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            close = get_close_matches(key, known, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"There is no configuration key {key!r}.{hint} See `vfl list`.")
        spec = known[key]
        if value == AUTO and _may_be_auto(spec):
            continue
        values[spec.name] = _typed(key, value, str(spec.type))
    return values


def _typed(key: str, value: Any, type_name: str) -> Any:
    """``value`` as the field's type; an int passes for a float, nothing else is converted."""
    wanted: type = {"int": int, "float": float, "str": str, "bool": bool}[type_name.split(" |")[0]]
    if wanted is int and isinstance(value, int) and abs(value) >= 2**31:
        raise ConfigError(f"{key} is out of range: give a number below {2**31}.")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 10**300 else math.inf
    if (
        not isinstance(value, wanted)
        or isinstance(value, bool) != (wanted is bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        kinds = {int: "a whole number", float: "a number", str: "a text in quotes"}
        kind = kinds.get(wanted, "true or false")
        raise ConfigError(f"{key} = {value!r} must be {kind}.")
    return value
