"""Convolution and loss options that used to go wrong (contract, section 6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bpk import extensions as E
from tests.helpers import backward, extended, mlp
from tests.references.compare import check, rand
from tests.references.reference import Reference


# ---- convolutions, cross-entropy ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "replicate"},
        {"padding": "same"},
        {"padding": "same", "dilation": 2, "padding_mode": "reflect"},
        {"stride": 2, "padding": 1, "dilation": 2},
    ],
    ids=str,
)
def test_convolution_options(options: dict[str, Any]) -> None:
    x = rand(3, 2, 5)
    conv = nn.Conv1d(2, 2, 2, **options).double()
    head = nn.Linear(2 * conv(x).shape[2], 3)
    check(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Tanh(), conv, nn.Sigmoid(), nn.Flatten(), head), x)


@pytest.mark.parametrize(
    "options", [{"stride": 2, "output_padding": 1}, {"groups": 2, "padding": 1}, {"stride": 3, "dilation": 2}], ids=str
)
def test_transposed_convolution_options(options: dict[str, Any]) -> None:
    x = rand(3, 2, 4)
    conv = nn.ConvTranspose1d(2, 2, 2, **options).double()
    check(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Tanh(), conv, nn.Flatten(), nn.Linear(2 * conv(x).shape[2], 3)), x)


def test_cross_entropy_with_weights_and_ignored_targets() -> None:
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), ignore_index=1)
    check(mlp(), rand(4, 4), loss_fn, torch.tensor([0, 1, 2, 0]))


def test_cross_entropy_with_ignored_targets_at_positions() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Unflatten(1, (3, 2)))
    check(model, rand(3, 4), nn.CrossEntropyLoss(ignore_index=-100), torch.tensor([[0, -100], [1, 2], [-100, -100]]))


def test_batch_axis_merged_with_another() -> None:
    """`[N, T, C]` flattened to `[N * T, C]` for the loss: rows are not samples."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), nn.Flatten(0, 1)).double()
    loss_fn, x, y = nn.CrossEntropyLoss(), rand(3, 2, 2), torch.randint(3, (6,))
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y), samples=3)
    model, loss_fn = extended(model, loss_fn)
    try:
        backward(model, loss_fn, x, y, E.BatchGrad(), E.BatchDiagGGNExact(), E.BatchDiagHessian())
    except NotImplementedError as error:
        assert "batch" in str(error)
        return
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
        torch.testing.assert_close(p.diag_ggn_exact_batch, ref.diag_ggn_batch(name))
        torch.testing.assert_close(p.diag_h_batch, ref.diag_h_batch(name))


def test_subclass_of_a_supported_layer() -> None:
    class MyLinear(nn.Linear):
        """Not another forward pass."""

    check(nn.Sequential(MyLinear(4, 3), nn.Tanh(), nn.Linear(3, 3)), rand(3, 4))


def test_kfra_through_dropout_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)).double().train()
    x, y = rand(5, 4), torch.randint(3, (5,))
    loss_fn = nn.CrossEntropyLoss()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y), seed=5)
    model, loss_fn = extended(model, loss_fn)
    torch.manual_seed(5)
    backward(model, loss_fn, x, y, E.KFRA())
    expected = ref.chain.kfra()
    for name, p in model.named_parameters():
        for found, e in zip(p.kfra, expected[name], strict=True):
            torch.testing.assert_close(found, e)
