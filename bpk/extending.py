"""`extend`: prepare a model or a loss, so that its backward pass can yield more than the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.losses.loss_call import trains
from bpk.jacobians.rule import Rule
from bpk.recording.activations import forget
from bpk.recording.before import BEFORE, forget_inputs, note_inputs, prepare
from bpk.recording.context.surroundings import is_scripted, require_local
from bpk.recording.loss_recorder import record_composed
from bpk.recording.membership import is_users, mark, mark_whole, unmark
from bpk.recording.recorder import record, record_passage
from bpk.rules import REGISTRY
from bpk.sweeps.products.block import BlockProduct

if TYPE_CHECKING:
    from bpk.converter import Converted

M = TypeVar("M", bound=nn.Module)

RECORDERS = (record, record_passage, record_composed)
"""The forward hooks of modules."""

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Where torch's quantised layers live (not imported: that takes long)."""


def extend(module: M, debug: bool = False, use_converter: bool = False) -> M:
    """Extend a model or a loss, recursively; returns the same object (with the converter: a graph of modules).

    Every layer that has a rule (and every layer without children) gets a forward hook that writes its calls
    down; so do modules that hold parameters themselves. Extending twice changes nothing. If only a part of a model is
    extended (`bpk.extend(model[-1])`), the parameters that it holds get fields, and no others.

    Args:
        module: An instance of `nn.Module`.
        debug: Print what is extended.
        use_converter: Rewrite the model's `forward` as a `torch.fx.GraphModule` made of modules first, which shares the
            model's parameters; `result.conversion_report` says what changed. A model that cannot be rewritten is
            extended as it is, with a warning that names the line.

    Raises:
        ValueError: If `module` is a class or no module, has a quantised layer, or a lazy
            one that was not initialised, a scripted one with parameters that are trained, or parameters that are spread
            over processes; if an option is no `bool`.

    >>> import torch, bpk
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> bpk.extend(model) is model
    True
    """
    check_module(module)
    check_options(debug=debug, use_converter=use_converter)
    if use_converter and REGISTRY.find(module) is None:
        from bpk.converter import convert_if_possible  # torch.fx loads slowly

        module = convert_if_possible(module, debug)  # type: ignore[assignment]
    attach(module, "", debug)
    follow(module)
    return module


def follow(module: nn.Module) -> None:
    """Note what a model as a whole is given and returns, which tells of samples, and of a loss among its results."""
    mark_whole(module)
    if note_inputs not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(note_inputs, with_kwargs=True)
        module.register_forward_hook(forget_inputs, always_call=True)


def convert_module_to_backpack(module: nn.Module, debug: bool = False) -> Converted:
    """Rewrite a model as a graph of modules, which shares its parameters, without extending it.

    See `bpk.custom_module.graph_utils.convert_module_to_backpack`; this is the same, and loads the converter when it is
    called.

    Args:
        module: The model.
        debug: Print the report.

    Raises:
        ConversionError: If the forward pass depends on values; the message names the line.

    >>> import torch, bpk
    >>> bpk.convert_module_to_backpack(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    Sequential(
      (0): Linear(in_features=2, out_features=1, bias=True)
    )
    """
    from bpk.converter import convert_module_to_backpack  # torch.fx loads slowly

    return convert_module_to_backpack(module, debug)


def check_options(**options: object) -> None:
    """Refuse a second module in the place of an option."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise value_error(
                f"extend(...) got {name}={value!r}, which is neither True nor False.",
                "it takes one model or loss, and options behind it.",
                "extend each by itself: model, loss_fn = bpk.extend(model), bpk.extend(loss_fn).",
            )


def check_module(module: object, function: str = "extend") -> None:
    """Refuse what cannot be extended, before anything is changed."""
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise value_error(
            f"{function}(...) got the module class {module.__name__} instead of an instance.",
            "only an instance has parameters and a forward pass.",
            f"write bpk.{function}({module.__name__}(...)).",
        )
    if not isinstance(module, nn.Module):
        raise value_error(
            f"{function}(...) got {type(module).__name__}, which is no module (nn.Module).",
            "forward hooks exist on modules only.",
            "wrap a function into an nn.Module; for a loss function use its class, such as nn.CrossEntropyLoss().",
        )
    for path, child in module.named_modules():
        if type(child).__module__.startswith(QUANTISED):
            raise value_error(
                f"Layer '{path or type(child).__name__}' ({type(child).__name__}) is quantised.",
                "its weights are integers and its output has no gradient: nothing can be computed for it or before it.",
                "extend the model before it is quantised.",
            )
    require_local(module.named_modules())
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise value_error(
                f"Parameter '{name}' is not initialised yet (a lazy layer).",
                "its shape, and so the layer's class, is only known after the first forward pass.",
                "run one forward pass, model(X), before bpk.extend(model).",
            )


def attach(module: nn.Module, path: str, debug: bool) -> None:
    """Hook a layer, or descend into a container."""
    rule = REGISTRY.find(module)
    children = dict(module.named_children())
    layer = rule is not None or not children
    own = any(p is not None for p in module.parameters(recurse=False))
    composed = rule is None and bool(children) and not path and not trains(module)
    recorders = [*[record] * layer, *[record_passage] * (own and rule is None), *[record_composed] * composed]
    if recorders and not is_hooked(module) and not isinstance(module, Plain):
        hook(module, path, recorders)
        if debug and (layer or own):
            print(f"[bpk] extend {path or type(module).__name__}: {rule or 'no rule'}")
    if rule is None:
        for name, child in children.items():
            if not is_scripted(child):
                attach(child, f"{path}.{name}" if path else name, debug)
    mark(module, detach)
    module._backpack_extend = True  # type: ignore[assignment]


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has been extended."""
    hooks = module._forward_hooks.values()
    return any(recorder in hooks for recorder in RECORDERS)


def hook(module: nn.Module, path: str, recorders: Iterable[Callable[..., Any]]) -> None:
    """Register the forward hooks of one layer, before those of the user, which may change the output."""
    module.__dict__["_bpk_path"] = path
    for recorder in reversed(list(recorders)):
        module.register_forward_hook(recorder, with_kwargs=True, prepend=True)
    rule = REGISTRY.find(module)
    may_draw = rule is not None and type(rule).draws is not Rule.draws
    if may_draw or isinstance(module.__dict__.get("inplace"), bool) or (rule is not None and is_users(module)):
        module.register_forward_pre_hook(prepare, with_kwargs=True)


def detach(module: nn.Module) -> None:
    """Take the forward hooks of one module away again."""
    for hooks, ours in (
        (module._forward_hooks, (*RECORDERS, forget_inputs)),
        (module._forward_pre_hooks, (note_inputs, prepare)),
    ):
        for key in [key for key, function in hooks.items() if function in ours]:
            del hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    forget(module)
    unmark(module)
    module._backpack_extend = False  # type: ignore[assignment]


def memory_cleanup(module: nn.Module) -> None:
    """Remove everything that the forward pass stored on the layers of a model (`input0`, `output`).

    Products with curvature blocks (the fields of `HMP`, `GGNMP`, `PCHMP`) go too: they keep the forward pass's tensors
    and, where plain functions lie between layers, a piece of autograd's graph.

    >>> import torch, bpk
    >>> layer = bpk.extend(torch.nn.Linear(2, 1))
    >>> out = layer(torch.ones(3, 2))
    >>> bpk.memory_cleanup(layer)
    >>> "output" in vars(layer)
    False
    """
    check_module(module, "memory_cleanup")
    for child in module.modules():
        forget(child)
        child.__dict__.pop(BEFORE, None)  # of a forward pass that has failed
    for param in module.parameters():
        for name in [name for name, value in vars(param).items() if isinstance(value, BlockProduct)]:
            delattr(param, name)
