"""Module extensions of activation layers."""

from torch import nn

from bpk.extensions.secondorder.sqrt_ggn.base import made_for

SqrtGGNReLU, SqrtGGNSigmoid, SqrtGGNTanh, SqrtGGNELU, SqrtGGNSELU, SqrtGGNLeakyReLU, SqrtGGNLogSigmoid = made_for(
    __name__, nn.ReLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.SELU, nn.LeakyReLU, nn.LogSigmoid
)
