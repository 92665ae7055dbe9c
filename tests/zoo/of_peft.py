"""Adapters of peft on frozen models of transformers."""

from typing import Any

from torch import nn

from tests.zoo.entries import (
    SPLITS,
    Entry,
    Exact,
    Net,
    Use,
    classes,
    entry,
    noise,
    total,
)
from tests.zoo.libraries import Library
from tests.zoo.of_transformers import (
    GPT2,
    READER,
    WRITER,
    model,
    padded,
    sentences,
    text,
)

LIBRARY = "peft"

peft = Library("peft")

BERT = ("BertForSequenceClassification", READER, sentences)
BERT_PADDED = ("BertForSequenceClassification", READER, padded(sentences))
GPT_2 = ("GPT2LMHeadModel", GPT2, text)
LLAMA = ("LlamaForCausalLM", WRITER, text)
TASKS = {BERT[0]: "SEQ_CLS", GPT_2[0]: "CAUSAL_LM", LLAMA[0]: "CAUSAL_LM"}


def adapted(base: tuple, method: str, **options: Any) -> Use:
    use = model(*base, attention="sdpa")
    config = getattr(peft, method)(task_type=TASKS[base[0]], **options)
    return use._replace(model=peft.get_peft_model(use.model, config).eval())


def convolutional() -> Use:
    def forward(self, x):
        return self.head(self.body(x).tanh().mean((2, 3)))

    base = Net(forward, body=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3))
    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"])
    return Use(peft.get_peft_model(base, config).eval(), (noise(2, 5, 5), classes()))


def several() -> Use:
    base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    made.add_adapter("second", peft.LoraConfig(r=1, target_modules=["2"]))
    made.base_model.set_adapter(["default", "second"])
    return Use(made.eval(), (noise(6), noise(3)), total)


QUERIES = dict(target_modules=["query", "value"])
FUSED = dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
PROJECTIONS = dict(target_modules=["q_proj", "v_proj", "gate_proj"])
IA3 = dict(target_modules=["key", "value", "output.dense"])
IA3 |= dict(feedforward_modules=["output.dense"])
STABLE = dict(use_rslora=True, bias="all", **QUERIES)
PREFIX = dict(num_virtual_tokens=3)
ENCODER = dict(encoder_hidden_size=8, **PREFIX)
NORMS = dict(target_modules=["input_layernorm"])
ADALORA = dict(total_step=10, **QUERIES)
ORTHOGONAL = dict(r=0, oft_block_size=4, **QUERIES)
WRITES = "writes in place into a tensor that all samples share"


def lora(name: str, base: tuple, **options: Any) -> Entry:
    return entry(name, adapted, base, "LoraConfig", r=2, **options)


ENTRIES = [
    lora("LoRA on BERT", BERT, **QUERIES),
    lora("LoRA on BERT, ragged mask", BERT_PADDED, **QUERIES, today=SPLITS),
    lora("LoRA on GPT-2", GPT_2, **FUSED),
    lora("LoRA on Llama", LLAMA, **PROJECTIONS),
    lora("LoRA of the embedding", GPT_2, target_modules=["wte"]),
    lora("DoRA on BERT", BERT, use_dora=True, **QUERIES),
    lora("DoRA on GPT-2", GPT_2, use_dora=True, **FUSED),
    lora("rank-stabilised LoRA with biases", BERT, **STABLE),
    entry("IA3 on BERT", adapted, BERT, "IA3Config", **IA3),
    entry("prompt tuning on BERT", adapted, BERT, "PromptTuningConfig", **PREFIX),
    entry("prompt tuning on GPT-2", adapted, GPT_2, "PromptTuningConfig", **PREFIX),
    entry("prompt encoder on BERT", adapted, BERT, "PromptEncoderConfig", **ENCODER),
    entry("prefix tuning on GPT-2", adapted, GPT_2, "PrefixTuningConfig", **PREFIX),
    entry(
        "AdaLoRA on BERT",
        adapted,
        BERT,
        "AdaLoraConfig",
        **ADALORA,
        today=Exact("loop", WRITES, "eye"),
    ),
    entry("LoHa on BERT", adapted, BERT, "LoHaConfig", r=2, **QUERIES),
    entry("LoKr on BERT", adapted, BERT, "LoKrConfig", r=2, **QUERIES),
    entry(
        "OFT on BERT",
        adapted,
        BERT,
        "OFTConfig",
        **ORTHOGONAL,
        today=Exact("loop", WRITES, "__setitem__"),
    ),
    entry(
        "VeRA on Llama", adapted, LLAMA, "VeraConfig", r=2, target_modules=["q_proj"]
    ),
    entry("norms alone, on Llama", adapted, LLAMA, "LNTuningConfig", **NORMS),
    entry("LoRA on a convolution, with a trained head", convolutional),
    entry("two LoRA adapters at once", several),
]
