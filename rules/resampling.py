"""Layers that move entries between channels and positions, or interpolate between them: linear maps, all of them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.example import case
from bpk.jacobians.families.linear_map import Copying, LinearMap


def shuffled(options: Any, x: Tensor) -> Tensor:
    """`[N, C, *d]` with the channels of groups in turns; on GPUs, torch's own takes no tensor with gaps in memory."""
    return x.unflatten(1, (options.groups, -1)).transpose(1, 2).flatten(1, 2)


RULES = (
    # channels to positions, and back
    Copying(
        nn.PixelShuffle,
        axes=3,
        functions=(F.pixel_shuffle,),
        examples=(
            case(nn.PixelShuffle, 2, shape=(2, 8, 2, 1)),
            case(nn.PixelShuffle, 3, shape=(2, 9, 1, 2)),
            case(nn.PixelShuffle, 2, shape=(2, 2, 4, 1, 2)),
        ),
    ),
    Copying(
        nn.PixelUnshuffle,
        axes=3,
        functions=(F.pixel_unshuffle,),
        examples=(
            case(nn.PixelUnshuffle, 2, shape=(2, 2, 4, 2)),
            case(nn.PixelUnshuffle, 3, shape=(2, 1, 3, 3)),
            case(nn.PixelUnshuffle, 2, shape=(2, 2, 1, 2, 4)),
        ),
    ),
    Copying(
        nn.ChannelShuffle,
        linear=shuffled,
        axes=1,
        functions=(F.channel_shuffle, F.native_channel_shuffle),
        examples=(
            case(nn.ChannelShuffle, 2, shape=(2, 6, 2, 2)),
            case(nn.ChannelShuffle, 3, shape=(3, 6, 2)),
            case(nn.ChannelShuffle, 2, shape=(2, 4, 1, 2, 2)),
        ),
    ),
    # patches to columns, and back (overlapping patches are added)
    Copying(
        nn.Unfold,
        axes=3,
        functions=(F.unfold,),
        examples=(
            case(nn.Unfold, 2, shape=(2, 2, 3, 4)),
            case(nn.Unfold, (2, 3), dilation=(2, 1), padding=(1, 0), stride=(1, 2), shape=(2, 1, 4, 5)),
        ),
    ),
    LinearMap(
        nn.Fold,
        axes=2,
        functions=(F.fold,),
        examples=(
            case(nn.Fold, (3, 4), 2, shape=(2, 8, 6)),
            case(nn.Fold, (4, 5), (2, 3), dilation=(2, 1), padding=(1, 0), stride=(1, 2), shape=(2, 6, 8)),
        ),
    ),
    # interpolation
    LinearMap(
        nn.Upsample,
        axes=2,
        functions=(F.interpolate, F.upsample),
        examples=(
            case(nn.Upsample, scale_factor=2, shape=(2, 2, 3)),
            case(nn.Upsample, 5, shape=(2, 1, 3)),
            case(nn.Upsample, scale_factor=(2, 1.5), shape=(2, 2, 2, 3)),
            case(nn.Upsample, (3, 2), shape=(2, 1, 2, 4)),
            case(nn.Upsample, scale_factor=2, shape=(2, 1, 2, 1, 2)),
            case(nn.Upsample, scale_factor=1.7, mode="nearest-exact", shape=(2, 1, 3, 2)),
            case(nn.Upsample, scale_factor=2.4, mode="linear", shape=(2, 2, 3)),
            case(nn.Upsample, 5, mode="linear", align_corners=True, shape=(2, 1, 3)),
            case(nn.Upsample, scale_factor=1.6, mode="bilinear", shape=(2, 2, 2, 3)),
            case(nn.Upsample, scale_factor=1.6, mode="bilinear", recompute_scale_factor=True, shape=(2, 1, 3, 3)),
            case(nn.Upsample, (3, 5), mode="bilinear", align_corners=True, shape=(2, 1, 2, 3)),
            case(nn.Upsample, scale_factor=2, mode="bicubic", shape=(2, 1, 2, 3)),
            case(nn.Upsample, (2, 5), mode="bicubic", align_corners=True, shape=(2, 1, 3, 3)),
            case(nn.Upsample, scale_factor=(1, 2, 1.5), mode="trilinear", shape=(2, 1, 2, 1, 2)),
            case(nn.Upsample, (1, 3, 2), mode="trilinear", align_corners=True, shape=(2, 1, 2, 2, 1)),
            case(nn.Upsample, (2, 3), mode="area", shape=(2, 1, 3, 4)),
        ),
    ),
    Copying(
        nn.UpsamplingNearest2d,
        axes=2,
        functions=(F.upsample_nearest,),
        examples=(
            case(nn.UpsamplingNearest2d, scale_factor=2, shape=(2, 2, 2, 3)),
            case(nn.UpsamplingNearest2d, (3, 2), shape=(2, 1, 2, 3)),
        ),
    ),
    LinearMap(
        nn.UpsamplingBilinear2d,
        axes=2,
        functions=(F.upsample_bilinear,),
        examples=(
            case(nn.UpsamplingBilinear2d, scale_factor=2, shape=(2, 2, 2, 3)),
            case(nn.UpsamplingBilinear2d, (3, 2), shape=(2, 1, 2, 3)),
        ),
    ),
)
