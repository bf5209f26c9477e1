"""The definitions of quantities in plain autograd: code that their pages show and run, for one small network.

Each defines `by_autograd(name, p)`. A convolution `0`, `tanh` `1`, a linear layer `3`; the loss is cross-entropy.
"""

GRADIENTS = """def gradients(p):  # [N, *p], one backward pass for each sample
    losses = [loss_fn(model(x[[n]]), y[[n]]) / len(x) for n in range(len(x))]
    return torch.stack([torch.autograd.grad(loss, p)[0] for loss in losses])


def by_autograd(name, p):
"""

BATCH_GRAD = f"{GRADIENTS}    return gradients(p)\n"
NORMS = f"{GRADIENTS}    return gradients(p).flatten(1).square().sum(1)\n"
SQUARES = f"{GRADIENTS}    return gradients(p).square().sum(0)\n"
VARIANCE = f"{GRADIENTS}    return gradients(p).var(0, correction=0)\n"
INNER_PRODUCTS = f"{GRADIENTS}    return gradients(p).flatten(1) @ gradients(p).flatten(1).T\n"

PROJECTED = f"""{GRADIENTS}    R = ProjectedGrad().whole(p.shape, p)  # [64, P], from the seed
    return gradients(p).flatten(1) @ R.T
"""

NORMS_OF_ALL = f"""{GRADIENTS}    squares = [gradients(q).flatten(1).square().sum(1) for q in model.parameters()]
    norms = len(x) * sum(squares).sqrt()  # of the gradients of samples' own losses, over all parameters
"""
WEIGHTED = f"{NORMS_OF_ALL}    return torch.tensordot(1 / (norms + 0.01), gradients(p), 1)\n"
CLIPPED = f"{NORMS_OF_ALL}    return torch.tensordot(1 / norms.clamp(min=1), gradients(p), 1)\n"

PARTS = """def parts(p):  # Jacobians [N, C, P], by a backward pass for each output of each sample; loss Hessians
    f = model(x)
    rows = [torch.autograd.grad(f[n, c], p, retain_graph=True)[0] for n in range(len(f)) for c in range(f.shape[1])]
    q = f.softmax(1).detach()
    H = (q.diag_embed() - q[:, :, None] * q[:, None]) / len(f)
    return torch.stack(rows).reshape(*f.shape, -1), H


"""

DIAGONAL = f"""{PARTS}def by_autograd(name, p):
    J, H = parts(p)
    return torch.einsum("ncp,ncd,ndp->p", J, H, J).reshape(p.shape)
"""

DIAGONALS = f"""{PARTS}def by_autograd(name, p):
    J, H = parts(p)
    return torch.einsum("ncp,ncd,ndp->np", J, H, J).reshape(-1, *p.shape)
"""

GGN_BLOCK = """def block(p):  # [P, P], of the GGN
    J, H = parts(p)
    return torch.einsum("ncp,ncd,ndq->pq", J, H, J)


"""

BLOCK = f"""{PARTS}{GGN_BLOCK}def by_autograd(name, p):
    return block(p)


def squared(root):
    return torch.einsum("cnp,cnq->pq", root.flatten(2), root.flatten(2))
"""

SPECTRUM = f"""{PARTS}{GGN_BLOCK}def by_autograd(name, p):  # the largest eigenvalues of the GGN's block
    return torch.linalg.eigvalsh(block(p))[-48:]  # N C: others are zero


def eigenvalues(gram, p):
    return torch.linalg.eigvalsh(gram)[-min(48, p.numel()) :]
"""

SECOND_DERIVATIVES = """def second_derivatives(p):  # [N, *p], the diagonal of every sample's Hessian
    rows = []
    for n in range(len(x)):
        g = torch.autograd.grad(loss_fn(model(x[[n]]), y[[n]]) / len(x), p, create_graph=True)[0].flatten()
        H = torch.autograd.grad(g, p, torch.eye(len(g), dtype=g.dtype), is_grads_batched=True)[0].flatten(1)
        rows.append(H.diagonal().reshape(p.shape))
    return torch.stack(rows)


def by_autograd(name, p):
"""
HESSIANS = f"{SECOND_DERIVATIVES}    return second_derivatives(p)\n"
HESSIAN = f"{SECOND_DERIVATIVES}    return second_derivatives(p).sum(0)\n"

VECTOR = """def vector(p):  # [1, *p]
    return torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(1, *p.shape)


"""

HESSIAN_PRODUCT = f"""{VECTOR}def by_autograd(name, p):  # Pearlmutter: the derivative of the gradient's product with v
    g = torch.autograd.grad(loss_fn(model(x), y), p, create_graph=True)[0]
    return torch.autograd.grad((g * vector(p)).sum(), p)[0][None]
"""

GGN_PRODUCT = f"""{VECTOR}{PARTS}def by_autograd(name, p):
    J, H = parts(p)
    return torch.einsum("ncp,ncd,ndq,vq->vp", J, H, J, vector(p).flatten(1)).reshape(1, *p.shape)
"""

POSITIVE_PRODUCT = f"""{VECTOR}{PARTS}def clipped_residual(p, v):  # Kᵀ [R]₊ K v, of tanh: tanh'' = -2 tanh (1 - tanh²)
    z = model[0](x)
    h = model[1](z).detach().requires_grad_()
    g = torch.autograd.grad(loss_fn(model[2:](h), y), h)[0]
    residual = (-2 * h * (1 - h**2) * g).clamp(min=0).detach()
    w = torch.zeros_like(z, requires_grad=True)
    transposed = torch.autograd.grad(z, p, w, create_graph=True)[0]  # Kᵀ w, whose derivative along v is K v
    along = torch.autograd.grad(transposed, w, v, retain_graph=True)[0]
    return torch.autograd.grad(z, p, residual * along)[0]


def by_autograd(name, p):
    J, H = parts(p)
    v = vector(p)
    product = torch.einsum("ncp,ncd,ndq,vq->vp", J, H, J, v.flatten(1)).reshape(v.shape)
    return product + clipped_residual(p, v[0]) if name.startswith("0.") else product
"""

INPUT_FACTOR = """def input_factor(layer):  # [I, I]; every position of a convolution is a row
    a = x if layer is model[0] else model[:3](x)
    rows = nn.functional.unfold(a, 3).transpose(1, 2).flatten(0, 1) if layer is model[0] else a
    return rows.T @ rows / len(x)


"""

MULTIPLIED = f"""{INPUT_FACTOR}def by_autograd(name, p):  # the factors, multiplied
    layer = model[int(name[0])]
    G = output_factor(layer)
    return G if p is layer.bias else torch.kron(G.contiguous(), input_factor(layer))


def multiplied(factors):
    return torch.kron(*factors) if len(factors) == 2 else factors[0]
"""

OF_BIAS = """def output_factor(layer):  # [O, O], the GGN's block of the bias
    return block(layer.bias)


"""

FACTORS = f"""{PARTS}{GGN_BLOCK}{OF_BIAS}{MULTIPLIED}"""

EIGENBASIS = f"""{PARTS}{GGN_BLOCK}{INPUT_FACTOR}def by_autograd(name, p):  # U diag(Uᵀ GGN U) Uᵀ
    layer = model[int(name[0])]
    U = torch.linalg.eigh(block(layer.bias)).eigenvectors
    if p is layer.weight:
        U = torch.kron(U, torch.linalg.eigh(input_factor(layer)).eigenvectors)
    return U * (U * (block(p) @ U)).sum(0) @ U.T


def multiplied(found):  # U diag(λ) Uᵀ
    U = torch.kron(*found.bases) if len(found.bases) == 2 else found.bases[0]
    return U * found.moments.flatten() @ U.T
"""

AVERAGED_FACTORS = f"""{PARTS}def output_factor(layer):  # [O, O], by one average that travels back
    G = parts(model[3].bias)[1].sum(0)  # the loss Hessians
    if layer is model[0]:
        slope = 1 - model[:3](x) ** 2  # of tanh, [N, channels * positions]
        G = model[3].weight.T @ G @ model[3].weight * (slope.T @ slope / len(x))
        G = G.reshape(4, 36, 4, 36).sum((1, 3))  # a bias acts on all 36 positions
    return G


{MULTIPLIED}"""
