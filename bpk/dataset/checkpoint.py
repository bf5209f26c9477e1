"""A file from which a run that was killed goes on: written as a whole or not at all, and checked when it is read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bpk.jacobians.core.errors import explain, value_error

MAGIC = b"bpk checkpoint 1\n"
HEAD = len(MAGIC) + hashlib.sha256().digest_size


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Put a state into a file, in the place of the one before.

    Raises:
        OSError: If it cannot be written; what was there before stays as it is.
    """
    content = io.BytesIO()
    torch.save(dict(state), content)
    with replacing(path) as file:
        file.write(MAGIC + hashlib.sha256(content.getbuffer()).digest())
        file.write(content.getbuffer())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into that takes the place of the one before once it is whole, and leaves that alone otherwise.

    Raises:
        OSError: If it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        settle(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise not_written(path, error) from error


def settle(folder: Path) -> None:
    """Let the new name of a file survive a loss of power (where folders can be opened)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def not_written(
    path: Path,
    error: OSError,
    left: str = "what was written before is as it was; nothing that was added up since is kept",
    do: str = "start the same run again: it goes on from there",
) -> OSError:
    """The one error of a full disk, or a folder that cannot be written to."""
    text = explain(
        f"'{path}' could not be written: {error.strerror or error}.",
        f"{left}.",
        f"make room (or correct the path), and {do}.",
    )
    return type(error)(text) if error.errno is None else type(error)(error.errno, text)


def read(path: Path) -> dict[str, Any]:
    """The state in a file.

    Raises:
        ValueError: If the file is not what was written.
    """
    content = path.read_bytes()
    if content[: len(MAGIC)] != MAGIC:
        raise damaged(path, "it is no checkpoint of bpk, or its beginning is lost")
    if hashlib.sha256(content[HEAD:]).digest() != content[len(MAGIC) : HEAD]:
        raise damaged(path, "its checksum does not fit: it was cut off, or changed")
    return torch.load(io.BytesIO(content[HEAD:]), weights_only=True)


def damaged(path: Path, why: str) -> ValueError:
    """The refusal of a file."""
    return value_error(f"The checkpoint '{path}' is damaged.", f"{why}.", "delete it to begin anew, or restore a copy.")


def require_same(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse the checkpoint of another run, and say what differs."""
    other = [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]
    if other:
        key = other[0]
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        raise value_error(
            f"The checkpoint '{path}' belongs to another run: {key} differs{more}.",
            f"there it was {before.get(key, 'nothing')}, and here it is {now.get(key, 'nothing')}; sums of both "
            "would be those of nothing.",
            "pass the same model, loss, extensions and loader, or another checkpoint=.",
        )
