"""Mixtures of experts of transformers 5: norms and clipped sums over plain SGD.

`python -m bench.experts` times five models of two layers of width 256 with 8 experts of
which a token takes 2, 8 samples of 64 tokens, in the default form of their experts.
That their numbers are those of a float64 loop is for `tests/zoo`.
"""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vgrad
from tests.zoo import of_transformers

RESULTS = Path(__file__).parent / "results/cpu_1_thread/experts.md"
ROUNDS, WIDTH = 7, 256
SIZES = dict(hidden_size=WIDTH, num_attention_heads=4, vocab_size=256)
SIZES |= dict(max_position_embeddings=128, intermediate_size=WIDTH, num_experts=8)
SIZES |= dict(moe_intermediate_size=WIDTH, shared_expert_intermediate_size=WIDTH)
SIZES |= dict(num_local_experts=8, n_routed_experts=8, sliding_window=16)


def contenders(name: str) -> dict[str, Callable[[], Any]]:
    """Return plain SGD's gradient, norms, a clipped sum, and one by a loop."""
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 64))
    text = {"input_ids": ids, "labels": ids, "use_cache": False}
    heads = dict(num_key_value_heads=2, head_dim=32)
    if name == "DeepSeek-V3":  # all heads have keys, of two parts
        heads = dict(num_key_value_heads=4)
    build = of_transformers.ROUTED[name]
    model = build(lambda: text, **SIZES, **heads, train=True)().model
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)

    def loss(params, buffers, ids):
        text = {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        return fmodel(params, buffers, **text).loss

    def plain() -> None:
        model.zero_grad()
        model(**text).loss.backward()

    norm, clip = (
        vgrad.per_sample_norm(loss, verify=False),
        vgrad.clipped_grad(loss, max_norm=1.0, verify=False),
    )
    loop = vgrad.clipped_grad(loss, max_norm=1.0, strategy="loop")
    transforms = {"norms": norm, "clipped sum": clip, "by a loop": loop}
    ways = {k: lambda f=f: f(params, buffers, ids) for k, f in transforms.items()}
    return {"SGD": plain, **ways}


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    rows = []
    for name in of_transformers.ROUTED:
        times: dict[str, list[float]] = {}
        for run in (ways := contenders(name)).values():
            run()
        for _ in range(ROUNDS):
            for way, run in ways.items():
                start = time.process_time()
                run()
                times.setdefault(way, []).append(time.process_time() - start)
        plain, *others = (statistics.median(spent) for spent in times.values())
        cells = (f"{median / plain:.2f}" for median in others)
        rows.append((name, f"{plain * 1e3:.0f}", *cells))
    lines = [("", "SGD, ms", *[*times][1:]), ("---", *["---:"] * 4), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    RESULTS.write_text(f"""\
# Mixtures of experts

Norms and clipped sums over forward and backward pass of plain SGD, one thread of
{platform.machine()}, CPU time, medians of {ROUNDS} rounds of all in turn
(`python -m bench.experts`).

{text}
""")


if __name__ == "__main__":
    main()
