"""Models of images: transformers, timm, diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers_models as known

from model_zoo.entry import Call, Entry, Sizes

_KNOWN = {family.id: family for family in known.FAMILIES}
_BATCH = {0: "batch"}
_TOKENS = {0: "batch", 1: "sequence"}
_OTHERS = (Sizes(3), Sizes(1))


def _pixels(size: int) -> Callable[[Sizes], dict[str, Any]]:
    return lambda sizes: {"pixel_values": torch.randn(sizes.batch, 3, size, size)}


def _images(id: str, make: Callable[[str], Any], size: int = 16, **more: Any) -> Entry:
    axes = {"pixel_values": _BATCH}
    return Entry(id, lambda attention: Call(make(attention), axes), _pixels(size), axes, others=_OTHERS, **more)


def _family(id: str, model: str, config: str, size: int = 16, sites: int = 2, **arguments: Any) -> Entry:
    family = known.Family(id, model, (config, arguments))
    return _images(id, family.make, size, sites=sites)


def _clip(sizes: Sizes) -> dict[str, Any]:
    ids = torch.randint(3, 98, (sizes.batch, sizes.sequence))
    ids[:, -1] = 98
    return {"input_ids": ids, "attention_mask": sizes.mask(), "pixel_values": torch.randn(sizes.batch, 3, 16, 16)}


def _two_sided(id: str, family: known.Family, sites: int) -> Entry:
    axes = {"input_ids": _TOKENS, "attention_mask": _TOKENS, "pixel_values": _BATCH}
    return Entry(id, lambda attention: Call(family.make(attention), axes), _clip, axes, sites=sites)


_SIGLIP = known.Family(
    "siglip",
    "SiglipModel",
    ("SiglipConfig", {"text_config": {**known._TEXT, "projection_size": 32}, "vision_config": known._IMAGE}),
)


class TimmAttention(torch.nn.Module):
    """A model of timm, whose input has another name."""

    def __init__(self, name: str, attention: str, **arguments: Any) -> None:
        super().__init__()
        import timm
        from timm.layers import set_fused_attn

        set_fused_attn(attention == "sdpa")
        try:
            torch.manual_seed(0)
            self.model = timm.create_model(name, pretrained=False, num_classes=5, **arguments)
        finally:
            set_fused_attn(True)

    def forward(self, pixel_values: Any) -> Any:
        return self.model(pixel_values)


def _timm(name: str, size: int = 32, sites: int = 2, **arguments: Any) -> Entry:
    def make(attention: str) -> Any:
        return TimmAttention(name, attention, **arguments)

    return _images(f"timm {name}", make, size, sites=sites)


_TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def _detr(attention: str) -> Any:
    import transformers

    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_queries=6,
    )  # fmt: skip
    model = transformers.DetrModel(config).eval()
    model.set_attn_implementation({"": attention})
    return model


_DETR_AXES = {"pixel_values": _BATCH, "pixel_mask": _BATCH}


def _masked_pixels(sizes: Sizes) -> dict[str, Any]:
    mask = torch.zeros(sizes.batch, 64, 64, dtype=torch.int64)
    for i in range(sizes.batch):
        mask[i, : 64 - 24 * (i % 2), : 64 - 16 * (i % 3)] = 1
    return {"pixel_values": torch.randn(sizes.batch, 3, 64, 64), "pixel_mask": mask}


_SAM_IMAGE = {"image_size": 32, "patch_size": 4}


def _sam(attention: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.SamConfig(
        vision_config={**_SAM_IMAGE, "hidden_size": 32, "num_hidden_layers": 2, "mlp_dim": 64, "num_attention_heads": 4,
                       "window_size": 4, "global_attn_indexes": [1], "output_channels": 16, "num_pos_feats": 8},
        prompt_encoder_config={**_SAM_IMAGE, "hidden_size": 16, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                             "iou_head_hidden_dim": 16},
    )  # fmt: skip
    model = transformers.SamModel(config).eval()
    model.set_attn_implementation(attention)
    return model


def _pointed(sizes: Sizes) -> dict[str, Any]:
    points = 32 * torch.rand(sizes.batch, 1, sizes.sequence, 2)
    return {"pixel_values": torch.randn(sizes.batch, 3, 32, 32), "input_points": points}


_SAM_AXES = {"pixel_values": _BATCH, "input_points": {0: "batch", 2: "points"}}


class Sample(torch.nn.Module):
    """A denoiser of diffusers: sample, timestep and what it attends to."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, sample: Any, timestep: Any, context: Any) -> Any:
        return self.model(sample, timestep, context, return_dict=False)


def _processors(model: Any, attention: str) -> Any:
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    model.set_attn_processor(AttnProcessor2_0() if attention == "sdpa" else AttnProcessor())
    return model.eval()


def _unet(attention: str) -> Any:
    import diffusers

    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=24,
        attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return Sample(_processors(model, attention))


def _unet_inputs(sizes: Sizes) -> dict[str, Any]:
    return {
        "sample": torch.randn(sizes.batch, 4, 16, 16),
        "timestep": torch.tensor([7]).expand(sizes.batch).clone(),
        "context": torch.randn(sizes.batch, sizes.sequence, 24),
    }


_UNET_AXES = {"sample": _BATCH, "timestep": _BATCH, "context": _TOKENS}


class Classes(torch.nn.Module):
    """A DiT: latent, timestep and class."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, sample: Any, timestep: Any, labels: Any) -> Any:
        return self.model(sample, timestep=timestep, class_labels=labels, return_dict=False)


def _dit(attention: str) -> Any:
    import diffusers
    from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor2_0() if attention == "sdpa" else AttnProcessor())
    return Classes(model)


def _dit_inputs(sizes: Sizes) -> dict[str, Any]:
    return {
        "sample": torch.randn(sizes.batch, 4, 8, 8),
        "timestep": torch.randint(0, 900, (sizes.batch,)),
        "labels": torch.randint(0, 10, (sizes.batch,)),
    }


_DIT_AXES = {"sample": _BATCH, "timestep": _BATCH, "labels": _BATCH}

ENTRIES = (
    *(_images(id, _KNOWN[id].make) for id in ("vit", "dinov2")),
    _family("deit", "DeiTModel", "DeiTConfig", **known._IMAGE),
    _two_sided("clip", _KNOWN["clip"], 4),
    _two_sided("siglip", _SIGLIP, 5),
    _family("swin", "SwinModel", "SwinConfig", 32, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
            num_heads=[2, 4], window_size=4, sites=4),
    _family("sam_vision", "SamVisionModel", "SamVisionConfig", 32, hidden_size=32, num_hidden_layers=2, mlp_dim=64,
            num_attention_heads=4, image_size=32, patch_size=4, window_size=4, global_attn_indexes=[1],
            output_channels=16, num_pos_feats=8),
    _timm("vit_tiny_patch16_224", **_TINY),
    _timm("deit_tiny_patch16_224", **_TINY),
    _timm("eva02_tiny_patch14_224", **_TINY),
    _timm("swin_tiny_patch4_window7_224", img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
          window_size=4, sites=4),
    Entry("detr", lambda attention: Call(_detr(attention), _DETR_AXES), _masked_pixels, _DETR_AXES, sites=6,
          others=_OTHERS),
    Entry("sam", lambda attention: Call(_sam(attention), _SAM_AXES), _pointed, _SAM_AXES, sites=9,
          others=(Sizes(3, 3), Sizes(1, 1))),
    Entry("diffusers UNet", _unet, _unet_inputs, _UNET_AXES, sites=8, others=(Sizes(3, 11), Sizes(1, 4))),
    Entry("diffusers DiT", _dit, _dit_inputs, _DIT_AXES, sites=2, others=_OTHERS),
)  # fmt: skip
