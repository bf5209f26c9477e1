"""Networks with branches, recurrences and attention: their forward pass calls functions."""

from __future__ import annotations

from torch import Tensor, nn


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
