"""Models of timm, built small: standardised weights, windows, tokens, mixers."""

import functools
from typing import Any

from tests.zoo.entries import Use, classes, entry, loops, noise
from tests.zoo.libraries import Library

LIBRARY = "timm"

timm = Library("timm")


def model(name: str, side: int, **options: Any) -> Use:
    made = timm.create_model(name, num_classes=3, **options).eval()
    return Use(made, (noise(3, side, side), classes()))


def of_class(path: str, side: int, **options: Any) -> Use:
    module, kind = path.split(".")
    made = getattr(Library(f"timm.models.{module}"), kind)(num_classes=3, **options)
    return Use(made.eval(), (noise(3, side, side), classes()))


def mixer(block: str, side: int = 8) -> Use:
    parts, layers = Library("timm.models.mlp_mixer"), Library("timm.layers")
    options = dict(img_size=side, patch_size=4, embed_dim=16, num_blocks=2)
    if block != "MixerBlock":
        options["mlp_ratio"] = 4
    if block == "ResBlock":
        options["norm_layer"] = parts.Affine
    if block == "SpatialGatingBlock":
        options["mlp_layer"] = layers.GatedMlp
    made = parts.MlpMixer(3, block_layer=getattr(parts, block), **options)
    return Use(made.eval(), (noise(3, side, side), classes()))


def standardised() -> Use:
    norm = functools.partial(Library("timm.layers").GroupNormAct, num_groups=4)
    options = dict(channels=(32, 64), stem_chs=16, norm_layer=norm)
    return of_class("resnetv2.ResNetV2", 16, layers=(1, 1), **options)


PATCHES = dict(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2)
WINDOWS = dict(img_size=16, patch_size=2, embed_dim=8, depths=(2, 2), num_heads=(2, 2))
SMALL = dict(img_size=16, patch_size=4)
STAGES = dict(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
XCIT = dict(patch_size=16, embed_dim=16, depth=1, num_heads=2)
VOLO = SMALL | dict(layers=[1, 1], embed_dims=[8, 16], num_heads=[2, 2])
VOLO |= dict(stem_hidden_dim=8, use_aux_head=False)
PIT = SMALL | dict(stride=2, base_dims=(4, 4), depth=(1, 1), heads=(2, 4))
HIERA = dict(img_size=(32, 32), embed_dim=8, stages=(1, 1), q_pool=1)
HIERA |= dict(mask_unit_size=(2, 2), mask_unit_attn=(True, False))
HIERA |= dict(global_pos_size=(4, 4))
LEVIT = dict(img_size=32, embed_dim=(16, 24), key_dim=8, depth=(1, 1), num_heads=(2, 3))
RESNET = dict(layers=(1, 1, 1, 1), channels=(8, 8, 16, 16))
DENSE = dict(growth_rate=4, block_config=(2, 2))
FOCAL = dict(depths=(1, 1), embed_dim=8)
LOOPS = loops("aten::as_strided_")

ENTRIES = [
    entry("ViT", model, "vit_tiny_patch16_224", 8, **PATCHES),
    entry("ViT with relative positions", model, "test_vit_relpos", 32, img_size=32),
    entry("DeiT, distilled", model, "deit_tiny_distilled_patch16_224", 8, **PATCHES),
    entry("CaiT", model, "cait_xxs24_224", 8, **PATCHES),
    entry("BEiT", model, "beit_base_patch16_224", 8, **PATCHES),
    entry("EVA with rotary positions", model, "eva02_tiny_patch14_224", 8, **PATCHES),
    entry("XCiT", model, "xcit_nano_12_p16_224", 16, **XCIT),
    entry("MLP-Mixer", mixer, "MixerBlock"),
    entry("gMLP", mixer, "SpatialGatingBlock"),
    entry("ResMLP", mixer, "ResBlock"),
    entry("Swin", model, "swin_tiny_patch4_window7_224", 16, window_size=4, **WINDOWS),
    entry("Swin v2", model, "swinv2_tiny_window8_256", 16, window_size=4, **WINDOWS),
    entry("ConvNeXt", model, "convnext_atto", 32, **STAGES),
    entry("ConvNeXt v2", model, "convnextv2_atto", 32, **STAGES),
    entry(
        "PoolFormer", of_class, "metaformer.MetaFormer", 16, depths=(1, 1), dims=(8, 16)
    ),
    entry("FocalNet", of_class, "focalnet.FocalNet", 16, **FOCAL, today=LOOPS),
    entry("VOLO", of_class, "volo.VOLO", 16, **VOLO),
    entry("PiT", of_class, "pit.PoolingVisionTransformer", 16, **PIT),
    entry("Hiera", of_class, "hiera.Hiera", 32, **HIERA),
    entry("LeViT, evaluated", of_class, "levit.Levit", 32, twice=True, **LEVIT),
    entry("ResNet, evaluated", model, "resnet18", 32, **RESNET),
    entry("ResNetV2 with standardised weights", standardised),
    entry("NFNet with standardised weights", model, "test_nfnet", 32),
    entry("EfficientNet, evaluated", model, "test_efficientnet", 32),
    entry("EfficientNet with EvoNorm", model, "test_efficientnet_evos", 32),
    entry("MobileNetV3, evaluated", model, "mobilenetv3_small_050", 32, slow=True),
    entry("RegNet, evaluated", model, "test_byobnet", 32),
    entry("DenseNet, evaluated", model, "densenet121", 32, **DENSE),
    entry("MaxViT, evaluated", model, "test_maxvit", 64, img_size=64, today=LOOPS),
    entry("CoAtNet, evaluated", model, "test_coatnet", 64, img_size=64, today=LOOPS),
    entry("MambaOut", model, "test_mambaout", 32),
    entry("EdgeNeXt", model, "edgenext_xx_small", 32, heads=(2, 2, 2, 2), **STAGES),
    entry("MobileViT, evaluated", model, "mobilevit_xxs", 32, slow=True),
    entry("GhostNet, evaluated", model, "ghostnet_050", 32, slow=True),
]
