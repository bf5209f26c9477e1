"""Results in files of the safetensors format, with all else that is known of them as metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpk.dataset.checkpoint import not_written
from bpk.jacobians.core.errors import value_error
from bpk.plan.parts import from_parts, in_parts
from bpk.recording.context.surroundings import is_sharded
from bpk.utils.ekfac import Eigenbasis

KEY = "bpk"
"""Under which name the metadata are kept."""


def save(path: Path, fields: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
    """Write fields, lists of factors and sparse matrices among them; of rows on disk only where they are."""
    needs_safetensors()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    shown: dict[str, dict[str, Any]] = {}
    for name, values in fields.items():
        for field, value in values.items():
            shown.setdefault(name, {})[field] = noted(f"{name}/{field}", value, tensors)
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, {KEY: json.dumps({**about, "fields": shown})})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        known = error if isinstance(error, OSError) else OSError(None, str(error))
        raise not_written(path, known, "the result is as it was", "save it again") from error


def noted(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Put the tensors of a value aside; returns how it is made of them."""
    if isinstance(value, list):
        return [noted(f"{key}/{number}", part, tensors) for number, part in enumerate(value)]
    if isinstance(value, Eigenbasis):
        return {"eigenbasis": [noted(key, value.bases, tensors), noted(f"{key}/moments", value.moments, tensors)]}
    if not isinstance(value, Tensor):  # an array in a file
        return {"file": str(value.filename), "shape": list(value.shape), "strides": list(value.strides)}
    if is_sharded(value):
        raise value_error(
            f"'{key}' is in shards, and cannot be saved in one file.",
            "each process has a part of it only.",
            "call full_tensor() on all processes, or torch.distributed.checkpoint.save(result.fields).",
        )
    if value.is_complex():  # which the format does not know
        return {"complex": noted(key, in_parts(value), tensors)}
    if value.is_sparse:
        value = value.coalesce()
        tensors[f"{key}/indices"], tensors[f"{key}/values"] = value.indices().contiguous(), value.values().contiguous()
        return {"sparse": key, "size": list(value.shape)}
    tensors[key] = value.detach().contiguous().clone()  # memory of its own, which the format asks for
    return key


def load(path: Path) -> dict[str, Any]:
    """What was saved: `fields`, and all that was said about them."""
    needs_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[KEY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise value_error(
            f"'{path}' is no result of bpk.accumulate, or damaged.",
            f"{type(error).__name__}: {error}.",
            "pass a file that Accumulated.save(path) has written.",
        ) from error
    fields = about["fields"]
    about["fields"] = {
        name: {field: restored(value, tensors) for field, value in of.items()} for name, of in fields.items()
    }
    return about


def restored(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value from what was noted."""
    if isinstance(value, list):
        return [restored(part, tensors) for part in value]
    if isinstance(value, str):
        return tensors[value]
    if "eigenbasis" in value:
        return Eigenbasis(*restored(value["eigenbasis"], tensors))
    if "complex" in value:
        return from_parts(restored(value["complex"], tensors))
    if "file" in value:
        import numpy

        rows, like = numpy.load(value["file"], mmap_mode="r"), (value["shape"], value["strides"])
        moved = (numpy.moveaxis(rows, 0, axis) for axis in range(rows.ndim))
        return next(x for x in moved if (list(x.shape), list(x.strides)) == like)
    key = value["sparse"]
    return torch.sparse_coo_tensor(
        tensors[f"{key}/indices"], tensors[f"{key}/values"], value["size"], is_coalesced=True, check_invariants=False
    )


def needs_safetensors() -> None:
    """Say what to install where the package that reads and writes the format is missing."""
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError("Results are saved by safetensors: pip install 'bpk[results]' (or safetensors)") from error
