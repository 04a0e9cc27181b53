"""Examples in docstrings run, and print what they show."""

from __future__ import annotations

import doctest
import logging
from importlib import import_module
from typing import Any

import pytest

import vfl_flower

STARTS_PROCESSES = ("run_ray", "run_supernodes")


def examples_of(found: Any, name: str) -> list[doctest.DocTest]:
    """Return the examples in the docstring of a function or class, and of its methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = import_module(found.__module__)
    return [each for each in finder.find(found, name, module) if each.examples]


def run(found: Any, name: str) -> list[str]:
    """Run the examples, and return what failed."""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    for each in examples_of(found, name):
        each.globs = {}  # an example imports what it uses
        runner.run(each, out=said.append)
    return said


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)


def test_every_public_name_has_an_example() -> None:
    assert all(examples_of(getattr(vfl_flower, name), name) for name in vfl_flower.__all__)
    assert not examples_of(run, "run")  # the control


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", sorted(vfl_flower.__all__, key=STARTS_PROCESSES.__contains__))
def test_an_example_runs(name: str) -> None:
    assert run(getattr(vfl_flower, name), name) == []


def test_an_example_that_prints_something_else_is_found() -> None:
    """The control."""

    def wrong() -> None:
        """Return nothing.

        >>> 1 + 1
        3
        """

    assert run(wrong, "wrong")
