"""What tests do tens of thousands of times, in less time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from io import BytesIO
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

PLAIN = (Tensor, nn.Parameter)

TOLERANCES = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5)}
"""What `torch.testing.assert_close` takes where it is given none."""


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    msg: str | Callable[[str], str] | None = None,
    **options: Any,
) -> None:
    """`torch.testing.assert_close`, which takes longer to prepare its message than to compare small tensors.

    It is asked wherever two plain tensors are not alike in everything, or not close, and with other options.
    """
    __tracebackhide__ = True
    if (
        not options
        and type(actual) in PLAIN
        and type(expected) in PLAIN
        and actual.dtype is expected.dtype
        and actual.dtype in TOLERANCES
        and actual.shape == expected.shape
        and actual.device == expected.device
        and not actual.is_meta
        and actual.layout is torch.strided
        and expected.layout is torch.strided
        and (rtol is None) == (atol is None)
    ):
        relative, absolute = TOLERANCES[actual.dtype] if rtol is None or atol is None else (rtol, atol)
        if torch.allclose(actual, expected, relative, absolute, equal_nan):
            return
    CAREFUL(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan, msg=msg, **options)


CAREFUL = torch.testing.assert_close


class Copies(Generic[T]):
    """Copies of an object, as independent of each other as those of `deepcopy`: all but its tensors by `pickle`, in C.

    Functions and classes, which need no name here, are not copied by either.
    """

    def __init__(self, original: T) -> None:
        self.apart = dict[int, Any]()
        """What is not in the pickle, by its `id`."""
        self.places = dict[int, int]()
        """Their places in that order, to which the pickle refers."""
        file = BytesIO()
        Pickler(file, self.place_of).dump(original)
        self.pickled = file.getvalue()

    def place_of(self, value: Any) -> int | None:
        """Its place among what is not in the pickle, if it is not."""
        if not (isinstance(value, FunctionType | type) or hasattr(type(value), "__deepcopy__")):
            return None
        self.apart[id(value)] = value
        return self.places.setdefault(id(value), len(self.places))

    def new(self) -> T:
        """Another copy."""
        copied: T = Unpickler(BytesIO(self.pickled), deepcopy(list(self.apart.values()))).load()
        return copied


class Pickler(pickle.Pickler):
    """Writes places in place of some objects. (Since Python 3.13 these methods cannot be set on an object.)"""

    def __init__(self, file: BytesIO, place_of: Callable[[Any], int | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.place_of = place_of

    def persistent_id(self, obj: Any) -> int | None:
        return self.place_of(obj)


class Unpickler(pickle.Unpickler):
    """Reads them, given what stands at these places."""

    def __init__(self, file: BytesIO, values: Sequence[Any]) -> None:
        super().__init__(file)
        self.values = values

    def persistent_load(self, pid: int) -> Any:
        return self.values[pid]
