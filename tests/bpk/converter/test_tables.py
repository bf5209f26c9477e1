"""Converted models of the tutorials: tables of their modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpk
from bpk.custom_module.graph_utils import BackpackTracer, convert_module_to_backpack
from tests.bpk.converter.helpers import CharRNN, convert

CHAR_RNN = """
placeholder x x () {}
call_module embedding embedding (x,) {}
call_module dropout0 dropout0 (embedding,) {}
call_module lstm_lstm_0 lstm.lstm_0 (dropout0,) {}
call_module lstm_reduce_tuple_0 lstm.reduce_tuple_0 (lstm_lstm_0,) {}
call_module lstm_dropout_0 lstm.dropout_0 (lstm_reduce_tuple_0,) {}
call_module lstm_lstm_1 lstm.lstm_1 (lstm_dropout_0,) {}
call_module reduce_tuple0 reduce_tuple0 (lstm_lstm_1,) {}
call_module reduce_tuple1 reduce_tuple1 (lstm_lstm_1,) {}
call_module dropout1 dropout1 (reduce_tuple0,) {}
call_module dense dense (dropout1,) {}
call_module permute0 permute0 (dense,) {}
output output output (permute0,) {}
"""


def table(module: nn.Module) -> list[str]:
    nodes = BackpackTracer().trace(module).nodes
    return [f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in nodes]


def test_converting_from_the_top() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    converted = bpk.convert_module_to_backpack(model)
    assert type(converted).__mro__[1:] == type(convert_module_to_backpack(model)).__mro__[1:]
    assert converted.get_submodule("0").weight is model[0].weight


def test_table_of_the_recurrent_tutorial() -> None:
    assert table(convert(CharRNN().eval())) == CHAR_RNN.strip().splitlines()


def resnet_table() -> list[str]:
    """The table of the residual tutorial."""
    rows = [("x", "x", None)]

    def call(target: str, *args: str) -> str:
        name = target.replace(".", "_")
        rows.append((name, target, args))
        return name

    h = call("maxpool", call("relu", call("bn1", call("conv1", "x"))))
    block = 0
    for layer in range(1, 5):
        for k in range(2):
            at = f"layer{layer}.{k}"
            y = call(f"{at}.relu0", call(f"{at}.bn1", call(f"{at}.conv1", h)))
            y = call(f"{at}.bn2", call(f"{at}.conv2", y))
            if layer > 1 and k == 0:
                h = call(f"{at}.downsample.1", call(f"{at}.downsample.0", h))
            h = call(f"{at}.relu1", call(f"sum_module{block}", y, h))
            block += 1
    call("fc", call("flatten0", call("avgpool", h)))
    shown = []
    for name, target, args in rows:
        given = "()" if args is None else f"({', '.join(args)}{',' if len(args) == 1 else ''})"
        shown.append(f"{'placeholder' if args is None else 'call_module'} {name} {target} {given} {{}}")
    return [*shown, "output output output (fc,) {}"]


def test_table_of_the_residual_tutorial(torchvision: Any) -> None:
    model = torchvision.models.resnet18(num_classes=5).eval()
    x = torch.rand(2, 3, 32, 32)
    expected = model(x)
    converted = convert(model)
    assert table(converted) == resnet_table()
    torch.testing.assert_close(converted(x), expected)
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(converted.state_dict()) == list(model.state_dict())


@pytest.fixture
def torchvision() -> Any:
    from examples._torchvision import import_torchvision

    import_torchvision()
    return pytest.importorskip("torchvision")
