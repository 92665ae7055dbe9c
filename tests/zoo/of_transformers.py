"""Models of transformers, tiny and with random weights, as their users call them."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.entries import (
    DIFFERENT,
    SAME,
    SIZE,
    SPLITS,
    Entry,
    Exact,
    Refused,
    Use,
    alone,
    classes,
    entry,
    loops,
    ragged,
)
from tests.zoo.libraries import Library

LIBRARY = "transformers"

transformers = Library("transformers")

T = 7

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
SMALL |= dict(intermediate_size=24)
READER = SMALL | dict(vocab_size=50, max_position_embeddings=16)
READER |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
WRITER = SMALL | dict(vocab_size=50, max_position_embeddings=16, num_key_value_heads=1)
EXPERTS = WRITER | dict(num_local_experts=4, num_experts_per_tok=2)
GPT_OSS = EXPERTS | dict(head_dim=8, sliding_window=4)
QWEN_3 = WRITER | dict(moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2)
QWEN_3 |= dict(head_dim=8, norm_topk_prob=True)
DEEPSEEK = EXPERTS | dict(n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=8)
DEEPSEEK |= dict(kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
DEEPSEEK |= dict(moe_intermediate_size=12, first_k_dense_replace=1)
DEEPSEEK |= dict(num_key_value_heads=2)
QWEN_NEXT = QWEN_3 | dict(shared_expert_intermediate_size=8, linear_num_key_heads=2)
QWEN_NEXT |= dict(linear_num_value_heads=2, linear_key_head_dim=4)
QWEN_NEXT |= dict(linear_value_head_dim=4)
QWEN_NEXT |= dict(layer_types=["linear_attention", "full_attention"])
JAMBA = EXPERTS | dict(num_experts=4, attn_layer_period=2, attn_layer_offset=1)
JAMBA |= dict(expert_layer_period=2, mamba_d_state=4, mamba_dt_rank=2)
VIEWER = SMALL | dict(image_size=8, patch_size=4, num_labels=3)
GPT2 = dict(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
GPT2 |= dict(bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0)
GPT2 |= dict(attn_pdrop=0.0)
DISTIL = dict(vocab_size=50, max_position_embeddings=16, dim=16, n_layers=2)
DISTIL |= dict(n_heads=2, hidden_dim=24)
T5 = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2)
T5 |= dict(decoder_start_token_id=0, dropout_rate=0.0)
BART = dict(vocab_size=50, max_position_embeddings=16, d_model=16, encoder_layers=2)
BART |= dict(decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
BART |= dict(encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0)
BART |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
DEBERTA = READER | dict(relative_attention=True, pos_att_type=["p2c", "c2p"])
DEBERTA |= dict(position_biased_input=False)
LONGFORMER = READER | dict(attention_window=4, max_position_embeddings=32)
LONGFORMER |= dict(pad_token_id=1)
BLOOM = dict(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
MAMBA = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
MAMBA |= dict(time_step_rank=2)
MAMBA_2 = SMALL | dict(vocab_size=50, state_size=4, num_heads=4, head_dim=8, n_groups=2)
MAMBA_2 |= dict(chunk_size=4)
MODERN = READER | dict(local_attention=4, pad_token_id=0, bos_token_id=1)
MODERN |= dict(eos_token_id=2, cls_token_id=1, sep_token_id=2)
REFORMER = dict(
    vocab_size=50, attention_head_size=8, hidden_size=16, feed_forward_size=24
)
REFORMER |= dict(
    num_attention_heads=2, axial_pos_shape=[2, 4], axial_pos_embds_dim=[8, 8]
)
REFORMER |= dict(max_position_embeddings=8, is_decoder=True, local_attn_chunk_length=4)
REFORMER |= dict(attn_layers=["local", "local"], hidden_dropout_prob=0.0)
REFORMER |= dict(local_attention_probs_dropout_prob=0.0)
SPEECH = SMALL | dict(conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(2, 2))
SPEECH |= dict(num_feat_extract_layers=2, num_conv_pos_embeddings=4, vocab_size=9)
SPEECH |= dict(num_conv_pos_embedding_groups=2, ctc_zero_infinity=True)
SPEECH |= dict(feat_extract_norm="layer", do_stable_layer_norm=True, pad_token_id=0)
SPEECH |= dict(hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0)
SPEECH |= dict(activation_dropout=0.0, final_dropout=0.0, layerdrop=0.0)
SPEECH |= dict(mask_time_prob=0.0, mask_feature_prob=0.0)
WHISPER = BART | dict(num_mel_bins=4, max_source_positions=6, max_target_positions=16)
WHISPER |= dict(
    decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None
)
WHISPER |= dict(attention_dropout=0.0, activation_dropout=0.0)
SWIN = dict(image_size=16, patch_size=2, embed_dim=8, window_size=4, num_labels=3)
SWIN |= dict(depths=[2, 2], num_heads=[2, 2])
CONVNEXT = dict(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=2)
CONVNEXT |= dict(num_labels=3)
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
RESNET |= dict(layer_type="basic")
CLIP = dict(vision_config=VIEWER, projection_dim=8)
CLIP |= dict(text_config=READER | dict(eos_token_id=49, pad_token_id=0))
SEGFORMER = dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], num_labels=3)
SEGFORMER |= dict(hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2])
SEGFORMER |= dict(num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8)
XLNET = dict(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24, dropout=0.0)
ALBERT = READER | dict(embedding_size=8)
OPT = READER | dict(ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)
BIG_BIRD = READER | dict(attention_type="original_full")
GEMMA = WRITER | dict(head_dim=8)
VAULT = GEMMA | dict(sliding_window=4, query_pre_attn_scalar=8)
VAULT |= dict(layer_types=["sliding_attention", "full_attention"])
PHI = WRITER | dict(partial_rotary_factor=0.5, resid_pdrop=0.0)
FALCON = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
NEOX = WRITER | dict(rotary_pct=0.5)


def words() -> torch.Tensor:
    return torch.randint(3, 49, (SIZE, T))


def text() -> dict[str, Any]:
    """Return a batch of whole sentences to go on with."""
    return {"input_ids": words(), "labels": words()}


def sentences() -> dict[str, Any]:
    """Return a batch of whole sentences to classify."""
    return {"input_ids": words(), "labels": classes(2)}


def padded(batch: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Give a batch the two-dimensional mask of ragged lengths that tokenizers make."""
    return lambda: batch() | {"attention_mask": ragged(T).long()}


def hidden_labels() -> dict[str, Any]:
    """Return a padded batch whose labels are ignored where it is padded."""
    batch = padded(text)()
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def pictures(side: int) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "pixel_values": torch.randn(SIZE, 3, side, side),
        "labels": classes(),
    }


def segments() -> dict[str, Any]:
    labels = torch.randint(3, (SIZE, 16, 16))
    return {"pixel_values": torch.randn(SIZE, 3, 16, 16), "labels": labels}


def pairs() -> dict[str, Any]:
    ids = torch.cat([words(), torch.full((SIZE, 1), 49)], 1)  # the last is read
    return {"input_ids": ids, "pixel_values": torch.randn(SIZE, 3, 8, 8)}


def speech(*, ragged_lengths: bool = False) -> dict[str, Any]:
    """Return sounds and letters, shorter ones filled up with -100."""
    batch = {
        "input_values": torch.randn(SIZE, 64),
        "labels": torch.randint(1, 9, (SIZE, 4)),
    }
    if ragged_lengths:
        batch["attention_mask"] = ragged(64, at_least=40).long()
        batch["labels"] = batch["labels"].masked_fill(~ragged(4), -100)
    return batch


def spectra() -> dict[str, Any]:
    return {"input_features": torch.randn(SIZE, 4, 12), "labels": words()}


def long_text() -> dict[str, Any]:
    ids = torch.randint(3, 49, (SIZE, 8))
    return {"input_ids": ids, "labels": ids}


def model(
    name: str,
    config: dict[str, Any],
    batch: Callable[[], dict[str, Any]],
    *,
    attention: str = "eager",
    train: bool = False,
    checkpointing: dict[str, Any] | None = None,
    **more: Any,
) -> Use:
    kind = getattr(transformers, name)
    options = config | more | dict(attn_implementation=attention)
    made = kind(kind.config_class(**options)).train(train)
    if checkpointing is not None:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return Use(made, (batch(),), None)


def clip() -> Use:
    def similarity(output, target):
        return (output.logits_per_image * target).sum()

    use = model("CLIPModel", CLIP, pairs)
    return use._replace(batch=(*use.batch, torch.rand(SIZE, 1)), criterion=similarity)


def of(name: str, config: dict[str, Any]) -> Callable[..., functools.partial[Use]]:
    """Return what makes the builder of a model from a batch and more options."""
    return functools.partial(functools.partial, model, name, config)


def rows(builders: dict[str, Callable[[], Use]], **more: Any) -> list[Entry]:
    return [entry(name, build, **more) for name, build in builders.items()]


CLASSIFIER, IMAGES = "ForSequenceClassification", "ForImageClassification"
BERT, LLAMA = of(f"Bert{CLASSIFIER}", READER), of("LlamaForCausalLM", WRITER)
GPT_2, T_5 = of("GPT2LMHeadModel", GPT2), of("T5ForConditionalGeneration", T5)
BART_LM = of("BartForConditionalGeneration", BART)
DEBERTA_2 = of(f"DebertaV2{CLASSIFIER}", DEBERTA)
LONG = of(f"Longformer{CLASSIFIER}", LONGFORMER)
BY_STRIDES = Exact("loop", "and the memory of its tensors alone", "as_strided")
MIXTRAL = of("MixtralForCausalLM", EXPERTS)
MODERN_BERT = of(f"ModernBert{CLASSIFIER}", MODERN)
VAULT_GEMMA = of("VaultGemmaForCausalLM", VAULT)
MAMBAS_2 = of("Mamba2ForCausalLM", MAMBA_2)
BLOOMS, MAMBAS = of("BloomForCausalLM", BLOOM), of("MambaForCausalLM", MAMBA)
WAV2VEC = of("Wav2Vec2ForCTC", SPEECH)
SEGMENTS = of("SegformerForSemanticSegmentation", SEGFORMER)
ROUTED = {
    "gpt-oss": of("GptOssForCausalLM", GPT_OSS),
    "Qwen3-MoE": of("Qwen3MoeForCausalLM", QWEN_3),
    "DeepSeek-V3": of("DeepseekV3ForCausalLM", DEEPSEEK),
    "Qwen3-Next": of("Qwen3NextForCausalLM", QWEN_NEXT),
    "Jamba": of("JambaForCausalLM", JAMBA),
}
PADDED = {
    "BERT": BERT(padded(sentences)),
    "RoBERTa": of(f"Roberta{CLASSIFIER}", READER)(padded(sentences)),
    "DistilBERT": of(f"DistilBert{CLASSIFIER}", DISTIL)(padded(sentences)),
    "Llama": LLAMA(padded(text)),
    "GPT-2": GPT_2(padded(text)),
    "T5": T_5(padded(text)),
    "BART": BART_LM(padded(text)),
}

UNASKED = [("Llama", "eager"), ("GPT-2", "eager")]
"""They do not ask whether a mask hides anything."""

CTC = loops("aten::ctc_loss.Tensor")
DROPOUT = dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, train=True)
LAYERDROP = dict(encoder_layerdrop=0.5, decoder_layerdrop=0.5, train=True)
AGAIN = dict(train=True, checkpointing={"use_reentrant": False})

EXACT = {
    "BERT": BERT(sentences, attention="sdpa"),
    "GPT-2": GPT_2(text, attention="sdpa"),
    "Llama": LLAMA(text, attention="sdpa"),
    "T5": T_5(text),
    "BART": BART_LM(text, attention="sdpa"),
    "Llama, ignored labels": LLAMA(hidden_labels),
    "ALBERT: one layer twice": of(f"Albert{CLASSIFIER}", ALBERT)(sentences),
    "DeBERTa v2": DEBERTA_2(sentences),
    "DeBERTa v2, ragged mask": DEBERTA_2(padded(sentences)),
    "DeBERTa": of(f"Deberta{CLASSIFIER}", DEBERTA)(padded(sentences)),
    "XLNet, ragged mask": of(f"XLNet{CLASSIFIER}", XLNET)(padded(sentences)),
    "FNet": of(f"FNet{CLASSIFIER}", READER)(sentences),
    "OPT, ragged mask": of("OPTForCausalLM", OPT)(padded(text)),
    "Gemma": of("GemmaForCausalLM", GEMMA)(text, attention="sdpa"),
    "VaultGemma": VAULT_GEMMA(text),
    "VaultGemma, ragged mask": VAULT_GEMMA(padded(text), sliding_window=8),
    "ModernBERT": MODERN_BERT(sentences, attention="sdpa"),
    "Mamba 2": MAMBAS_2(text),
    "Mamba 2, no cache": MAMBAS_2(text, use_cache=False),
    "Phi": of("PhiForCausalLM", PHI)(text, attention="sdpa"),
    "GPT-NeoX, ragged mask": of("GPTNeoXForCausalLM", NEOX)(padded(text)),
    "Falcon": of("FalconForCausalLM", FALCON)(text),
    "Mixtral, batched experts": MIXTRAL(text, experts_implementation="batched_mm"),
    "Whisper": of("WhisperForConditionalGeneration", WHISPER)(spectra),
    "BERT, gradient checkpointing": BERT(sentences, **AGAIN),
    "GPT-2, gradient checkpointing": GPT_2(text, **AGAIN),
    "Llama, gradient checkpointing, ragged mask": LLAMA(padded(text), **AGAIN),
    "ViT": of(f"ViT{IMAGES}", VIEWER)(pictures(8), attention="sdpa"),
    "BEiT": of(f"Beit{IMAGES}", VIEWER)(pictures(8)),
    "ConvNeXt": of(f"ConvNext{IMAGES}", CONVNEXT)(pictures(16)),
    "ResNet, evaluated": of(f"ResNet{IMAGES}", RESNET)(pictures(16)),
    "SegFormer, evaluated": SEGMENTS(segments),
    "SegFormer, stages of one width": SEGMENTS(segments, hidden_sizes=[8, 8]),
    "CLIP": clip,
}
IN_PARTS = {
    "BERT, masked language model": of("BertForMaskedLM", READER)(hidden_labels),
    "ModernBERT, ragged mask": MODERN_BERT(padded(sentences), attention="sdpa"),
    "Mamba 2, ragged mask": MAMBAS_2(padded(text)),
    "ELECTRA, ragged mask": of(f"Electra{CLASSIFIER}", ALBERT)(padded(sentences)),
    "BigBird, ragged mask": of(f"BigBird{CLASSIFIER}", BIG_BIRD)(padded(sentences)),
    "Qwen2, ragged mask": of("Qwen2ForCausalLM", WRITER)(
        padded(text), attention="sdpa"
    ),
    "Mixtral, eager experts": MIXTRAL(text, experts_implementation="eager"),
    "Mixtral, eager experts, ragged mask": MIXTRAL(
        padded(text), experts_implementation="eager"
    ),
    "gpt-oss, eager experts": ROUTED["gpt-oss"](text, experts_implementation="eager"),
}
ENTRIES = [
    *(
        entry(
            f"{name}, ragged mask, {attention}",
            functools.partial(build, attention=attention),
            today=Exact() if (name, attention) in UNASKED else SPLITS,
        )
        for name, build in PADDED.items()
        for attention in ("eager", "sdpa")
    ),
    *rows(EXACT),
    *rows(IN_PARTS, today=SPLITS),
    # Their grouped products have no kernel for float64.
    *rows(
        {name: build(text) for name, build in ROUTED.items()},
        single=True,
        plainly=lambda model: model.set_experts_implementation("eager"),
        tolerance=2e-5,
    ),
    entry("BART, LayerDrop", BART_LM(text, **LAYERDROP), options=SAME),
    entry("BERT, dropout", BERT(sentences, **DROPOUT), options=SAME),
    *rows(
        {
            "BART, LayerDrop, each sample its own": BART_LM(text, **LAYERDROP),
            "BERT, ragged mask and dropout, each sample its own": BERT(
                padded(sentences), **DROPOUT
            ),
        },
        options=DIFFERENT,
        today=SPLITS,
    ),
    entry("Longformer", LONG(sentences), today=BY_STRIDES),
    entry("Longformer, ragged mask", LONG(padded(sentences)), today=BY_STRIDES),
    entry("Bloom", BLOOMS(text), today=alone("GeLUFunction")),
    entry("Bloom, ragged mask", BLOOMS(padded(text)), today=alone("GeLUFunction")),
    entry("Mamba", MAMBAS(text), tolerance=1e-6),
    entry("Mamba, no cache", MAMBAS(text, use_cache=False), tolerance=1e-6),
    entry(
        "Reformer",
        of("ReformerModelWithLMHead", REFORMER)(long_text, train=True),
        today=Refused("expected to need nothing but its context"),
    ),
    entry("wav2vec2 with CTC", WAV2VEC(speech), today=CTC),
    entry(
        "wav2vec2 with CTC, ragged sounds",
        WAV2VEC(functools.partial(speech, ragged_lengths=True)),
        today=SPLITS,
    ),
    entry(
        "wav2vec2, LayerDrop",
        WAV2VEC(speech, train=True, layerdrop=0.5),
        options=SAME,
        today=CTC,
    ),
    entry("HuBERT with CTC", of("HubertForCTC", SPEECH)(speech), today=CTC),
    entry(
        "Llama, ragged mask and dropout, each sample its own",
        LLAMA(padded(text), train=True, attention_dropout=0.2),
        options=DIFFERENT,
    ),
    entry(
        "BERT, re-entrant gradient checkpointing",
        BERT(sentences, train=True, checkpointing={"use_reentrant": True}),
        today=Refused("Pass use_reentrant=False"),
    ),
    entry(
        "Swin",
        of(f"Swin{IMAGES}", SWIN)(pictures(16)),
        today=loops("aten::as_strided_"),
    ),
]
