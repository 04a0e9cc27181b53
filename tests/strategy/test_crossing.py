"""Every system beside every option, with nothing else set, on digits.

`TABLE` says what each cell must give. In the row ``plain`` it is the least accuracy of a system, in
hundredths. A number below it says how many hundredths less than the system's plain run a cell may
have. A small letter stands for a sentence of `REFUSALS` that refuses the cell. A capital letter
stands for the page in `LESS` that says why the cell has less; the least accuracy stands after it.
"""

from functools import cache
from typing import Any

import pytest

import vfl_flower
from vfl_flower.config.errors import VflError

SYSTEMS: dict[str, dict[str, Any]] = {
    "split-nn": {"strategy": "split-nn"},
    "vafl": {"strategy": "vafl"},
    "ef-vfl": {"strategy": "ef-vfl"},
    "shared": {"strategy": "ef-vfl", "labels": "shared"},
    "cvfl": {"strategy": "cvfl"},
    "cascaded": {"strategy": "cascaded"},
    "dpzv": {"strategy": "dpzv"},
    "asyrevel": {"strategy": "asyrevel"},
}
NOISE = {"privacy": "labels", "epsilon": 4.0}
SUMS = {"aggregation": "secure", "combine": "mean"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label noise 1": {**NOISE, "epsilon": 1.0},
    "label noise 4": NOISE,
    "noise on embeddings": {"privacy": "perturbed-embedding", "embedding-noise": 0.1},
    "secure": SUMS,
    "presence": {"presence": 0.6},
    "laser": {"presence": 0.6, "subsets": "laser"},
    "sampled": {"subsets": "sampled"},
    "float16": {"codec": "float16", "downlink-codec": "float16"},
    "balanced": {"class-weights": "balanced"},
    "adam": {"optimizer": "adam"},
    "adamw, cosine": {"optimizer": "adamw", "lr-schedule": "cosine"},
    "bfloat16": {"precision": "bfloat16"},
    "clipped": {"clip-gradient": 1.0},
    "window 64": {"window": 64},
    "delays": {"delay": "poisson"},
    "secure, label noise": {**SUMS, **NOISE},
    "presence, label noise": {"presence": 0.6, **NOISE},
    "presence, balanced": {"presence": 0.6, "class-weights": "balanced"},
    "linear": {"bottom-model": "linear"},
    "cnn": {"bottom-model": "cnn"},
}

TABLE = """
                         split-nn  vafl  ef-vfl  shared  cvfl  cascaded  dpzv  asyrevel
plain                       94      94     94      93     93      92       30      85
label noise 1               N50     N50    N50     N65    N50     N05      N05     N05
label noise 4               4       4      4       4      A72     5        4       8
noise on embeddings         3       3      3       3      3       E65      E05     E35
secure                      3       a      c       s      c       a        a       a
presence                    P82     P82    P82     k      P70     P72      D05     P45
laser                       P82     P82    P82     k      P75     P78      l       P50
sampled                     3       3      3       k      3       3        D05     10
float16                     3       3      3       3      3       z        z       z
balanced                    3       3      3       3      4       3        w       5
adam                        3       3      3       3      A80     3        D05     5
adamw, cosine               3       3      3       3      A78     3        D05     8
bfloat16                    3       3      3       3      3       b        b       b
clipped                     3       3      3       3      4       5        D05     10
window 64                   W88     3      3       3      W85     4        6       6
delays                      3       3      3       3      3       5        6       6
secure, label noise         4       a      c       s      c       a        a       a
presence, label noise       Q75     Q75    Q75     k      Q70     Q65      Q30     Q50
presence, balanced          P82     P80    P82     k      P72     P74      w       P45
linear                      3       3      3       3      3       3        6       4
cnn                         3       4      3       3      4       7        D05     14
"""

REFUSALS = {
    "a": "parties that do not step together upload other rows at other times",
    "b": "precision = 'bfloat16' rounds off the differences that zeroth order learns from",
    "c": "codec = 'top-k' has nothing to compress in masked numbers, which look random",
    "k": "labels = 'shared' has parties use the top model",
    "l": "subsets = 'laser' weighs copies of a row",
    "s": "labels = 'shared' sends embeddings to all parties",
    "w": "class-weights = 'balanced' follows from all labels",
    "z": "has nothing to compress under zeroth order: feedback",
}
LESS = {
    "A": "docs/how-to/tune.md: Adam follows the errors of directly compressed embeddings",
    "D": "docs/how-to/tune.md: 1,222 rows of ten classes do not carry epsilon 1 of scalar noise",
    "E": "docs/explanation/what-leaks.md: differences of the loss lose more to noise on embeddings",
    "N": "docs/explanation/what-leaks.md: 1,222 rows of ten classes do not carry epsilon 1",
    "P": "docs/explanation/partial-rows.md: each party lacks two people of five",
    "Q": "docs/explanation/partial-rows.md: that, and noise on labels of as few rows",
    "W": "docs/explanation/windows-and-staleness.md: a window of 64 steps is over an epoch",
}


def cells() -> dict[tuple[str, str], str]:
    """Return what each cell of `TABLE` must give, by option and system."""
    head, *lines = TABLE.strip("\n").split("\n")
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert head.split() == list(SYSTEMS) and list(rows) == list(OPTIONS)
    return {
        (option, system): due
        for option, row in rows.items()
        for system, due in zip(SYSTEMS, row, strict=True)
    }


CELLS = cells()
REFUSED = [cell for cell, due in CELLS.items() if due in REFUSALS]
MEASURED = [cell for cell, due in CELLS.items() if due not in REFUSALS]


@cache
def accuracy(option: str, system: str) -> float:
    """Return the test accuracy of a cell with default options, in hundredths."""
    keys = {"dataset": "digits", "noise-seed": 0, **SYSTEMS[system], **OPTIONS[option]}
    return 100 * float(vfl_flower.train(keys, parties=4).summary["test_accuracy"])


@pytest.mark.parametrize(("option", "system"), REFUSED)
def test_a_cell_is_refused_in_one_sentence(option: str, system: str) -> None:
    with pytest.raises(VflError) as raised:
        accuracy(option, system)
    sentence = str(raised.value)
    assert REFUSALS[CELLS[option, system]] in sentence and "\n" not in sentence


@pytest.mark.nightly
@pytest.mark.parametrize(("option", "system"), MEASURED)
def test_a_cell_is_within_its_distance(option: str, system: str) -> None:
    due = CELLS[option, system]
    if due[0] in LESS or option == "plain":
        least = float(due.lstrip("".join(LESS)))
    else:
        least = accuracy("plain", system) - float(due)
    assert accuracy(option, system) >= least


@pytest.mark.nightly
def test_the_table_would_tell_rates_of_sgd_under_adam() -> None:
    """The control: rates of SGD under Adam lie below what the table allows."""
    keys = {"dataset": "digits", "strategy": "vafl", "optimizer": "adam", "noise-seed": 0}
    spoilt = vfl_flower.train({**keys, "party-lr": 0.05, "server-lr": 0.05}, parties=4).summary
    assert 100 * spoilt["test_accuracy"] < accuracy("plain", "vafl") - float(CELLS["adam", "vafl"])
