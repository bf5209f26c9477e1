"""Matrix products."""

from bpk.custom_module import generated

MatMul = generated("MatMul")
RightMatMul = generated("RightMatMul")
LeftMatMul = generated("LeftMatMul")
Einsum = generated("Einsum")
