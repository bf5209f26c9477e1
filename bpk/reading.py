"""Fields of a parameter, with types that editors and type checkers know, and a message where one is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, overload

from torch import Tensor

from bpk.extensions.registry import every_extension
from bpk.jacobians.core.errors import NotThere, type_error
from bpk.jacobians.core.tabular import Table, Tabular
from bpk.plan.objective import NO_FIELD
from bpk.utils.ekfac import Eigenbasis

T = TypeVar("T")
Product = Callable[[Tensor], Tensor]


class Field(Generic[T]):
    """A field, as an attribute of `Fields`."""

    def __set_name__(self, owner: type[Fields], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, fields: None, owner: type[Fields]) -> Field[T]: ...

    @overload
    def __get__(self, fields: Fields, owner: type[Fields]) -> T: ...

    def __get__(self, fields: Fields | None, owner: type[Fields]) -> Any:
        if fields is None:
            return self
        try:
            return fields[self.name]
        except NoField as error:
            raise AttributeError(str(error)) from None


class NoField(NotThere):
    """A parameter has no such field."""


class Fields(Tabular, Mapping[str, Any]):
    """What `bpk` has saved on a parameter: attributes for its own quantities, and `fields["name"]` for any.

    >>> import torch, bpk
    >>> from bpk.extensions import DiagGGNExact
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(DiagGGNExact()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> bpk.fields_of(model.weight)
    field           value
    --------------  -------------
    diag_ggn_exact  Tensor [3, 4]
    >>> bpk.fields_of(model.weight).diag_ggn_exact.shape
    torch.Size([3, 4])
    """

    grad_batch = Field[Tensor]()
    batch_l2 = Field[Tensor]()
    sum_grad_squared = Field[Tensor]()
    variance = Field[Tensor]()
    weighted_grad = Field[Tensor]()
    clipped_grad = Field[Tensor]()
    diag_ggn_exact = Field[Tensor]()
    diag_ggn_mc = Field[Tensor]()
    diag_ggn_exact_batch = Field[Tensor]()
    diag_ggn_mc_batch = Field[Tensor]()
    diag_h = Field[Tensor]()
    diag_h_batch = Field[Tensor]()
    sqrt_ggn_exact = Field[Tensor]()
    sqrt_ggn_mc = Field[Tensor]()
    grad_gram = Field[Tensor]()
    ggn_gram = Field[Tensor]()
    ggn_gram_mc = Field[Tensor]()
    projected_grad = Field[Tensor]()
    axis_gram = Field[list[Tensor]]()
    diag_jtj_exact = Field[Tensor]()
    diag_jtj_mc = Field[Tensor]()
    diag_jtj_exact_output = Field[Tensor]()
    grad_token = Field[Tensor]()
    token_l2 = Field[Tensor]()
    projected_grad_token = Field[Tensor]()
    diag_ggn_exact_token = Field[Tensor]()
    diag_ggn_mc_token = Field[Tensor]()
    trace_ggn_exact_token = Field[Tensor]()
    trace_ggn_mc_token = Field[Tensor]()
    kfac = Field[list[Tensor]]()
    kflr = Field[list[Tensor]]()
    kfra = Field[list[Tensor]]()
    hbp = Field[list[Tensor]]()
    kfac_batch = Field[list[Tensor]]()
    kflr_batch = Field[list[Tensor]]()
    ekfac = Field[Eigenbasis]()
    ekflr = Field[Eigenbasis]()
    hmp = Field[Product]()
    ggnmp = Field[Product]()
    pchmp = Field[Product]()

    def __init__(self, param: Tensor) -> None:
        self.param = param

    def __getitem__(self, name: str) -> Any:
        if name in self.names():
            return vars(self.param)[name]
        raise missing(name, self.names(), vars(self.param).get(NO_FIELD, {}))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def names(self) -> list[str]:
        """The fields that are there (private names are no fields)."""
        return [name for name in vars(self.param) if not name.startswith("_")]

    def table(self) -> Table:
        """Fields, and what they hold."""
        rows = [[name, shown(value)] for name, value in self.items()]
        return Table(("field", "value"), rows, () if rows else ["no fields"])


def fields_of(param: Tensor) -> Fields:
    """The fields of a parameter, with types: `bpk.fields_of(p).kfac` is a `list[Tensor]`.

    Raises:
        TypeError: If what is given is no tensor.
    """
    if not isinstance(param, Tensor):
        raise type_error(
            f"fields_of(...) got a {type(param).__name__}.",
            "fields are saved on parameters.",
            "pass one: fields_of(model.weight), or {name: fields_of(p) for name, p in model.named_parameters()}.",
        )
    return Fields(param)


def missing(name: str, there: list[str], known: Mapping[str, tuple[str, str]]) -> NoField:
    """Why there is no such field (of some, a pass has known), and what may be meant."""
    if name in known:
        return NoField(f"A backward pass has left the parameter without a field '{name}'.", *known[name])
    makers = {extension.savefield: str(extension) for extension in every_extension()}
    if name in makers:
        why = f"fields are saved by a backward pass in a context: {', '.join(there) or 'none'} are there."
        return NoField(f"The parameter has no field '{name}'.", why, f"run it in backpack({makers[name]}()).")
    close = get_close_matches(name, {*makers, *there}, n=1)
    return NoField(
        f"There is no field '{name}'.",
        f"no quantity is saved under this name ({', '.join(there) or 'none'} are there).",
        f"did you mean '{close[0]}'?" if close else "see bpk.extensions for the names.",
    )


def shown(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        return f"Tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(map(shown, value))}"
    return repr(value)
