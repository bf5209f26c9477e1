"""What random networks are made of, as source code: `x` is the tensor at hand, axis 0 its batch axis."""

from __future__ import annotations

# fmt: off
ACTIVATIONS = (
    "ReLU()", "ReLU6()", "Hardtanh(-0.8,0.9)", "Hardsigmoid()", "LeakyReLU(0.1)", "Hardshrink(0.2)",
    "Softshrink(0.1)", "Threshold(0.1,-0.2)", "PReLU()", "ELU(0.7)", "CELU()", "SELU()", "Hardswish()",
    "Softplus(2.0)", "GELU()", "GELU('tanh')", "Sigmoid()", "LogSigmoid()", "SiLU()", "Mish()", "Softsign()",
    "Tanh()", "Tanhshrink()", "RReLU().eval()", "RReLU()", "Softmax(-1)", "LogSoftmax(-1)", "Softmin(-1)", "Identity()",
)
"""Layers of `torch.nn` that leave the shape alone."""

IN_PLACE = (
    "ReLU", "ELU", "SiLU", "LeakyReLU", "Hardswish", "Mish", "CELU", "SELU", "Hardtanh", "ReLU6",
)
"""Those that may overwrite their input."""

ELEMENTWISE = (
    "torch.tanh(x)", "x.sigmoid()", "F.gelu(x)", "F.silu(x)", "F.relu(x)", "x * 0.5 + 1", "1 - x", "x / 2", "-x",
    "x.abs()", "x ** 2", "x.clamp(-1, 1)", "x / (1 + x.abs())", "torch.where(x > 0, x, 0.1 * x)", "torch.sin(x)",
    "x.exp().clamp(max=5)", "x.square()", "F.elu(x)", "F.softplus(x)", "F.leaky_relu(x, 0.2)",
    "torch.add(x, 1, alpha=2)", "x.mul(0.3).add(0.1)", "2 / (x.square() + 1)", "torch.log1p(x.abs())",
    "(x + 3).clamp(min=0.1).sqrt()", "torch.rsqrt(x.square() + 0.5)", "x.detach() * x", "F.dropout(x, 0.3, True)",
    "F.dropout(x, 0.3, False)", "torch.atan(x)", "x.clone()", "x.contiguous()", "x - 0.5 * x.detach()",
    "x.expm1().clamp(max=3)", "torch.erf(x)", "F.mish(x)", "x * x", "x + x", "torch.maximum(x, -0.5 * x)",
    "torch.minimum(x, x.square())", "torch.square(x).neg()", "F.hardtanh(x)", "F.softmax(x, -1)", "x.log_softmax(-1)",
    "F.normalize(x + 0.3, dim=-1, eps=0.1)", "x.cumsum(-1)", "x.flip(-1)", "x.roll(1, -1)",
    "x - x.mean(-1, keepdim=True)",
    "x / (1 + (x + 0.3).norm(dim=-1, keepdim=True))", "x * x.sum(-1, keepdim=True)", "x.mT.mT",
)
"""Functions that leave all axes but the last one alone."""

AXIS = (
    "F.softmax(x, dim=$)", "x.log_softmax($)", "x.roll(1, $)", "x.flip($)", "x.cumsum($)", "x.mean($)", "x.sum($)",
    "x.mean($, keepdim=True)", "torch.cat([x, x.tanh()], $)", "torch.stack([x, x.sin()], $)", "x.amax($)",
    "x.logsumexp($)", "x.unsqueeze($)", "x.transpose($, 1)", "x.transpose($, -1)", "x.movedim($, 1)",
    "x.chunk(2, $)[0]", "x.narrow($, 0, 1)", "x.select($, 0)", "x.std($, keepdim=True)", "x.var($, unbiased=False)",
    "x.prod($)", "x.sort($).values", "x.topk(1, $).values", "x.unbind($)[-1]", "x.split(1, $)[0]",
    "x.index_select($, torch.tensor([0, 0]))", "x.repeat_interleave(2, $)", "F.normalize(x + 0.3, dim=$, eps=0.1)",
    "x / x.exp().sum($, keepdim=True)", "(x + 0.3).norm(dim=$, keepdim=True) + x", "x - x.mean($, keepdim=True)",
    "x.squeeze($)", "torch.cat([x, x], $)", "x.max($).values", "x.cummax($).values", "x.softmax($) * x",
    "x * x.sigmoid().mean($, keepdim=True)", "torch.cat(x.chunk(2, $)[::-1], $)", "x.diff(dim=$)",
    "x.unsqueeze($).squeeze($)", "x.swapaxes($, 1)", "x.median($).values", "F.pad(x, (1, 1))",
    "x.flatten($ - 1 or 1)",
)
"""Functions along an axis `$` behind the batch axis."""

SHAPED = {
    2: (
        "x[:, :, None]", "x[:, None]", "x[:, :2]", "x[:, 1:]", "x[:, [0, -1]]", "x[:, ::2]",
        "x @ x.new_ones(*x.shape[1:], 2)", "x.unsqueeze(1) * x.unsqueeze(2)", "torch.einsum('ni,nj->nij', x, x)",
        "x.expand(2, -1, -1).transpose(0, 1)", "x.repeat(1, 2)",
        "x.outer(x.new_ones(2)) if False else x[..., None].expand(-1, -1, 2)",
        "torch.einsum('ni,ni->n', x, x)[:, None]", "x.sum(1, keepdim=True)", "x.gather(1, x.argsort(1))",
        "F.pad(x, (1, 0), value=0.3)", "torch.hstack([x, x * 2])",
    ),
    3: (
        "x.flatten(1)", "x.permute(0, 2, 1)", "x.transpose(-1, -2)", "x @ x.transpose(1, 2)", "torch.bmm(x, x.mT)",
        "torch.einsum('nij,nkj->nik', x, x)", "x[:, 0]", "x[:, -1]", "x[..., 0]", "x.mean(1)",
        "x.mean((1, 2))[:, None]", "x.sum(2)", "x.softmax(-1) @ x.mT", "x[:, None]", "x.tril()",
        "F.scaled_dot_product_attention(x, x, x)", "x.masked_fill(x > 0.5, 0.0)", "x.mT", "torch.matmul(x.mT, x)",
        "F.avg_pool1d(x, 2, 1)", "F.max_pool1d(x, 2, 1)", "F.interpolate(x, scale_factor=2)",
        "x.reshape(x.shape[0], -1)", "x.view(x.shape[0], -1)", "x[:, :, :1]", "torch.einsum('nij->nji', x)",
        "F.adaptive_avg_pool1d(x, 1).squeeze(2)", "x.diagonal(dim1=1, dim2=2)",
    ),
    4: (
        "x.flatten(2)", "x.flatten(1, 2)", "x.permute(0, 2, 3, 1)", "x.mean((2, 3))", "x[:, :, 0]", "x[..., -1]",
        "x @ x.mT", "x.sum(1)", "F.avg_pool2d(x, 2, 1)", "F.max_pool2d(x, 2, 1)", "F.interpolate(x, size=(2, 3))",
        "x.roll((1, 1), (2, 3))", "x.flatten(1)", "x.transpose(1, 2)", "x.amax((2, 3))", "F.unfold(x, 2)",
        "torch.einsum('nchw,ndhw->ncd', x, x)", "F.adaptive_max_pool2d(x, 1).flatten(1)",
        "x.reshape(x.size(0), x.size(1), -1).mT", "F.pixel_unshuffle(x, 2)",
        "x.to(memory_format=torch.channels_last)",
    ),
}
"""Functions by the number of axes."""

STATEMENTS = (
    "x = x.clone(); x += 0.5", "x = x * 2; x.relu_()", "x = x + 0.1; x.tanh_()", "x = x.clone(); x[:, 0] = 0",
    "x = x * 1; x *= x.detach()", "x = x.clone(); x[:, 0] *= 2", "x += 1", "x *= 0.5", "x = x.relu_()",
    "x -= 0.25 * x.detach()", "x = x + 0; x += x.sin()", "x = F.relu(x, inplace=True)", "x = x.sigmoid_()", "x /= 2",
    "x = x.clone(); x[:, :1] += x[:, -1:].clone()", "x = x.clone().masked_fill_(x < 0, 0.1)", "x = x.mul_(0.7)",
    "x = F.leaky_relu_(x, 0.1)",
)
"""Assignments, most of them in place."""
