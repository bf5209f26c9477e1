"""`install_as_backpack`, and the names that programs for BackPACK import.

Whatever imports `backpack` runs in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NAMES = {
    "": "CTX backpack convert_module_to_backpack disable extend extensions install_as_backpack memory_cleanup context",
    "context": "CTX backpack disable",
    "extensions": "BatchGrad BatchL2Grad SumGradSquared Variance DiagGGNExact DiagGGNMC BatchDiagGGNExact "
    "BatchDiagGGNMC DiagHessian BatchDiagHessian SqrtGGNExact SqrtGGNMC KFAC KFLR KFRA HBP HMP GGNMP PCHMP",
    "extensions.backprop_extension": "BackpropExtension FAIL_ERROR FAIL_WARN FAIL_SILENT",
    "extensions.module_extension": "ModuleExtension",
    "extensions.firstorder": "BatchGrad BatchL2Grad SumGradSquared Variance",
    "extensions.firstorder.base": "FirstOrderModuleExtension",
    "extensions.firstorder.batch_grad": "BatchGrad",
    "extensions.firstorder.batch_l2_grad": "BatchL2Grad",
    "extensions.firstorder.sum_grad_squared": "SumGradSquared",
    "extensions.firstorder.variance": "Variance",
    "extensions.secondorder": "DiagGGNExact DiagHessian SqrtGGNExact KFAC KFLR KFRA HBP",
    "extensions.secondorder.base": "SecondOrderBackpropExtension",
    "extensions.secondorder.diag_ggn": "DiagGGNExact DiagGGNMC BatchDiagGGNExact BatchDiagGGNMC",
    "extensions.secondorder.diag_hessian": "DiagHessian BatchDiagHessian",
    "extensions.secondorder.sqrt_ggn": "SqrtGGNExact SqrtGGNMC",
    "extensions.secondorder.hbp": "HBP KFAC KFLR KFRA BackpropStrategy ExpectationApproximation LossHessianStrategy",
    "extensions.curvmatprod": "HMP GGNMP PCHMP",
    "extensions.curvature": "Curvature",
    "core.derivatives": "derivatives_for",
    "core.derivatives.convnd": "weight_jac_t_save_memory",
    "hessianfree.hvp": "hessian_vector_product",
    "hessianfree.ggnvp": "ggn_vector_product ggn_vector_product_from_plist",
    "hessianfree.rop": "R_op jacobian_vector_product",
    "hessianfree.lop": "L_op transposed_jacobian_vector_product",
    "utils.convert_parameters": "vector_to_parameter_list",
    "utils.subsampling": "subsample",
    "utils.kroneckers": "kfacs_to_mat two_kfacs_to_mat kfac_mat_prod apply_kfac_mat_prod inv_kfac_mat_prod "
    "apply_inv_kfac_mat_prod inv_kfacs is_matrix is_vector",
    "utils.examples": "load_one_batch_mnist load_mnist_dataset get_mnist_dataloader autograd_diag_ggn_exact",
    "utils.module_classification": "is_loss is_nll",
}
"""The names of contract section 4, by module."""


def run(code: str, *arguments: str) -> str:
    """What a program prints that runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("path", NAMES)
def test_names_exist(path: str) -> None:
    module = importlib.import_module(f"bpk.{path}".rstrip("."))
    missing = [name for name in NAMES[path].split() if name not in vars(module)]
    assert not missing


def test_backpack_is_bpk_after_installing() -> None:
    code = f"""
        import sys, importlib, pickle
        import bpk
        specs = {{name: module.__spec__ for name, module in sys.modules.items() if name.startswith("bpk")}}
        bpk.install_as_backpack()
        bpk.install_as_backpack()  # a second time changes nothing
        import backpack, backpack.extensions.secondorder.hbp as hbp
        from backpack import backpack as context, extend
        from backpack.context import CTX
        from backpack.hessianfree.hvp import hessian_vector_product
        assert backpack is bpk and context is bpk.backpack and extend is bpk.extend and CTX is bpk.CTX
        assert hbp is sys.modules["bpk.extensions.secondorder.hbp"]
        for path in {sorted(NAMES)!r}:
            theirs, ours = (importlib.import_module(f"{{root}}.{{path}}".rstrip(".")) for root in ("backpack", "bpk"))
            assert theirs is ours, path
            assert ours.__name__ == ours.__spec__.name == f"bpk.{{path}}".rstrip("."), ours.__spec__
        for name, spec in specs.items():
            assert sys.modules[name].__spec__ is spec, name
        assert pickle.loads(pickle.dumps(bpk.extensions.BatchGrad)) is bpk.extensions.BatchGrad
        for missing in ("backpack.nothing", "backpack.extensions.nothing", "backpack.context.nothing"):
            try:
                importlib.import_module(missing)
            except ModuleNotFoundError as error:
                print(error)
        importlib.reload(backpack.utils.subsampling)
    """
    lines = run(code).splitlines()
    assert lines[0] == "No module named 'backpack.nothing': bpk stands in for backpack here, and has no 'bpk.nothing'."
    assert len(lines) == 3


def test_uninstall_takes_it_back() -> None:
    code = """
        import importlib.util, sys
        import bpk
        from bpk.dropin import uninstall_as_backpack
        before = list(sys.meta_path)
        uninstall_as_backpack()  # nothing to do
        bpk.install_as_backpack()
        import backpack.extensions
        uninstall_as_backpack()
        assert sys.meta_path == before
        assert not [name for name in sys.modules if name.split(".")[0] == "backpack"]
        spec = importlib.util.find_spec("backpack")
        assert spec is None or "site-packages" in spec.origin, spec
        import bpk.extensions
        bpk.install_as_backpack()
        import backpack.extensions
        assert backpack is bpk
    """
    run(code)


def test_a_program_for_backpack_runs() -> None:
    code = """
        import bpk
        bpk.install_as_backpack()
        import torch
        from backpack import backpack, extend, extensions
        model, loss_fn = extend(torch.nn.Linear(3, 2)), extend(torch.nn.MSELoss())
        with backpack(extensions.BatchGrad(), extensions.KFAC()):
            loss_fn(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
        print(list(model.weight.grad_batch.shape), [list(f.shape) for f in model.weight.kfac])
    """
    assert run(code) == "[4, 2, 3] [[2, 2], [3, 3]]"


def test_refused_where_another_backpack_was_imported(tmp_path: Path) -> None:
    (tmp_path / "backpack.py").write_text("")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import bpk, backpack
        before = list(sys.meta_path)
        try:
            bpk.install_as_backpack()
        except RuntimeError as error:
            print(error)
        assert sys.meta_path == before and sys.modules["backpack"] is backpack
    """
    message = run(code)
    assert "the real BackPACK was imported already" in message
    assert "Why:" in message
    assert "Do:  call bpk.install_as_backpack() at the start" in message


# ---- laplace-torch ------------------------------------------------------------------------------
needs_laplace = pytest.mark.skipif(
    importlib.util.find_spec("laplace") is None, reason="laplace-torch is not installed (pip install bpk[test])"
)

POSTERIORS = [
    f"{likelihood} {subset} {structure} {backend}"
    for likelihood in ("classification", "regression")
    for subset in ("all", "last_layer")
    for structure in ("diag", "kron", "full")
    for backend in ("BackPackGGN", "BackPackEF", "GGN", "EF")
    if structure != "kron" or backend.endswith("GGN")  # the others have none
]


@pytest.fixture(scope="module")
def on_laplace() -> dict[str, float]:
    """What `tests/bpk/laplace_on_bpk.py` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.bpk.laplace_on_bpk"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_laplace
@pytest.mark.parametrize("name", POSTERIORS)
def test_laplace_agrees_with_its_backend_for_curvlinops(on_laplace: dict[str, float], name: str) -> None:
    assert on_laplace[name] < 1e-10


@needs_laplace
def test_laplace_uses_bpk(on_laplace: dict[str, float]) -> None:
    assert on_laplace["same module"] is True
    for backend in ("BackPackGGN", "GGN"):
        assert on_laplace[f"jacobians {backend}"] < 1e-12
        assert on_laplace[f"sampled diag {backend}"] < 0.2
        assert on_laplace[f"sampled kron {backend}"] < 0.2
        assert on_laplace[f"training {backend}"] < 0


@needs_laplace
def test_a_backend_of_laplace_without_jacobians(on_laplace: dict[str, float]) -> None:
    for name in ("low_rank", "covariances", "others", "by_jacobians", "scalars"):
        assert on_laplace[name] < 1e-10, name
    assert on_laplace["without_jacobians"] is True
    words = (
        "'1.weight' has 5 axes",
        "has Kronecker factors of the sizes",
        "embeddings",
        "transposed convolutions",
        "do not depend on unused",
        "FullLaplace is no posterior",
        "do not require gradients: bias",
    )
    for message, word in zip(on_laplace["refusals"], words, strict=True):  # type: ignore[call-overload]
        assert word in message
