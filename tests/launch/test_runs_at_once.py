"""A SuperNode serves several runs at once: a training or a prediction beside a service."""

import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pandas as pd
import pytest

from tests.fleet import evaluations, fleet, until
from vfl_flower.launch.processes import reserved_port
from vfl_flower.transport.flower_processes import RUNS_AT_ONCE, serve_runs_at_once


class Node:
    """A SuperNode's state and loop, with a SuperLink that a test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flower: Any = import_module("flwr.supernode.start_client_internal")
        store = import_module("flwr.supercore.object_store").ObjectStoreFactory()
        self.state = import_module("flwr.supernode.nodestate").NodeStateFactory(store).state()
        self.coming: list[int] = []  # runs whose messages the SuperLink has
        self.tasks: dict[int, int] = {}  # run -> its last task

        def pull(state: Any, receive: Any) -> int | None:
            """Flower's function, without its calls to the SuperLink."""
            if not (found := receive()):
                return None
            run: int = found[0].metadata.run_id
            state.store_message(found[0])
            self.tasks[run] = state.create_task(task_type="flwr-clientapp", run_id=run)
            return run

        monkeypatch.setattr(self.flower, "_pull_and_store_message", pull)

    def turn(self) -> list[int]:
        """One turn of the loop, without waits; return the runs whose answers are sent."""
        receive = lambda: (message(self.coming.pop(0)), None) if self.coming else None  # noqa: E731
        if self.flower._pull_and_store_message(state=self.state, receive=receive) is None:
            return []
        answers = self.state.get_messages_legacy(is_reply=True)
        self.state.delete_messages(
            message_ids=[
                each
                for answer in answers
                for each in (answer.metadata.message_id, answer.metadata.reply_to_message_id)
            ]
        )
        return [answer.metadata.run_id for answer in answers]

    def turns(self, *runs: int) -> None:
        self.coming += runs
        for _ in range(len(runs) + 1):
            self.turn()

    def answer(self, run: int) -> None:
        """Answer the message of a run, whose task ends."""
        token = self.state.claim_task(self.tasks[run])
        assert token and self.state.activate_task(self.tasks[run])
        self.state.store_message(message(run, replies=True))
        assert self.state.finish_task(self.tasks[run], "completed", "")

    @property
    def served(self) -> list[int]:
        found = self.state.get_tasks(statuses=["pending", "starting", "running"])
        return sorted(task.run_id for task in found)


def message(run: int, replies: bool = False) -> Any:
    order = f"order of {run}"
    names = {"message_id": f"answer to {order}" if replies else order}
    names["reply_to_message_id"] = order if replies else ""
    return SimpleNamespace(metadata=SimpleNamespace(run_id=run, **names))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    found = Node(monkeypatch)
    serve_runs_at_once()
    return found


def test_a_second_run_is_served_before_the_first_has_answered(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.turns(1, 2)
    assert node.served == [1, 2]
    node.answer(2)
    assert node.turn() == [2] and node.served == [1]
    of_flower = Node(monkeypatch)  # the control: its loop would wait for an answer to the first
    of_flower.coming = [1, 2]
    waits = of_flower.flower._pull_and_store_message
    assert waits(of_flower.state, lambda: (message(of_flower.coming.pop(0)), None)) == 1


def test_a_run_has_one_task_at_a_time(node: Node) -> None:
    """A second would begin from an older state."""
    node.turns(1, 1, 2)
    assert node.served == [1, 2]
    node.answer(1)
    assert node.turn() == [1]
    node.turn()
    assert node.served == [1, 2]


def test_a_run_waits_where_as_many_are_served_and_the_log_says_for_which(
    node: Node, own_log: list[str]
) -> None:
    runs = list(range(1, RUNS_AT_ONCE + 1))
    node.turns(*runs, 77)
    node.turn()
    assert node.served == runs
    (said,) = [line for line in own_log if "waits" in line]
    assert said.startswith("Run 77 waits: this SuperNode serves runs 1, 2, 3, 4, and no more")
    node.answer(2)
    for _ in range(2):
        node.turn()
    assert node.served == [1, 3, 4, 77]


def test_the_functions_of_flower_are_as_they_are_replaced() -> None:
    flower: Any = import_module("flwr.supernode.start_client_internal")
    names = inspect.signature(flower._pull_and_store_message).parameters
    assert {"state", "receive"} <= names.keys()
    loop = inspect.getsource(flower.start_client_internal)
    assert "run_id = _pull_and_store_message(\n                state=state," in loop
    assert "receive=receive," in loop
    assert "if run_id is None:" in loop and "_push_messages(" in loop


@pytest.mark.slow
@pytest.mark.nightly
def test_training_and_a_prediction_beside_a_service(tmp_path: Path) -> None:
    keys = {"strategy": "split-nn", "dataset": "breast-cancer", "epochs": 3}
    with fleet(2, tmp_path) as nodes, reserved_port() as port:
        run, log = nodes.finish(nodes.submit(keys)), tmp_path / "serve.log"
        serving = {"task": "serve", "model": str(run.folder), "score-timeout": 10.0}
        serving |= {"serve-address": f"127.0.0.1:{port}"}
        service = nodes.superlink.submit(serving, 2, log)
        until(lambda: "is served at" in log.read_text())
        token = (run.folder / "serve.token").read_text().split()[1]

        def score() -> Any:
            said = httpx.post(
                f"http://127.0.0.1:{port}/v1/predict",
                json={"ids": [0, 1]},
                headers={"Authorization": f"Bearer {token}"},
                timeout=60,
            )
            assert said.status_code == 200, said.text
            return said.json()["predictions"]

        first = score()
        beside = nodes.submit({**keys, "epochs": 60, "window": 1, "patience": 0.0})
        until(lambda: evaluations(beside[1]) >= 1 or beside[0].poll() is not None)
        assert score() == first  # while it trains
        out = tmp_path / "scores.csv"
        predicting = {"task": "predict", "model": str(run.folder), "out": str(out)}
        assert nodes.superlink.submit(predicting, 2, tmp_path / "predict.log").wait(120) == 0
        assert len(pd.read_csv(out)) == 114
        assert nodes.finish(beside).summary["test_accuracy"] > 0.9
        assert score() == first and service.poll() is None
        for app in nodes.server_apps():
            app.terminate()
        service.wait(60)
