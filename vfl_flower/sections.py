"""Sections of the run configuration: every key, its default and its meaning, in this one place.

A field is a key of the same name in kebab case, unless it says otherwise; ``None`` stands for
"auto". `vfl_flower.config` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vfl_flower import registry

_EXCHANGES_APART = 1000  # checkpoints, on SuperNodes


def key(default: Any, help: str, **more: Any) -> Any:
    """A configuration key; its name is that of the field, unless ``name`` is given.

    ``auto`` says in words what decides it where it has no default of its own.
    ``choices``, ``registry``, ``least``, ``above`` and ``below`` say which values can be.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class DataConfig:
    """Rows, columns and labels."""

    dataset: str = key(
        "digits",
        "digits, breast-cancer, npz:PATH, csv:PATH, parquet:PATH, svmlight:PATH (sparse), or "
        "hf:NAME_OR_DIR, divided among the parties; or files:PATH, the label holder's own csv or "
        "parquet file, where each party names its own in its --node-config",
    )
    label: str = key("label", "label column of a csv, parquet or hf data set, or of files:")
    target: str = key(
        "classification",
        "what labels are: classes, or numbers, of which the squared error is minimised",
        choices=("classification", "regression"),
    )
    class_weights: str = key(
        "",
        "weights of the classes in the loss, in order of the classes, as in '1,5'; or "
        "balanced: inverse to their frequency; empty: all 1",
    )
    label_range: str = key(
        "",
        "lowest and highest label of regression, as in '0,120', which labels are clipped to; noise "
        "on labels or scalars needs it",
    )
    id: str = key("id", "id column of the label holder's file, with files:")
    columns: str = key(
        "", "feature columns of the label holder's file, with commas; empty: all others; none"
    )
    missing: str = key(
        "refuse",
        "missing numbers in the label holder's columns: refuse them, or fill in the median",
        choices=("refuse", "median"),
    )
    text: str = key(
        "refuse",
        "text in the label holder's columns: refuse it, or a 0/1 column for each value",
        choices=("refuse", "one-hot"),
    )
    align: str = key(
        "psi",
        "with files: rows that all have are found by private set intersection; any: so are rows "
        "that at least `min-parties` have; or ids: all must have the same ids, which parties must "
        "allow in their node configurations",
        choices=("psi", "any", "ids"),
    )
    min_parties: int = key(
        1,
        "with align = 'any': parties that must have a row for it to be used; 0: none, where the "
        "label holder has columns of its own",
        least=0,
    )
    presence: float = key(
        1.0,
        "share of the rows of a divided data set that each party has, drawn by seed, to try out "
        "partial rows; a row that nobody would have is one party's",
        above=0,
    )
    test_fraction: float = key(
        0.2,
        "share of rows held out, where the data has no test part; 0: none, and all figures are of "
        "the training rows",
        least=0,
        below=1,
    )
    validation_fraction: float | None = key(
        None,
        "share of the training rows that are held out to choose by: the model is that of the "
        "evaluation with the least loss on them; 0: none, and it is that of the last epoch",
        auto="0.15, of 20000 rows at most; 0 of fewer than 200 training rows, and with "
        "privacy = 'scalar', which would not cover their labels",
        least=0,
        below=1,
    )
    image_split: str = key(
        "quadrants",
        "how images are divided among parties: a near-square grid of blocks, bands of rows or "
        "columns of pixels, or equal parts of the flattened image, one pixel wide",
        choices=("quadrants", "rows", "columns", "flat"),
    )
    tokenizer: str = key(
        "",
        "folder of the tokenizer of a divided data set of texts, as transformers saves it; a party "
        "gets its part of each text's words",
    )
    text_length: int = key(64, "tokens of a part of a text, at most", least=1)
    augment: str = key(
        "none",
        "what parties do to samples in training passes, unless their node configurations say it: "
        "crop-flip, for images",
        registry=registry.AUGMENTATIONS,
    )

    @property
    def called(self) -> str:
        """What sentences call it."""
        return "the data" if self.dataset.startswith("memory:") else self.dataset

    @property
    def apart(self) -> bool:
        """Whether participants have files of their own, rather than parts of what one owner has."""
        return self.dataset.startswith("files:")

    @property
    def partial(self) -> bool:
        """Whether parties may lack rows."""
        return self.align == "any" or self.presence < 1

    @property
    def own_data(self) -> bool:
        """Whether every participant has data of its own, and rows must be aligned."""
        return self.dataset.startswith(("files:", "memory:"))


@dataclass(frozen=True)
class ModelConfig:
    """Bottom models, the top model, its loss and its metrics."""

    bottom: str = key(
        "mlp",
        "model of a party, from features to embedding; binarised and scorecard have no gradient; "
        "or FILE.py:NAME, a torch module of your own, which on real nodes each party names itself",
        name="bottom-model",
        registry=registry.BOTTOMS,
    )
    bottom_args: str = key(
        "", "arguments of a bottom model of your own, as in 'depth=20 width=16'", name="model-args"
    )
    bottom_hidden: int = key(
        64, "hidden units (mlp, lstm) or channels (cnn) of the bottom model", least=1
    )
    embedding_size: int | None = key(
        None,
        "length of a party's embedding",
        auto="the number of outputs for `sum`, else 32",
        least=1,
    )
    embedding_activation: str | None = key(
        None,
        "activation on the embedding",
        auto="none for `sum`, aggregation = 'secure' and a bottom model of your own, else relu",
        choices=("none", "relu", "sigmoid", "tanh"),
    )
    bottom_bias: bool = key(True, "whether linear layers of a bottom model have a bias")
    top: str = key(
        "mlp",
        "model of the label holder; `sum` adds the embeddings up and has no parameters; or "
        "FILE.py:NAME, a torch module of your own",
        name="top-model",
        registry=registry.TOPS,
    )
    top_args: str = key("", "arguments of a top model of your own, as in 'width=16'")
    top_hidden: int = key(64, "hidden units of an mlp top model", least=1)
    combine: str = key(
        "concat",
        "how a linear or mlp top model reads the parties' embeddings",
        auto="concat; mean where parties may lack rows",
        choices=("concat", "mean", "sum"),
    )
    aggregation: str = key(
        "plain",
        "what the label holder gets of the parties' embeddings: each party's; or secure: masked "
        "ones, of which it learns the sum alone, in synchronous systems whose top model reads the "
        "sum or the mean",
        choices=("plain", "secure"),
    )
    loss: str = key(
        "standard",
        "loss of a row: cross entropy, or of numbers half the squared error; or FILE.py:NAME, a "
        "function of yours from outputs and labels to the rows' losses",
        registry=registry.LOSSES,
    )
    metrics: str = key(
        "none",
        "further figures of the test rows: FILE.py:NAME, a function of yours from outputs and "
        "labels to numbers by name",
        registry=registry.METRICS,
    )


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast all learn.

    Epochs, patience, mini-batches and rates that a user leaves out are None until the training rows
    are known (`systems.sized`). Defaults are those of many rows.
    """

    epochs: int = key(
        20,
        "passes over the training rows, for each party on average",
        auto="20; without noise on embeddings or scalars 60 of fewer than 1,000 training rows, or "
        "where parties may lack rows",
        least=1,
    )
    patience: float = key(
        10.0,
        "epochs without a better evaluation on the validation rows, after which a run stops; 0: "
        "it never does",
        auto="10; 20 where epochs are 60",
        least=0,
    )
    batch_size: int = key(
        32,
        "rows of a mini-batch; as many as there are, or more: full batch",
        auto="32; with noise on labels about a hundredth of the training rows, from 32 to 512",
        least=1,
    )
    party_lr: float = key(
        0.2,
        "learning rate of the parties",
        auto="the system's for this optimizer; or 0.2 for sgd, 0.1 on fewer than 1,000 training "
        "rows; 0.02 for momentum and nesterov; 0.002 for adam and adamw, 0.0005 with label noise",
        least=0,
    )
    server_lr: float = key(
        0.2, "learning rate of the top model", auto="as that of the parties", least=0
    )
    optimizer: str = key(
        "sgd",
        "optimizer of parties and top model; momentum and nesterov are of 0.9",
        auto="the system's, or sgd; for gradients adamw with weight-decay=0.05 where parties may "
        "lack rows, else adam with noise on labels",
        choices=("sgd", "momentum", "nesterov", "adam", "adamw"),
    )
    weight_decay: float = key(
        0.0,
        "weight decay of parties and top model: decoupled for adamw, else added to the gradient",
        least=0,
    )
    lr_schedule: str = key(
        "constant",
        "learning rates by the share of epochs that is done: constant, by steps of `lr-decay`, "
        "falling as a cosine to 0, or one cycle up to them and down",
        choices=("constant", "step", "cosine", "one-cycle"),
    )
    lr_step: int | None = key(
        None, "epochs after which lr-schedule = 'step' lowers the rates", auto="10", least=1
    )
    lr_decay: float | None = key(
        None, "what lr-schedule = 'step' multiplies the rates by", auto="0.1", above=0
    )
    warm_up: float = key(
        0.0, "epochs in which the rates rise linearly to those of the schedule", least=0
    )
    clip_gradient: float = key(
        0.0,
        "norm to which a mini-batch's gradient is clipped, that of each party's model and of the "
        "top model by itself; 0: none",
        least=0,
    )
    precision: str = key(
        "float32",
        "numbers by which models are passed through, forward and backward; bfloat16: matrix "
        "products and convolutions, by torch's autocast",
        choices=("float32", "bfloat16"),
    )
    subsets: str | None = key(
        None,
        "what the top model learns from besides each row's parties: nothing; a random subset of "
        "them, of uniform size; or one of each size, weighted as LASER-VFL does",
        auto="sampled where parties may lack rows, else off",
        choices=("off", "sampled", "laser"),
    )
    freeze: bool = key(
        False,
        "with `grow`: whether the bottom models of the parties of then stay as they are, and only "
        "new parties and the top model learn",
    )
    regulariser: str = key(
        "l2",
        "the party's own regulariser g: l2 is ||w||^2 / 2, nonconvex is AsyREVEL Eq. (22)",
        choices=("l2", "nonconvex"),
    )
    regulariser_weight: float = key(0.0, "weight lambda of the party's own regulariser", least=0)
    seed: int = key(0, "seed of models, batches and delays", least=0)


@dataclass(frozen=True)
class EstimatorConfig:
    """How parties and the top model learn from a mini-batch."""

    kind: str = key(
        "first-order",
        "how parties learn: by gradient rows, or by scalar loss differences",
        name="estimator",
        registry=registry.ESTIMATORS,
    )
    server_update: str = key(
        "first-order",
        "how the top model learns: by its gradient, or by loss differences of its own",
        choices=("first-order", "zeroth-order"),
    )
    differences: str = key(
        "one-sided",
        "points of a zeroth-order difference: w + mu u and w, or w + mu u and w - mu u",
        choices=("one-sided", "two-sided"),
    )
    directions: str = key(
        "gaussian",
        "directions u: standard normal, unit sphere, or sphere of radius sqrt(d)",
        choices=("gaussian", "sphere", "scaled-sphere"),
    )
    mu: float = key(1e-3, "smoothing parameter mu of zeroth-order differences", above=0)
    perturbs: str = key(
        "each",
        "what a zeroth-order difference is along: each party's direction, for a scalar of its own; "
        "or the directions of all at once, for one scalar (SPSA), in a synchronous system",
        choices=("each", "all"),
    )
    labels: str = key(
        "private",
        "who knows the labels: the label holder alone, which sends gradient rows (EF-VFL Alg. 2), "
        "or the parties too, which get each other's embeddings and the top model (Alg. 1)",
        choices=("private", "shared"),
    )
    local_steps: int = key(
        1, "steps Q that all take on a mini-batch, with shared labels (EF-VFL sec. 5.3)", least=1
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """Who waits for whom, and which rows a step uses."""

    quorum: int | None = key(
        None,
        "replies the label holder waits for: all parties is synchronous, 1 asynchronous",
        auto="the system's own",
        least=1,
    )
    window: int | None = key(
        None,
        "steps of a party that one message exchange carries",
        auto="1 in process, 8 under Ray, else 16, and zeroth order 16, 64 and 64; over streams "
        "between nodes 1 to 32, by how long exchanges and steps are measured to take",
        least=1,
    )
    sampling: str = key(
        "shuffle",
        "mini-batches: slices of a shuffled epoch, or each row by chance batch-size / rows",
        choices=("shuffle", "poisson"),
    )
    max_delay: int = key(
        0,
        "bound D on the age, in label-holder steps, of an embedding that is used; 0: no bound",
        least=0,
    )
    delay: str = key(
        "none",
        "delay of an activation on the in-process engine's virtual clock: none, VAFL's "
        "appendix G, or one party 20 to 60 % slower than the others (AsyREVEL)",
        choices=("none", "poisson", "exponential", "straggler"),
    )


@dataclass(frozen=True)
class CodecConfig:
    """How one direction of a party's link is compressed; keys of the downlink begin so."""

    codec: str = key(
        "identity",
        "uplink: embeddings as they are, their largest entries, quantized by chance, or in 2 bytes",
        registry=registry.CODECS,
    )
    keep: float | None = key(None, "share of a mini-batch's entries that top-k keeps", auto="0.1")
    bits: int | None = key(None, "qsgd has 2^bits levels", auto="4")
    compression: str = key(
        "direct",
        "what the codec compresses: an embedding itself (CVFL), or its difference from a surrogate "
        "that both ends keep (EF21, EF-VFL)",
        choices=("direct", "error-feedback"),
    )

    @property
    def surrogates(self) -> bool:
        """Whether both ends keep surrogates of what is sent; unchanged numbers need none."""
        return self.compression == "error-feedback" and self.codec != "identity"


@dataclass(frozen=True)
class PrivacyConfig:
    """Noise, and the budget that it is to keep."""

    mechanism: str = key(
        "none",
        "labels: labels are randomised once, before anything is learned from them; scalar: clipped "
        "differences, and noise on the scalars that parties receive and on the top model (DPZV); "
        "perturbed-embedding: noise on all that leaves a party (VAFL sec. 4)",
        name="privacy",
        registry=registry.LEDGERS,
    )
    embedding_noise: float = key(
        1.0, "standard deviation c of the last layer's Gaussian noise", least=1e-6
    )
    inner_noise: float = key(0.0, "standard deviation of the inner layers' uniform noise", least=0)
    embedding_bound: float = key(
        1.0,
        "norm R to which the last layer's output is clipped before its noise is added",
        least=1e-6,  # far from where numbers of 32 bits, and noise with them, become zero
    )
    clip: float = key(
        1.0,
        "bound C of a row's loss difference, which is clipped to [-C, C]",
        above=0,
    )
    epsilon: float | None = key(
        None,
        "privacy budget of a run with noise on labels, or on scalars at `delta`",
        auto="the system's, or none",
        above=0,
    )
    delta: float | None = key(
        None,
        "delta at which epsilon is meant",
        auto="1e-5, or 0.1 over the training rows where that is less",
        above=0,
        below=1,
    )
    top_clip: float = key(
        0.5,
        "bound of the norm of a row's gradient with respect to the top model, with scalar noise",
        above=0,
    )
    noise_multiplier: float | None = key(
        None,
        "deviation of the scalar noise on a mean over U rows, over C / U",
        auto="calibrated to epsilon, delta and the length of the run",
        least=0,
    )
    calibration: str = key(
        "known",
        "noise for a budget where mini-batches are known, as they are to parties; or as if they "
        "were secret, by dp-accounting's PLD accountant, or by DPZV's formula with a top model "
        "without noise: these two with sampling = 'poisson', and what then holds is said beside it",
        choices=("known", "secret", "paper"),
    )
    noise_seed: int = key(
        -1,
        "-1: secret noise, directions, Poisson batches and, with files:, first models of parties "
        "and the order of partial rows; >= 0: repeatable ones, for experiments only",
        least=-1,
    )


@dataclass(frozen=True)
class RunningConfig:
    """Where and how a run takes place."""

    transport: str = key(
        "auto",
        "on SuperNodes: a stream between label holder and parties, Flower's messages, or auto, a "
        "stream if every party can connect",
        choices=("auto", "stream", "messages"),
    )
    stream_address: str = key(
        "127.0.0.1",
        "host name or IP by which parties reach the label holder; with :PORT, where a router or "
        "relay forwards that port to the one listened on",
    )
    stream_ports: str = key(
        "9500-9599", "port that the label holder listens on, or the range to find a free one in"
    )
    session_seconds: float = key(
        600.0,
        "seconds after which parties keep their state, and streams are opened anew",
        above=0,
    )
    parties: int = key(0, "number of parties to wait for; 0: as many as there are nodes", least=0)
    party_timeout: float = key(
        600.0,
        "seconds that a party may stay silent, or take to start and to align its ids",
        above=0,
    )
    on_party_failure: str = key(
        "stop",
        "when a party fails: stop, or continue with its last embeddings (quorum below all)",
        choices=("stop", "continue"),
    )
    eval_every: float = key(
        1.0, "epochs, or parts of one, between evaluations on the test rows", above=0
    )
    checkpoint_every: int | None = key(
        None,
        "exchanges between two checkpoints, at the label holder and parties; 0: one at the end",
        auto="1000 on SuperNodes, else 0",
        least=0,
    )
    observer: str = key(
        "none",
        "who else is told of evaluations, progress, failures and the end: tensorboard, for which "
        "scalars are written to RUN/tensorboard; or FILE.py:NAME, of an Observer of your own",
        registry=registry.OBSERVERS,
    )
    resume: str = key("", "results folder of a run that was cut short, to go on with")
    grow: str = key(
        "",
        "results folder of a finished run, by whose models this one begins, perhaps with more "
        "parties; keys that are not given are as then",
    )
    device: str = key("auto", "cpu, cuda, or auto: a GPU where there is one")
    out: str = key("", "results folder; empty: runs/STRATEGY-DATASET-TIME")

    def exchanges_apart(self, simulated: bool) -> int:
        """Exchanges between two checkpoints; 0 where there is one at the end only."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        return 0 if simulated else _EXCHANGES_APART
