"""Expert settings: what a system or an experiment decides, in the option `expert`."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import KEYS, OPTIONS, flower_defaults, opened, packed, parse
from vfl_flower.protocol.system import System
from vfl_flower.protocol.systems import refuse_places, resolve
from vfl_flower.tools import listing
from vfl_flower.tools.cli import main
from vfl_flower.tools.options import given

EXPERT = {name: each for name, each in KEYS.items() if each.expert}


def test_a_setting_has_the_same_meaning_in_the_option_beside_options_and_in_a_system() -> None:
    text = "mu=0.1 directions=sphere noise-seed=3 bottom-bias=false"
    settings = {"mu": 0.1, "directions": "sphere", "noise-seed": 3, "bottom-bias": False}
    config = resolve({"strategy": "cascaded", **settings})
    for expert in (text, settings):
        assert opened({"epochs": 2, "expert": expert}) == {"epochs": 2, **settings}
        assert resolve({"strategy": "cascaded", "expert": expert}) == config
    system = System("own", "A system.", defaults=settings)
    assert parse(system.defaults) == settings
    assert resolve({"strategy": "cascaded", "expert": "auto"}) == resolve({"strategy": "cascaded"})


def test_settings_that_are_packed_can_be_opened() -> None:
    values = {name: each.default for name, each in KEYS.items() if each.default is not None}
    values |= {"tokenizer": "/a folder/b", "mu": 1e-7, "bottom-bias": False}
    there = packed(values)
    assert there.keys() <= OPTIONS.keys() and opened(there) == values
    assert packed(there) == there and packed({"epochs": 1}) == {"epochs": 1}
    assert flower_defaults().keys() == OPTIONS.keys()  # Flower accepts no others


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"expert": "epochs=3"}, "expert names 'epochs', which is no expert setting"),
        ({"expert": "muh=3"}, "expert names 'muh', which is no expert setting: Did you mean mu?"),
        ({"expert": "mu"}, r"expert = 'mu' is no settings\. Write name=value"),
        ({"expert": "mu='1"}, "is no settings"),
        ({"expert": 3}, "expert = 3 is no settings"),
        ({"expert": "mu=0.1", "mu": 0.1}, "mu is given twice: in expert, and beside it"),
        ({"expert": "mu=small"}, "mu = 'small' "),
        ({"expert": "noise-seed=0.5"}, "noise-seed = 0.5 "),
        ({"expert": "bottom-bias=1"}, "bottom-bias = '1' "),
        ({"expert": "perturbs=some"}, "perturbs = 'some' is not known"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(raw)


def test_a_node_takes_no_code_by_a_setting() -> None:
    for raw in ({"expert": "directions=evil.py:Run"}, {"expert": {"sampling": "a.b:Run"}}):
        with pytest.raises(ConfigError, match="names code, which a node does not take"):
            refuse_places(raw)
    refuse_places({"expert": "directions=sphere"})  # the control


def test_a_command_says_how_to_write_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "mu is an expert setting, not an option: write expert='mu=0.1'."
    for command in (["run", "-c", "mu=0.1"], ["compare", "cascaded mu=0.1"]):
        assert main(command) != 0
        assert sentence in capsys.readouterr().err
    _, keys, _ = given(["expert='mu=0.1'", "epochs=3 expert='delay=poisson'"], None)
    assert keys == {"mu": 0.1, "epochs": 3, "delay": "poisson"}


def test_the_example_that_is_shown_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    for name, setting in EXPERT.items():
        words = shlex.split(listing._command(setting).replace("\\\n", ""))
        _, keys, _ = given([words[at + 1] for at, word in enumerate(words) if word == "-c"], None)
        assert resolve(keys).values()[name] == keys[name]
