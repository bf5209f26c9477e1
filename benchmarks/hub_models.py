"""Small models with random weights, of the classes in `transformers` and `timm`: a table of a hundred.

Each line says which class, with which options, and what it is called with. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from examples._torchvision import import_torchvision

if find_spec("torchvision"):
    import_torchvision()  # which both packages import
for package in ("transformers.modeling_utils", "timm"):  # here, so that it is imported once for all processes
    if find_spec(package.split(".")[0]):
        importlib.import_module(package)

SAMPLES, TOKENS, WORDS, CLASSES = 3, 5, 13, 3
"""Sizes of a batch: samples, positions of a sequence, of its vocabulary, and classes."""

PICTURE = 3
"""The token in whose place a piece of a picture is put; it is none of `words`."""


@dataclass(frozen=True)
class Hub:
    """A line of the table: the package, the name of the class or model, its options, and what its inputs are."""

    package: str
    name: str
    data: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        """What it is called in the table."""
        return self.label or self.name

    def build(self) -> nn.Module:
        """The model in float64 and evaluation mode."""
        torch.manual_seed(0)
        model = (transformer if self.package == "transformers" else timm_model)(self.name, dict(self.options))
        return self.prepared(model.double())

    def prepared(self, model: nn.Module) -> nn.Module:
        """Random numbers added to all parameters, some of which start at zero, and BatchNorms that fit to them."""
        with torch.no_grad():
            for param in model.parameters():
                fan_in = param.numel() // len(param) if param.dim() > 1 else 8
                param.add_(torch.randn_like(param), alpha=0.6 / max(fan_in, 8) ** 0.5)
            norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
            for norm in norms:
                norm.momentum = 1.0
            if norms:
                self.call(model.train(), self.inputs(4 * SAMPLES))
        return model.eval()

    def inputs(self, rows: int = SAMPLES) -> dict[str, Tensor]:
        """What the model is called with: tensors whose first axis is the batch axis."""
        torch.manual_seed(1)
        return DATA[self.data](self.options, rows)

    def call(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits."""
        found: Any = model(**inputs) if self.package == "transformers" else model(inputs["pixel_values"])
        found = getattr(found, "logits", found)
        return found if isinstance(found, Tensor) else found[0]


def transformer(name: str, options: dict[str, Any]) -> nn.Module:
    """A model of `transformers`, by the name of its class; the configuration is that of the class."""
    import transformers

    model: Any = getattr(transformers, name)
    config = model.config_class(**without(options, "pieces", "size"))
    return model(config)


def timm_model(name: str, options: dict[str, Any]) -> nn.Module:
    """A model of `timm`, by its name, or by its class in one of the modules of `timm.models`."""
    import timm

    options = {"num_classes": CLASSES, **without(options, "size")}
    if "." in name:
        module, kind = name.split(".")
        return getattr(importlib.import_module(f"timm.models.{module}"), kind)(**options)
    return timm.create_model(name, pretrained=False, **options)


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Options except for some."""
    return {key: value for key, value in options.items() if key not in names}


# ---- what models are called with -----------------------------------------------------------------
def words(rows: int, length: int = TOKENS) -> Tensor:
    """Random tokens; the first few are special in many vocabularies."""
    return torch.randint(4, WORDS, (rows, length))


def noise(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def tokens(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """A sequence of tokens."""
    return {"input_ids": words(rows)}


def masked(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Sequences of several lengths, and a mask."""
    mask = torch.ones(rows, TOKENS, dtype=torch.long)
    mask[1::2, -2:] = 0
    return {"input_ids": words(rows), "attention_mask": mask}


def long_tokens(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """A longer sequence, for attention in windows."""
    return {"input_ids": words(rows, 16)}


def pair(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Tokens for an encoder and a decoder."""
    return {"input_ids": words(rows), "decoder_input_ids": words(rows, 4)}


def images(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Square images."""
    size = options.get("size", options.get("image_size", 32))
    return {"pixel_values": noise(rows, 3, size, size)}


def video(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """A few frames."""
    size = options["image_size"]
    return {"pixel_values": noise(rows, options["num_frames"], 3, size, size)}


def audio(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """A wave."""
    return {"input_values": noise(rows, 400)}


def spectrum(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Features of sound, for an encoder and a decoder."""
    return {"input_features": noise(rows, 4, 16), "decoder_input_ids": words(rows, 4)}


def frames(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Features of sound, frame by frame, for an encoder and a decoder."""
    return {"input_features": noise(rows, 16, 4), "decoder_input_ids": words(rows, 4)}


def with_pictures(rows: int, pieces: int) -> dict[str, Tensor]:
    """Tokens with the pieces of a picture in between."""
    found = words(rows, TOKENS + pieces)
    found[:, 1 : 1 + pieces] = PICTURE
    return {"input_ids": found, "attention_mask": torch.ones_like(found)}


def pictures(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """A picture for each sequence; some models put those of all samples side by side in one sequence."""
    size = options["vision_config"]["image_size"]
    sizes = torch.tensor([[size, size]] * rows)
    return {**with_pictures(rows, options["pieces"]), "pixel_values": noise(rows, 3, size, size), "image_sizes": sizes}


def patches(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """The same, as the patches of all pictures, one after the other, and how many of them there are in each."""
    tokens = with_pictures(rows, 2)
    grid = torch.tensor([[1, 2, 4]] * rows)
    values = noise(rows * 8, 3 * 2 * options["vision_config"]["patch_size"] ** 2)
    kinds = (tokens["input_ids"] == PICTURE).long()
    return {**tokens, "pixel_values": values, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def boxes(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Tokens, and where they are on a page."""
    corners = torch.randint(0, 8, (rows, TOKENS, 4))
    corners[..., 2:] += 8
    return {"input_ids": words(rows), "bbox": corners}


def series(options: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Several values over time."""
    return {"past_values": noise(rows, options["context_length"], options["num_input_channels"])}


DATA: dict[str, Callable[[Mapping[str, Any], int], dict[str, Tensor]]] = {
    function.__name__: function
    for function in (
        tokens, masked, long_tokens, pair, images, video, audio, spectrum, frames, pictures, patches, boxes, series
    )
}  # fmt: skip

# ---- the table -----------------------------------------------------------------------------------
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
    "num_labels": CLASSES,
}
GROUPED = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 4}
"""Grouped-query attention."""
LATENT = {**TEXT, "kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
"""Keys and values by way of a small latent vector."""
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
GPT = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 24, "pad_token_id": 0,
       "num_labels": CLASSES}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 24,
    "pad_token_id": 0, "decoder_start_token_id": 1, "num_labels": CLASSES,
}  # fmt: skip
T5 = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 1,
      "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "num_labels": CLASSES}  # fmt: skip
VISION = {"image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 12, "num_labels": CLASSES}  # fmt: skip
STAGES = {"hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": CLASSES, "image_size": 32}
SOUND = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "conv_dim": [4, 4], "conv_kernel": [10, 8], "conv_stride": [5, 8], "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_labels": CLASSES, "pad_token_id": 0, "num_feat_extract_layers": 2,
}  # fmt: skip


def hub(name: str, data: str = "tokens", base: Mapping[str, Any] = TEXT, **options: Any) -> Hub:
    """A model of `transformers`."""
    return Hub("transformers", name, data, {**base, **options})


def image(name: str, size: int = 32, label: str = "", **options: Any) -> Hub:
    """A model of `timm`."""
    return Hub("timm", name, "images", {"size": size, **options}, label)


VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2)}
WIDTHS = {"depths": (1, 1), "dims": (8, 12)}

MODELS = (
    # encoders of text
    hub("BertForSequenceClassification", "masked"),
    hub("BertForMaskedLM"),
    hub("RobertaForSequenceClassification", "masked"),
    hub("CamembertForTokenClassification"),
    hub("XLMRobertaForSequenceClassification"),
    hub("DistilBertForSequenceClassification", base={"vocab_size": WORDS, "dim": 8, "n_layers": 2, "n_heads": 2,
        "hidden_dim": 12, "max_position_embeddings": 24, "num_labels": CLASSES}),
    hub("AlbertForSequenceClassification", embedding_size=6),
    hub("ElectraForSequenceClassification", embedding_size=6),
    hub("DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    hub("DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True),
    hub("ModernBertForSequenceClassification", global_attn_every_n_layers=2, local_attention=4),
    hub("MPNetForSequenceClassification"),
    hub("ErnieForSequenceClassification"),
    hub("RemBertForSequenceClassification", input_embedding_size=6, output_embedding_size=6),
    hub("RoFormerForSequenceClassification"),
    hub("ConvBertForSequenceClassification", embedding_size=8, head_ratio=1, conv_kernel_size=3),
    hub("MobileBertForSequenceClassification", embedding_size=6, intra_bottleneck_size=4, true_hidden_size=4),
    hub("SqueezeBertForSequenceClassification", embedding_size=8, q_groups=1, k_groups=1, v_groups=1,
        post_attention_groups=1, intermediate_groups=2, output_groups=2),
    hub("LongformerForSequenceClassification", "long_tokens", attention_window=4),
    hub("BigBirdForSequenceClassification", attention_type="original_full"),
    hub("XLNetForSequenceClassification", base={"vocab_size": WORDS, "d_model": 8, "n_layer": 2, "n_head": 2,
        "d_inner": 12, "num_labels": CLASSES, "pad_token_id": 0}),
    hub("FNetForSequenceClassification"),
    hub("FunnelForSequenceClassification", base={"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 8, "n_head": 2,
        "d_head": 4, "d_inner": 12, "num_decoder_layers": 1, "num_labels": CLASSES}),
    hub("NystromformerForSequenceClassification", num_landmarks=5, segment_means_seq_len=5),
    hub("PerceiverForSequenceClassification", base={"vocab_size": WORDS, "num_latents": 3, "d_latents": 8, "d_model": 6,
        "num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
        "max_position_embeddings": 24, "num_labels": CLASSES}),
    # decoders
    hub("GPT2LMHeadModel", base=GPT),
    hub("GPT2ForSequenceClassification", base=GPT),
    hub("GPTNeoForCausalLM", base={"vocab_size": WORDS, "hidden_size": 8, "num_layers": 2, "num_heads": 2,
        "attention_types": [[["global", "local"], 1]], "window_size": 3, "max_position_embeddings": 24}),
    hub("GPTNeoXForCausalLM"),
    hub("GPTJForCausalLM", base=GPT, rotary_dim=2),
    hub("GPTBigCodeForCausalLM", base=GPT),
    hub("OpenAIGPTLMHeadModel", base=GPT),
    hub("OPTForCausalLM", ffn_dim=12, word_embed_proj_dim=8),
    hub("BloomForCausalLM", base={"vocab_size": WORDS, "hidden_size": 8, "n_layer": 2, "n_head": 2}),
    hub("MptForCausalLM", base={"vocab_size": WORDS, "d_model": 8, "n_layers": 2, "n_heads": 2, "max_seq_len": 24}),
    hub("LlamaForCausalLM", base=GROUPED),
    hub("LlamaForSequenceClassification", base=TEXT),
    hub("MistralForCausalLM", base=GROUPED),
    hub("MixtralForCausalLM", base={**GROUPED, **EXPERTS}),
    hub("Qwen2ForCausalLM", base=GROUPED),
    hub("Qwen2MoeForCausalLM", base=GROUPED, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6,
        experts_implementation="eager", shared_expert_intermediate_size=6),
    hub("Qwen3ForCausalLM", base=GROUPED),
    hub("GemmaForCausalLM", base=GROUPED),
    hub("Gemma2ForCausalLM", base=GROUPED, query_pre_attn_scalar=4, sliding_window=4),
    hub("Gemma3ForCausalLM", base=GROUPED, query_pre_attn_scalar=4, sliding_window=4),
    hub("PhiForCausalLM"),
    hub("Phi3ForCausalLM", base=GROUPED),
    hub("Starcoder2ForCausalLM", base=GROUPED),
    hub("FalconForCausalLM", num_ln_in_parallel_attn=None, new_decoder_architecture=False),
    hub("StableLmForCausalLM", base=GROUPED),
    hub("OlmoForCausalLM", base=GROUPED),
    hub("Olmo2ForCausalLM", base=GROUPED),
    hub("CohereForCausalLM", base=GROUPED),
    hub("GlmForCausalLM", base=GROUPED),
    hub("GraniteForCausalLM", base=GROUPED),
    hub("BioGptForCausalLM"),
    hub("MambaForCausalLM", base={"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 3,
        "residual_in_fp32": False}),
    hub("RwkvForCausalLM", base={"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2,
        "context_length": 24, "use_cache": False}),
    # other ways to attend, states, and mixtures
    hub("DeepseekV3ForCausalLM", base=LATENT, n_routed_experts=3, moe_intermediate_size=6, first_k_dense_replace=1,
        n_group=1, topk_group=1, num_experts_per_tok=2, experts_implementation="eager"),
    hub("GptOssForCausalLM", base={**GROUPED, **EXPERTS}, sliding_window=4),
    hub("DbrxForCausalLM", base={"vocab_size": WORDS, "d_model": 8, "n_heads": 2, "n_layers": 1, "max_seq_len": 24,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 8, "ffn_hidden_size": 6, "moe_num_experts": 3, "moe_top_k": 2}}),
    hub("Mamba2ForCausalLM", base={"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 3,
        "num_heads": 2, "head_dim": 8, "n_groups": 1, "chunk_size": 3, "expand": 2}),
    hub("BambaForCausalLM", base=GROUPED, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=3,
        mamba_chunk_size=4, mamba_expand=2),
    hub("RecurrentGemmaForCausalLM", base=GROUPED, block_types=["recurrent", "attention"], attention_window_size=4),
    hub("MiniMaxForCausalLM", base={**GROUPED, **EXPERTS}, layer_types=["full_attention", "linear_attention"],
        block_size=4),
    hub("Qwen3NextForCausalLM", base=GROUPED, layer_types=["linear_attention", "full_attention"], num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=6, linear_key_head_dim=4,
        linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=4, experts_implementation="eager"),
    hub("SwitchTransformersForConditionalGeneration", "pair", T5, num_experts=3, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1),
    # texts with pictures, pages, time series
    hub("Mistral3ForConditionalGeneration", "pictures", {"text_config": {"model_type": "mistral", **GROUPED},
        "vision_config": {"model_type": "pixtral", **VISION, "image_size": 32}, "image_token_index": PICTURE,
        "spatial_merge_size": 2, "pieces": 4}),
    hub("Qwen2VLForConditionalGeneration", "patches", {"image_token_id": PICTURE,
        "text_config": {**TEXT, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default",
        "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}},
        "vision_config": {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 2, "patch_size": 4}}),
    hub("LayoutLMv3ForSequenceClassification", "boxes", TEXT, input_size=32, coordinate_size=1, shape_size=2,
        max_2d_position_embeddings=24),
    hub("PatchTSTForClassification", "series", {"num_input_channels": 2, "context_length": 12, "patch_length": 4,
        "patch_stride": 4, "num_hidden_layers": 1, "d_model": 8, "num_attention_heads": 2, "ffn_dim": 12,
        "num_targets": CLASSES}),
    # encoders with decoders
    hub("T5ForConditionalGeneration", "pair", T5),
    hub("MT5ForConditionalGeneration", "pair", T5, feed_forward_proj="gated-gelu"),
    hub("BartForConditionalGeneration", "pair", BART),
    hub("MBartForConditionalGeneration", "pair", BART),
    hub("PegasusForConditionalGeneration", "pair", BART),
    hub("MarianMTModel", "pair", BART),
    hub("WhisperForConditionalGeneration", "spectrum", BART, num_mel_bins=4, max_source_positions=8,
        max_target_positions=8),
    hub("Speech2TextForConditionalGeneration", "frames", BART, input_feat_per_channel=4, input_channels=1,
        conv_channels=6, max_source_positions=16, max_target_positions=8),
    # images, videos, sound
    hub("ViTForImageClassification", "images", VISION),
    hub("DeiTForImageClassification", "images", VISION),
    hub("BeitForImageClassification", "images", VISION, use_relative_position_bias=True),
    hub("Dinov2ForImageClassification", "images", VISION, mlp_ratio=2),
    hub("ViTMSNForImageClassification", "images", VISION),
    hub("SwinForImageClassification", "images", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1],
        "num_heads": [2, 2], "window_size": 4, "num_labels": CLASSES}),
    hub("Swinv2ForImageClassification", "images", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1],
        "num_heads": [2, 2], "window_size": 4, "num_labels": CLASSES}),
    hub("ConvNextForImageClassification", "images", STAGES, num_stages=2),
    hub("ConvNextV2ForImageClassification", "images", STAGES, num_stages=2),
    hub("ResNetForImageClassification", "images", STAGES, embedding_size=6),
    hub("RegNetForImageClassification", "images", STAGES, embedding_size=6, groups_width=4),
    hub("MobileViTForImageClassification", "images", {"image_size": 32, "hidden_sizes": [8, 8, 12],
        "neck_hidden_sizes": [4, 4, 6, 8, 8, 8, 8], "num_attention_heads": 2, "num_labels": CLASSES}),
    hub("PoolFormerForImageClassification", "images", {"hidden_sizes": [4, 8], "depths": [1, 1],
        "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "num_labels": CLASSES}),
    hub("SegformerForSemanticSegmentation", "images", {"hidden_sizes": [4, 8], "depths": [1, 1],
        "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 6, "num_labels": CLASSES}),
    hub("PvtForImageClassification", "images", {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1],
        "sequence_reduction_ratios": [2, 1], "hidden_sizes": [4, 8], "patch_sizes": [4, 2], "strides": [4, 2],
        "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": CLASSES}),
    hub("HieraForImageClassification", "images", {"image_size": [32, 32], "patch_stride": [4, 4], "depths": [1, 1],
        "num_heads": [1, 2], "embed_dim": 4, "num_query_pool": 1, "query_stride": [2, 2], "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False], "mlp_ratio": 2.0, "num_labels": CLASSES, "size": 32}),
    hub("FocalNetForImageClassification", "images", {"image_size": 32, "depths": [1, 1], "embed_dim": 8,
        "hidden_sizes": [8, 16], "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": CLASSES}),
    hub("CLIPForImageClassification", "images", {"vision_config": VISION, "image_size": 16, "num_labels": CLASSES}),
    hub("SiglipForImageClassification", "images", {"vision_config": VISION, "image_size": 16, "num_labels": CLASSES}),
    hub("VivitForVideoClassification", "video", {**VISION, "num_frames": 2, "tubelet_size": [1, 8, 8]}),
    hub("TimesformerForVideoClassification", "video", {**VISION, "num_frames": 2}),
    hub("Wav2Vec2ForSequenceClassification", "audio", SOUND),
    hub("HubertForCTC", "audio", SOUND),
    hub("WavLMForSequenceClassification", "audio", SOUND),
    # timm
    image("test_vit", img_size=32),
    image("test_vit_relpos", img_size=32),
    image("test_resnet"),
    image("test_convnext"),
    image("test_efficientnet"),
    image("test_byobnet"),
    image("test_mambaout"),
    image("test_nfnet"),
    image("test_coatnet", img_size=32),
    image("test_maxvit", img_size=32),
    image("vit_tiny_patch16_224", 16, **VIT),
    image("deit_tiny_distilled_patch16_224", 16, **VIT),
    image("deit3_small_patch16_224", 16, **VIT),
    image("beit_base_patch16_224", 16, **VIT),
    image("cait_xxs24_224", 16, **VIT),
    image("xcit_nano_12_p16_224", 32, img_size=32, embed_dim=8, depth=1, num_heads=2),
    image("eva02_tiny_patch14_224", 16, **VIT),
    image("volo.VOLO", 32, img_size=32, embed_dims=(8, 12), layers=(1, 1), num_heads=(2, 2), mlp_ratio=(2, 2),
          downsamples=(True, False), outlook_attention=(True, False), post_layers=("ca",)),
    image("convit_tiny", 16, **VIT),
    image("crossvit.CrossVit", 48, img_size=48, img_scale=(1.0, 2 / 3), patch_size=(12, 16), embed_dim=(8, 12),
          num_heads=(2, 2), depth=((1, 2, 0),), mlp_ratio=(2, 2, 1)),
    image("swin_tiny_patch4_window7_224", 32, **SWIN),
    image("swinv2_tiny_window8_256", 32, **SWIN),
    image("twins_svt_small", 32, img_size=32, embed_dims=(4, 8), num_heads=(1, 2), mlp_ratios=(2, 2), depths=(2, 2),
          wss=(4, 2), sr_ratios=(2, 1), patch_size=4),
    image("pvt_v2_b0", 32, embed_dims=(4, 8), depths=(1, 1), num_heads=(1, 2), sr_ratios=(2, 1), mlp_ratios=(2, 2)),
    image("mlp_mixer.MlpMixer", 16, img_size=16, patch_size=8, num_blocks=2, embed_dim=8),
    image("gmlp_ti16_224", 32, img_size=32),
    image("metaformer.MetaFormer", 32, **WIDTHS),
    image("convnext.ConvNeXt", 32, depths=(1, 1, 1, 1), dims=(8, 8, 12, 12)),
    image("convnext.ConvNeXt", 32, depths=(1, 1, 1, 1), dims=(8, 8, 12, 12), use_grn=True, ls_init_value=None,
          label="convnext.ConvNeXt (V2)"),
    image("inception_next_tiny", 32, depths=(1, 1), dims=(8, 16)),
    image("edgenext_xx_small", 64, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), heads=(2, 2, 2, 2)),
    image("focalnet.FocalNet", 32, embed_dim=8, depths=(1, 1), focal_levels=(2, 2), focal_windows=(3, 3)),
    image("davit_tiny", 32, embed_dims=(8, 16), depths=(1, 1), num_heads=(2, 2), window_size=4),
    image("mobilevit_xxs", 32),
    image("levit_128s", 64, img_size=64, embed_dim=(16, 16, 16), key_dim=4, num_heads=(2, 2, 2), depth=(1, 1, 1)),
    image("pit.PoolingVisionTransformer", 32, img_size=32, patch_size=8, stride=8, stem_type="overlap",
          base_dims=(4, 4, 4), depth=(1, 1, 1), heads=(2, 2, 2), mlp_ratio=2),
    image("resnet10t", 32),
    image("resnext26ts", 32),
    image("regnetx_002", 32),
    image("regnety_002", 32),
    image("densenet121", 32, block_config=(2, 2), growth_rate=4),
    image("mobilenetv3_small_050", 32),
    image("mobilenetv4_conv_small_035", 32),
    image("efficientnet_lite0", 32),
    image("ghostnet_050", 32),
    image("lcnet_035", 32),
    image("tinynet_e", 32),
    image("repvgg_a0", 32),
    image("dla46_c", 32),
    image("hrnet_w18_small", 32),
    image("rexnet_100", 32, width_mult=0.3),
    image("starnet_s1", 32),
    image("fastvit_t8", 64),
    image("tiny_vit.TinyVit", 64, embed_dims=(8, 8, 12, 12), depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2),
          window_sizes=(4, 4, 4, 2)),
    image("sequencer.Sequencer2d", 28, img_size=28, layers=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8),
          hidden_sizes=(4, 4, 4, 4), patch_sizes=(7, 1, 1, 1), mlp_ratios=(2, 2, 2, 2)),
)  # fmt: skip
