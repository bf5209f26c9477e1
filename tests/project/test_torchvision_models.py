"""torchvision's classification models: one of each family, and the page that lists all of them."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

if find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)

from benchmarks.torchvision_check import CLASSES, Result, build, examine, models, names, prepared
from benchmarks.torchvision_models import read
from benchmarks.torchvision_reference import error
from benchmarks.torchvision_table import PAGE, page


def swin(**options: Any) -> nn.Module:
    """A small Swin transformer."""
    return models.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=CLASSES, **options)


def swin_v2() -> nn.Module:
    """A small Swin transformer, version 2."""
    parts = models.swin_transformer
    return swin(block=parts.SwinTransformerBlockV2, downsample_layer=parts.PatchMergingV2)


def convnext() -> nn.Module:
    """A small ConvNeXt."""
    setting = models.convnext.CNBlockConfig
    return models.ConvNeXt([setting(8, 12, 1), setting(12, None, 2)], 0.1, 0.5, CLASSES)


def maxvit() -> nn.Module:
    """A small MaxViT: convolutions, attention in windows and on grids."""
    return models.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.1, num_classes=CLASSES)


def vit() -> nn.Module:
    """A small vision transformer."""
    return models.VisionTransformer(32, 16, 2, 2, 16, 24, num_classes=CLASSES)


NAMED = ("squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5")
SMALL = {f.__name__: f for f in (vit, swin, swin_v2, convnext, maxvit)}


@pytest.mark.parametrize("converter", [True, False], ids=["converted", "as it is"])
@pytest.mark.parametrize("name", [*NAMED, *SMALL])
def test_every_entry_is_right(name: str, converter: bool) -> None:
    result = Result(name, converter, 32 if name in SMALL else 64)
    examine(prepared(SMALL[name](), 32) if name in SMALL else build(name), result)
    assert result.faults == []
    assert result.trained == result.params and result.unused == 0
    if converter:
        assert not any("without the converter" in warning for warning in result.warnings)


def test_differences_that_are_no_number_are_noticed() -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    assert error(one, one) == error(zero, zero) == 0
    assert error(1.5 * one, one) == 0.5
    assert error(one, zero) == error(one * math.nan, one) == error(one, one * math.nan) == math.inf


def test_frozen_parameters_and_heads_that_take_no_part_get_no_field() -> None:
    model = build("googlenet", aux_logits=True)
    model.conv1.requires_grad_(False)  # type: ignore[union-attr]
    result = Result("googlenet", True, 32)
    examine(model, result)
    assert result.faults == []
    assert result.unused == sum(name.startswith("aux") for name, _ in model.named_parameters()) > 0
    assert result.trained < result.params


def test_a_wrong_entry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result("squeezenet1_1", True, 32, ggn_error=1e-7, seconds=61, gib=float("nan"))
    assert result.faults == ["takes 61 s", "GGN diagonal is off by 1.0e-07"]
    monkeypatch.setattr("benchmarks.torchvision_check.DiagGGNExact.value", lambda self, uses: 1.01 * uses.squared_sum())
    result = Result("squeezenet1_1", True, 32)
    examine(build("squeezenet1_1"), result)
    assert result.faults == ["GGN diagonal is off by 1.0e-02"]


def test_the_page_shows_what_was_found() -> None:
    results = read()
    assert len(set(names())) == 80 and len(results) == 160
    assert {(r.model, r.converter) for r in results} == {(name, way) for name in names() for way in (True, False)}
    assert [r.faults for r in results] == [[]] * len(results)
    assert PAGE.read_text() == page(results)
