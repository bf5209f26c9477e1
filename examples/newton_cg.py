"""Hessian-free optimisation: Newton steps with the GGN, solved by conjugate gradients, without forming a matrix.

A step solves `(G + λ I) d = -g`. Conjugate gradients need products `G v` only, and `ggn_vector_product` gives them
by automatic differentiation at the cost of a few backward passes. The damping λ follows how well the quadratic
model predicted the decrease (Levenberg-Marquardt), and the diagonal of G, from `DiagGGNExact`, preconditions the
iteration.

Prints the loss after each step. Checks the first step against a dense solve, for which G is built column by column.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _digits import load_digits
from _plots import lines
from bpk.extensions import DiagGGNExact
from bpk.hessianfree.ggnvp import ggn_vector_product
from bpk.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list

Product = Callable[[Tensor], Tensor]


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    x, y = nn.functional.avg_pool2d(digits.train_x, digits.size // 4).double()[:500], digits.train_y[:500]
    model = bpk.extend(nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10)).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    params = list(model.parameters())
    damping = 0.1
    first = loss_fn(model(x), y).item()
    print(f"{digits.name}, seen as 4 x 4; {sum(p.numel() for p in params)} parameters, loss {first:.4f}")

    losses, used = [first], [0]
    for step in range(1, 16):
        outputs = model(x)
        loss = loss_fn(outputs, y)
        model.zero_grad()
        with bpk.backpack(DiagGGNExact()):
            loss.backward(retain_graph=True)
        gradient = parameter_list_to_vector([p.grad for p in params])
        diagonal = parameter_list_to_vector([p.diag_ggn_exact for p in params])

        def times_ggn(v: Tensor, loss: Tensor = loss, outputs: Tensor = outputs) -> Tensor:
            product = ggn_vector_product(loss, outputs, model, vector_to_parameter_list(v, params))
            return parameter_list_to_vector(product)

        if step == 1:
            dense = torch.stack([times_ggn(e) for e in torch.eye(len(gradient), dtype=torch.float64)])
            agree("diagonal of the GGN, from its columns", diagonal, dense.diag())
            direct = torch.linalg.solve(dense + damping * torch.eye(len(dense), dtype=torch.float64), -gradient)
            exact, count = conjugate_gradients(times_ggn, damping, -gradient, diagonal, 500, 1e-10)
            agree(f"conjugate gradients ({count} products), against a dense solve", exact, direct, 1e-6)

        direction, products = conjugate_gradients(times_ggn, damping, -gradient, diagonal, 30, 1e-3)
        expected = (gradient @ direction + direction @ times_ggn(direction) / 2).item()
        move(params, direction)
        with torch.no_grad(), bpk.disable():
            reached = loss_fn(model(x), y).item()
        losses.append(min(reached, loss.item()))
        used.append(used[-1] + products)
        ratio = (reached - loss.item()) / expected  # 1: the quadratic model was right
        print(f"  step {step:>2}: loss {reached:.4f}, {products:>2} products, damping {damping:.1e}, ratio {ratio:.2f}")
        if ratio < 0.25:
            damping *= 3
        elif ratio > 0.75:
            damping /= 3
        if reached > loss.item():
            move(params, -direction)
    final = loss_fn(model(x), y).item()
    lines("Newton steps by conjugate gradients", "products with the GGN", "loss", {"": (used, losses)}, log=True)
    assert final < 0.3 * first, "Newton steps must bring the loss down"


def conjugate_gradients(
    times: Product, damping: float, right: Tensor, diagonal: Tensor, most: int, tolerance: float
) -> tuple[Tensor, int]:
    """Solve `(G + damping I) d = right`, preconditioned with the diagonal; also the number of products with G."""
    solution = torch.zeros_like(right)
    residual, inverse = right.clone(), 1 / (diagonal + damping)
    direction = inverse * residual
    decrease = residual @ direction
    count = 0
    while residual.norm() > tolerance * right.norm() and count < most:
        count += 1
        product = times(direction) + damping * direction
        length = decrease / (direction @ product)
        solution = solution + length * direction
        residual = residual - length * product
        before, decrease = decrease, residual @ (inverse * residual)
        direction = inverse * residual + decrease / before * direction
    return solution, count


@torch.no_grad()
def move(params: list[nn.Parameter], step: Tensor) -> None:
    """Add a flat vector to the parameters."""
    for p, d in zip(params, vector_to_parameter_list(step, params), strict=True):
        p += d


if __name__ == "__main__":
    main()
