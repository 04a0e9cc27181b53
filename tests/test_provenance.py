"""The peak memory that a run reports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from vfl_flower.config import provenance
from vfl_flower.config.provenance import peak_memory_mb

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
