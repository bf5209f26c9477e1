"""`bpk` needs torch and sympy, and nothing else: einops and all packages that extras name are out of reach here.

`tools/check_wheel.sh` installs the wheel into an empty environment; this one shows which use would ask for more.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.project.test_packaging import PROJECT, ROOT

MODULES = {
    "scikit-learn": "sklearn",
    "laplace-torch": "laplace",
    "backpack-for-pytorch": "backpack",
    "curvlinops-for-pytorch": "curvlinops",
}
"""What packages are imported as, if not by their name."""

REFUSED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""

USES = {
    "all quantities": "with bpk.backpack(*every_extension()): loss(model(x), y).backward()",
    "verify": "bpk.verify(model, loss, x, y, bpk.extensions.BatchGrad(), raise_on_error=True)",
    "support": "str(bpk.support(model, inputs=x)), str(bpk.support_matrix())",
    "cost": "str(bpk.cost(model, loss, x, y, bpk.extensions.KFAC()))",
    "accumulate": "bpk.accumulate(model, loss, [(x, y)], bpk.extensions.DiagGGNExact())",
    "operators": "bpk.operators.GGN(model, loss, [(x, y)]) @ torch.randn(35)",
    "check_rule": "bpk.check_rule(bpk.register(Elementwise('tanh(x)', type('Mine', (nn.Tanh,), {}))))",
    "converter": "bpk.extend(nn.Sequential(nn.Linear(4, 3)), use_converter=True)",
}


def optional() -> set[str]:
    """The modules of all packages that only extras ask for."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    found = {re.match(r"[\w-]+", d).group() for extra in extras for d in extra}  # type: ignore[union-attr]
    return {MODULES.get(name, name).replace("-", "_") for name in found} | {"einops"}


ALL_USES = """
import torch, bpk, traceback, warnings
from torch import nn
from bpk.extensions.registry import every_extension
from bpk.jacobians import Elementwise
warnings.simplefilter("ignore")
for name, use in {uses!r}.items():
    model = bpk.extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    loss, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(6, 4), torch.arange(6) % 3
    try:
        exec(use)
        print("works:", name)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def without_extras() -> subprocess.CompletedProcess[str]:
    """One process for all uses: it takes longer to start than they take."""
    code = REFUSED.format(names=optional()) + ALL_USES.format(uses=USES)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("use", USES)
def test_it_works_without_extras(use: str, without_extras: subprocess.CompletedProcess[str]) -> None:
    assert f"works: {use}\n" in without_extras.stdout, without_extras.stderr


def test_packages_are_out_of_reach() -> None:
    code = REFUSED.format(names=optional()) + "import bpk\nbpk.plot.axes_or_new(None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "pip install '.[plot]'" in done.stderr
    assert {"sklearn", "matplotlib", "scipy", "safetensors"} <= optional()
