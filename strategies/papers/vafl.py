"""VAFL: a Method of Vertical Asynchronous Federated Learning (Chen, Jin, Sun and Yin, 2020).

Algorithm 1: parties draw their own mini-batches and never wait for each other (lines 3-7). The
label holder answers each upload with its table of the others' embeddings, which may be stale (lines
11-13, Eq. 2b and 3). It steps its model once (lines 9-10, Eq. 2a). Option ``max-delay`` is the
bound D of section 2.3.

Algorithm 2, t-synchronous: the label holder waits for t uploads, option ``quorum``.

Section 4, perturbed local embedding: ``privacy = "perturbed-embedding"``.

The paper's optimizer is plain SGD: ``optimizer = "sgd"``. The default is Adam, whose loss falls
more evenly.

The algorithm on one page: ``strategies/reference/vafl.py``.
"""

from vfl_flower.protocol.system import HALF, ONE, System

VAFL = System(
    name="vafl",
    about="VAFL, Algorithm 1: parties draw their own mini-batches and never wait.",
    quorum=ONE,
    # The top model steps once for each party's mini-batch, so often that it must do so with care.
    rates={"sgd": (0.05, 0.05)},
)
VAFL_T = System(
    name="vafl-t",
    about="VAFL, Algorithm 2: the label holder waits for `quorum` parties, by default half.",
    quorum=HALF,
)
