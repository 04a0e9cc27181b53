"""Baselines, which show the gain of federating and of training the parties."""

from vfl_flower.protocol.system import System

FROZEN = System(
    name="frozen",
    about="Baseline: parties upload untrained embeddings once, and only the top model learns.",
    baseline="one upload · parties untrained · first-order server · identity · no privacy",
    flower_strategy="strategies.baselines.frozen:Frozen",
    gradients=False,
)
ALONE = System(
    name="local-only",
    about="Baseline: the label holder and the best single party train without the other parties.",
    baseline="sync · first-order · first-order server · identity · no privacy, one party at a time",
    flower_strategy="strategies.baselines.local_only:Alone",
)
JOINED = System(
    name="centralised",
    about="Baseline: the same model, trained on all columns in one place; simulations only.",
    baseline="no messages · centralised mini-batch training of bottom and top models together",
    flower_strategy="strategies.baselines.centralised:Joined",
    gradients=True,
)
COMMON = System(
    name="intersection-only",
    about="Baseline of partial rows: `centralised` on the rows that every party has.",
    baseline="no messages · centralised training on the rows that all parties have",
    flower_strategy="strategies.baselines.centralised:Common",
    gradients=True,
)
