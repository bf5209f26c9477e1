"""Recurrent layers and their cells.

At each step `a_t = W_ih x_t + b_ih` and `b_t = W_hh h_(t-1) + b_hh` enter the cell, and an LSTM may project its result,
`h_t = W_hr m_t`. Kronecker factors are those of these linear maps, with time as an extra axis:

    A = sum_n sum_t u_t u_t^T / N     u_t = x_t for weight_ih, h_(t-1) for weight_hh, m_t for weight_hr
    G = the GGN's block of a bias added to the map's output: gradients are summed over time, then multiplied

so that `G` of `weight_ih` is that of `bias_ih`; in a GRU the hidden part of the candidate has a gradient of its own.
"expand": one row of `G` for each step, `A` divided by `N T`; "reduce": `A` of `u` averaged over time.

Dropout between layers multiplies the output of each layer but the last by a mask, `x_t = mask_t h_t` with entries 0 and
`1 / (1 - p)`. Masks are drawn once more, from the state of the random generator before the forward call, and believed
if the output that was recorded follows from them. Where it does not (cuDNN draws from a state of its own), the layer
is refused; single layers with `nn.Dropout` in between serve as well.
"""

from __future__ import annotations

from torch import nn

from bpk.jacobians.core.example import case
from bpk.jacobians.recurrent.cells import Elman, Gru, Lstm
from bpk.jacobians.recurrent.recurrent import Recurrent, RecurrentStep

NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
STEP_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


RULES = (
    Recurrent(
        nn.RNN,
        cell=Elman,
        params=NAMES,
        examples=(
            case(nn.RNN, 2, 3, batch_first=True, shape=(3, 4, 2)),
            case(nn.RNN, 2, 2, bias=False, nonlinearity="relu", shape=(2, 3, 2)),
            case(nn.RNN, 2, 2, num_layers=2, bidirectional=True, batch_first=True, shape=(3, 2, 2)),
        ),
    ),
    Recurrent(
        nn.LSTM,
        cell=Lstm,
        params=NAMES,
        examples=(
            case(nn.LSTM, 2, 3, batch_first=True, shape=(3, 3, 2)),
            case(nn.LSTM, 2, 2, bias=False, shape=(2, 3, 2)),
            case(nn.LSTM, 2, 3, proj_size=2, bidirectional=True, batch_first=True, shape=(3, 2, 2)),
            case(nn.LSTM, 2, 2, num_layers=2, batch_first=True, shape=(3, 2, 2)),
        ),
    ),
    Recurrent(
        nn.GRU,
        cell=Gru,
        params=NAMES,
        examples=(
            case(nn.GRU, 2, 3, batch_first=True, shape=(3, 3, 2)),
            case(nn.GRU, 2, 2, bias=False, shape=(2, 3, 2)),
            case(nn.GRU, 2, 2, num_layers=2, bias=False, bidirectional=True, batch_first=True, shape=(3, 2, 2)),
        ),
    ),
    RecurrentStep(
        nn.RNNCell,
        cell=Elman,
        params=STEP_NAMES,
        examples=(
            case(nn.RNNCell, 2, 3, shape=(4, 2)),
            case(nn.RNNCell, 2, 3, nonlinearity="relu", bias=False, shapes=((4, 2), (4, 3))),
        ),
    ),
    RecurrentStep(
        nn.GRUCell,
        cell=Gru,
        params=STEP_NAMES,
        examples=(case(nn.GRUCell, 2, 3, shape=(4, 2)), case(nn.GRUCell, 2, 2, bias=False, shapes=((4, 2), (4, 2)))),
    ),
    RecurrentStep(
        nn.LSTMCell,
        cell=Lstm,
        params=STEP_NAMES,
        examples=(case(nn.LSTMCell, 2, 3, shape=(4, 2)), case(nn.LSTMCell, 3, 2, bias=False, shape=(4, 3))),
    ),
)
