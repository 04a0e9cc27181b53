"""Options of bottom models, the top model, the loss and the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config import plugins
from vfl_flower.config.options.option import basic, key, setting


@dataclass(frozen=True)
class ModelConfig:
    """Bottom models, the top model, its loss and its metrics."""

    bottom: str = basic(
        "tabular-or-mlp",
        "Chooses the party's model, which maps features to an embedding. `tabular-or-mlp` is "
        "`tabular` for rows of at most 128 numbers, else `mlp`. `tabular` encodes numbers by their "
        "quantiles, and averages 8 models with shared weights. `binarised` and `scorecard` have no "
        "gradient, so they need a zeroth-order system. FILE.py:NAME names your own torch module. "
        "On real nodes, each party names its own module.",
        example="bottom-model='linear'",
        auto="the system's, or tabular-or-mlp for parties that learn from gradients. Else mlp.",
        name="bottom-model",
        registry=plugins.BOTTOMS,
    )
    bottom_args: str = key(
        "",
        "Passes arguments to your own bottom model.",
        example="bottom-model='examples/own_tower.py:Tower' model-args='width=16'",
        name="model-args",
    )
    bottom_hidden: int = setting(
        64,
        "Sets the hidden units (mlp, lstm, each model of tabular) or channels (cnn) of the bottom "
        "model.",
        example="bottom-hidden=128",
        least=1,
    )
    embedding_size: int | None = basic(
        None,
        "Sets the length of a party's embedding.",
        example="embedding-size=16",
        auto="the number of outputs for top-model='sum', else 32.",
        least=1,
    )
    embedding_activation: str | None = setting(
        None,
        "Chooses the activation on the embedding. With aggregation='secure', a real node accepts "
        "only an activation that its node configuration permits.",
        example="embedding-activation='tanh'",
        auto="none for top-model='sum', for aggregation='secure' and for your own bottom model. "
        "Else relu.",
        choices=("none", "relu", "sigmoid", "tanh"),
    )
    bottom_bias: bool = setting(
        True, "Adds a bias to the linear layers of the bottom model.", example="bottom-bias=false"
    )
    top: str = basic(
        "mlp",
        "Chooses the label holder's model, which maps embeddings to outputs. `sum` adds the "
        "embeddings and has no parameters. FILE.py:NAME names your own torch module.",
        example="top-model='linear'",
        name="top-model",
        registry=plugins.TOPS,
    )
    top_args: str = setting(
        "",
        "Passes arguments to your own top model.",
        example="top-model='own.py:Top' top-args='width=16'",
        before="own.py has a torch module Top(sizes, outputs, width)",
    )
    top_hidden: int = setting(
        64, "Sets the hidden units of an mlp top model.", example="top-hidden=32", least=1
    )
    combine: str = basic(
        "concat",
        "Chooses how a linear or mlp top model combines the parties' embeddings.",
        example="combine='mean'",
        auto="concat. mean if parties may lack rows.",
        choices=("concat", "mean", "sum"),
    )
    aggregation: str = basic(
        "plain",
        "Chooses whether the label holder sees each embedding (plain) or only their sum (secure). "
        "`secure` masks the embeddings. It needs a synchronous system and a top model that reads "
        "the sum or the mean. FILE.py:NAME names your own aggregation.",
        example="aggregation='secure' combine='mean'",
        registry=plugins.AGGREGATIONS,
    )
    loss: str = key(
        "standard",
        "Chooses the loss of a row. `standard` is cross entropy, or half the squared error for "
        "regression. FILE.py:NAME names your own function from outputs and labels to the losses "
        "of the rows.",
        example="loss='examples/own_tower.py:smooth'",
        registry=plugins.LOSSES,
    )
    metrics: str = key(
        "none",
        "Adds metrics on the test rows. FILE.py:NAME names your own function from outputs and "
        "labels to named numbers.",
        example="metrics='examples/own_tower.py:top_3'",
        registry=plugins.METRICS,
    )
