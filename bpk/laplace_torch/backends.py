"""What laplace-torch calls a backend: curvature of a batch, Jacobians and individual gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from laplace.curvature import CurvatureInterface, EFInterface, GGNInterface
from laplace.utils import Kron
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from bpk.context import backpack
from bpk.extending import extend
from bpk.extensions import KFAC, KFLR, BatchGrad, DiagGGNExact, DiagGGNMC, SqrtGGNExact, SumGradSquared
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.side_by_side import as_rows
from bpk.kernels.passes import half_squared_error
from bpk.kernels.predictive import only
from bpk.operators import GGN as GGNOperator

MOST_AXES = 4
"""Of parameters for which laplace-torch knows Kronecker factors."""


class Backend(CurvatureInterface):
    """Jacobians, gradients and fields of the parameters that the approximation is of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        frozen = [name for name, p in self._model.named_parameters() if not p.requires_grad]
        if self.last_layer and frozen:
            raise value_error(
                f"The last layer has parameters that do not require gradients: {', '.join(frozen)}.",
                "laplace-torch has an entry for each of its parameters, and curvature has none for these.",
                "call requires_grad_(True) on them, or freeze all that is left out, with subset_of_weights='all'.",
            )
        extend(self.model)
        extend(self.lossfunc)

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """`[N, C, P]` and the outputs `[N, C]`, in one backward pass of all columns."""
        with self.trained(), torch.enable_grad():
            f = self.model(x)
            rows = self.fields(half_squared_error(self.model)(f), SqrtGGNExact(), enable_backprop)
        found = torch.cat([as_rows(row, 2) for row in rows], 2).transpose(0, 1)
        found = found if self.subnetwork_indices is None else found[:, :, self.subnetwork_indices]
        return (found, f) if enable_backprop else (found.detach(), f.detach())

    functorch_jacobians = jacobians

    def selected_output_jacobians(
        self, x: Any, outputs: Tensor, enable_backprop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Rows `[N, K, P]` of the Jacobian, `K` of each sample `[N, K]` or one `[N]`: as many columns go back."""
        chosen = outputs[:, None] if outputs.dim() == 1 else outputs
        with self.trained(), torch.enable_grad():
            f = self.model(x)
            if len(chosen) != len(f):
                raise ValueError(f"outputs are chosen for {len(chosen)} samples, and there are {len(f)}.")
            rows = self.fields(half_squared_error(self.model)(f.gather(1, chosen)), SqrtGGNExact(), enable_backprop)
        found = torch.cat([as_rows(row, 2) for row in rows], 2).transpose(0, 1)
        return (found, f) if enable_backprop else (found.detach(), f.detach())

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Individual gradients `[N, P]` and the loss."""
        loss, rows = self.quantity(x, y, BatchGrad())
        found = torch.cat([as_rows(row) for row in rows], 1)
        return found if self.subnetwork_indices is None else found[:, self.subnetwork_indices], loss

    def diagonal(self, x: Any, y: Tensor, extension: BackpropExtension) -> tuple[Tensor, Tensor]:
        """The loss and a diagonal `[P]`, in laplace-torch's scaling."""
        loss, parts = self.quantity(x, y, extension)
        found = torch.cat([part.flatten() for part in parts])
        found = found if self.subnetwork_indices is None else found[self.subnetwork_indices]
        return self.factor * loss, self.factor * found

    # ---- one pass --------------------------------------------------------------------------------------
    def quantity(self, x: Any, y: Tensor, extension: BackpropExtension) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch, and a field of each parameter."""
        with self.trained(), torch.enable_grad():
            f = self.model(x)
            if self.likelihood == "classification":
                f, y = f.flatten(0, -2), y.flatten()
            loss = self.lossfunc(f, y)
            return loss.detach(), self.fields(loss, extension)

    def fields(self, loss: Tensor, extension: BackpropExtension, create_graph: bool = False) -> list[Any]:
        """A field of each parameter; neither it nor a gradient stays there."""
        with backpack(extension):
            torch.autograd.grad(loss, self.params, create_graph=create_graph, allow_unused=True)
        found = [vars(p).pop(extension.savefield, None) for p in self.params]
        missing = [name for name, value in zip(self.params_dict, found, strict=True) if value is None]
        if missing:
            raise value_error(
                f"The outputs of {type(self.model).__name__} do not depend on {', '.join(missing)}.",
                "laplace-torch has an entry for every trained parameter.",
                "call requires_grad_(False) on those that are not used.",
            )
        return found

    def trained(self) -> Any:
        """Inside, only the approximation's parameters require gradients: columns stop at the first of them."""
        ours = {id(p) for p in self.params}
        every = dict(self.model.named_parameters())
        return only(every, [name for name, p in every.items() if id(p) in ours])


def no_factors(params: Mapping[str, Tensor]) -> Kron:
    """Kronecker factors that are zero, as laplace-torch has them; a scalar parameter is a vector of one entry there."""
    for name, p in params.items():
        if p.dim() > MOST_AXES:
            raise value_error(
                f"'{name}' has {p.dim()} axes.",
                f"laplace-torch knows Kronecker factors of parameters with up to {MOST_AXES}.",
                "use hessian_structure='diag', or leave the parameter out by requires_grad_(False).",
            )
    first = next(iter(params.values()))
    return Kron.init_from_model([p if p.dim() else p.reshape(1) for p in params.values()], first.device, first.dtype)


class GGN(Backend, GGNInterface):
    """The generalised Gauss-Newton matrix by `bpk`'s rules, as laplace-torch's `backend=`.

    Args:
        model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y: What laplace-torch passes.
        stochastic: Whether targets are drawn (`DiagGGNMC`, `KFAC`) in the place of exact columns.
        num_samples: How many are drawn per sample.
        rank: How many eigenpairs a low-rank approximation has.

    The last three are given as `backend_kwargs=dict(...)`.
    """

    def __init__(
        self, *args: Any, stochastic: bool = False, num_samples: int = 1, rank: int = 10, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.stochastic, self.num_samples, self.rank = stochastic, num_samples, rank

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The loss, and the diagonal `[P]`."""
        return self.diagonal(x, y, DiagGGNMC(mc_samples=self.num_samples) if self.stochastic else DiagGGNExact())

    def kron(self, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, Kron]:
        """The loss, and Kronecker factors of a batch of a data set of `N` samples."""
        extension = KFAC(mc_samples=self.num_samples) if self.stochastic else KFLR()
        orders = extension.orders = {}
        loss, found = self.quantity(x, y, extension)
        expected = no_factors(self.params_dict).kfacs
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        for name, p, ours, theirs in zip(self.params_dict, self.params, found, expected, strict=True):
            sizes = [[list(factor.shape) for factor in factors] for factors in (ours, theirs)]
            if sizes[0] != sizes[1] or id(p) in tables or orders.get(p) is not None:
                raise value_error(
                    f"'{name}' has Kronecker factors of the sizes {sizes[0]}; laplace-torch adds to {sizes[1]}.",
                    "it knows vectors with one factor, matrices and convolutions with two, in the order of axes; "
                    "those of embeddings and of transposed convolutions are in another order.",
                    "use hessian_structure='diag', or leave the parameter out by requires_grad_(False).",
                )
        # over batches, laplace-torch adds up: the sum of output factors, and the mean over samples of input factors
        scaled = [[*factors[:-1], factors[-1] * (len(y) / N)] if len(factors) == 2 else factors for factors in found]
        return self.factor * loss, self.factor * Kron(scaled)

    def eig_lowrank(self, data_loader: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Top eigenvectors `[P, K]` and eigenvalues `[K]` of the data set's GGN, and the loss."""
        operator = GGNOperator(self.model, self.lossfunc, data_loader)
        k = min(self.rank, operator.shape[0] - 1)
        # the same result every time; not a vector of ones, along which softmax and its like do not change
        start = torch.randn(
            operator.shape[0], dtype=operator.dtype, device="cpu", generator=torch.Generator().manual_seed(0)
        )
        values, vectors = map(torch.as_tensor, eigsh(operator.to_scipy(), k, v0=start.numpy()))
        some = values > values.amax() * torch.finfo(values.dtype).eps * operator.shape[0]
        with torch.no_grad():
            device = self.params[0].device
            loss = sum(self.lossfunc(self.model(x.to(device)), y.to(device)) for x, y in data_loader)
        return vectors[:, some].to(device), self.factor * values[some].to(device), self.factor * loss


class EF(Backend, EFInterface):
    """The empirical Fisher by `bpk`'s rules, as laplace-torch's `backend=`. It has no Kronecker factors."""

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The loss, and the diagonal `[P]`."""
        return self.diagonal(x, y, SumGradSquared())
