"""What a user asks about: a model, what it takes to evaluate a loss, and extensions by their names."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bpk.command_line.errors import UserError, close_to, described
from bpk.command_line.locate import find
from bpk.extensions import HBP
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension

KEYS = ("model", "loss", "inputs", "targets")
CONVENTION = "a factory returns (model, loss, inputs, targets), a dict with these keys, or a model"


@dataclass(frozen=True)
class Given:
    """A model, and perhaps a loss and data."""

    model: nn.Module
    loss: nn.Module | Callable[..., Tensor] | None = None
    inputs: Any = None
    targets: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to name a factory, data for one that returns only a model, and extensions."""
    parser.add_argument("factory", help="module:factory or path/to/file.py:factory; " + CONVENTION)
    parser.add_argument(
        "--input-shape", type=numbers, metavar="3,64,64", help="of one sample, if there is only a model"
    )
    parser.add_argument("--classes", type=int, help="number of classes, if there is only a model")
    parser.add_argument("--batch", type=int, default=2, help="number of samples, if there is only a model (default: 2)")
    parser.add_argument("--eval", action="store_true", help="put the model into evaluation mode")
    parser.add_argument("--seed", type=int, default=0, help="for the factory, data, and the choice of entries")
    parser.add_argument("--quantities", metavar="BatchGrad,KFAC,...", help="names of extensions (default: all)")


def numbers(text: str) -> tuple[int, ...]:
    """`3,64,64` as numbers."""
    return tuple(int(part) for part in text.replace("x", ",").split(","))


def given(options: argparse.Namespace) -> Given:
    """What the factory returns, in evaluation mode if asked.

    Raises:
        UserError: If there is none, it raises, or returns something else.
    """
    name, made = options.factory, find(options.factory)
    torch.manual_seed(options.seed)
    if callable(made) and not isinstance(made, nn.Module):
        made = called(name, made)
    if isinstance(made, nn.Module):
        made = (made,)
    if not isinstance(made, Mapping) and not (isinstance(made, (tuple, list)) and 1 <= len(made) <= len(KEYS)):
        raise UserError(f"{name} returned {described_value(made)}: {CONVENTION}")
    parts = dict(made) if isinstance(made, Mapping) else dict(zip(KEYS, made, strict=False))
    for key in parts:
        if key not in KEYS:
            raise UserError(f"{name} returned a dict with the key '{key}': {CONVENTION}")
        picks = key == "loss" and callable(parts[key]) and not isinstance(parts[key], type)
        if key in ("model", "loss") and not (picks or isinstance(parts[key], nn.Module)):
            raise UserError(f"{name} returned {described_value(parts[key])} as {key}, which is no module (nn.Module)")
    if "model" not in parts:
        raise UserError(f"{name} returned no model: {CONVENTION}")
    if options.eval:
        parts["model"].eval()
    return Given(**parts)


def called(name: str, factory: Any) -> Any:
    """The result of a factory."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UserError(f"{name} is called without arguments, but {error}") from error
    except ValueError:  # a callable without a signature
        pass
    try:
        return factory()
    except Exception as error:  # whatever the user's code raises
        raise UserError(f"{name} raised: {described(error)}") from error


def described_value(value: object) -> str:
    """A short description of a value that is not what it should be."""
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"


def completed(options: argparse.Namespace) -> Given:
    """What the factory gives, with data and a loss for classification where it returns only a model."""
    found = given(options)
    if found.loss is not None:
        if found.inputs is None:
            raise UserError(f"{options.factory} returned no inputs: {CONVENTION}")
        return found
    wanted = {"--input-shape": options.input_shape, "--classes": options.classes}
    missing = [flag for flag, value in wanted.items() if not value]
    if missing:
        raise UserError(
            f"{options.factory} returned a model without loss and data: give {' and '.join(missing)} "
            "for classification with cross-entropy, or return (model, loss, inputs, targets)"
        )
    torch.manual_seed(options.seed)
    inputs = torch.randn(options.batch, *options.input_shape)
    targets = torch.randint(options.classes, (options.batch,))
    return Given(found.model, nn.CrossEntropyLoss(), inputs, targets)


def named(names: str | None) -> tuple[BackpropExtension, ...]:
    """`BatchGrad,KFAC` as extensions; all of them where nothing is asked for."""
    if not names:
        return every_extension()
    known = {type(extension).__name__: extension for extension in every_extension()}
    also = {"HBP": HBP()}
    asked = list(dict.fromkeys(part.strip() for part in names.split(",")))
    for name in asked:
        if name not in known | also:
            hint = close_to(name, list(known)) or f"; there are {', '.join(known)}"
            raise UserError(f"there is no quantity '{name}'{hint}")
    return tuple((known | also)[name] for name in asked)
