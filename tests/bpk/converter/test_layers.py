"""Converted recurrent layers, sizes that are written as numbers, and layers without samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.jacobians.attention.function import ScaledDotProductAttention
from bpk.jacobians.core.function_module import ParametricFunction
from tests.bpk.converter.helpers import check, convert, linear, targets
from tests.helpers import backward
from tests.references.compare import ON_ANY_GRAPH, agrees, rand
from tests.references.reference import Reference


# ---- sizes written as numbers, and layers without samples ---------------------------------------------------
class Numbered(nn.Module):
    """A token for two samples, and no other number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer, self.head = nn.Parameter(torch.randn(1, 1, 4)), linear(), linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(2, -1, -1), self.layer(x)], 1)
        return self.head((x + self.token).tanh().flatten(1))


def test_a_batch_size_that_is_written_as_a_number() -> None:
    converted = check(Numbered(), rand(2, 2, 4))
    assert len([m for m in converted.modules() if isinstance(m, ParametricFunction)]) == 2
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        converted(rand(3, 2, 4))  # as the model itself


class OneSample(nn.Module):
    """Steps as rows, and as one sample again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.head = linear(), nn.Parameter(torch.randn(4)), linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.layer(x.flatten(0, 1)) * self.scale)
        return self.head((rows.unflatten(0, (1, 3)) * self.scale).flatten(1))


def test_a_batch_of_one_that_is_merged_and_split() -> None:
    check(OneSample(), rand(1, 3, 4))


class PositionNetwork(nn.Module):
    """Attention whose mask a small network computes from a table of coordinates."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.project, self.head, self.axes = linear(4, 12), linear(12, 3), axes
        self.network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        self.out = nn.Identity()
        self.register_buffer("coordinates", torch.randn(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        n, steps, size = x.shape
        query, key, value = self.project(x).view(n, steps, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        mask = self.out(self.network(self.coordinates).view(3, 3, 2).permute(2, 0, 1)).contiguous()
        mask = {2: mask[0], 3: mask, 4: mask.unsqueeze(0)}[self.axes]
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(found.transpose(1, 2).reshape(n, steps * size))


@pytest.mark.parametrize("samples", [2, 3])  # two, as there are heads
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_an_attention_mask_from_parameters(axes: int, samples: int) -> None:
    model, x, y = PositionNetwork(axes).double(), rand(samples, 3, 4), torch.randint(3, (samples,))
    check(copy.deepcopy(model), x, y)
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors=False)


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3), (2, 3, 3), (1, 2, 3, 3)])
def test_an_attention_layer_with_a_trained_mask(shape: tuple[int, ...]) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.head = linear(), linear(12, 3)
            self.mask, self.attend = nn.Parameter(torch.randn(shape)), ScaledDotProductAttention()

        def forward(self, x: Tensor) -> Tensor:
            h = self.project(x)
            if len(shape) != 3 or shape[0] == 2:
                h = h.view(-1, 3, 2, 2).transpose(1, 2)
            return self.head(self.attend(h, h, h, self.mask).reshape(-1, 12))

    model, x, y = Masked().double(), rand(3, 3, 4), torch.randint(3, (3,))
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors=False)


# ---- recurrent layers ------------------------------------------------------------------------------------
class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], read: str, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 2, num_layers=2, batch_first=True, **options)
        width = options.get("proj_size", 2) * (2 if options.get("bidirectional") else 1)
        self.out = linear(width * (2 if read == "both" else 1), 3)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.rnn(x)
        if self.read == "output":
            return self.out(output[:, -1])
        h = state[0] if isinstance(self.rnn, nn.LSTM) else state
        if self.read == "state":
            return self.out(h[-1])
        return self.out(torch.cat([output.mean(1), h[0]], 1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}], ids=str)
def test_multi_layer_recurrent(kind: type[nn.Module], options: dict[str, Any]) -> None:
    model = Recurrent(kind, "output", **options)
    state = copy.deepcopy(model.double().state_dict())
    converted = check(model, rand(2, 3, 3), exts=ON_ANY_GRAPH)
    assert f"rnn.{kind.__name__.lower()}_1" in targets(converted)
    assert str(converted.load_state_dict(state)) == "<All keys matched successfully>"
    assert str(converted.load_state_dict(converted.state_dict())) == "<All keys matched successfully>"


@pytest.mark.parametrize("read", ["state", "both"])
def test_recurrent_layers_read_through_their_state_stay_whole(read: str) -> None:
    model = Recurrent(nn.LSTM, read).double()
    x = rand(2, 3, 3)
    converted = convert(model)
    torch.testing.assert_close(converted(x), model(x))
    assert targets(converted)[0] == "rnn"
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in model.named_parameters()]
