"""The peak memory that a run reports, and the versions of both sides."""

import ctypes
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from tests.conftest import Start
from tests.protocol import __main__ as protocol
from tests.serving import served
from vfl_flower import client_app
from vfl_flower.config import provenance
from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.config.protocol_version import DIGEST, VERSION
from vfl_flower.config.provenance import peak_memory_mb, running, shared_code
from vfl_flower.launch.engines import predict_local
from vfl_flower.transport.early_messages import AlignOrder
from vfl_flower.transport.messages import DescribeOrder, Order, Payload
from vfl_flower.transport.wire import Call, read_reply, to_failure, to_message

PRINTED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("provenance", sys.argv[1])
provenance = importlib.util.module_from_spec(spec)
spec.loader.exec_module(provenance)
print(provenance.peak_memory_mb())
"""


def test_the_peak_of_a_process_holds_its_arrays_and_nothing_of_its_parents() -> None:
    before = peak_memory_mb()
    parents = np.ones(2**24)  # 128 MiB
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


LATER = f"vfl-flower 9.0.0 (protocol {VERSION + 1}, code 0123456789ab)"
WORDED = f"vfl-flower 9.0.0 (protocol {VERSION}, code 0123456789ab)"
"""The next version differs in a word of a report, or in anything that no message carries."""


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


def test_an_older_side_that_compares_no_versions_is_told_so() -> None:
    message = to_message(DescribeOrder(outputs=1), 1, 60.0)
    older = "runs an older version, and the label holder runs vfl-fl"
    for cause, said in {
        "There is no option 'calibrate'. See `vfl list --all`.": older,
        "was sent a DescribeOrder that has an unknown field.": older,
        "has no column.": "failed: has no column",  # the control
    }.items():
        with pytest.raises(VflError, match=said):
            read_reply(to_failure(cause, message), Payload)
    del message.content["scalars"]["version"]
    with pytest.raises(VflError, match="the label holder runs an older version"):
        read_reply(client_app.app(message, node()), Payload)


def test_make_protocol_counts_on_if_asked_to() -> None:
    text = protocol.FILE.read_text()
    assert protocol.renewed(text, False) == text
    assert f"\nVERSION = {VERSION + 1}\n" in protocol.renewed(text, True)


def test_the_protocol_version_is_of_this_code() -> None:
    assert shared_code() == DIGEST, (
        "Code that label holder and parties share has changed. Run `make protocol` if an older "
        "side can still take part, else `make protocol VERSION=next`."
    )


def test_another_protocol_is_another_version() -> None:
    others = ["", "vfl-flower 0.2.0 (code 0123456789ab)", LATER, f"{LATER}\n", f"{WORDED} "]
    others += [WORDED.replace(f"protocol {VERSION}", "protocol "), f"{WORDED}, {LATER}"]
    assert not any(map(provenance.speaks, others))
    assert provenance.speaks(WORDED) and provenance.speaks(running())  # the control


def test_versions_of_one_protocol_train_predict_and_serve_together(
    tmp_path: Path, run: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, served_orders = client_app.app, set()

    def next_version(message: Message, context: Context) -> Message:
        """Serve an order as the next version's label holder sends it."""
        assert isinstance(message, Call) and isinstance(message.payload, Order)
        served_orders.add(message.payload.kind)
        message.payload = replace(message.payload, version=WORDED)
        return app(message, context)

    provenance._note_other_code.cache_clear()
    keys = {"dataset": "breast-cancer", "epochs": 1}
    with caplog.at_level(logging.INFO, "vfl_flower"):
        finished = run(2, keys, next_version)  # type: ignore[arg-type]
    assert finished.summary["test_accuracy"] == run(2, keys).summary["test_accuracy"]
    assert [each.message for each in caplog.records if "9.0.0" in each.message] == [
        f"The label holder runs {WORDED}, and this party {running()}."
    ]
    with monkeypatch.context() as patched:
        patched.setattr(client_app, "app", next_version)
        assert predict_local({"model": str(finished.folder)}).is_file()
    (tmp_path / "service").mkdir(0o700)
    with served(finished.folder, tmp_path / "service", client=next_version) as service:
        assert service.ask(*sorted(service.loaded.rows.ids.tolist())[:2])
    assert {"query.describe", "train"} < served_orders and len(served_orders) > 3


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone has it")
def test_freed_memory_goes_back_to_the_system_after_a_large_file_alone() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pieces = [b"x" * 60_000 for _ in range(2_000)]
    pins = pieces[::50]  # so that the heap does not shrink by itself
    del pieces
    before = resident()
    provenance.return_memory(99_999)
    assert before - resident() < 10e6  # the control
    provenance.return_memory(100_000)
    assert before - resident() > 60e6 and len(pins) == 40
