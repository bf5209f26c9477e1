"""Rows of all samples in files, which are read as arrays in place (`numpy.memmap`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bpk.dataset.checkpoint import not_written, replacing
from bpk.dataset.rows import BETWEEN, Stored, owner
from bpk.extensions.over_batches import Rows, Size
from bpk.jacobians.core.errors import value_error

PIECE = 1 << 24
"""How many bytes are scaled at a time."""


class OnDisk(Stored):
    """A file `<field>/<parameter>.npy` for each field of each parameter, of rows `[N, ...]`.

    Rows of the summed loss are appended to `.rows` files, which become `.npy` when the divisor is known. `types` are
    those of NumPy.
    """

    def __init__(self, rules: Mapping[str, Rows], folder: Path) -> None:
        super().__init__(rules)
        import_numpy()
        self.folder = folder
        self.types: dict[tuple[str, str], str] = {}

    def path(self, key: tuple[str, str], ending: str) -> Path:
        """The file of a field of a parameter."""
        return self.folder.joinpath(key[0], f"{key[1].replace(BETWEEN, '.')}.{ending}")

    def begin(self) -> None:
        """Refuse a folder that holds another result; what a run without checkpoints left is overwritten."""
        old = next(self.folder.glob("*/*.npy"), None)
        if old is not None:
            raise value_error(
                f"The folder '{self.folder}' holds rows of an earlier run ('{old.relative_to(self.folder)}').",
                "they would be overwritten, or taken for those of this run.",
                "pass another folder as per_sample=, or delete this one.",
            )
        self.remove_others()

    def remove_others(self) -> None:
        """Remove rows that no checkpoint speaks of: a run was killed before it had written one."""
        known = {self.path(key, "rows") for key in self.shapes}
        for path in self.folder.glob("*/*.rows"):
            if path not in known:
                path.unlink()

    def append(self, field: str, name: str, rows: Tensor) -> None:
        key = field, name
        path = self.path(key, "rows")
        array = rows.cpu().contiguous().numpy()
        array = array.astype(self.types.setdefault(key, array.dtype.str), copy=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(array.data)
        except OSError as error:
            raise not_written(path, error) from error

    def whole(self, size: Size) -> dict[str, dict[str, Any]]:
        return self.together((field, name, self.array(field, name, size)) for field, name in self.shapes)

    def array(self, field: str, name: str, size: Size) -> Any:
        """The rows of one large batch of this size, read in place."""
        numpy, key, rule = import_numpy(), (field, name), self.rules[field]
        if self.path(key, "rows").exists():  # else a run that was killed had come so far
            self.finish(key, 1 / size.weight(rule.power_of(owner(name)[1])))
        return numpy.moveaxis(numpy.load(self.path(key, "npy"), mmap_mode="r"), 0, rule.axis)

    def finish(self, key: tuple[str, str], factor: float) -> None:
        """Write the rows of the loss itself."""
        numpy = import_numpy()
        rows, kind = self.path(key, "rows"), numpy.dtype(self.types[key])
        with replacing(self.path(key, "npy")) as file, open(rows, "rb") as source:
            head = {"descr": kind.str, "fortran_order": False, "shape": (self.count, *self.shapes[key])}
            numpy.lib.format.write_array_header_1_0(file, head)
            while piece := source.read(PIECE):
                file.write((numpy.frombuffer(piece, kind) * kind.type(factor)).data)
        rows.unlink()

    # ---- checkpoints ------------------------------------------------------------------------------
    def state(self) -> Any:
        for key in self.shapes:
            path = self.path(key, "rows")
            if path.exists():
                with open(path, "ab") as file:
                    os.fsync(file.fileno())
        return self.shapes, self.types, self.count

    def restore(self, state: Any, done: bool) -> None:
        self.shapes, self.types, self.count = state
        self.remove_others()
        numpy = import_numpy()
        for key, shape in self.shapes.items():
            path = self.path(key, "rows")
            size = numpy.dtype(self.types[key]).itemsize * self.count
            for length in shape:
                size *= length
            if done and not path.exists() and self.path(key, "npy").exists():
                continue
            if not path.exists() or path.stat().st_size < size:
                raise value_error(
                    f"The file '{path}' is shorter than the {self.count} rows that the checkpoint speaks of.",
                    "it was cut off, or belongs to another run.",
                    "delete the checkpoint and the folder to begin anew, or restore a copy.",
                )
            os.truncate(path, size)


def import_numpy() -> Any:
    """NumPy, which torch can do without."""
    try:
        import numpy
    except ImportError as error:
        raise ImportError("Rows on disk are NumPy arrays: pip install numpy") from error
    return numpy
