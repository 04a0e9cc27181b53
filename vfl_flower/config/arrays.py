"""The type of any NumPy array, and the largest magnitude of an array or a tensor."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def peak(rows: Any) -> float:
    """Return the largest magnitude of numbers, of NumPy or torch; NaN if one is NaN."""
    if 0 in rows.shape:
        return 0.0
    if not isinstance(rows, np.ndarray) and rows.is_cpu:
        rows = rows.numpy(force=True)  # NumPy takes half of torch's time, and shares the memory
    if isinstance(rows, np.ndarray):
        least, most = np.minimum.reduce(rows, None), np.maximum.reduce(rows, None)
    else:
        import torch

        least, most = torch.stack(rows.aminmax()).tolist()  # waits for the GPU once
    return max(-float(least), float(most))
