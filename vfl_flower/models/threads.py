"""Share small computations of torch among threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def for_each(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Do some work for each item, on as many threads as torch has.

    Meanwhile, each operation of torch uses one thread. Threads that share every small operation
    would wait for each other.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        for each in items:
            work(each)
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, items):
                pass
    finally:
        torch.set_num_threads(threads)
