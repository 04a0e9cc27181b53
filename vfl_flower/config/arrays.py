"""The type of any NumPy array."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
