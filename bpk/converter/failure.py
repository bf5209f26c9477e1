"""What cannot be converted, and where: the error that names the line."""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Callable
from typing import Any

import torch

from bpk.jacobians.core.errors import explain


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
    files = [frame.filename.replace(os.sep, "/") for frame in frames_of(error)]
    return any("torch/_functorch/" in name or name.endswith("torch/nn/utils/stateless.py") for name in files)


def frames_of(error: BaseException) -> list[inspect.FrameInfo]:
    """The frames that an error went through."""
    return inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []


def user_line(error: BaseException) -> str:
    """`file:line, in function: code` of the innermost frame of the user's own code, or of a package that it calls."""
    packages = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ours = tuple(os.path.realpath(p) + os.sep for p in packages)
    installed = tuple(os.path.realpath(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "purelib", "platlib"))
    found = users = ""
    for frame in frames_of(error):
        path = os.path.realpath(frame.filename)
        if path.startswith(ours) or not os.path.exists(path):
            continue
        code = (frame.code_context or [""])[0].strip()
        found = f"{frame.filename}:{frame.lineno}, in {frame.function} (`{code}`),"
        if not path.startswith(installed):
            users = found
    return users or found


def line_of(function: Callable[..., Any]) -> str:
    """`file:line, in function` where a function is defined, if it has a file."""
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return ""
    return f"{plain.__code__.co_filename}:{plain.__code__.co_firstlineno}, in {plain.__name__},"
