"""The contexts: `backpack(...)` around a backward pass, `disable()` around a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr
from types import TracebackType

from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.backward import Backward
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.errors import counted, value_error
from bpk.recording.context.opened import ExtensionHook, Opened, Pass, Settings
from bpk.recording.context.state import CTX
from bpk.recording.context.surroundings import require_eager
from bpk.recording.context.told import Told

__all__ = ["CTX", "backpack", "disable"]

TAKEN = frozenset(dir(nn.Parameter))
"""Names of what a parameter has without any extension."""


class backpack(Settings):
    """Activate extensions for the backward passes inside the context.

    Args:
        *extensions: Instances of extensions, such as `BatchGrad()` or `KFAC(mc_samples=2)`.
        extension_hook: Called as `extension_hook(module)` after all extensions are through with a
            module; it may replace or delete what they saved.
        debug: Print what is computed for which module.
        retain_graph: Keep what the forward pass stored, for another backward pass.
        chunk_size: How many columns of a square root of the GGN travel at a time. Left out, as many as `memory` holds.
        memory: Bytes that these columns may take at the largest layer (default: 256 MiB on processors, half where 64
            columns fit there; no limit elsewhere). Layers are passed once for each chunk.
        grad_scaler: The scaler of `grad_scaler.scale(loss).backward()`: fields are then those of `loss` itself.
        samples: Of which samples the rows of the loss are, where that is not plain: the sample `[R]` of each row (0 to
            `N - 1`), their number where the graph tells the rest, or both as a pair. The graph has to agree. Left out,
            it is found out, and you are told what is a guess.

    Raises:
        ValueError: If something other than an extension instance is passed, or two that save the same field.

    Contexts nest: the innermost one is active, and leaving it restores the one around it. A context is seen by the
    thread that has entered it. While it is open, backward passes of this thread run in this thread, on every device.

    >>> import torch, bpk
    >>> from bpk.extensions import BatchGrad
    >>> model = bpk.extend(torch.nn.Linear(2, 1))
    >>> loss_fn = bpk.extend(torch.nn.MSELoss())
    >>> with bpk.backpack(BatchGrad()):
    ...     loss_fn(model(torch.ones(3, 2)), torch.zeros(3, 1)).backward()
    >>> model.weight.grad_batch.shape
    torch.Size([3, 1, 2])
    """

    def __init__(
        self,
        *extensions: BackpropExtension,
        extension_hook: ExtensionHook | None = None,
        debug: bool = False,
        retain_graph: bool = False,
        chunk_size: int | None = None,
        memory: int | None = None,
        grad_scaler: GradScaler | None = None,
        samples: int | Tensor | tuple[int, Tensor] | None = None,
    ) -> None:
        for extension in extensions:
            check_extension(extension)
            if grad_scaler is not None and extension.has_module_extensions:
                raise value_error(
                    f"{extension} has module extensions, and backpack(...) a grad_scaler.",
                    "nothing tells how what they return scales with the loss.",
                    "leave out grad_scaler=, and divide their fields by the right power of scaler.get_scale().",
                )
        check_fields(extensions)
        if extension_hook is not None and not callable(extension_hook):
            raise value_error(
                f"backpack(..., extension_hook={extension_hook!r}) cannot be called.",
                "it is called with each module whose fields are there.",
                "pass a function of a module: extension_hook=lambda module: ...",
            )
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise value_error(
                f"backpack(..., grad_scaler={grad_scaler!r}) is no GradScaler.",
                "fields are divided by the scale that it has when the backward pass runs.",
                "pass the scaler itself: grad_scaler=scaler.",
            )
        chunk_size, memory = positive("chunk_size", chunk_size), positive("memory", memory)
        told = None if samples is None else Told.of(samples)
        super().__init__(
            extensions, extension_hook, debug, retain_graph, chunk_size, memory, grad_scaler=grad_scaler, told=told
        )
        self._opened: list[Opened] = []

    def __enter__(self) -> backpack:
        require_eager()
        opened = Opened(self, self.begin)
        self._opened.append(opened)
        CTX.enter(opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = CTX.innermost(self._opened)
        self._opened.remove(opened)
        CTX.leave(opened)
        opened.abort()
        if CTX.stack:
            CTX.stack[-1].reached |= opened.reached
        if kind is None:
            opened.check()

    def begin(self, task: int, under_way: dict[int, Pass]) -> Backward:
        """A backward pass of this number has come to a recorded call for the first time."""
        return Backward(self, task, under_way)


def positive(name: str, number: int | None) -> int | None:
    """A number of at least one, or `None`."""
    found = counted(number)
    if number is not None and found is None:
        raise value_error(
            f"backpack(..., {name}={repr(number)}) is not a whole number of at least 1.",
            "it limits how many columns, or bytes of columns, exist at a time.",
            f"pass a whole number, or leave {name} out.",
        )
    return found


def check_fields(extensions: Sequence[BackpropExtension]) -> None:
    """Refuse extensions that would overwrite each other's results."""
    fields: dict[str, BackpropExtension] = {}
    for extension in extensions:
        if extension.savefield in fields:
            raise value_error(
                f"backpack(...) got {fields[extension.savefield]} and {extension}, which both save "
                f"'{extension.savefield}'.",
                "one would overwrite the other.",
                "use one of them, or give one another name: extension.savefield = '...'.",
            )
        fields[extension.savefield] = extension


def check_field(extension: BackpropExtension) -> None:
    """Refuse an extension that cannot save its values, or would overwrite what torch has on a parameter."""
    name = type(extension).__name__
    try:
        field = extension.savefield
    except AttributeError as error:
        do = "call super().__init__() in its __init__."
        raise value_error(f"{name} has no savefield.", "its base class was not initialised.", do) from error
    if field in TAKEN:
        raise value_error(
            f"{name} saves its values in '{field}', which every tensor has.",
            "parameters would lose what torch keeps there.",
            'take another name: field = "..." in the class, or savefield=.',
        )


def check_extension(extension: object) -> None:
    """Refuse a class instead of an instance, or anything else, saying what to write."""
    if isinstance(extension, BackpropExtension):
        check_field(extension)
        return
    if isinstance(extension, type) and issubclass(extension, BackpropExtension):
        name = extension.__name__
        raise value_error(
            f"backpack(...) got the class {name} instead of an instance.",
            "an extension carries options and results, so it must be created first.",
            f"write backpack({name}()).",
        )
    raise value_error(
        f"backpack(...) got {repr(extension)}, which is not an extension.",
        "it takes instances of the classes in bpk.extensions.",
        "write for example backpack(BatchGrad(), KFAC()); for a list of extensions, backpack(*extensions).",
    )


class disable:
    """Run the forward pass of extended modules without storing anything (in this thread).

    >>> import torch, bpk
    >>> model = bpk.extend(torch.nn.Linear(2, 1))
    >>> with bpk.disable():
    ...     out = model(torch.ones(3, 2))
    >>> "input0" in vars(model), bpk.disable.should_store_io()
    (False, True)
    """

    def __init__(self) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(CTX.disabled)
        CTX.disabled = True

    def __exit__(self, *error: object) -> None:
        CTX.disabled = self.before.pop()

    @staticmethod
    def should_store_io() -> bool:
        """Whether a forward pass now would store inputs and outputs on extended modules: `False` inside `disable`."""
        return not CTX.disabled
