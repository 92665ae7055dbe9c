"""Models of transformers: parameters that are expanded, dropout and autocast.

That gradients, norms and clipped sums of them are exact is for `tests/zoo`.
"""

import pytest
import torch

import vgrad
from tests import oracle
from tests.zoo import libraries, of_transformers, running
from vgrad.persample import EXPANDED

libraries.declare_vision_ops()
pytest.importorskip("transformers")

# Swin ends in an adaptive pooling that torch's vmap runs sample by sample.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")

ENTRIES = {entry.name: entry for entry in of_transformers.ENTRIES}
RMS = ("norm.weight", "norm_f.weight")  # scales of norms that are written out
NOT_RULED = {  # endings of names
    "GPT-2": (),
    "Llama": RMS,
    "T5": RMS,
    "BERT": (),
    "BART": (),
    "ViT": ("cls_token", "position_embeddings"),
    "Swin": ("relative_position_bias_table",),
    "ConvNeXt": ("layer_scale_parameter",),
    "CLIP": ("logit_scale", "class_embedding"),
}


def given(name, dtype=torch.float64):
    use = running.built(ENTRIES[name])
    batch = running.pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, use.batch
    )
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        use.model.to(dtype), disable_autograd_tracking=True
    )
    return vgrad.sample_loss(fmodel, use.criterion), (params, buffers, *batch)


@pytest.mark.parametrize("name", NOT_RULED)
def test_explain_tells_what_was_expanded(name):
    loss, (params, *rest) = given(name)
    found = vgrad.explain(vgrad.clipped_grad(loss, max_norm=1.0))(params, *rest)
    assert found.strategy == "recorded"
    assert {each for row in found.rows for each in row.names} == params.keys()
    rows = (row for row in found.rows if row.why.startswith(EXPANDED))
    expanded = {each for row in rows for each in row.names}
    assert expanded == {each for each in params if each.endswith(NOT_RULED[name])}


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
def test_strategies_agree_under_autocast(name):
    loss, rest = given(name, torch.float32)
    full = vgrad.per_sample_grad(loss)(*rest)
    with vgrad.autocast("cpu", dtype=torch.bfloat16):
        found = {
            strategy: vgrad.per_sample_grad(loss, strategy=strategy)(*rest)
            for strategy in ("recorded", "vmap", "loop")
        }
    length = oracle.norms(full)
    for grads in found.values():
        assert {grad.dtype for grad in grads.values()} == {torch.float32}
        apart = {key: grad - found["loop"][key] for key, grad in grads.items()}
        lost = {key: grad - full[key] for key, grad in grads.items()}
        assert (oracle.norms(apart) <= 2**-6 * length).all()
        assert (oracle.norms(lost) >= 2**-10 * length).all()  # it was in bfloat16
