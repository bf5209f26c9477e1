"""Every script in examples/ runs, agrees with autograd (it stops where it does not), and prints what it promises."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forked import ROOT, run_script

SCRIPTS = sorted(p for p in (ROOT / "examples").glob("[a-z]*.py") if p.stem != "demo")  # it has tests of its own
LIMIT = 60  # seconds of one processor: independent of what else runs; a script that needs more is ended

PRINTS = {
    "all_extensions": [
        ".grad_batch: weight [512, 10, 784], bias [512, 10]",
        ".sqrt_ggn_exact: weight [10, 512, 10, 784], bias [10, 512, 10]",
        ".kfac: weight [[10, 10], [784, 784]], bias [[10, 10]]",
        ".grad_gram: weight [512, 512], bias [512, 512]",
        ".ekflr: weight bases [[10, 10], [784, 784]], moments [10, 784]",
        "All 39 extensions agree with autograd.",
    ],
    "batched_jacobians": ["SqrtGGNExact, [32, 10, 12194]", "neural tangent kernel [320, 320]"],
    "char_rnn_converter": [
        "call_module  lstm_reduce_tuple_0  lstm.reduce_tuple_0  (lstm_lstm_0,)",
        "lstm.lstm_1.weight_hh_l0 [256, 64] diag_ggn_exact [256, 64]",
        "entry    69272",
    ],
    "char_rnn_custom_modules": ["(9): Permute", "5.weight_hh_l0           [256, 64] grad_batch [8, 256, 64]"],
    "curvature_pictures": ["share of the GGN's trace after training", "3.weight"],
    "custom_layer": ["grad_batch [10, 1]", "root [4, 10, 4]", "Multilinear(Scale):"],
    "diag_ggn_optimizer": ["DiagGGNExact", "DiagGGNMC", "held-out accuracy"],
    "dp_sgd": ["norms of individual gradients", "step 200: epsilon 4.05 at delta 0.0001"],
    "ddp_curvature": ["step 9: gradient noise", "480 samples in 10 batches"],
    "ewc_and_merging": ["then 5-9 with the penalty", "weighted by the diagonals", "stopped in the middle"],
    "extension_hook_and_memory": ["peak of the backward pass without a hook", "peak with the hook"],
    "ekfac_blocks": ["EKFAC of 5.weight: error"],
    "gradient_similarity": ["after training: mean cosine of the same digit"],
    "token_gradients": ["largest gradient: 'x' in 'mainx...'"],
    "axis_moments": ["last layer, inputs: nine tenths in"],
    "projected_neighbours": ["k =  64 for each parameter: error of cosines 0.0"],
    "predictive_band": ["standard deviation at the points 0.0", "in the gap"],
    "pinn_kfac": ["Adam: relative error", "KFAC: relative error"],
    "poisson_pinn": ["2 dimensions: relative error", "5 dimensions: relative error"],
    "first_1_wrong_labels": ["1500 images, 75 with a wrong label", "(99% of all)", "label 8, is a 1"],
    "first_2_pruning": ["by saliency   by size", "90%"],
    "first_3_uncertainty": ["with the Laplace approximation", "0.99"],
    "hutchinson_trace": ["trace of the Hessian", "1000 vectors"],
    "kfac_training": ["SGD with twice the steps", "KFAC wins"],
    "language_model": ["tca hse o hmtt at enta  0.", "blocks.1.attention.qkv", "bpk.verify: 112 ok"],
    "newton_cg": ["against a dense solve", "step 15"],
    "influence": ["by the Hessian 1.000", "projected numbers and the Fisher 0.99"],
    "private_sgd": ["clipped sum of 0.weight", "held-out accuracy"],
    "residual_by_hand": ["linear1.weight           [10, 3920] grad_batch [32, 10, 3920]", "entry    39499"],
    "residual_custom_modules": ["2.branch.1.0.weight      [2, 2, 3, 3]", "entry    15747"],
    "resnet18_converter": [
        "call_module  sum_module2            sum_module2            (layer2_0_bn2, layer2_0_downsample_1)",
        "layer4.1.bn2.bias        [512] diag_ggn_exact [512]",
        "entry 11179076",
    ],
    "siamese": ["5 of 32 held-out pairs make", "probability of being the same", "bpk.verify: 24 ok"],
    "subsampling": [".grad_batch: [3, 16, 20]", "diag_ggn_exact of both halves"],
    "torchvision_model": ["features.12                197184", "gradient norm", "bpk.verify: 208 ok"],
    "unet": ["step 80, loss", "pixels, gradient norm", "bpk.verify: 136 ok"],
    "variance_gradient": ["by finite differences", "step 30"],
}
"""Lines, or parts of them, of what each example prints; the tutorials' shapes among them."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    done = run_script(script, tmp_path, LIMIT)
    if done.stderr.startswith("skipped:"):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    for part in PRINTS[script.stem]:
        assert part in done.stdout, f"{part!r} is not in\n{done.stdout}"
    assert "relative error" in done.stdout or "match: True" in done.stdout, "no check was printed"


def test_every_example_says_what_it_shows() -> None:
    readme = (ROOT / "README.md").read_text()
    for script in SCRIPTS:
        assert f"(examples/{script.name})" in readme, f"{script.name} is missing in the README's table"
        lines = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()
        assert len(lines) > 3 and lines[0].endswith(".") and not lines[1], script.name
        assert any(line.startswith("Prints ") for line in lines), script.name


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    needs = importlib.import_module("_check").needs
    needs("torch")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert find_spec("sklearn") is None
    with pytest.raises(SystemExit, match=r"skipped: this example needs scikit-learn; install.*\[demo\]"):
        needs("torch", "sklearn")
