"""The states of all random generators that a run draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader


class Randomness:
    """The generators of Python, NumPy (if it was imported), torch, its CUDA devices, and those of a loader."""

    def __init__(self, loader: Any) -> None:
        self.generators = generators_of(loader)

    def now(self) -> dict[str, Any]:
        """Their states."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = (kind, keys.tolist(), *rest)
        state["loader"] = [generator.get_state() for generator in self.generators]
        return state

    def set(self, state: dict[str, Any]) -> None:
        """Put them into these states."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            torch.cuda.set_rng_state_all(state["cuda"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])  # noqa: NPY002 (its global generator is what data sets draw from)
        for generator, known in zip(self.generators, state["loader"], strict=True):
            generator.set_state(known)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Those of a loader and its samplers, each once."""
    holders: list[Any] = [loader]
    if isinstance(loader, DataLoader):
        holders += [loader.sampler, loader.batch_sampler]
    holders += [
        vars(holder)["sampler"] for holder in holders if hasattr(holder, "__dict__") and "sampler" in vars(holder)
    ]
    found = [vars(holder).get("generator") for holder in holders if hasattr(holder, "__dict__")]
    known = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(known.values())
