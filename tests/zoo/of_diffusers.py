"""Models of diffusers, trained as their examples do: noise is predicted."""

from typing import Any

import torch
from torch.nn import functional as F

from tests.zoo.entries import SIZE, Entry, Use, entry, noise
from tests.zoo.libraries import Library

LIBRARY = "diffusers"

diffusers = Library("diffusers")


def of_first(output, target):
    return F.mse_loss(output[0], target)


def model(
    name: str, inputs, target: tuple[int, ...], *, checkpointing=False, **options: Any
) -> Use:
    made = getattr(diffusers, name)(**options).train(checkpointing)
    if checkpointing:
        made.enable_gradient_checkpointing()
    return Use(made, (*inputs(), noise(*target)), of_first)


def noisy(*shape: int):
    return lambda: (noise(*shape), torch.randint(1000, (SIZE,)))


def conditioned(*shape: int, words: tuple[int, int]):
    return lambda: (noise(*shape), torch.randint(1000, (SIZE,)), noise(*words))


def images(*shape: int):
    return lambda: (noise(*shape),)


def labelled():
    labels = {"class_labels": torch.randint(3, (SIZE,))}
    return noise(4, 4, 4), torch.randint(1000, (SIZE,)), labels


BLOCKS = dict(block_out_channels=(8, 16), norm_num_groups=4)
UNET = dict(sample_size=8, layers_per_block=1, **BLOCKS)
ATTENTION_UNET = UNET | dict(
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
)
TEXT_UNET = UNET | dict(
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=8,
    attention_head_dim=4,
)
CODER = dict(
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=2,
    **BLOCKS,
)
PATCHES = dict(num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=4)
PATCHES |= dict(in_channels=4, patch_size=2)
DIT = PATCHES | dict(num_embeds_ada_norm=4, norm_num_groups=4)
PIXART = PATCHES | dict(out_channels=4, caption_channels=8, cross_attention_dim=16)
PIXART |= dict(use_additional_conditions=False)
TINY = dict(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8))
TINY |= dict(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), latent_channels=2)
LINE = dict(sample_size=16, in_channels=2, out_channels=2, extra_in_channels=64)
LINE |= dict(down_block_types=("DownBlock1DNoSkip", "DownBlock1D"))
LINE |= dict(up_block_types=("UpBlock1D", "UpBlock1DNoSkip"))
LINE |= dict(block_out_channels=(32, 32))
SD3 = PATCHES | dict(joint_attention_dim=8, caption_projection_dim=16)
SD3 |= dict(pooled_projection_dim=8, out_channels=4)
PRIOR = dict(num_attention_heads=2, attention_head_dim=4, num_layers=1)
PRIOR |= dict(embedding_dim=8, num_embeddings=4)
NO_CONDITIONS = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def unet(name: str, **options: Any) -> Entry:
    batch = noisy(3, 8, 8), (3, 8, 8)
    return entry(name, model, "UNet2DModel", *batch, **ATTENTION_UNET, **options)


def coder(name: str, kind: str, **options: Any) -> Entry:
    return entry(name, model, kind, images(3, 8, 8), (3, 8, 8), **options)


def words(*more: tuple[int, ...]):
    """Return what makes images, words, more numbers and times."""
    shapes = (4, 4, 4), (5, 8), *more
    return lambda: (*(noise(*each) for each in shapes), torch.randint(1000, (SIZE,)))


ENTRIES = [
    unet("UNet2D"),
    unet("UNet2D, gradient checkpointing", checkpointing=True),
    entry(
        "UNet2D with a condition",
        model,
        "UNet2DConditionModel",
        conditioned(4, 8, 8, words=(5, 8)),
        (4, 8, 8),
        **TEXT_UNET,
    ),
    entry("DiT", model, "DiTTransformer2DModel", labelled, (4, 4, 4), **DIT),
    entry(
        "PixArt",
        model,
        "PixArtTransformer2DModel",
        lambda: (*words()(), NO_CONDITIONS),
        (4, 4, 4),
        **PIXART,
    ),
    coder("autoencoder (KL)", "AutoencoderKL", **CODER),
    coder("autoencoder, tiny", "AutoencoderTiny", **TINY),
    coder("VQ model", "VQModel", num_vq_embeddings=8, **CODER),
    entry("UNet1D", model, "UNet1DModel", noisy(2, 16), (2, 16), **LINE),
    entry(
        "SD3 transformer", model, "SD3Transformer2DModel", words((8,)), (4, 4, 4), **SD3
    ),
    entry(
        "prior transformer",
        model,
        "PriorTransformer",
        lambda: (noise(8), torch.randint(1000, (SIZE,)), noise(8), noise(4, 8)),
        (8,),
        **PRIOR,
    ),
]
