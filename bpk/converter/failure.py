"""What cannot be converted, and where: the error that names the line."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

from bpk.jacobians.core.errors import PACKAGES, explain, users_frames


class ConversionError(NotImplementedError):
    """A model's forward pass cannot be written as a graph.

    Attributes:
        where: File, line and code where it happens, if that is known.
        reason: What stands in the way.
        why: Why the converter cannot take that.
    """

    def __init__(self, model: object, reason: str, why: str, do: str, where: str = "") -> None:
        what = f"{type(model).__name__} cannot be converted: {where or 'its forward pass'} {reason}."
        super().__init__(explain(what, why, do))
        self.where = where
        self.reason = reason
        self.why = why


WITHOUT = (
    "use bpk.extend(model) without use_converter=True, which takes any forward pass, or move that line into a "
    "module of its own and bpk.register() a rule for it."
)
"""What to do where a forward pass is no graph."""


def not_a_graph(root: object, error: Exception) -> ConversionError:
    """What is raised where a forward pass cannot be traced."""
    reason = f"cannot be written down as a graph of calls ({type(error).__name__}: {error})"
    why = (
        "the converter goes through the forward pass once, before any input is known, so that Python cannot branch or "
        "loop on values or shapes, and nothing is remembered from one call to the next."
    )
    if uses_transform(error):
        reason = f"calls a transform of torch.func, or a module with other parameters ({type(error).__name__}: {error})"
        why = (
            "such calls evaluate a function of tensors while the forward pass is written down, and there are none "
            "before the model runs."
        )
    return ConversionError(root, reason, why, WITHOUT, user_line(error))


class Transformed(RuntimeError):
    """Found while a forward pass is written down: it happens inside of `torch.func`."""


def uses_transform(error: BaseException) -> bool:
    """Whether an error comes from `torch.func`: `vmap`, `grad`, `jvp`, `functional_call`, ..."""
    if isinstance(error, Transformed):
        return True
    files = [frame.filename.replace(os.sep, "/") for frame in traceback.extract_tb(error.__traceback__)]
    return any("torch/_functorch/" in name or name.endswith("torch/nn/utils/stateless.py") for name in files)


def user_line(error: BaseException) -> str:
    """`file:line, in function: code` of the innermost frame of the user's own code, or of a package that it calls."""
    frames = users_frames(error)
    users = [frame for frame in frames if PACKAGES not in frame.filename] or frames
    return f"{users[-1].filename}:{users[-1].lineno}, in {users[-1].name} (`{users[-1].line}`)," if users else ""


def line_of(function: Callable[..., Any]) -> str:
    """`file:line, in function` where a function is defined, if it has a file."""
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return ""
    return f"{plain.__code__.co_filename}:{plain.__code__.co_firstlineno}, in {plain.__name__},"
