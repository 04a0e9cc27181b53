"""Options of training: epochs, rates, and how parties and the top model learn."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config import plugins
from vfl_flower.config.options.option import basic, key, setting

KINDS = {
    "sgd": "sgd",
    "momentum": "momentum",
    "nesterov": "momentum",
    "adam": "adam",
    "adamw": "adam",
}
"""Optimizer -> its kind. Optimizers of one kind share default learning rates."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast all learn.

    Epochs, patience, mini-batches and rates that a user leaves out are None until the training rows
    are known (`protocol.systems.sized`). Defaults are those for many rows.
    """

    epochs: int = basic(
        60,
        "Sets the largest number of passes over the training rows, averaged over parties.",
        example="epochs=10",
        auto="60 with fewer than 1000 training rows, if parties may lack rows, or if adam, first "
        "order and validation rows end the run. Else 20, as with noise on embeddings or scalars.",
        least=1,
    )
    patience: float = key(
        10.0,
        "Stops the run after this many epochs without a better validation loss. 0 never stops "
        "early.",
        example="patience=5",
        auto="10. With fewer than 1000 training rows 5 for adam by first order, else 20. 20 if "
        "parties may lack rows. Noise on embeddings or scalars keeps 10.",
        least=0,
    )
    calibrate: str = key(
        "none",
        "Chooses how class probabilities are calibrated after training, on the validation rows. "
        "`platt` fits a sigmoid. `isotonic` fits a function that never falls, which needs more "
        "rows.",
        example="dataset='breast-cancer' calibrate='platt'",
        choices=("none", "platt", "isotonic"),
    )
    batch_size: int = basic(
        32,
        "Sets the rows of a mini-batch. A size of at least all rows means full-batch training.",
        example="batch-size=64",
        auto="32. With noise on labels, about a hundredth of the training rows, from 32 to 512.",
        least=1,
    )
    party_lr: float = basic(
        0.001,
        "Sets the learning rate of the parties.",
        example="party-lr=0.05",
        auto="the system's rate for this optimizer. Else 0.2 for sgd, 0.02 for momentum and "
        "nesterov. adam and adamw get 0.001 in first-order systems, else 0.002. With fewer than "
        "1000 training rows, sgd gets 0.1, and first-order adam 0.0005. So does first-order adam "
        "with noise on labels.",
        least=0,
    )
    server_lr: float = basic(
        0.001,
        "Sets the learning rate of the top model.",
        example="server-lr=0.05",
        auto="as `party-lr`, or the system's rate for this optimizer.",
        least=0,
    )
    optimizer: str = basic(
        "adam",
        "Chooses the optimizer of the parties and of the top model. `momentum` and `nesterov` "
        "use a coefficient of 0.9. torch.optim:NAME names another of torch's, and FILE.py:NAME "
        "names your own.",
        example="optimizer='adam'",
        auto="the system's. Else adam in first-order systems but cvfl, or adamw with "
        "weight-decay=0.05 if parties may lack rows. Noise on labels needs adam. sgd in other "
        "systems, and in any system if you give a rate.",
        registry=plugins.OPTIMIZERS,
    )
    weight_decay: float = key(
        0.0,
        "Sets the weight decay of the parties and of the top model. `adamw` decouples it from "
        "the gradient. Other optimizers add it to the gradient.",
        example="optimizer='adamw' weight-decay=0.01",
        least=0,
    )
    lr_schedule: str = key(
        "constant",
        "Chooses how learning rates change during the run. `step` multiplies the rates by "
        "`lr-decay`. `cosine` lowers them to 0. `one-cycle` raises them first, then lowers them.",
        example="lr-schedule='cosine'",
        choices=("constant", "step", "cosine", "one-cycle"),
    )
    lr_step: int | None = setting(
        None,
        "Sets the epochs between two decays of lr-schedule='step'.",
        example="lr-schedule='step' lr-step=5",
        auto="10",
        least=1,
    )
    lr_decay: float | None = setting(
        None,
        "Sets the factor by which lr-schedule='step' multiplies the rates.",
        example="lr-schedule='step' lr-decay=0.5",
        auto="0.1",
        above=0,
    )
    warm_up: float = setting(
        0.0,
        "Raises the rates linearly from 0 during this many epochs.",
        example="warm-up=0.5",
        least=0,
    )
    clip_gradient: float = setting(
        0.0,
        "Clips the gradient of each mini-batch to this norm. Each party's model and the top model "
        "are clipped separately. 0 clips nothing.",
        example="clip-gradient=1.0",
        least=0,
    )
    precision: str = setting(
        "float32",
        "Chooses the floating-point precision of forward and backward passes. `bfloat16` applies "
        "to matrix products and convolutions, by torch's autocast.",
        example="precision='bfloat16'",
        choices=("float32", "bfloat16"),
    )
    subsets: str | None = key(
        None,
        "Chooses the party subsets that the top model also trains on. `sampled` draws one random "
        "subset, of uniform size. `laser` takes one subset of each size, weighted as in LASER-VFL.",
        example="subsets='sampled' combine='mean'",
        auto="off. If parties may lack rows: laser for first-order systems but cvfl, sampled for "
        "others.",
        choices=("off", "sampled", "laser"),
    )
    freeze: bool = key(
        False,
        "Freezes the bottom models of the earlier run that `grow` names. Only new parties and the "
        "top model learn.",
        example="grow='runs/a' freeze=true",
    )
    regulariser: str = setting(
        "l2",
        "Chooses the regulariser g of each party. `l2` is ||w||^2 / 2. `nonconvex` is equation 22 "
        "of the AsyREVEL paper.",
        example="regulariser='nonconvex' regulariser-weight=0.001",
        choices=("l2", "nonconvex"),
        symbol="g",
    )
    regulariser_weight: float = setting(
        0.0,
        "Sets the weight of each party's regulariser.",
        example="regulariser-weight=0.001",
        least=0,
        symbol="lambda",
    )
    seed: int = basic(
        0, "Sets the seed of models, mini-batches and simulated delays.", example="seed=1", least=0
    )


@dataclass(frozen=True)
class EstimatorConfig:
    """How parties and the top model learn from a mini-batch."""

    kind: str = key(
        "first-order",
        "Chooses how parties learn: from gradient rows, or from scalar loss differences.",
        example="estimator='zeroth-order' party-lr=0.002",
        name="estimator",
        registry=plugins.ESTIMATORS,
    )
    server_update: str = setting(
        "first-order",
        "Chooses how the top model learns: from its gradient, or from loss differences.",
        example="strategy='syn-zoo' server-update='first-order'",
        registry=plugins.SERVER_UPDATES,
    )
    differences: str = setting(
        "one-sided",
        "Chooses the two points of a zeroth-order difference. `one-sided` uses w + mu u and w. "
        "`two-sided` uses w + mu u and w - mu u.",
        example="strategy='cascaded' differences='two-sided'",
        choices=("one-sided", "two-sided"),
    )
    directions: str = setting(
        "gaussian",
        "Chooses the distribution of the directions u. They are standard normal, or uniform on "
        "the unit sphere, or uniform on the sphere of radius sqrt(d).",
        example="strategy='cascaded' directions='sphere'",
        registry=plugins.DIRECTIONS,
        symbol="u",
    )
    mu: float = setting(
        1e-3,
        "Sets the smoothing parameter of zeroth-order differences.",
        example="strategy='cascaded' mu=0.0001",
        above=0,
        symbol="mu",
    )
    perturbs: str = setting(
        "each",
        "Chooses which parties one zeroth-order difference perturbs. `each` gives every party a "
        "scalar for its direction. `all` perturbs all parties at once and yields one scalar "
        "(SPSA). `all` needs a synchronous system.",
        example="strategy='syn-zoo' perturbs='all'",
        choices=("each", "all"),
    )
    labels: str = setting(
        "private",
        "Chooses who knows the labels. With `private`, the label holder sends gradient rows "
        "(EF-VFL, Algorithm 2). With `shared`, parties get the labels, all embeddings and the top "
        "model (EF-VFL, Algorithm 1).",
        example="strategy='ef-vfl' labels='shared'",
        choices=("private", "shared"),
    )
    local_steps: int = setting(
        1,
        "Sets the steps that all participants take on one mini-batch. It needs shared labels "
        "(EF-VFL, section 5.3).",
        example="strategy='ef-vfl' labels='shared' local-steps=4",
        least=1,
        symbol="Q",
    )
    initial_surrogates: str = setting(
        "zero",
        "Chooses where the surrogates of error feedback begin. With `zero`, a row's first upload "
        "is compressed whole. With `embeddings`, each party uploads all its training rows, "
        "compressed, before the first step (EF-VFL, Algorithm 1, input).",
        example="strategy='ef-vfl' initial-surrogates='embeddings'",
        choices=("zero", "embeddings"),
        symbol="G^0",
    )
