"""`bpk` itself, and packages that may be installed beside it: BackPACK, Opacus and curvlinops."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from functools import partial
from typing import Any

import torch

from benchmarks.alternative import Alternative, Job, PlainJob, Result, product_vectors, reduce_rows
from benchmarks.problems import Problem, Setup
from benchmarks.quantities import QUANTITIES, Form, Quantity

_TORCHVISION: list[torch.library.Library] = []  # the definitions last as long as this object


def declare_torchvision_operators() -> None:
    """Declare the two operators without which torchvision cannot be imported.

    A torchvision wheel built for another variant of torch (CUDA beside CPU) loads no operators of its
    own, and then fails on import where it registers shapes for them. Nothing here calls them.
    """
    if _TORCHVISION:
        return
    with contextlib.suppress(ImportError, RuntimeError):
        import torchvision  # noqa: F401

        return
    library = torch.library.Library("torchvision", "DEF")
    _TORCHVISION.append(library)
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # already defined
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _import(name: str) -> tuple[Any, str | None]:
    """The package, or the reason why it cannot be used."""
    try:
        return importlib.import_module(name), None
    except Exception as error:  # a broken optional package must not stop the others
        return None, f"not importable: {type(error).__name__}: {error}".splitlines()[0]


class Pack(Alternative):
    """`bpk` or BackPACK: they are called in the same way.

    Networks whose forward pass calls functions go through the package's converter, unless `convert` is off.
    """

    def __init__(self, root: str, name: str, convert: bool = True, **limits: int) -> None:
        self.root = root
        self.name = name
        self.convert = convert
        self.limits = limits

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        if not self.convert and not problem.functions:
            return "made of modules only"
        if self.root != "bpk":
            declare_torchvision_operators()
        package, missing = _import(self.root)
        if missing:
            return missing
        if not hasattr(package, "extend"):
            return f"{self.root} has no extend()"
        extensions, missing = _import(f"{self.root}.extensions")
        if missing and quantity.extensions:
            return missing
        absent = [e for e in quantity.extensions if not hasattr(extensions, e)]
        if absent:
            return f"no extension {', '.join(absent)}"
        for name in quantity.extensions if quantity.options else ():
            known = inspect.signature(getattr(extensions, name)).parameters
            if unknown := [option for option, _ in quantity.options if option not in known]:
                return f"no option {', '.join(unknown)}"
        return None

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return PackJob(setup, quantity, self.root, self.convert and setup.functions, self.limits)


class PackJob(Job):
    """`extend` once, then forward and backward in the context of the extensions.

    As in a training loop, the fields stay on the parameters until the next run overwrites them.
    """

    def __init__(
        self,
        setup: Setup,
        quantity: Quantity,
        root: str,
        convert: bool = False,
        limits: dict[str, int] | None = None,
    ) -> None:
        super().__init__(setup, quantity)
        package = importlib.import_module(root)
        classes = importlib.import_module(f"{root}.extensions") if quantity.extensions else None
        self.context = partial(package.backpack, **(limits or {}))
        self.extensions = [getattr(classes, name)(**dict(quantity.options)) for name in quantity.extensions]
        self.fields = [QUANTITIES[name].field for name in quantity.extensions]
        self.model = package.extend(setup.model, use_converter=True) if convert else package.extend(setup.model)
        self.loss = package.extend(setup.loss)
        self.vectors = product_vectors(setup)
        own = list(self.model.parameters())
        kept = {id(p) for p in own} >= {id(p) for p in setup.params}
        self.params = setup.params if kept else own  # a converter may copy them

    def run(self) -> Result:
        s = self.setup
        if not self.extensions:
            self.loss(self.model(s.inputs), s.targets).backward()
            return {}
        with self.context(*self.extensions):
            self.loss(self.model(s.inputs), s.targets).backward()
        params = self.params
        result: Result = {}
        for name, field in zip(self.quantity.results, self.fields, strict=True):
            values = [getattr(p, field) for p in params]
            if QUANTITIES[name].form is Form.PRODUCT:
                values = [product(v) for product, v in zip(values, self.vectors, strict=True)]
            result[name] = values
        return result

    def clear(self) -> None:
        for p in self.params:
            p.grad = None

    def drop(self) -> None:
        for p in self.params:
            for field in self.fields:
                vars(p).pop(field, None)


class Opacus(Alternative):
    """Individual gradients by Opacus' `GradSampleModule`, other first-order quantities from these."""

    name = "opacus"

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        if quantity.name not in ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"):
            return "first-order quantities only"
        return _import("opacus.grad_sample")[1]

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return OpacusJob(setup, quantity)


class OpacusJob(PlainJob):
    """Recurrent layers are replaced by Opacus' own, which hold parameters of the same names."""

    def __init__(self, setup: Setup, quantity: Quantity) -> None:
        super().__init__(setup, quantity)
        module = importlib.import_module("opacus.grad_sample")
        model = setup.model
        if any(isinstance(m, torch.nn.RNNBase) for m in model.modules()):
            model = importlib.import_module("opacus.validators").ModuleValidator.fix(model)
        self.model = module.GradSampleModule(model, loss_reduction="mean", strict=False)
        found = dict(model.named_parameters())
        self.params = [found[name] for name, _ in setup.model.named_parameters()]

    def run(self) -> Result:
        s = self.setup
        s.loss(self.model(s.inputs), s.targets).backward()
        rows: list[Any] = [p.grad_sample for p in self.params]  # type: ignore[attr-defined]
        return {self.quantity.name: reduce_rows(self.quantity.name, rows)}

    def clear(self) -> None:
        for p in self.params:
            p.grad = p.grad_sample = None  # type: ignore[attr-defined]  # kept, it would be added to a list

    def canonical(self, result: Result) -> Result:
        """Opacus leaves out the division by `N`."""
        power = 1 if self.quantity.name == "BatchGrad" else 2
        return {k: [v / self.setup.batch**power for v in values] for k, values in result.items()}


class Curvlinops(Alternative):
    """Kronecker factors by curvlinops' `KFACLinearOperator`, in its only definition: every position by itself.

    For linear layers of single vectors that is the usual one. It gives the factors alone, without `.grad`.
    """

    name = "curvlinops"

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        if quantity.name not in FISHER:
            return "Kronecker factors only"
        own = [m for m in problem.setup(1).model.modules() if m._parameters]
        if any(type(m) not in (torch.nn.Linear, torch.nn.Conv2d) for m in own):  # type: ignore[comparison-overlap]
            return "linear and convolutional layers only"
        if not quantity.options and (problem.steps or any(isinstance(m, torch.nn.Conv2d) for m in own)):
            return "another definition of factors"
        return _import("curvlinops")[1]

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return CurvlinopsJob(setup, quantity)


FISHER = {"KFAC": "mc", "KFACExpand": "mc", "KFLR": "type-2", "KFLRExpand": "type-2"}


class CurvlinopsJob(Job):
    """The operator, and its factors, are made anew in every run: it has no other way to see new parameters."""

    def run(self) -> Result:
        s = self.setup
        operator = importlib.import_module("curvlinops").KFACLinearOperator(
            s.model,
            s.loss,
            s.params,
            [(s.inputs, s.targets)],
            check_deterministic=False,
            fisher_type=FISHER[self.quantity.name],
            seed=int(torch.randint(2**31, ())),
            num_data=s.batch,
            num_per_example_loss_terms=1,
        )
        operator.compute_kronecker_factors()
        return {self.quantity.name: [operator]}

    def canonical(self, result: Result) -> Result:
        """Factors by parameter."""
        (operator,) = result[self.quantity.name]
        found = operator.state_dict()
        inputs, outputs = found["input_covariances"], found["gradient_covariances"]
        names = (name.rsplit(".", 1) for name, _ in self.setup.model.named_parameters())
        factors = [[outputs[layer], inputs[layer]] if kind == "weight" else [outputs[layer]] for layer, kind in names]
        return {self.quantity.name: factors}


BPK = Pack("bpk", "bpk")
BPK_PLAIN = Pack("bpk", "bpk plain", convert=False)
BACKPACK = Pack("backpack", "backpack")
MEBIBYTES = (16, 64, 256)
LIMITED = {mb: Pack("bpk", f"bpk {mb} MiB", memory=mb << 20) for mb in MEBIBYTES}
"""`bpk` with a limit on the memory of columns."""
