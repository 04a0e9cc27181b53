"""AsyREVEL: Desirable Companion for Vertical Federated Learning (Zhang et al., 2021).

Of the smoothing by the unit sphere (AsyREVEL-Uni) Eq. (15) has the factor d. The rate of its neural
network, 7.5, is one without that factor: with it, it is 7.5 / d, which is what rows here use.
"""

from __future__ import annotations

from benchmarks.papers.page import interval
from benchmarks.papers.rows import (
    ACCURACY,
    PERCENT,
    Column,
    Data,
    Histories,
    History,
    Job,
    Keys,
    Picture,
    Row,
    last,
    until,
    within,
)

PARTIES = 8
REGRESSION: Keys = {  # Eq. (22)
    "bottom-model": "linear",
    "top-model": "sum",
    "regulariser": "nonconvex",
    "regulariser-weight": 1e-4,
    "optimizer": "sgd",
    "batch-size": 64,
}
NETWORK: Keys = {  # 98 pixels of the flattened image, 128, 1; then q x 10
    "image-split": "flat",
    "bottom-model": "mlp",
    "bottom-hidden": 128,
    "embedding-size": 1,
    "embedding-activation": "none",
    "top-model": "linear",
    "optimizer": "sgd",
    "batch-size": 64,
}
D_PARTY = 98 * 128 + 128 + 128 + 1
D_TOP = 8 * 10 + 10
UNI_RATES: Keys = {  # 7.5, and 7.5 / q for the label holder
    "directions": "sphere",
    "party-lr": 7.5 / D_PARTY,
    "server-lr": 7.5 / PARTIES / D_TOP,
}
GAU_RATES: Keys = {"party-lr": 0.002, "server-lr": 0.002 / PARTIES}
SYSTEMS: dict[str, Keys] = {
    "AsyREVEL-Gau": {"strategy": "asyrevel"},
    "SynREVEL-Gau": {"strategy": "synrevel"},
    "AsyREVEL-Uni": {"strategy": "asyrevel", "directions": "sphere"},
    "SynREVEL-Uni": {"strategy": "synrevel", "directions": "sphere"},
}
LOSS = (Picture("virtual_seconds", "train_loss", "virtual seconds", "training loss"),)


def rates(data: Data) -> dict[str, Job]:
    """The network by AsyREVEL-Uni, at 7.5 and at 7.5 / d, for each side."""
    common = {**NETWORK, **UNI_RATES, "dataset": data.mnist, "strategy": "asyrevel"}
    common |= {"window": 64, "epochs": 5, "delay": "none"}
    return {
        "7.5 / d, and 7.5 / q / d": Job(PARTIES, common),
        "7.5 and 7.5 / q": Job(
            PARTIES,
            {**common, "party-lr": 7.5, "server-lr": 7.5 / PARTIES},
        ),
        "Gau, 0.002 and 0.002 / q": Job(
            PARTIES,
            {**common, **GAU_RATES, "directions": "gaussian"},
        ),
        "Gau, 0.002 and 0.01": Job(
            PARTIES,
            {**common, "directions": "gaussian", "party-lr": 0.002, "server-lr": 0.01},
        ),
    }


def sending(data: Data) -> dict[str, Job]:
    """An epoch of each model, by gradients (TIG) and by function values, first with one output."""
    made = {}
    for of, model, dataset in (
        ("credit", REGRESSION, data.credit),
        ("MNIST", NETWORK, data.mnist),
        ("MNIST, 128 outputs", {**NETWORK, "embedding-size": 128}, data.mnist),
    ):
        common = {**model, "dataset": dataset, "window": 8, "epochs": 1, "delay": "none"}
        for name, keys in (("TIG", {"strategy": "vafl"}), ("AsyREVEL", SYSTEMS["AsyREVEL-Gau"])):
            rate = {"party-lr": 0.001, "server-lr": 0.001}
            made[f"{of} | {name}"] = Job(PARTIES, {**common, **keys, **rate})
    return made


def losslessness(data: Data) -> dict[str, Job]:
    """The network: eight parties, and one difference along the direction of the whole model.

    Rates fall by a cosine. Joined data have a hundred thousand parameters in one difference, which
    diverges at the rate of eight parties' top model. With "sphere", each model has its own sphere.
    The paper has one sphere of all parameters, on which a model's part grows with the model. So
    joined data have "scaled-sphere". Gradients show what the network can reach.
    """
    common = {**NETWORK, "dataset": data.mnist, "epochs": 20, "eval-every": 5}
    common["lr-schedule"] = "cosine"
    apart: Keys = {"strategy": "asyrevel", "delay": "none", "window": 16}
    apart |= {"party-lr": 0.0012, "server-lr": 0.02}
    joined: Keys = {"strategy": "syn-zoo", "perturbs": "all", "window": 64}
    joined |= {"party-lr": 0.001, "server-lr": 0.001}
    made = {
        f"{name} | {said}": Job(PARTIES, {**common, **keys, "directions": directions})
        for name, said, keys, directions in (
            ("Gau", "eight parties", apart, "gaussian"),
            ("Gau", "joined", joined, "gaussian"),
            ("Uni", "eight parties", apart, "sphere"),
            ("Uni", "joined", joined, "scaled-sphere"),
        )
    }
    gradients: Keys = {"strategy": "vafl", "delay": "none", "window": 8, "epochs": 10}
    gradients |= {"party-lr": 0.05, "server-lr": 0.05}
    return {**made, "gradients | eight parties": Job(PARTIES, {**common, **gradients})}


def losslessness_of_credit(data: Data) -> dict[str, Job]:
    """Logistic regression on credit: eight parties, and one party with all columns."""
    common = {**REGRESSION, "dataset": data.credit_one_hot, "strategy": "asyrevel", "delay": "none"}
    common |= {"party-lr": 0.003, "server-lr": 0.003, "window": 8, "epochs": 20, "eval-every": 20}
    return {
        f"{name} | {said}": Job(parties, {**common, "directions": directions})
        for name, directions in (("Gau", "gaussian"), ("Uni", "sphere"))
        for said, parties in (("eight parties", PARTIES), ("joined", 1))
    }


def regression(data: Data) -> dict[str, Job]:
    """Loss against time, with a party 20 to 60 % slower: logistic regression."""
    rate = {"party-lr": 0.003, "server-lr": 0.003}
    common = {**REGRESSION, **rate, "dataset": data.credit, "window": 1, "epochs": 6}
    return {
        name: Job(PARTIES, {**common, **keys, "eval-every": 0.5}) for name, keys in SYSTEMS.items()
    }


def table(data: Data) -> dict[str, Job]:
    """The same on any table of two classes: a9a, w8a, rcv1 and epsilon are svmlight files."""
    return {
        name: Job(job.parties, {**job.keys, "dataset": data.table, "epochs": 60, "eval-every": 5})
        for name, job in regression(data).items()
    }


def network(data: Data) -> dict[str, Job]:
    """Loss against time: the neural network."""
    common = {**NETWORK, "dataset": data.mnist, "window": 8, "epochs": 15}
    of = {"Gau": GAU_RATES, "Uni": UNI_RATES}
    return {
        name: Job(PARTIES, {**common, **of[name[-3:]], **keys}) for name, keys in SYSTEMS.items()
    }


def speedup(data: Data) -> dict[str, Job]:
    """Logistic regression by 1, 2, 4 and 8 parties: an activation takes its share of the columns.

    The virtual clock counts a second for each activation, whatever the party's size: seconds here
    are that over the number of parties.
    """
    rate = {"party-lr": 0.003, "server-lr": 0.003}
    common = {**REGRESSION, **rate, "dataset": data.credit, "window": 1, "epochs": 12}
    common["eval-every"] = 0.1
    return {
        f"{name} | {parties}": Job(parties, {**common, **SYSTEMS[f"{name}-Gau"]})
        for name in ("AsyREVEL", "SynREVEL")
        for parties in (1, 2, 4, 8)
    }


def share_of_time(history: History) -> float | None:
    """Seconds to a test loss of 0.5; one party, which has all columns, has no straggler beside it.

    The training loss of a tenth of an epoch crosses 0.5 long before it stays below.
    """
    parties = history[0]["parties"]
    clock = "steps" if parties == 1 else "virtual_seconds"
    seconds = until("test_loss", 0.5, clock, falls=True)(history)
    return None if seconds is None else seconds / parties


def speedups(histories: Histories) -> list[str]:
    """Return Eq. (23) by number of parties: one party's seconds over theirs, seed by seed."""
    columns = ["asynchronous", "synchronous"]
    lines = [f"| parties | {' | '.join(columns)} |", "|---|---|---|"]
    for parties in (2, 4, 8):
        cells = []
        for name in ("AsyREVEL", "SynREVEL"):
            alone, together = (
                [share_of_time(each) for each in histories[f"{name} | {number}"]]
                for number in (1, parties)
            )
            pairs = zip(alone, together, strict=True)
            cells.append(interval([one / each for one, each in pairs if one and each]))
        lines.append(f"| {parties} | {' | '.join(cells)} |")
    return lines


def reached(loss: float) -> Column:
    """Return virtual seconds to a training loss."""
    return until("train_loss", loss, "virtual_seconds", falls=True)


SENT = {
    "bytes up a step": lambda history: history[-1]["bytes_up"] / history[-1]["steps"],
    "bytes down a step": lambda history: history[-1]["bytes_down"] / history[-1]["steps"],
}
TIMES = {"virtual seconds": last("virtual_seconds"), "training loss": last("train_loss")}
ROWS = {
    "asyrevel-rates": Row(
        "section 5.1: the rate 7.5 of AsyREVEL-Uni, with the factor d and without", rates, ACCURACY
    ),
    "asyrevel-table3": Row("what is sent: gradients (TIG) or function values", sending, SENT),
    "asyrevel-table4": Row(
        "losslessness, MNIST (or Fashion): eight parties, and the same on joined data",
        losslessness,
        {**ACCURACY, "best of 10 epochs": within("test_accuracy", "epoch", 10, PERCENT)},
        theirs={
            "Gau | eight parties": "91.89 ± 0.29",
            "Gau | joined": "91.89 ± 0.25",
            "Uni | eight parties": "91.84 ± 0.38",
            "Uni | joined": "91.84 ± 0.32",
        },
        seeds=3,
    ),
    "asyrevel-table4-credit": Row(
        "losslessness, credit: eight parties, and the same on joined data",
        losslessness_of_credit,
        ACCURACY,
        theirs={
            "Gau | eight parties": "81.93 ± 0.24",
            "Gau | joined": "81.93 ± 0.36",
            "Uni | eight parties": "81.88 ± 0.14",
            "Uni | joined": "81.88 ± 0.10",
        },
    ),
    "asyrevel-fig3": Row(
        "loss against time, credit: asynchronous and synchronous",
        regression,
        {**TIMES, **{f"to loss {loss}": reached(loss) for loss in (0.55, 0.52, 0.5)}},
        LOSS,
    ),
    "asyrevel-fig3-table": Row(
        "loss against time, any table: asynchronous and synchronous",
        table,
        {**TIMES, "to loss 0.3": reached(0.3)},
        LOSS,
    ),
    "asyrevel-fig3-mnist": Row(
        "loss against time, MNIST (or Fashion): asynchronous and synchronous",
        network,
        {**TIMES, "to loss 0.8": reached(0.8)},
        LOSS,
        seeds=3,
    ),
    "asyrevel-fig4": Row(
        "speed-up by the number of parties, credit: seconds to a test loss of 0.5",
        speedup,
        {"seconds to test loss 0.5": share_of_time},
        tables={"speed-up": speedups},
    ),
}
