"""What each quantity is: its formula, its cost as a rule of thumb, what people use it for, and its definition in code.

The code (`by_autograd.py`) uses nothing but plain autograd. The pages of quantities run it beside `bpk` and print how
far both are apart; a test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.site import by_autograd as code


@dataclass(frozen=True)
class Definition:
    """One quantity."""

    formula: str
    """LaTeX; `g_n` is the gradient of sample n's share of the loss, `J_n` the Jacobian of its prediction `f_n`."""
    words: str
    """What the symbols are, and the scaling."""
    time: str
    memory: str
    uses: str
    autograd: str
    """Code that defines `by_autograd(name, p)`."""
    value: str = "p.{field}"
    """What is compared with it, in terms of the field."""
    arguments: str = ""
    """Of the extension, in the code."""


SHARES = "`g_n` is the gradient of sample `n`'s share of the loss: with a mean over `N` samples, of `loss_n / N`."
CURVATURE = (
    "`J_n` is the Jacobian of sample `n`'s prediction in the parameter, `H_n` the Hessian of its share of the loss in "
    "the prediction (it carries the `1/N` of a mean)."
)
COLUMNS = "the columns `[C, N, *layer]` that travel back, in rounds of at most 256 MiB (`memory=`, `chunk_size=`)"
SAMPLED = "the columns `[M, N, *layer]` that travel back"
FACTORS = "the factors, `O² + I²` numbers for a layer with `O` outputs and `I` inputs"
KRONECKER = (
    r"\mathrm{GGN} \approx G \otimes A, \quad A = \frac{1}{N} \sum_n a_n a_n^\top, \quad "
    r"G = \sum_n J_n^\top H_n J_n"
)
IN_G = (
    "`a_n` are the inputs of the layer, `J_n` in `G` is the prediction's Jacobian in the bias of the layer. "
    "Positions of a convolution are summed, in `A` and before the outer product in `G`, as in BackPACK; "
    '`approximation="expand"` and `"reduce"` are the variants of the literature.'
)
EIGENVALUES = (
    r"\mathrm{GGN} \approx U \, \mathrm{diag} (\lambda) \, U^\top, \quad U = U_G \otimes U_A, \quad "
    r"\lambda = \mathrm{diag} ( U^\top \, \mathrm{GGN} \; U )"
)
IN_BASIS = (
    "`U_G` and `U_A` are eigenvectors of the Kronecker factors `G` and `A`, and `λ` (`moments`) is the diagonal of "
    "the block in their basis: no other is nearer to it. A parameter without an input factor has its own eigenvectors."
)
BASES = "the bases, as large as the factors, and as many moments as the parameter has entries"
TRAINING = "Natural-gradient and second-order training, Laplace approximations, pruning."
MC = (
    r"H_n \approx \frac{1}{M} \sum_m s_{nm} s_{nm}^\top, \quad "
    r"s_{nm} \propto \nabla_f \, \ell(f_n, \hat y_{nm}), \quad "
)
MC_WORDS = f"{CURVATURE} Targets `ŷ_nm` are drawn from the loss's predictive distribution (softmax, Gaussian, ...)."
MANY = "mc_samples=2000"

DEFINITIONS: dict[str, Definition] = {
    "BatchGrad": Definition(
        r"\mathrm{grad\_batch}_n = g_n = \nabla_\theta \, \ell_n / N",
        f"{SHARES} Rows add up to `p.grad`.",
        "little more than writing the result: a layer's inputs and output gradients are there already",
        "`N` times the parameters, the result itself; `BatchL2Grad`, `Variance` and an `extension_hook` avoid it",
        "Differentially private training, influence functions, outliers, importance sampling, gradient noise.",
        code.BATCH_GRAD,
    ),
    "BatchL2Grad": Definition(
        r"\mathrm{batch\_l2}_n = \lVert g_n \rVert^2",
        f"{SHARES} One number for each parameter tensor; their sum over parameters is the norm of the whole gradient.",
        "less than the gradient itself: for a linear layer the product of two norms",
        "`N` numbers for each parameter",
        "Gradient clipping in differentially private training, importance sampling, hard examples.",
        code.NORMS,
    ),
    "SumGradSquared": Definition(
        r"\mathrm{sum\_grad\_squared} = \sum_n g_n \odot g_n",
        SHARES,
        "one more product of matrices for each layer, about that of the gradient",
        "as many numbers as the parameters; individual gradients are not kept",
        "The empirical Fisher's diagonal, adaptive step sizes, signal-to-noise ratios.",
        code.SQUARES,
    ),
    "Variance": Definition(
        r"\mathrm{variance} = \frac{1}{N} \sum_n g_n \odot g_n - \Bigl(\frac{1}{N} \sum_n g_n\Bigr)^2",
        f"{SHARES} Divided by `N` (biased).",
        "that of `SumGradSquared`",
        "as many numbers as the parameters",
        "Batch sizes and step sizes from gradient noise, early stopping, tests of training.",
        code.VARIANCE,
    ),
    "WeightedGrad": Definition(
        r"\mathrm{weighted\_grad} = \sum_n c_n \, g_n, \quad c_n = w ( \lVert \nabla_\theta \, \ell_n \rVert )",
        f"{SHARES} Weights are given, or a function `w` of the norms of the gradients of samples' own losses, over all "
        "parameters; by default `1 / (norm + 0.01)`.",
        "for norms, that of `BatchL2Grad`; for the sum, one more product of matrices for each layer",
        "as many numbers as the parameters; with a function, what layers have read is kept to the end of the pass",
        "Automatic clipping in differentially private training, importance sampling, reweighted or dropped samples.",
        code.WEIGHTED,
    ),
    "ClippedGrad": Definition(
        r"\mathrm{clipped\_grad} = \sum_n \min \bigl( 1, \tfrac{\mathrm{max\_norm}}"
        r"{\lVert \nabla_\theta \, \ell_n \rVert} \bigr) \, g_n",
        f"{SHARES} Norms are those of the gradients of samples' own losses, over all parameters.",
        "that of `WeightedGrad`",
        "that of `WeightedGrad`",
        "Differentially private training (DP-SGD), robustness to outliers.",
        code.CLIPPED,
    ),
    "GradGram": Definition(
        r"\mathrm{grad\_gram}_{nm} = \langle g_n, g_m \rangle",
        f"{SHARES} The sum over parameters is the Gram matrix of the model's gradients.",
        "products of all pairs of samples: `N²` times the inputs and outputs of a linear layer, or those of rows",
        "`N²` numbers for each parameter; individual gradients exist a part at a time, if at all",
        "Similarity of samples and conflicts between them, eigenvalues of the empirical Fisher, gradient noise.",
        code.INNER_PRODUCTS,
    ),
    "ProjectedGrad": Definition(
        r"\mathrm{projected\_grad}_n = R \, g_n, \quad \mathrm{E} \, R^\top R = I",
        f"{SHARES} `R` `[k, P]` is random, and follows from the seed and the parameter's shape.",
        'products with `R`, which is made again in every pass; for `kind="factored"` with two small matrices',
        "`N k` numbers for each parameter; `R` exists some rows at a time",
        "Influence of training samples (TRAK, LoGra), nearest neighbours among gradients, data selection.",
        code.PROJECTED,
    ),
    "DiagGGNExact": Definition(
        r"\mathrm{diag\_ggn\_exact} = \mathrm{diag} \Bigl( \sum_n J_n^\top H_n J_n \Bigr)",
        CURVATURE,
        "a backward pass with `C` columns for each sample, and their squares at every parameter",
        f"the result has the size of the parameters; meanwhile {COLUMNS}",
        "Laplace approximations, pruning, preconditioners; for cross-entropy it is the diagonal of the Fisher matrix.",
        code.DIAGONAL,
    ),
    "DiagGGNMC": Definition(
        MC + r"\mathrm{diag\_ggn\_mc} = \mathrm{diag} \Bigl( \sum_n J_n^\top H_n J_n \Bigr)",
        MC_WORDS,
        "a backward pass with `M` columns for each sample in place of `C`",
        f"the result has the size of the parameters; meanwhile {SAMPLED}",
        "As `DiagGGNExact`, where there are many classes: unbiased, with an error that falls like `1/√M`.",
        code.DIAGONAL,
        arguments=MANY,
    ),
    "BatchDiagGGNExact": Definition(
        r"\mathrm{diag\_ggn\_exact\_batch}_n = \mathrm{diag} ( J_n^\top H_n J_n )",
        f"{CURVATURE} Rows add up to `diag_ggn_exact`.",
        "that of `DiagGGNExact`",
        f"`N` times the parameters; meanwhile {COLUMNS}",
        "Which samples carry curvature; its spread over the batch.",
        code.DIAGONALS,
    ),
    "BatchDiagGGNMC": Definition(
        MC + r"\mathrm{diag\_ggn\_mc\_batch}_n = \mathrm{diag} ( J_n^\top H_n J_n )",
        MC_WORDS,
        "that of `DiagGGNMC`",
        f"`N` times the parameters; meanwhile {SAMPLED}",
        "As `BatchDiagGGNExact`, where there are many classes.",
        code.DIAGONALS,
        arguments=MANY,
    ),
    "DiagHessian": Definition(
        r"\mathrm{diag\_h} = \mathrm{diag} \bigl( \nabla_\theta^2 \, \ell \bigr), \quad "
        r"\nabla_\theta^2 \, \ell = \mathrm{GGN} + \sum_n \sum_k (\nabla_\theta^2 f_{nk}) \, \partial_{f_{nk}} \ell",
        "The loss is that of the whole batch. Beside the GGN, every curved layer adds its second derivative, "
        "contracted with the gradient of its output. With piecewise linear layers (ReLU) Hessian and GGN are equal.",
        "`C` columns as for the GGN, and one more for every number that a curved layer (`tanh`, softmax) takes in",
        f"the result has the size of the parameters; meanwhile {COLUMNS}",
        "Saddle points and negative curvature, which the GGN does not show; pruning.",
        code.HESSIAN,
    ),
    "BatchDiagHessian": Definition(
        r"\mathrm{diag\_h\_batch}_n = \mathrm{diag} \bigl( \nabla_\theta^2 \, \ell_n / N \bigr)",
        "The Hessian of every sample's share of the loss; rows add up to `diag_h`.",
        "that of `DiagHessian`",
        f"`N` times the parameters; meanwhile {COLUMNS}",
        "Which samples carry negative curvature.",
        code.HESSIANS,
    ),
    "SqrtGGNExact": Definition(
        r"V_{cn} = J_n^\top s_{nc}, \quad H_n = \sum_c s_{nc} s_{nc}^\top, \quad "
        r"\mathrm{GGN} = \sum_{cn} V_{cn} V_{cn}^\top",
        f"{CURVATURE} The factor is not unique; its square is.",
        "that of `DiagGGNExact`, and writing the result",
        "`C N` times the parameters, the result itself",
        "Eigenvalues and eigenvectors of the GGN through the small Gram matrix `[CN, CN]` (ViViT), Jacobians, kernels.",
        code.BLOCK,
        "squared(p.{field})",
    ),
    "SqrtGGNMC": Definition(
        MC + r"V_{mn} = \tfrac{1}{\sqrt M} \, J_n^\top s_{nm}",
        MC_WORDS,
        "that of `DiagGGNMC`, and writing the result",
        "`M N` times the parameters, the result itself",
        "As `SqrtGGNExact`, where there are many classes.",
        code.BLOCK,
        "squared(p.{field})",
        "mc_samples=300",
    ),
    "GGNGram": Definition(
        r"\mathrm{ggn\_gram} = V V^\top, \quad V_{(cn)} = J_n^\top s_{nc}, \quad H_n = \sum_c s_{nc} s_{nc}^\top",
        f"{CURVATURE} The root is not unique; the spectrum of `V Vᵀ` is that of the GGN's block `Vᵀ V`, but for zeros.",
        "that of `DiagGGNExact`, and products of all pairs of columns",
        "`(C N)²` numbers for each parameter; meanwhile all columns `[C, N, *layer]` at once",
        "Eigenvalues and eigenvectors of the GGN (ViViT), slopes and curvatures of samples along them.",
        code.SPECTRUM,
        "eigenvalues(p.{field}, p)",
    ),
    "GGNGramMC": Definition(
        MC + r"\mathrm{ggn\_gram\_mc} = V V^\top, \quad V_{(mn)} = \tfrac{1}{\sqrt M} \, J_n^\top s_{nm}",
        MC_WORDS,
        "that of `DiagGGNMC`, and products of all pairs of columns",
        "`(M N)²` numbers for each parameter; meanwhile all columns `[M, N, *layer]` at once",
        "As `GGNGram`, where there are many classes.",
        code.SPECTRUM,
        "eigenvalues(p.{field}, p)",
        "mc_samples=100",
    ),
    "KFAC": Definition(
        MC + KRONECKER,
        f"{IN_G} Loss Hessians are sampled, as for `DiagGGNMC`.",
        "a backward pass with `M` columns, and a product of matrices for each factor",
        f"{FACTORS}; meanwhile {SAMPLED}",
        TRAINING,
        code.FACTORS,
        "multiplied(p.{field})",
        MANY,
    ),
    "KFLR": Definition(
        KRONECKER,
        f"{IN_G} Loss Hessians `H_n` are exact.",
        "that of `DiagGGNExact`, and a product of matrices for each factor",
        f"{FACTORS}; meanwhile {COLUMNS}",
        TRAINING,
        code.FACTORS,
        "multiplied(p.{field})",
    ),
    "KFRA": Definition(
        r"\mathrm{GGN} \approx G \otimes A, \quad G^{(l)} = \frac{1}{N} \sum_n {J_n^{(l)}}^\top G^{(l+1)} J_n^{(l)}, "
        r"\quad G^{(L)} = \sum_n H_n",
        "`J_n` is the Jacobian of one layer: in place of columns for every sample, one average travels back. "
        "`A` as for `KFLR`.",
        "products with the Jacobian of every layer on a matrix as large as its output, for all samples",
        f"{FACTORS}; meanwhile a matrix with as many rows and columns as a layer has outputs",
        TRAINING,
        code.AVERAGED_FACTORS,
        "multiplied(p.{field})",
    ),
    "EKFAC": Definition(
        MC + EIGENVALUES,
        f"{IN_BASIS} Loss Hessians are sampled, as for `DiagGGNMC`.",
        "that of `KFAC`, eigenvectors of the factors, and columns in their basis",
        f"{BASES}; meanwhile {SAMPLED}",
        TRAINING,
        code.EIGENBASIS,
        "multiplied(p.{field})",
        MANY,
    ),
    "EKFLR": Definition(
        EIGENVALUES,
        f"{IN_BASIS} Loss Hessians `H_n` are exact.",
        "that of `KFLR`, eigenvectors of the factors, and columns in their basis",
        f"{BASES}; meanwhile {COLUMNS}",
        TRAINING,
        code.EIGENBASIS,
        "multiplied(p.{field})",
    ),
    "HBP": Definition(
        KRONECKER,
        f"{IN_G} The options choose among `KFAC`, `KFLR` and `KFRA`; the defaults are those of `KFAC`.",
        "that of the member that is chosen",
        FACTORS,
        TRAINING,
        code.FACTORS,
        "multiplied(p.{field})",
        MANY,
    ),
    "HMP": Definition(
        r"v \mapsto \bigl( \nabla_\theta^2 \, \ell \bigr) v",
        "The block of the Hessian that belongs to one parameter; `[V, *p]` goes in and comes out, for any `V`.",
        "a forward and a backward sweep behind the parameter for each call, for all `V` vectors at once",
        "the tensors of the forward pass are kept, as long as the function is",
        "Newton steps by conjugate gradients, eigenvalues by power iteration, traces by random vectors.",
        code.HESSIAN_PRODUCT,
        "p.{field}(vector(p))",
    ),
    "GGNMP": Definition(
        r"v \mapsto \Bigl( \sum_n J_n^\top H_n J_n \Bigr) v",
        f"{CURVATURE} `[V, *p]` goes in and comes out, for any `V`.",
        "a forward and a backward sweep behind the parameter for each call, for all `V` vectors at once",
        "the tensors of the forward pass are kept, as long as the function is",
        "As `HMP`, where the matrix has to be positive semi-definite.",
        code.GGN_PRODUCT,
        "p.{field}(vector(p))",
    ),
    "PCHMP": Definition(
        r"v \mapsto \Bigl( \sum_n J_n^\top H_n J_n + \sum_l {K^{(l)}}^\top \bigl[ R^{(l)} \bigr]_+ K^{(l)} \Bigr) v",
        "`R` is a layer's residual, its second derivative contracted with the gradient of its output; `[·]₊` sets "
        "negative eigenvalues to zero (or takes their absolute value), `K` is the Jacobian of the layer's input in "
        "the parameter.",
        "that of `HMP`; eigenvalues where a residual is not diagonal",
        "the tensors of the forward pass are kept, as long as the function is",
        "Conjugate gradients with more curvature than the GGN's, and still positive semi-definite.",
        code.POSITIVE_PRODUCT,
        "p.{field}(vector(p))",
    ),
}
