"""Networks with branches, recurrences and attention: their forward pass calls functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """BatchNorm, ReLU and convolution, twice, beside the identity (He et al., 2016: pre-activation)."""

    def __init__(self, planes_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(planes_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        same = stride == 1 and planes_in == planes
        self.shortcut = None if same else nn.Conv2d(planes_in, planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu1(self.norm1(x))
        out = self.conv2(self.relu2(self.norm2(self.conv1(a))))
        return out + (x if self.shortcut is None else self.shortcut(a))


class WideResNet(nn.Module):
    """Wide ResNet (Zagoruyko & Komodakis, 2016).

    Three groups of `(depth - 4) / 6` blocks, with 1, 2 and 4 times `width * planes` channels. Nothing but the sums is a
    function, so that every peer's converter can follow.
    """

    def __init__(
        self, depth: int, width: int, planes: int = 16, channels: int = 3, side: int = 32, classes: int = 10
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, planes, 3, 1, 1, bias=False)
        blocks, planes_in = [], planes
        for group in range(3):
            for block in range((depth - 4) // 6):
                planes_out = planes * width * 2**group
                blocks.append(ResidualBlock(planes_in, planes_out, 2 if group and not block else 1))
                planes_in = planes_out
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(planes_in)
        self.relu = nn.ReLU()
        self.average = nn.AvgPool2d(side // 4)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(planes_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.blocks(self.conv(x))))
        return self.linear(self.flatten(self.average(x)))


class CharRNN(nn.Module):
    """Next-character prediction `[N, T] -> [N, C, T]`: embedding, a stack of LSTMs, a linear layer."""

    def __init__(self, vocabulary: int = 83, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.linear = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        features, _ = self.lstm(self.embedding(x))
        return self.linear(features).permute(0, 2, 1)


class GRUClassifier(nn.Module):
    """`[N, T, features] -> [N, C]`: a GRU over time, and a linear layer on its last step."""

    def __init__(self, features: int = 32, hidden: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.gru(x)[0][:, -1])


class Transformer(nn.Module):
    """`[N, T, features] -> [N, C]`: a linear embedding, encoder layers, the mean over time, a linear layer."""

    def __init__(
        self, features: int = 32, width: int = 64, heads: int = 4, inner: int = 256, layers: int = 2, classes: int = 10
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, width)
        layer = nn.TransformerEncoderLayer(width, heads, inner, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.encoder(self.embedding(x)).mean(1))


class LanguageModel(nn.Module):
    """Words `[N, T]` to predictions of the next: an embedding and a linear layer, which may share their weight.

    Predictions are `[N, V, T]`, or with `flat` `[N T, V]`, as the loss of most language models takes them.
    """

    def __init__(self, vocabulary: int = 10_000, width: int = 64, tied: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.embedding(x))
        return out.flatten(0, 1) if self.flat else out.transpose(1, 2)


class TwoConvolutions(nn.Module):
    """Convolution, BatchNorm, ReLU, twice."""

    def __init__(self, planes_in: int, planes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(planes)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Segmentation `[N, C, H, W] -> [N, classes, H, W]` on three levels (Ronneberger et al., 2015), written freely."""

    def __init__(self, channels: int = 3, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.down1 = TwoConvolutions(channels, width)
        self.down2 = TwoConvolutions(width, 2 * width)
        self.bottom = TwoConvolutions(2 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.merge2 = TwoConvolutions(4 * width, width)
        self.up1 = nn.ConvTranspose2d(width, width, 2, 2)
        self.merge1 = TwoConvolutions(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        deep = self.bottom(F.max_pool2d(coarse, 2))
        coarse = self.merge2(torch.cat([self.up2(deep), coarse], 1))
        return self.head(self.merge1(torch.cat([self.up1(coarse), fine], 1)))


class Encoder(nn.Module):
    """A small convolutional network; what has no parameters is called as functions, or (`modules`) as modules."""

    def __init__(self, modules: bool = False) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.LayerNorm(256)
        self.conv2, self.first, self.last = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(128, 256), nn.Linear(256, 10)
        self.relu1, self.relu2, self.gelu, self.flat = nn.ReLU(), nn.ReLU(), nn.GELU(), nn.Flatten()
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(4)
        self.by_modules = modules

    def forward(self, x: Tensor) -> Tensor:
        if self.by_modules:
            x = self.flat(self.pool2(self.relu2(self.conv2(self.pool1(self.relu1(self.conv1(x)))))))
            return self.last(self.gelu(self.norm(self.first(x))))
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 4).flatten(1)
        return self.last(F.gelu(F.layer_norm(self.first(x), (256,), self.norm.weight, self.norm.bias)))


def wrn_16_4() -> nn.Module:
    """Wide ResNet 16-4 for 10 classes."""
    return WideResNet(16, 4)


def resnet18() -> nn.Module:
    """torchvision's ResNet-18 for 10 classes."""
    from benchmarks.peers import declare_torchvision_operators

    declare_torchvision_operators()
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def tiny_resnet() -> nn.Module:
    """A small residual network for a test."""
    return WideResNet(10, 1, planes=2, channels=2, side=8, classes=3)


def tiny_char_rnn() -> nn.Module:
    """A small character RNN for a test."""
    return CharRNN(5, 3)


def tiny_gru() -> nn.Module:
    """A small GRU classifier for a test."""
    return GRUClassifier(3, 4, 3)


def tiny_transformer() -> nn.Module:
    """A small transformer encoder for a test."""
    return Transformer(3, 4, 2, 6, 2, 3)


def tiny_language_model() -> nn.Module:
    """A small language model for a test."""
    return LanguageModel(5, 3)


def tiny_tied_language_model() -> nn.Module:
    """The same with one weight for embedding and head."""
    return LanguageModel(5, 3, tied=True)


def tiny_unet() -> nn.Module:
    """A small segmentation network for a test."""
    return UNet(2, 2, 2)
