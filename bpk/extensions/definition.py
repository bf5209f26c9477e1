"""In which words an extension says what its field must be: the field's form, and what plain autograd computes.

`bpk.verify` and the tests evaluate definitions with quantities that plain autograd gives, and nothing of `bpk`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from torch import Tensor


class Form(Enum):
    """What a field holds for a parameter `[*p]` and `N` samples, and so how it is compared with its definition."""

    BATCH = "[*p]"
    SAMPLES = "[N, *p]"
    OUTPUTS = "[C, *p]"
    NUMBER = "[]"
    NUMBERS = "[N]"
    SAMPLE_VECTORS = "[N, K]"
    """Numbers of each sample, of which each depends on all entries of the parameter."""
    TOKENS = "[N, T, *p]"
    TOKEN_NUMBERS = "[N, T]"
    TOKEN_VECTORS = "[N, T, K]"
    """Numbers of each token of a sample, of which each depends on all entries of the parameter."""
    GRAM = "[N, N]"
    """One number for each pair of samples."""
    AXES = "[d, d] or [d], for each axis"
    """A matrix for each axis of the parameter, or its diagonal; the definition has their entries in one row."""
    ROOT_GRAM = "[V N, V N]"
    """The Gram matrix of a square root: the definition is `[N, N]`, the squared norm of each block `[V, V]`."""
    ROOT = "[V, N, *p]"
    """A square root: the definition is the matrix `[N, *p, *p]` of each sample."""
    PRODUCT = "[V, *p] -> [V, *p]"
    """A callable: the definition is its product `[*p]` with `plain.vector`."""
    BOUNDED_PRODUCT = "[V, *p] -> [V, *p], at least"
    """A symmetric one: the definition is the products `[B, *p]` with matrices that are not larger than it."""
    EIGENBASIS = "[U_G, U_A], [G, A] or [U_G], [G]"
    """Eigenbases of Kronecker factors with second moments, of which `bpk.verification.eigenbasis` knows."""
    GROUP_FACTORS = "[G, A] or [G], with an axis for groups of samples"
    """Those of each group, of which `bpk.verification.kronecker` knows, too."""
    FACTORS = "[G, A] or [G]"
    """Kronecker factors of the GGN, whose definition `bpk.verification.kronecker` knows."""

    @property
    def by_sample(self) -> bool:
        """Whether the definition is a row for each sample, so that some samples are enough to look at."""
        alone = (Form.SAMPLES, Form.NUMBERS, Form.SAMPLE_VECTORS, Form.ROOT, Form.GRAM, Form.ROOT_GRAM)
        return self in alone or self.by_token

    @property
    def by_token(self) -> bool:
        """Whether it is a row for each token of a sample."""
        return self in (Form.TOKENS, Form.TOKEN_NUMBERS, Form.TOKEN_VECTORS)

    @property
    def of_every_entry(self) -> bool:
        """Whether each number depends on all entries of the parameter, so that the definition must see them all."""
        others = (Form.TOKEN_NUMBERS, Form.TOKEN_VECTORS, Form.AXES)
        return self in (Form.NUMBER, Form.NUMBERS, Form.SAMPLE_VECTORS, Form.GRAM, Form.ROOT_GRAM, *others)


class PlainAutograd(ABC):
    """What plain autograd says about one parameter, in terms of which definitions are written.

    Here `n` counts the samples that the extension considers, as often as `subsampling` names them, and `E` entries of
    the parameter that are looked at: all of them for the forms `[]` and `[N]`. The gradient `g_n` and the Hessian `H_n`
    of a sample's share of the loss carry its scaling (`1/N` of a mean); `J_n` is the Jacobian of its prediction.
    """

    batch_size: int
    """`N`, of the whole batch."""

    @property
    @abstractmethod
    def gradients(self) -> Tensor:
        """`[n, E]`: the gradients `g_n`."""

    @property
    @abstractmethod
    def norms(self) -> Tensor:
        """`[n]`: squared norms of `g_n`, of all entries, for fewer numbers in memory."""

    @property
    @abstractmethod
    def total_norms(self) -> Tensor:
        """`[n]`: squared norms of `g_n` over all parameters of the model that are trained."""

    @property
    @abstractmethod
    def token_gradients(self) -> Tensor:
        """`[n, T, E]`: the gradients `g_nt` of the terms that the loss adds up for a sample, `sum_t g_nt = g_n`.

        Terms are those of rows of the prediction, and of positions in each.
        """

    @property
    @abstractmethod
    def token_norms(self) -> Tensor:
        """`[n, T]`: squared norms of `g_nt`, of all entries, for fewer numbers in memory."""

    @property
    @abstractmethod
    def token_ggn_diagonals(self) -> Tensor:
        """`[n, T, E]`: diagonals of `J_n^T H_nt J_n`, with the Hessian of a term."""

    @property
    @abstractmethod
    def jacobian_squares(self) -> Tensor:
        """`[n, E]`: diagonals of `J_n^T J_n`."""

    @property
    @abstractmethod
    def output_jacobian_squares(self) -> Tensor:
        """`[C, E]`: squares of the Jacobian of each output, summed over samples; `C T` of predictions `[N T, C]`."""

    @property
    @abstractmethod
    def ggn(self) -> Tensor:
        """`[n, E, E]`: `J_n^T H_n J_n`, the generalised Gauss-Newton matrix (with the draws of a sampled extension)."""

    @property
    def ggn_diagonals(self) -> Tensor:
        """`[n, E]`: its diagonals."""
        return self.ggn.diagonal(dim1=1, dim2=2)

    @property
    @abstractmethod
    def hessian_diagonals(self) -> Tensor:
        """`[n, E]`: diagonals of the Hessians of the samples' shares of the loss."""

    @property
    @abstractmethod
    def hessian_diagonal(self) -> Tensor:
        """`[E]`: their sum, for fewer backward passes."""

    @property
    @abstractmethod
    def vector(self) -> Tensor:
        """`[*p]`: some vector to multiply with."""

    @property
    @abstractmethod
    def ggn_product(self) -> Tensor:
        """`[*p]`: the GGN's block, summed over samples, times `vector`."""

    @property
    @abstractmethod
    def hessian_product(self) -> Tensor:
        """`[*p]`: the Hessian's block, summed over samples, times `vector`."""
