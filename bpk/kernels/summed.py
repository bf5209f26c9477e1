"""Fields added up over the parameters of a model, as soon as they are there."""

from __future__ import annotations

from torch import Tensor, nn

from bpk.jacobians.core.errors import NotThere, value_error


class Summed:
    """An `extension_hook` that adds fields up over parameters and removes them, so that few exist at a time.

    For fields whose sum is the model's: `grad_gram` `[N, N]`, `ggn_gram` `[C N, C N]`, `batch_l2` `[N]`,
    `projected_grad` `[N, K]`. It adds up one backward pass; make a new one for the next.

    >>> import torch, bpk
    >>> from bpk.extensions import GradGram
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> total = bpk.Summed("grad_gram")
    >>> with bpk.backpack(GradGram(), extension_hook=total):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> total["grad_gram"].shape
    torch.Size([8, 8])
    """

    def __init__(self, *fields: str) -> None:
        self.fields = fields
        self.totals: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module) -> None:
        """The fields of a module's parameters are there."""
        for param in module.parameters():
            for field in self.fields:
                value = param.__dict__.pop(field, None)
                if value is not None:
                    self.add(field, value)

    def add(self, field: str, value: Tensor) -> None:
        """Add one parameter's field."""
        total = self.totals.get(field)
        if total is not None and total.shape != value.shape:
            raise value_error(
                f"'{field}' has the shapes {list(total.shape)} and {list(value.shape)} at two parameters.",
                "what is added up must belong to the same samples and columns: that of several losses may not.",
                "read the fields themselves, or use one loss.",
            )
        # not in place: the sum may have a graph, and the first value may be the user's
        self.totals[field] = value if total is None else total + value

    def __getitem__(self, field: str) -> Tensor:
        """The sum of a field."""
        if field not in self.totals:
            raise NotThere(
                f"There is no sum of '{field}': {sorted(self.totals) or 'nothing'} has been added up.",
                "its extension was not active in a backward pass with this hook, or no parameter has a gradient.",
                "write backpack(extension, extension_hook=total), and name the extension's field in Summed(...).",
            )
        return self.totals[field]
