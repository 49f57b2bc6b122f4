"""Types of the arrays of the search, and how its inner loops are compiled."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[Any]
Record: TypeAlias = Any
"""One of the records; in compiled functions, its fields are attributes."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compiles a function at its first call for each type of its arguments, and stores the result on disk.

    numba compiles it again if the file of the function changes. So a compiled function calls only those of its own file.
    """
    try:
        return cast(_Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # No folder for the result can be written.
        return cast(_Function, numba.njit(nogil=True)(function))
