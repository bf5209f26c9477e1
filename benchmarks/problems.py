"""The networks that are measured: seeded random data in the shapes of well-known data sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import architectures, attention, networks


@dataclass
class Setup:
    """One network with a loss and one batch, ready to run.

    `functions` says that the forward pass calls functions beside modules, so that packages with a converter use it.
    """

    model: nn.Module
    loss: nn.CrossEntropyLoss
    inputs: Tensor
    targets: Tensor
    functions: bool = False

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order in which every result lists them."""
        return list(self.model.parameters())

    @property
    def batch(self) -> int:
        """`N`, the number of samples."""
        return self.inputs.shape[0]

    @property
    def positions(self) -> int:
        """The number of targets, which the mean in the loss divides by: `N`, or `N T` with a target at every step."""
        return self.targets.numel()

    def columns(self) -> int:
        """The number of entries of one sample's prediction: columns of the exact square root."""
        with torch.no_grad():
            return self.model(self.inputs[:1]).numel()


@dataclass(frozen=True)
class Problem:
    """A network, the shape of one sample, and the quantities that are measured on it.

    With a `vocabulary`, inputs are indices below it. `steps` is the shape of one sample's targets where it has
    several. `check_batch` is the number of samples in the correctness check, smaller than `batch` where the reference
    (a loop over samples and classes) would take minutes. `tolerance` bounds the error relative to the norm: in float32,
    one sample at a time and all at once round differently, and a near tie in a max-pooling window, or an input of a
    ReLU near zero, then goes to the other side (2e-3 was seen; in deep networks with small feature maps, 2e-2). `slow`
    names alternatives that would take minutes for a single run. `flat` targets are `[N T]`. Where any reference would
    take hours, `check` names a small network of the same kind whose results are compared in place of this one's.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    quantities: tuple[str, ...]
    check_batch: int | None = None
    vocabulary: int | None = None
    steps: tuple[int, ...] = ()
    functions: bool = False
    tolerance: float = 1e-2
    slow: tuple[str, ...] = ()
    flat: bool = False
    check: str | None = None
    device: str = "cpu"

    def setup(self, batch: int | None = None, seed: int = 0) -> Setup:
        """Draw parameters and `batch` samples; the same seed gives the same problem everywhere."""
        torch.manual_seed(seed)
        model = self.build()
        n = self.batch if batch is None else batch
        if self.vocabulary is None:
            inputs = torch.rand(n, *self.shape)
        else:
            inputs = torch.randint(self.vocabulary, (n, *self.shape))
        targets = torch.randint(self.classes, (n, *self.steps))
        if self.flat:
            targets = targets.flatten()
        evaluate(model, inputs)
        here = self.device
        return Setup(model.to(here), nn.CrossEntropyLoss(), inputs.to(here), targets.to(here), self.functions)

    def check_setup(self) -> Setup:
        """The batch on which results are compared with the reference."""
        if self.check is None:
            return self.setup(self.check_batch)
        return replace(KNOWN[self.check], device=self.device).setup()


def evaluate(model: nn.Module, inputs: Tensor) -> None:
    """Take the statistics of every BatchNorm from one batch and leave it in evaluation mode."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(inputs)
    model.eval()


FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
PRODUCTS = ("HMP", "GGNMP", "PCHMP")
DIAGONALS = ("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "DiagHessian", "BatchDiagHessian")
EXPANDED = ("KFACExpand", "KFLRExpand")
SHARED = ("FirstOrderTogether", "DiagGGNExactWithKFLR")
SMALL = ("NoContext", *FIRST_ORDER, *DIAGONALS, "SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR", *PRODUCTS, *SHARED)
USUAL = ("NoContext", *FIRST_ORDER, "DiagGGNExact", "DiagGGNMC", "KFAC", "FirstOrderTogether")

PROBLEMS = {
    p.name: p
    for p in (
        Problem("logreg", "Logistic regression, MNIST shapes", networks.logistic_regression, (1, 28, 28), 10, 512,
                (*SMALL, "KFRA")),
        # [C, N, p] would take 6.8 GB here, so no SqrtGGNExact.
        Problem("mlp", "MLP 784-1000-500-100-10, MNIST shapes", networks.mlp, (1, 28, 28), 10, 128,
                (*(q for q in SMALL if q != "SqrtGGNExact"), "KFRA")),
        Problem("3c3d", "3C3D, CIFAR-10 shapes", networks.c3d3, (3, 32, 32), 10, 64,
                (*SMALL, *EXPANDED)),
        Problem("3c3d_sigmoid", "3C3D with one sigmoid, CIFAR-10 shapes", networks.c3d3_sigmoid, (3, 32, 32), 10, 16,
                ("DiagHessian", "BatchDiagHessian", "HMP", "GGNMP")),
        Problem("lenet5", "LeNet-5 with tanh, MNIST shapes", networks.lenet5, (1, 28, 28), 10, 8,
                ("DiagGGNExact", "DiagHessian", "BatchDiagHessian"), check_batch=2),
        Problem("3c3d_norm", "3C3D with weight normalisation, CIFAR-10 shapes", networks.c3d3_weight_norm, (3, 32, 32),
                10, 32, (*FIRST_ORDER, "DiagGGNExact", "DiagGGNMC"), check_batch=4),
        Problem("3c3d_pruned", "3C3D with one sigmoid and masked weights, CIFAR-10 shapes", networks.c3d3_pruned,
                (3, 32, 32), 10, 16, (*FIRST_ORDER, "DiagGGNExact", "DiagGGNMC", "DiagHessian"), check_batch=4),
        # 100 columns: the exact quantities follow at N=4.
        Problem("allcnnc", "All-CNN-C, CIFAR-100 shapes", networks.all_cnn_c, (3, 32, 32), 100, 16,
                ("NoContext", *FIRST_ORDER, "DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", "KFACExpand",
                 *PRODUCTS, "FirstOrderTogether"), check_batch=4),
        Problem("allcnnc_n4", "All-CNN-C, CIFAR-100 shapes", networks.all_cnn_c, (3, 32, 32), 100, 4,
                ("DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "KFLR", "KFLRExpand", "DiagGGNExactWithKFLR")),
        # 83 x 25 columns: the exact quantities follow at N=4.
        Problem("charrnn", "Character RNN (2-layer LSTM), T=25", architectures.CharRNN, (25,), 83, 16,
                tuple(q for q in USUAL if q != "DiagGGNExact"), check_batch=2, vocabulary=83, steps=(25,),
                functions=True),
        Problem("charrnn_n4", "Character RNN (2-layer LSTM), T=25", architectures.CharRNN, (25,), 83, 4,
                ("DiagGGNExact", "BatchDiagGGNExact"), check_batch=2, vocabulary=83, steps=(25,), functions=True,
                slow=("torch.func",)),
        Problem("wrn16_4", "Wide ResNet 16-4, CIFAR-10 shapes, evaluation mode", architectures.wrn_16_4, (3, 32, 32),
                10, 8, USUAL, functions=True, tolerance=4e-2),
        Problem("resnet18", "ResNet-18, 3 x 64 x 64, evaluation mode", architectures.resnet18, (3, 64, 64), 10, 8,
                (*USUAL, "DiagHessian"), functions=True, tolerance=4e-2),
        Problem("transformer", "Transformer encoder (2 layers), T=32", architectures.Transformer, (32, 32), 10, 16,
                USUAL, functions=True),
        Problem("vit", "ViT (4 blocks), CIFAR-10 shapes, T=65", attention.ViT, (3, 32, 32), 10, 8,
                (*USUAL, "BatchDiagGGNExact"), functions=True),
        Problem("gpt", "GPT (4 blocks), tied embeddings, 256 words, T=64", attention.GPT, (64,), 256, 8,
                tuple(q for q in USUAL if q not in ("DiagGGNExact", "KFAC")), check_batch=2, vocabulary=256,
                steps=(64,), functions=True),
        Problem("gru", "GRU classifier, T=25", architectures.GRUClassifier, (25, 32), 10, 16,
                USUAL, functions=True),
    )
}  # fmt: skip

BRANCHED = (*(q for q in USUAL if q != "NoContext"), "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact")

TEST_PROBLEMS = {
    p.name: p
    for p in (
        Problem("tiny", "A small convolutional network", networks.tiny, (2, 6, 6), 4, 5,
                (*(q for q in SMALL if q != "PCHMP"), *EXPANDED)),
        Problem("tiny_mlp", "A small multilayer perceptron", networks.tiny_mlp, (6,), 3, 4,
                (*SMALL, *EXPANDED, "KFRA")),
        Problem("tiny_charrnn", "A small character RNN", architectures.tiny_char_rnn, (4,), 5, 3, BRANCHED,
                vocabulary=5, steps=(4,), functions=True),
        Problem("tiny_resnet", "A small residual network", architectures.tiny_resnet, (2, 8, 8), 3, 4,
                (*BRANCHED, "HMP", "GGNMP"), functions=True),
        Problem("tiny_transformer", "A small transformer", architectures.tiny_transformer, (4, 3), 3, 3, BRANCHED,
                functions=True),
        Problem("tiny_lm", "A small language model", architectures.tiny_language_model, (4,), 5, 3, BRANCHED,
                vocabulary=5, steps=(4,), functions=True),
        Problem("tiny_lm_tied", "A small language model, tied", architectures.tiny_tied_language_model, (4,), 5, 3,
                tuple(q for q in BRANCHED if q != "KFAC"), vocabulary=5, steps=(4,), functions=True),
        Problem("tiny_unet", "A small segmentation network", architectures.tiny_unet, (2, 4, 4), 2, 2,
                ("BatchGrad", "DiagGGNExact"), steps=(4, 4), functions=True),
        Problem("tiny_vit", "A small ViT", attention.tiny_vit, (2, 4, 4), 3, 3, BRANCHED, functions=True),
        Problem("tiny_gpt", "A small GPT, tied embeddings", attention.tiny_gpt, (4,), 5, 4,
                tuple(q for q in BRANCHED if q != "KFAC"), vocabulary=5, steps=(4,), functions=True),
        Problem("tiny_gru", "A small GRU classifier", architectures.tiny_gru, (5, 3), 3, 3, BRANCHED, functions=True),
    )
}  # fmt: skip

HEAD = ("BatchGrad", "DiagGGNMC", "KFAC")
REAL_SIZE = ("BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNMC")


def language_model(name: str, tied: bool, flat: bool, width: int = 64) -> Problem:
    """A language model's head of 10,000 words with T=128."""
    build = partial(architectures.LanguageModel, width=width, tied=tied, flat=flat)
    title = f"Language model, 10,000 words, D={width}, T=128{', tied' * tied}{', loss on [N T, V]' * flat}"
    small = "tiny_lm_tied" if tied else "tiny_lm"
    return Problem(name, title, build, (128,), 10_000, 8, HEAD, vocabulary=10_000, steps=(128,), functions=True,
                   flat=flat, check=small)  # fmt: skip


LARGE = {
    p.name: p
    for p in (
        language_model("lm", False, False),
        language_model("lm_tied", True, False),
        language_model("lm_flat", False, True),
        language_model("lm_tied_flat", True, True),
        language_model("lm_256", False, False, 256),
        Problem("charrnn_50", "Character RNN (2-layer LSTM), T=50", architectures.CharRNN, (50,), 83, 4,
                ("DiagGGNExact",), vocabulary=83, steps=(50,), functions=True, check="tiny_charrnn"),
        Problem("charrnn_50_n16", "Character RNN (2-layer LSTM), T=50", architectures.CharRNN, (50,), 83, 16,
                ("DiagGGNExact",), vocabulary=83, steps=(50,), functions=True, check="tiny_charrnn"),
        Problem("vit_b_16", "ViT-B/16, ImageNet shapes, T=197", partial(attention.ViT, 224, 16, 3, 768, 12, 12, 1000),
                (3, 224, 224), 1000, 4, REAL_SIZE, functions=True, check="tiny_vit"),
        Problem("gpt2", "GPT-2 (124 million parameters), T=128", partial(attention.GPT, 50_257, 1024, 768, 12, 12),
                (128,), 50_257, 4, REAL_SIZE, vocabulary=50_257, steps=(128,), functions=True, check="tiny_gpt"),
        Problem("unet", "U-Net, 3 x 32 x 32, 4 classes", architectures.UNet, (3, 32, 32), 4, 2, ("DiagGGNExact",),
                steps=(32, 32), functions=True, check="tiny_unet"),
        Problem("encoder", "Convolutional network whose forward is functions", architectures.Encoder, (3, 16, 16), 10,
                32, FIRST_ORDER + ("DiagGGNMC", "DiagGGNExact", "KFAC"), functions=True),
        Problem("encoder_modules", "The same network made of modules", partial(architectures.Encoder, True),
                (3, 16, 16), 10, 32, FIRST_ORDER + ("DiagGGNMC", "DiagGGNExact", "KFAC")),
    )
}  # fmt: skip
"""Networks that are measured on request only."""

KNOWN = {**PROBLEMS, **TEST_PROBLEMS, **LARGE}
