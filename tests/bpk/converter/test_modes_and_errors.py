"""Converted models in both modes, their copies, and what cannot be converted."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

import bpk
from bpk import extensions as E
from bpk.custom_module.graph_utils import ConversionError, convert_module_to_backpack
from bpk.jacobians.core.function_module import FunctionModule, ParametricFunction, PlainFunction
from tests.bpk.converter.helpers import CharRNN, Direct, convert, linear, targets
from tests.helpers import backward
from tests.references.compare import ON_ANY_GRAPH, agrees, rand
from tests.references.reference import Reference


# ---- modes, copies, errors -------------------------------------------------------------------------------
def test_functional_dropout_follows_the_mode() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training) + F.dropout(x, 0.5) * 0

    for training in (True, False):
        converted = convert(Dropping().train(training))
        x = torch.ones(50, 4)
        assert isinstance(converted.get_submodule("dropout0"), nn.Dropout)
        assert converted.train()(x).unique().tolist() == [0.0, 2.0]
        assert converted.eval()(x).unique().tolist() == [1.0]
        assert targets(converted).count("dropout0") == 1
        assert isinstance(converted.get_submodule("dropout1"), PlainFunction)  # always on


@pytest.mark.parametrize("training", [True, False])
def test_slopes_that_are_drawn_whatever_the_mode_is(training: bool) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.rrelu(x, 0.1, 0.9, training)

    x = -torch.ones(40)
    for mode in (True, False):
        assert (len(convert(Fixed().train(mode))(x).unique()) > 1) == training


def test_weights_that_are_normalised_draw_nothing() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, F.normalize(self.weight, dim=1))

    report = convert(Normalised()).conversion_report
    assert report.direct
    assert not report.fixed


def test_the_mode_stays() -> None:
    model = CharRNN().eval()
    assert not any(m.training for m in convert(model).modules())
    assert all(m.training for m in convert(model.train()).modules())


def test_options_that_depend_on_the_mode() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)

    model = Attention().train()
    converted = convert(model)
    x = torch.randn(2, 8, 4)
    assert not torch.equal(converted(x), converted(x))
    torch.testing.assert_close(converted.eval()(x), model.eval()(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(copied: Any) -> None:
    converted = convert(CharRNN().eval())
    x = torch.randint(5, (2, 3))
    twin = copied(converted)
    torch.testing.assert_close(twin(x), converted(x))
    assert list(twin.state_dict()) == list(converted.state_dict())
    assert twin.conversion_report == converted.conversion_report
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in converted.parameters()})
    y = torch.randint(5, (2, 3))
    backward(twin, bpk.extend(nn.CrossEntropyLoss()), x, y, E.BatchGrad())
    for p in twin.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


class Branching(nn.Module):
    """A forward pass that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return self.layer(x)


def test_control_flow_names_the_line() -> None:
    with pytest.raises(ConversionError) as info:
        convert_module_to_backpack(Branching())
    message = str(info.value)
    assert "test_modes_and_errors.py:" in message and "if x.sum() > 0:" in message
    assert "without use_converter" in message


class Transforming(nn.Module):
    """Calls of `torch.func`, and parameters that the forward pass computes with before it uses its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.scale, self.head, self.how = linear(), nn.Parameter(torch.randn(4)), linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "functional_call":
            halved = {name: p / 2 for name, p in self.layer.named_parameters()}
            return self.head(functional_call(self.layer, halved, (x,)))
        if self.how == "vmap":
            return self.head(vmap(lambda row: self.layer(row).tanh())(x))
        if self.how == "ensemble":
            copies = {name: torch.stack([p, 2 * p]) for name, p in self.layer.named_parameters()}
            return self.head(vmap(lambda p: functional_call(self.layer, p, (x,)))(copies).mean(0))
        if self.how == "jvp":
            return self.head(sum(jvp(self.layer, (x,), (torch.ones_like(x),))))
        if self.how == "parameters alone":
            return self.head(self.layer(x) * vmap(torch.exp)(dict(self.named_parameters())["scale"]))
        return self.head(self.layer(x) * functional_call(Scale(), {"weight": self.scale.exp()}, (x,)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("how", ["functional_call", "vmap", "ensemble", "jvp", "another module"])
def test_transforms_are_refused_for_what_they_are(how: str) -> None:
    model = Transforming(how)
    with pytest.raises(ConversionError, match=r"transform of torch\.func, or a module with other parameters") as error:
        convert_module_to_backpack(model)
    assert "test_modes_and_errors.py:" in error.value.where
    model.double()
    x = rand(3, 4)
    with pytest.warns(UserWarning, match="extended without the converter"):
        assert bpk.extend(model, use_converter=True) is model
    assert model(x).shape == (3, 3)


def test_what_is_computed_from_parameters_alone_is_not_fixed_at_the_conversion() -> None:
    with pytest.raises(ConversionError, match="computes a tensor from parameters") as error:
        convert_module_to_backpack(Transforming("parameters alone"))
    assert "named_parameters" in error.value.where


def test_what_cannot_be_converted_is_extended_as_it_is() -> None:
    model, x, y = Branching().double(), rand(5, 4), torch.randint(3, (5,))
    before, expected = dict(vars(model)), model(x)
    with pytest.warns(UserWarning) as told:
        extended = convert(model)
    assert extended is model and len(told) == 1
    message = str(told[0].message)
    assert message.startswith("Branching is extended without the converter: ")
    assert "test_modes_and_errors.py:" in message and "in forward (`if x.sum() > 0:`)" in message
    assert "Why:" in message and "Do:  nothing" in message
    assert {name for name in vars(model) if not name.startswith("_b")} == {n for n in before if not n.startswith("_b")}
    assert torch.equal(model(x), expected)
    ref = Reference(copy.deepcopy(model), (x,), lambda pred: F.cross_entropy(pred, y))
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, False)


def test_the_line_is_the_users_own() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(sorted(x.unbind(1), key=float), 1)

    with pytest.raises(ConversionError) as info:
        convert_module_to_backpack(Inside())
    assert info.value.where.startswith(__file__) and "sorted(x.unbind(1)" in info.value.where


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.autocast("cpu")], ids=["no_grad", "autocast"])
def test_contexts_inside_of_forward_are_refused(context: Any) -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with context():
                y = x * 2
            return x + y

    with pytest.raises(ConversionError, match=r"y = x \* 2"):
        convert_module_to_backpack(Cut())


def test_tracing_leaves_nothing_behind() -> None:
    class Remembering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last + 1

    model = Remembering()
    assert torch.equal(convert(model)(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    assert "last" not in vars(model)


def test_layers_and_converted_models_stay_what_they_are() -> None:
    layer = nn.LSTM(2, 2)
    assert convert(layer) is layer
    converted = convert(CharRNN())
    assert convert(converted) is converted


def test_random_numbers_are_refused() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(4)

    with pytest.raises(ConversionError, match="draws random numbers"):
        convert_module_to_backpack(Noisy())
    with pytest.warns(UserWarning, match="draws random numbers"):
        convert(Noisy())


def test_arguments_with_defaults_keep_them() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    converted = convert(Masked())
    assert torch.equal(converted(torch.ones(2, 2)), torch.ones(2, 2))
    assert "mask=None" in str(converted.conversion_report)


def test_constants_of_the_forward_pass() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1.0, 2.0])

    model = Constant()
    converted = convert(model)
    assert list(vars(model)) == list(vars(Constant()))  # the original is left alone
    assert torch.equal(converted(torch.ones(1, 2)), torch.tensor([[1.0, 2.0]]))
    assert not converted.state_dict()


def test_function_modules_show_what_they_do() -> None:
    class Cumulative(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cummax(x, dim=1)[0].renorm(2, 0, 1.0)

    converted = convert(Cumulative())
    assert [repr(m) for m in converted.children()] == [
        "Function(torch.cummax(#0, dim=1))",
        "Function(operator.getitem(#0, 0))",
        "Function(Tensor.renorm(#0, 2, 0, 1.0))",
    ]
    assert all(isinstance(m, FunctionModule) for m in converted.children())


def test_mixed_samples_are_noticed() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.first(x), None, None, self.scale, training=True)

    converted = convert(Mixing())
    assert any(isinstance(m, ParametricFunction) for m in converted.modules())
    loss = bpk.extend(nn.CrossEntropyLoss())(converted(torch.randn(5, 4)), torch.randint(4, (5,)))
    with pytest.raises(NotImplementedError, match="mix"), bpk.backpack(E.BatchDiagGGNExact()):
        loss.backward()
    inputs = torch.randn(5, 4), torch.randint(4, (5,))
    assert bpk.verify(converted, nn.CrossEntropyLoss(), *inputs, E.DiagGGNExact()), "a sum over the batch exists"


def test_the_original_still_works() -> None:
    model = Direct("position")
    x = torch.randn(2, 3, 4)
    expected = model(x)
    convert_module_to_backpack(model)
    assert torch.equal(model(x), expected)


def test_a_tensor_that_is_a_plain_attribute() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(2, 2), torch.tensor([2.0, 3.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.factor

    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(3, 2)
    expected, names = model(x), list(model.state_dict())
    converted = bpk.extend(model, use_converter=True)
    torch.testing.assert_close(converted(x), expected)
    assert list(converted.state_dict()) == names


class StepInside(nn.Module):
    """One step of gradient descent in the forward pass, on a copy of a parameter for each sample, or on itself."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.weight, self.layer, self.copies = nn.Parameter(torch.randn(3, 1)), nn.Linear(3, 3), copies

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).unsqueeze(1)
        weight = self.weight.expand(x.shape[0], 3, 1) if self.copies else self.weight
        (grad,) = torch.autograd.grad((h @ weight).square().sum(), weight, create_graph=True)
        return (h @ (weight - 0.1 * grad)).squeeze(1)


def test_a_derivative_by_what_is_computed_from_parameters_is_refused() -> None:
    """Each function that uses it would have a tensor of its own; by a parameter itself it is none of these."""
    with pytest.raises(ConversionError, match="differentiates with respect to what it computes from parameters"):
        bpk.convert_module_to_backpack(StepInside(copies=True))
    x = torch.randn(4, 3)
    for copies in (True, False):
        plain = StepInside(copies)
        expected = plain(x)
        model = bpk.extend(plain, use_converter=True)
        torch.testing.assert_close(model(x), expected)
