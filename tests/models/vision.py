"""Models of images as people write them: see `test_any_model.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.handwritten import Case


def image(n: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(n, channels, height, width)


def double(inputs: int, outputs: int) -> nn.Sequential:
    """A block of a U-Net."""
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(first, nn.GroupNorm(1, outputs), nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Down, up by transposed convolution or interpolation, padded to the size of the skip connection."""

    def __init__(self, classes: int, transposed: bool) -> None:
        super().__init__()
        self.down1, self.down2, self.decode = double(1, 2), double(2, 2), double(4, 2)
        self.up = nn.ConvTranspose2d(2, 2, 2, stride=2) if transposed else nn.Conv2d(2, 2, 1)
        self.transposed, self.out = transposed, nn.Conv2d(2, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        x = self.down2(F.max_pool2d(skip, 2))
        if self.transposed:
            x = self.up(x)
            dh, dw = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dw // 2, dw - dw // 2, dh // 2, dh - dh // 2])
        else:
            x = self.up(F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False))
        return self.out(self.decode(torch.cat([skip, x], dim=1)))


class SoftDice(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = logits.sigmoid()
        overlap = (p * target).sum((1, 2, 3))
        return (1 - (2 * overlap + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()


def unet() -> Case:
    return Case(UNet(2, True), nn.CrossEntropyLoss(), (image(2, 1, 5, 4),), (torch.randint(2, (2, 5, 4)),))


def unet_interpolated() -> Case:
    target = torch.randint(2, (2, 1, 4, 4)).to(torch.get_default_dtype())
    return Case(UNet(1, False), nn.BCEWithLogitsLoss(), (image(2, 1, 4, 4),), (target,))


class SpatialAttention(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(1, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * int(c) ** (-0.5), dim=2)
        return x + self.out(torch.bmm(v, weights.permute(0, 2, 1)).reshape(b, c, h, w))


class Denoiser(nn.Module):
    """A U-Net with GroupNorm, attention, an embedding of the time step, and up-sampling by PixelShuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 2), nn.SiLU(), nn.Linear(2, 2))
        self.first, self.down = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, stride=2, padding=1)
        self.norm, self.attention = nn.GroupNorm(2, 2), SpatialAttention(2)
        self.up, self.out = nn.Conv2d(2, 8, 1), nn.Conv2d(4, 1, 3, padding=1)

    def embed(self, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.exp(-math.log(100) * torch.arange(2, dtype=t.dtype) / 2)[None]
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = self.first(x)
        z = self.down(skip) + self.time(self.embed(t))[:, :, None, None]
        z = self.attention(F.silu(self.norm(z)))
        return self.out(torch.cat((skip, F.pixel_shuffle(self.up(z), 2)), 1))


def denoiser() -> Case:
    return Case(Denoiser(), nn.MSELoss(), (image(2, 1, 4, 4), torch.rand(2)), (image(2, 1, 4, 4),))


class MobileBlock(nn.Module):
    """Depthwise convolution, squeeze and excitation, layer scale, all by hand."""

    def __init__(self, c: int = 3) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, c, 1), nn.BatchNorm2d(c)
        self.depthwise = nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False)
        self.squeeze, self.excite, self.out = nn.Linear(c, 2), nn.Linear(2, c), nn.Linear(c, 3)
        self.gamma = nn.Parameter(torch.full((c, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.hardswish(self.bn(self.depthwise(x)))
        s = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean(dim=(2, 3)))))).view(y.size(0), -1, 1, 1)
        x = x + self.gamma * (y * s)
        return self.out(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))


def mobile_block() -> Case:
    return Case(MobileBlock().eval(), nn.CrossEntropyLoss(), (image(3, 1, 3, 3),), (torch.randint(3, (3,)),))


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shuffle = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.b(F.leaky_relu(self.a(x), 0.2))) + F.interpolate(x, scale_factor=2)


def super_resolution() -> Case:
    return Case(SuperResolution(), nn.SmoothL1Loss(), (image(2, 1, 2, 2),), (image(2, 1, 4, 4),))


class ViT(nn.Module):
    """Patches by `unfold`, a class token, a position embedding, an encoder layer by hand."""

    def __init__(self, d: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch, self.proj = patch, nn.Linear(patch * patch, d)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, 5, d))
        self.norm, self.attention = nn.LayerNorm(d), nn.MultiheadAttention(d, 2, batch_first=True)
        self.head = nn.Linear(d, 3)
        for p in self.attention.parameters():  # its factors have tests of their own
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        p = self.patch
        x = self.proj(x.unfold(2, p, p).unfold(3, p, p).reshape(x.shape[0], -1, p * p))
        x = torch.cat((self.cls.repeat(x.shape[0], 1, 1), x), dim=1) + self.pos
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x[:, 0])


def vit() -> Case:
    return Case(ViT(), nn.CrossEntropyLoss(), (image(3, 1, 4, 4),), (torch.randint(3, (3,)),))


class ShiftedWindows(nn.Module):
    """Windows in the batch axis, a shift by `roll`, and a learned table of relative positions."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(1, d), nn.Linear(d, 3 * d), nn.Linear(d, 3)
        self.table = nn.Parameter(torch.randn(9, 2) / 2)
        grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = grid[:, :, None] - grid[:, None, :] + 1
        self.register_buffer("index", relative[0] * 3 + relative[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.movedim(1, -1))
        n, h, w, d = x.shape
        z = torch.roll(x, (-1, -1), (1, 2)).view(n, h // 2, 2, w // 2, 2, d)
        z = z.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
        q, k, v = self.qkv(z).view(-1, 4, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) + self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1)
        z = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, h // 2, w // 2, 2, 2, d)
        z = z.permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, d)
        return self.head((x + torch.roll(z, (1, 1), (1, 2))).mean((1, 2)))


def shifted_windows() -> Case:
    return Case(ShiftedWindows(), nn.CrossEntropyLoss(), (image(2, 1, 2, 4),), (torch.randint(3, (2,)),))


class StandardizedConv2d(nn.Conv2d):
    """A subclass with a `forward` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        w = w / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Video(nn.Module):
    """Frames in the batch axis, weight standardisation, the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.norm, self.out = StandardizedConv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, C, H, W]
        n, t = x.shape[:2]
        f = F.silu(self.norm(self.frame(x.flatten(0, 1))))
        return self.out(f.view(n, t, -1).mean(1))


def video() -> Case:
    return Case(Video(), nn.CrossEntropyLoss(), (torch.randn(2, 2, 1, 3, 3),), (torch.randint(2, (2,)),))


CASES: tuple[Callable[[], Case], ...] = (
    unet,
    unet_interpolated,
    denoiser,
    mobile_block,
    super_resolution,
    vit,
    shifted_windows,
    video,
)
