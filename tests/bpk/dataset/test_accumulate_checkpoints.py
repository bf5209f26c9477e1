"""Runs of `bpk.accumulate` that are killed, go on, or find a file that is not theirs."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bpk
from bpk import extensions as E
from bpk.dataset import checkpoint
from bpk.dataset.fingerprint import settings
from bpk.dataset.keeper import Keeper
from tests.helpers import mlp

ROOT = Path(__file__).parents[3]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bpk.dataset.accumulate_worker", str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "."})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no such signal")
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    begun = start(tmp_path / "whole")
    begun.communicate(timeout=120)
    draw, killed = random.Random(0), 0
    while True:
        worker = start(tmp_path / "killed", "checkpointed")
        assert worker.stdout is not None
        for _ in range(draw.randint(1, 11)):
            worker.stdout.readline()
        if killed < 4:
            worker.kill()
            killed += 1
        worker.communicate(timeout=120)
        assert worker.returncode in (0, -signal.SIGKILL)
        if killed == 4 and worker.returncode == 0:
            break
    expected, found = (torch.load(tmp_path / name / "found.pt") for name in ("whole", "killed"))
    assert expected["0.weight"]["grad_batch"].shape == (60, 8, 4)
    for name, fields in expected.items():
        for field, value in fields.items():
            pairs = zip(*[v if isinstance(v, list) else [v] for v in (found[name][field], value)], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (name, field)


class Stopped(Exception):
    """The end of a process, so to speak."""


def stopping(batches: list[tuple[Tensor, Tensor]], at: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first batches, and then the end."""
    for number, batch in enumerate(batches):
        if number == at:
            raise Stopped
        yield batch


def problem(count: int = 7) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    sizes = [1 + k % 3 for k in range(count)]
    return mlp(), [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]


def go(path: Path, model: nn.Module, batches: Any, *extensions: Any, **options: Any) -> bpk.Accumulated:
    loss = options.pop("loss_fn", nn.CrossEntropyLoss())
    return bpk.accumulate(
        model, loss, batches, *(extensions or (E.Variance(), E.KFLR())), checkpoint=path, every=2, **options
    )


def interrupted(path: Path, at: int = 5) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A run that came to an end in the middle."""
    model, batches = problem()
    with pytest.raises(Stopped):
        go(path, model, stopping(batches, at))
    return model, batches


@pytest.mark.parametrize("at", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("rows", ["memory", "disk"])
def test_goes_on(tmp_path: Path, at: int, rows: str) -> None:
    model, batches = problem()
    some = E.Variance(), E.KFAC(), E.SqrtGGNMC(2)
    place = {name: True if rows == "memory" else tmp_path / name for name in ("one", "two")}
    torch.manual_seed(1)
    expected = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, *some, per_sample=place["one"])
    after = torch.rand(1)
    torch.manual_seed(1)
    with pytest.raises(Stopped):
        go(tmp_path / "run", model, stopping(batches, at), *some, per_sample=place["two"])
    torch.manual_seed(2)
    found = go(tmp_path / "run", model, iter(batches), *some, per_sample=place["two"])
    for name, fields in expected.items():
        for field, value in fields.items():
            parts = [
                v if isinstance(v, list) else [torch.as_tensor(v.copy() if rows == "disk" and "sqrt" in field else v)]
                for v in (found[name][field], value)
            ]
            assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True)), (name, field)
    assert torch.equal(torch.rand(1), after), "generators are where a run without a stop leaves them"
    again = go(tmp_path / "run", model, iter([]), *some, per_sample=place["two"])
    assert again.batches == 7 and again.loss == found.loss, "what is done needs no data"


@pytest.mark.processor("torch's loaders draw there")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_loader_goes_on_in_the_same_order(tmp_path: Path, workers: int) -> None:
    """Without a generator of its own, it shuffles by torch's."""
    model, _ = problem()
    data = TensorDataset(torch.arange(12.0, dtype=torch.float64)[:, None].expand(12, 4), torch.arange(12) % 3)
    seen: list[float] = []

    def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        if len(seen) == stop:
            raise Stopped
        seen.extend(batch[0][:, 0].tolist())
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    stop = 10
    with pytest.raises(Stopped):
        go(tmp_path / "run", model, DataLoader(data, 2, shuffle=True, num_workers=workers), step=step)
    del seen[8:]  # the checkpoint is that after four batches
    stop = -1
    go(tmp_path / "run", model, DataLoader(data, 2, shuffle=True, num_workers=workers), step=step)
    assert sorted(seen) == list(range(12)) and seen != sorted(seen)


@pytest.mark.processor("torch's loaders draw there")
@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"drop_last": True}])
def test_persistent_workers_go_on_in_the_same_order(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of the same loader, in the same process: its generator gives another order once workers have their seeds."""
    model, _ = problem()
    data = TensorDataset(torch.arange(13.0, dtype=torch.float64)[:, None].expand(13, 4), torch.arange(13) % 3)
    draws, seen = torch.Generator().manual_seed(1), list[Any]()
    loader = DataLoader(
        data, **{"batch_size": 2} | options, shuffle=True, num_workers=1, persistent_workers=True, generator=draws
    )

    def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        if len(seen) == stop:
            raise Stopped
        seen.append(batch)
        loss: Tensor = loss_fn(model(batch[0].reshape(-1, 4)), batch[1].reshape(-1))
        return loss

    stop = 4
    with pytest.raises(Stopped):
        go(tmp_path / "run", model, loader, step=step)
    stop = -1
    go(tmp_path / "run", model, loader, step=step)
    numbers = [n for x, _ in seen for n in x.reshape(-1, 4)[:, 0].tolist()]
    assert len(set(numbers)) == len(numbers) == (12 if options.get("drop_last") else 13)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, batches = interrupted(path)
    content = path.read_bytes()
    draw = random.Random(0)
    places = [0, 20, len(content) - 1, *(draw.randrange(len(content)) for _ in range(20))]
    spoilt = [content[:k] + bytes([content[k] ^ 1]) + content[k + 1 :] for k in places]
    for wrong in (*spoilt, content[:-1], content[:30], b"", content + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"checkpoint '{path}' is damaged.*\n.*\n.*delete it"):
            go(path, model, iter(batches))
    path.write_bytes(content)
    assert go(path, model, iter(batches)).batches == 7


def test_checkpoints_of_other_runs_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, batches = interrupted(path)
    changed = problem()[0]
    with torch.no_grad():
        changed[0].bias[1] += 1e-15  # type: ignore[index, operator, union-attr]
    with pytest.raises(ValueError, match=rf"'{path}' belongs to another run: the model's tensor '0.bias' differs"):
        go(path, changed, iter(batches))
    with pytest.raises(ValueError, match="the model's layer '1' differs"):
        go(path, nn.Sequential(model[0], nn.Tanh(), model[2]), iter(batches))  # type: ignore[index]
    with pytest.raises(ValueError, match="extension kflr differs"):
        go(path, model, iter(batches), E.Variance(), E.KFLR("expand"))
    with pytest.raises(ValueError, match="extension kflr differs"):
        go(path, model, iter(batches), E.Variance())
    with pytest.raises(ValueError, match=r"the loss's layer '' differs.*\n.*ignore_index=1"):
        go(path, model, iter(batches), loss_fn=nn.CrossEntropyLoss(ignore_index=1))
    with pytest.raises(ValueError, match=r"loader ended after 1 batches.*\n.*written after 4"):
        go(path, model, iter(batches[:1]))
    assert go(path, model, iter(batches)).batches == 7


def test_checkpoints_of_another_divisor_are_refused(tmp_path: Path) -> None:
    """A run that is whole, too: it would give what the other divisor made."""
    model, batches = problem()
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    go(tmp_path / "run", model, iter(batches), loss_fn=loss_fn, divisor="sum")
    with pytest.raises(ValueError, match=r"divisor= differs.*\n.*there it was 'sum'"):
        go(tmp_path / "run", model, iter(batches), loss_fn=loss_fn, divisor=lambda batch: len(batch[0]))


@pytest.mark.parametrize(("before", "after"), [("memory", "disk"), ("disk", "memory"), ("memory", "callback")])
def test_checkpoints_of_rows_that_went_elsewhere_are_refused(tmp_path: Path, before: str, after: str) -> None:
    model, batches = problem()
    places: dict[str, dict[str, Any]] = {
        "memory": {"per_sample": True},
        "disk": {"per_sample": tmp_path / "rows"},
        "callback": {"per_sample": True, "callback": lambda number, fields: None},
    }
    go(tmp_path / "run", model, iter(batches), E.BatchL2Grad(), **places[before])
    with pytest.raises(ValueError, match="belongs to another run: where rows of samples go differs"):
        go(tmp_path / "run", model, iter(batches), E.BatchL2Grad(), **places[after])


def test_functions_in_a_tuple_are_known_by_what_they_do() -> None:
    """Not by their addresses, which another process does not have."""

    def described(factor: int) -> str:
        layer = nn.Linear(2, 2)
        layer.functions = (lambda x: factor * x, "twice", 2)  # type: ignore[assignment]
        return settings(layer)

    assert described(2) == described(2) != described(3) and " at 0x" not in described(2)


def test_checkpoints_of_other_batches_are_refused(tmp_path: Path) -> None:
    """As many batches, cut in other places or in another order: samples are missing, or count twice."""
    path = tmp_path / "run"
    model, batches = interrupted(path)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    other = list(zip(x.split([2] * 6 + [1]), y.split([2] * 6 + [1]), strict=True))
    with pytest.raises(ValueError, match=rf"'{path}' belongs to another run: .* had 7 rows, and now they have 8"):
        go(path, model, iter(other))
    with pytest.warns(UserWarning, match=f"first batch is another one .*'{path}'"):
        go(path, model, iter([batches[3], *batches[1:3], batches[0], *batches[4:]]))
    path.unlink()
    interrupted(path)
    assert go(path, model, iter(batches)).samples == len(x)


class Noisy(TensorDataset):
    """A data set that draws from the generator from which a model draws, too."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn_like(x), y


@pytest.mark.processor("samplers draw there")
def test_augmented_batches_go_on(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Those that were passed are augmented in another way when they are loaded again; nobody minds."""
    model, batches = problem()
    loader = DataLoader(Noisy(*(torch.cat(parts) for parts in zip(*batches, strict=True))), 2, shuffle=True)
    torch.manual_seed(5)
    once = go(tmp_path / "once", model, loader, E.DiagGGNMC())
    torch.manual_seed(5)
    with pytest.raises(Stopped), pytest.MonkeyPatch.context() as patch:
        patch.setattr("bpk.dataset.keeper.Keeper.added", stop_at_four)
        go(tmp_path / "run", model, loader, E.DiagGGNMC())
    again = go(tmp_path / "run", model, loader, E.DiagGGNMC())
    for name, fields in once.items():
        assert torch.equal(fields["diag_ggn_mc"], again[name]["diag_ggn_mc"])
    assert not [w for w in recwarn if "first batch" in str(w.message)]


def stop_at_four(keeper: Keeper) -> None:
    """A run that ends when it has written its state for the second time."""
    if keeper.totals.batches % 2 == 0:
        keeper.write(False)
    if keeper.totals.batches == 4:
        raise Stopped


def change(model: nn.Module, loss_fn: nn.Module, batch: list[Tensor]) -> Tensor:
    """A step that writes into its batch."""
    x, y = batch
    loss: Tensor = loss_fn(model(x.mul_(2)), y)
    return loss


def test_batches_are_known_as_the_loader_gives_them(tmp_path: Path) -> None:
    model, batches = problem()
    with pytest.raises(Stopped):
        go(tmp_path / "run", model, stopping([(x.clone(), y) for x, y in batches], 5), step=change)
    assert go(tmp_path / "run", model, iter(batches), step=change).batches == 7


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    model, batches = interrupted(path)
    before, real = path.read_bytes(), os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(
        OSError, match=rf"'{path}' could not be written: No space left.*\n.*as it was.*\n.*make room"
    ) as e:
        go(path, model, iter(batches))
    assert e.value.errno == errno.ENOSPC
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(checkpoint.os, "fsync", real)
    assert go(path, model, iter(batches)).batches == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
def test_rows_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "rows" / "batch_l2").mkdir(parents=True)
    (tmp_path / "rows" / "batch_l2" / "0.weight.rows").symlink_to("/dev/full")
    from bpk.dataset.on_disk import OnDisk

    sink = OnDisk({"batch_l2": E.BatchL2Grad().over_batches}, tmp_path / "rows")  # type: ignore[dict-item]
    with pytest.raises(OSError, match="rows' could not be written: No space left"):
        sink.append("batch_l2", "0.weight", torch.zeros(5))


def test_a_path_that_cannot_be_written_is_told_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written"):
        go(tmp_path / "file" / "run", problem()[0], stopping([], 0))


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"is a folder.*\n.*one file.*\n.*name a file in it"):
        go(tmp_path, problem()[0], stopping([], 0))
    assert not any(tmp_path.iterdir())


def test_rows_on_disk_that_are_too_short_are_refused(tmp_path: Path) -> None:
    model, batches = problem()
    with pytest.raises(Stopped):
        go(tmp_path / "run", model, stopping(batches, 5), E.BatchGrad(), per_sample=tmp_path / "rows")
    file = tmp_path / "rows" / "grad_batch" / "0.bias.rows"
    os.truncate(file, 8)
    with pytest.raises(ValueError, match=rf"'{file}' is shorter than the 7 rows"):
        go(tmp_path / "run", model, iter(batches), E.BatchGrad(), per_sample=tmp_path / "rows")
