"""Baselines, without which a result says little: what federating is worth, and training parties."""

from __future__ import annotations

from vfl_flower.systems import System

FROZEN = System(
    name="frozen",
    about="Baseline: parties upload their first embeddings once and are never trained.",
    baseline="one upload · parties untrained · first-order server · identity · no privacy",
    strategy="strategies.frozen:Frozen",
    gradients=False,
)
ALONE = System(
    name="alone",
    about="Baseline: the best single party with the label holder, without the others.",
    baseline="sync · first-order · first-order server · identity · no privacy, one party at a time",
    strategy="strategies.alone:Alone",
)
JOINED = System(
    name="joined",
    about="Baseline: the same model, centralised on joined data; simulations only.",
    baseline="no messages · centralised mini-batch training of bottom and top models together",
    strategy="strategies.joined:Joined",
    gradients=True,
)
COMMON = System(
    name="common",
    about="Baseline of partial rows: `joined` with the rows alone that all have; simulations only.",
    baseline="no messages · centralised training on the rows that all parties have",
    strategy="strategies.joined:Common",
    gradients=True,
)
