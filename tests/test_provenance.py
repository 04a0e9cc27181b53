"""The peak memory that a run reports, and the versions of both sides."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from vfl_flower import client_app
from vfl_flower.config import provenance
from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.config.provenance import peak_memory_mb, running
from vfl_flower.transport.early_messages import AlignOrder
from vfl_flower.transport.messages import DescribeOrder, Payload
from vfl_flower.transport.wire import read_reply, to_failure, to_message

PRINTED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("provenance", sys.argv[1])
provenance = importlib.util.module_from_spec(spec)
spec.loader.exec_module(provenance)
print(provenance.peak_memory_mb())
"""


def test_the_peak_of_a_process_holds_its_arrays_and_nothing_of_its_parents() -> None:
    before = peak_memory_mb()
    parents = np.ones(2**25)  # 256 MiB
    assert peak_memory_mb() >= max(before, parents.nbytes / 2**20)
    command = [sys.executable, "-c", PRINTED, provenance.__file__]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert 1 < float(said) < 100


# --- versions of both sides -----------------------------------------------------------------------


def node() -> Context:
    config: Any = {"partition-id": 1, "num-partitions": 2, "simulated": True}
    return Context(7, 1, config, RecordDict(), {"dataset": "breast-cancer"})


@dataclass(frozen=True, kw_only=True)
class LaterOrder(DescribeOrder):
    """An order as a later version may send it."""

    more: int = 0


LATER = "vfl-flower 9.0.0 (code 0123456789ab)"


@pytest.mark.parametrize("call", [True, False])
@pytest.mark.parametrize(
    "order",
    [
        DescribeOrder(outputs=1, version=LATER),
        LaterOrder(outputs=1, version=LATER),
        AlignOrder(method="psi", config='{"an-option-of-later": 1}', version=LATER),
    ],
    ids=["alike", "with a field", "with an option"],
)
def test_a_node_of_another_version_names_both_before_all_else(order: Any, call: bool) -> None:
    reply = client_app.app(to_message(order, 1, 60.0, call), node())
    with pytest.raises(VflError) as raised:
        read_reply(reply, Payload)
    said = str(PartyError("The party on node 1", str(raised.value)))
    assert said == (
        f"Party 1 runs {running()}, and the label holder runs {LATER}. Install the same version "
        "at both, and restart SuperNode and SuperLink."
    )
    control = replace(order, version=running())
    with pytest.raises(VflError) as raised:
        read_reply(client_app.app(to_message(control, 1, 60.0, call), node()), Payload)
    assert LATER not in str(raised.value)


@pytest.mark.parametrize(
    "cause",
    [
        "There is no option 'calibrate'. See `vfl list --all`.",
        "was sent a DescribeOrder that has an unknown field.",
    ],
)
def test_an_older_node_that_compares_no_versions_is_told_so(cause: str) -> None:
    message = to_message(DescribeOrder(outputs=1), 1, 60.0)
    with pytest.raises(VflError, match="runs an older version, and the label holder runs vfl-fl"):
        read_reply(to_failure(cause, message), Payload)
    with pytest.raises(VflError, match="failed: has no column"):  # the control
        read_reply(to_failure("has no column.", message), Payload)


def test_an_older_label_holder_is_told_so() -> None:
    message = to_message(DescribeOrder(outputs=1), 1, 60.0)
    del message.content["scalars"]["version"]
    with pytest.raises(VflError, match="the label holder runs an older version"):
        read_reply(client_app.app(message, node()), Payload)
