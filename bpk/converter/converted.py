"""What the converter returns: a graph of modules that holds the original's parameters, and a report of what changed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from bpk.jacobians.core.errors import explain, type_error
from bpk.jacobians.core.function_module import Plain
from bpk.recording.membership import mark_as

REPORT = "bpk.conversion_report"
"""Key of the report in `GraphModule.meta`, which copies keep."""


@dataclass
class ConversionReport:
    """What the converter changed.

    Attributes:
        renamed: By new name: the name that a parameter or buffer had in the original model.
        shared: Further names in the graph of parameters that kept their own.
        replaced: By name of the new module: the functions that it stands for.
        generic: New modules without a rule, which autograd carries columns through, and how they look.
        direct: New modules that use parameters directly, and how they look.
        reused: By name of the original module: the modules that stand for its calls.
        unused: Modules that the forward pass never calls; they are kept.
        fixed: What was decided at the conversion and stays so.
        mode: `"training"` or `"evaluation"` if the graph is that of this mode, and the other one takes another path.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    generic: dict[str, str] = field(default_factory=dict)
    direct: dict[str, str] = field(default_factory=dict)
    reused: dict[str, list[str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    mode: str = ""

    def __str__(self) -> str:
        tables: dict[str, dict[str, str] | list[str]] = {
            "renamed parameters (new: original)": self.renamed,
            "functions that became layers": self.replaced,
            "functions that autograd handles": self.generic,
            "functions that use parameters directly (generic rule)": self.direct,
            "layers that are called several times": {name: ", ".join(calls) for name, calls in self.reused.items()},
            "unused layers": self.unused,
            "fixed at the conversion": self.fixed,
        }
        lines: list[str] = []
        for title, found in tables.items():
            entries = [f"{name}: {text}" for name, text in found.items()] if isinstance(found, dict) else found
            lines += [f"{title}:", *(f"  {entry}" for entry in entries)] if entries else []
        return "\n".join(lines) or "nothing changed"


class Holder(nn.Module, Plain):
    """Stands where the original model had a container: it keeps the names of what is inside."""


class Converted(fx.GraphModule, Plain):
    """A model as a graph of modules.

    Its state dict has the original's names where they could be kept, and it loads state dicts of the original model.
    `conversion_report` says what changed. Children, parameters and buffers are those of `root`, in their order, also
    where the graph does not use them.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, report: ConversionReport, name: str) -> None:
        super().__init__(root, graph, name)
        for kept in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kept] = root.__dict__[kept]
        self.meta[REPORT] = report
        mark_as(self, root.__dict__)

    @property
    def conversion_report(self) -> ConversionReport:
        """What the converter changed."""
        return self.meta[REPORT]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
            if len(args) + len(kwargs) <= len(names) and kwargs.keys() <= {*names}:
                raise
            raise type_error(
                f"A converted model takes the inputs {', '.join(names)}, and got something else: {error}.",
                "inputs that have a default keep it when a model is converted: "
                f"{', '.join(self.conversion_report.fixed) or 'there are none here'}.",
                "leave out what is fixed, or use bpk.extend(model) without the converter, which takes any call.",
            ) from error

    def train(self, mode: bool = True) -> Converted:
        """Set the mode; warns where the graph is that of the other one."""
        wanted = "training" if mode else "evaluation"
        if self.conversion_report.mode not in ("", wanted):
            message = explain(
                f"A converted model is set to {wanted} mode, but it was converted in the other one.",
                "the forward pass takes another path in the other mode, and the graph has one of them only.",
                f"convert the model in {wanted} mode, or use bpk.extend(model) without the converter.",
            )
            warnings.warn(message, UserWarning, stacklevel=2 if mode else 3)  # eval() is train(False)
        return super().train(mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of `nn.Module`; parameters that the graph knows under several names appear once."""
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        state = super().state_dict(*args, **kwargs)
        for name in self.conversion_report.shared:
            state.pop(prefix + name, None)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        report = self.conversion_report
        for new, old in report.renamed.items():
            if prefix + old in state_dict and prefix + new not in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        for further, name in report.shared.items():
            if prefix + name in state_dict:
                state_dict.setdefault(prefix + further, state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _deepcopy_init(self) -> Any:
        def init(module: Converted, root: nn.Module, graph: fx.Graph) -> None:
            Converted.__init__(module, root, graph, self.conversion_report, type(self).__name__)

        return init

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (super().__reduce__(), self.conversion_report, type(self).__name__)


def rebuild(reduced: tuple[Any, ...], report: ConversionReport, name: str) -> Converted:
    """Undo pickling."""
    function, args = reduced
    root = Holder()
    root.__dict__.update(args[0])
    return Converted(root, function(*args).graph, report, name)
