"""Convolutions and transposed convolutions over one, two or three axes, with every option."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bpk.jacobians.convolution.convolution import Conv, ConvTranspose
from bpk.jacobians.core.example import case

RULES = (
    Conv(
        1,
        nn.Conv1d,
        functions=(F.conv1d,),
        examples=(
            case(nn.Conv1d, 2, 3, 3, shape=(3, 2, 7)),
            case(nn.Conv1d, 2, 4, 2, stride=2, padding=1, groups=2, bias=False, shape=(2, 2, 6)),
            case(nn.Conv1d, 2, 3, 4, padding="same", shape=(2, 2, 6)),
            case(nn.Conv1d, 2, 2, 3, padding=2, padding_mode="circular", shape=(2, 2, 6)),
        ),
    ),
    Conv(
        2,
        nn.Conv2d,
        functions=(F.conv2d,),
        examples=(
            case(nn.Conv2d, 2, 3, 3, shape=(3, 2, 5, 6)),
            case(nn.Conv2d, 2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), shape=(2, 2, 6, 5)),
            case(nn.Conv2d, 4, 6, 2, groups=2, bias=False, shape=(3, 4, 3, 4)),
            case(nn.Conv2d, 3, 6, 3, padding=1, groups=3, shape=(2, 3, 4, 4)),
            case(nn.Conv2d, 2, 2, (2, 4), padding="same", dilation=(1, 1), shape=(2, 2, 5, 5)),
            case(nn.Conv2d, 2, 2, 2, padding="same", padding_mode="replicate", shape=(2, 2, 4, 4)),
            case(nn.Conv2d, 2, 2, 3, padding=1, padding_mode="reflect", stride=2, shape=(2, 2, 5, 4)),
            case(nn.Conv2d, 2, 2, 3, padding=(1, 2), padding_mode="circular", shape=(2, 2, 4, 4)),
            case(nn.Conv2d, 2, 3, 3, padding="valid", shape=(2, 2, 3, 3)),
        ),
    ),
    Conv(
        3,
        nn.Conv3d,
        functions=(F.conv3d,),
        examples=(
            case(nn.Conv3d, 2, 2, 2, shape=(2, 2, 3, 3, 4)),
            case(nn.Conv3d, 2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2, shape=(2, 2, 2, 3, 3)),
            case(nn.Conv3d, 1, 2, 2, padding="same", padding_mode="replicate", bias=False, shape=(2, 1, 3, 2, 3)),
        ),
    ),
    ConvTranspose(
        1,
        nn.ConvTranspose1d,
        functions=(F.conv_transpose1d,),
        examples=(
            case(nn.ConvTranspose1d, 2, 3, 3, shape=(3, 2, 4)),
            case(nn.ConvTranspose1d, 4, 2, 3, stride=2, padding=1, output_padding=1, groups=2, shape=(2, 4, 3)),
            case(nn.ConvTranspose1d, 2, 2, 2, dilation=3, padding=2, output_padding=2, bias=False, shape=(2, 2, 5)),
        ),
    ),
    ConvTranspose(
        2,
        nn.ConvTranspose2d,
        functions=(F.conv_transpose2d,),
        examples=(
            case(nn.ConvTranspose2d, 2, 3, 2, shape=(3, 2, 3, 3)),
            case(
                nn.ConvTranspose2d,
                2,
                3,
                (3, 2),
                stride=(2, 3),
                padding=(1, 0),
                output_padding=(1, 2),
                shape=(2, 2, 3, 2),
            ),
            case(nn.ConvTranspose2d, 4, 6, 2, groups=2, dilation=2, bias=False, shape=(2, 4, 3, 3)),
            case(nn.ConvTranspose2d, 3, 3, 3, padding=2, groups=3, shape=(2, 3, 4, 4)),
        ),
    ),
    ConvTranspose(
        3,
        nn.ConvTranspose3d,
        functions=(F.conv_transpose3d,),
        examples=(
            case(nn.ConvTranspose3d, 2, 2, 2, shape=(2, 2, 2, 2, 2)),
            case(
                nn.ConvTranspose3d,
                2,
                4,
                (1, 2, 2),
                stride=(1, 2, 1),
                output_padding=(0, 1, 0),
                groups=2,
                shape=(2, 2, 2, 2, 2),
            ),
        ),
    ),
)
