"""Check a built wheel: what it contains, and that it works where only it is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from pathlib import Path


def check_names(wheel: Path) -> None:
    """Refuse a wheel that brings anything but `bpk/`, holds a file twice, or misses what the checkout has."""
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    strange = [n for n in names if not n.startswith("bpk/")]
    doubled = sorted({n for n in names if names.count(n) > 1})
    expected = {f"bpk/{p.relative_to('bpk')}" for p in Path("bpk").rglob("*.py") if not under_link(p)}
    for folder in ("rules", "jacobians"):
        expected |= {f"bpk/{p}" for p in Path(folder).rglob("*.py")}
    expected |= {"bpk/py.typed", "bpk/jacobians/families/derivations.json"}
    missing = sorted(expected - set(names))
    if strange or doubled or missing:
        sys.exit(f"{wheel.name}: not under bpk/: {strange}; twice: {doubled}; missing: {missing}")
    print(f"{wheel.name}: {len(names)} files, all under bpk/")


def under_link(path: Path) -> bool:
    """Whether a file lies behind one of the symbolic links `bpk/rules`, `bpk/jacobians`."""
    return any(parent.is_symlink() for parent in path.parents)


def use_it() -> None:
    """Find the rules, compute quantities and verify them, with nothing but the wheel and what it asks for."""
    from importlib.metadata import requires

    import torch
    from torch import nn

    import bpk
    from bpk.extensions import BatchGrad, DiagGGNExact
    from bpk.rules import REGISTRY

    needed = {re.match(r"[\w-]+", line)[0] for line in requires("bpk") or () if "extra ==" not in line}  # type: ignore[index]
    if needed != {"torch", "sympy"}:
        sys.exit(f"the wheel asks for {sorted(needed)}, and must need no more than torch and sympy")
    for optional in ("matplotlib", "safetensors", "sklearn", "tabulate", "torchvision", "scipy"):
        if importlib.util.find_spec(optional) is not None:
            sys.exit(f"the wheel brought {optional!r}, which it must not need")
    for stranger in ("rules", "jacobians", "tests", "benchmarks"):
        if importlib.util.find_spec(stranger) is not None:
            sys.exit(f"the wheel installed a top-level package {stranger!r}")
    model = bpk.extend(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(5, 1, 4, 4)), torch.tensor([0, 1, 2, 0, 1]))
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, msg=name)
        assert p.diag_ggn_exact.shape == p.shape, name
    data = torch.utils.data.TensorDataset(torch.randn(6, 1, 4, 4), torch.arange(6) % 3)
    found = bpk.accumulate(model, loss_fn, torch.utils.data.DataLoader(data, batch_size=4), DiagGGNExact())
    assert found.samples == 6
    inputs, targets = torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    print(bpk.verify(model, loss_fn, inputs, targets, raise_on_error=True).summary())
    print(f"bpk from {Path(bpk.__file__).parent.name}/ in site-packages: {len(list(REGISTRY))} rules")


if __name__ == "__main__":
    if sys.argv[1] == "names":
        check_names(Path(sys.argv[2]))
    else:
        use_it()
