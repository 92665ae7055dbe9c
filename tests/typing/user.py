"""What a user may write; type checkers refuse the lines that end in "# wrong"."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import vgrad
from vgrad.typing import Buffers, Params

model = nn.Linear(20, 3)
x, y = torch.randn(8, 20), torch.randint(3, (8,))
fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
loss = vgrad.sample_loss(fmodel, cross_entropy)
batch_loss = vgrad.batch_loss(fmodel, cross_entropy)
given = (params, buffers, x, y)
assert_type(params, Params)
fmodel.evaluate()  # wrong


def own_loss(params: Params, buffers: Buffers, x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


# Quantities.
assert_type(vgrad.per_sample_grad(loss)(*given), dict[str, Tensor])
assert_type(vgrad.per_sample_grad(own_loss)(params, buffers, x), dict[str, Tensor])
grads, aux = vgrad.per_sample_grad(loss, has_aux=True)(params, buffers, x, y)
assert_type(grads["weight"], Tensor)
assert_type(vgrad.per_sample_norm(loss, chunk_size=4)(params, buffers, x), Tensor)
layers = vgrad.per_sample_norm(loss, groups="layer")(params, buffers, x, y)
assert_type(layers, dict[str, Tensor])
assert_type(vgrad.per_sample_gram(loss)(params, buffers, x, cross=(x, y)), Tensor)
assert_type(vgrad.per_sample_projection(loss, 9, seed=0)(*given), Tensor)
assert_type(vgrad.per_sample_projection(loss, (2, 3), seed=0)(*given), Params)
assert_type(vgrad.weighted_grad(loss)(torch.ones(8), *given), dict[str, Tensor])
clip = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded", chunk_size="auto")
clipped = clip(params, buffers, x, y, mask=y > 0)
assert_type(clipped, vgrad.ClippedGrad)
assert_type(clip.sensitivity, vgrad.Sensitivity)
moments = vgrad.gradient_moments(loss)(params, buffers, x, y)
assert_type(vgrad.NoiseScale().add(moments).value, Tensor)
assert_type(vgrad.explain(clip)(params, buffers, x, y).strategy, str)

vgrad.per_sample_grad(loss, strategy="quick")  # wrong
vgrad.per_sample_grad(loss, chunks=4)  # wrong
vgrad.per_sample_norm(loss, chunk_size="all")  # wrong
vgrad.per_sample_norm(loss, groups="parameters")  # wrong
vgrad.clipped_grad(loss)  # wrong
vgrad.clipped_grad(loss, max_norm=1.0, clipping="layer")  # wrong
vgrad.clipped_grad(loss, max_norm=1.0, passes=3)  # wrong
vgrad.gradient_moments(loss, randomness="random")  # wrong
vgrad.weighted_grad(loss)(params, buffers, x, y)  # wrong
print(clipped.gradients)  # wrong
print(moments.noisescale)  # wrong
print(clip.with_scale)  # wrong
clip(params, x)  # wrong
print(vgrad.per_sample_gradient)  # wrong

# Compiled, the types stay.
compiled = vgrad.compile(clip, backend="replay", batch_sizes=[8])
assert_type(compiled(params, buffers, x, y).norms, Tensor)
assert_type(compiled.reports()[0].calls, int)
print(compiled(params, buffers, x, y).gradients)  # wrong
compiled(x)  # wrong
vgrad.compile(clip, backend="fast")  # wrong
vgrad.compile(clip, fallback="no")  # wrong
vgrad.compile(None)  # wrong

# Training.
tx = vgrad.optim.sgd(0.1, momentum=0.9)
state = vgrad.training.TrainState.create(tx, params, buffers)
step = vgrad.training.train_step(batch_loss, tx, policy="mixed_bfloat16")
state, metrics = vgrad.compile(step)(state, x, y)
assert_type(state, vgrad.training.TrainState)
assert_type(metrics, dict[str, Any])
plan = vgrad.dp.Plan(60, 0.1, 1.0, 1.0, steps=10, delta=1e-5, accountant="rdp")
private = vgrad.training.private_step(loss, tx, plan, strategy="auto")
state, _ = private(state, x, y)
print(state.parameters)  # wrong
vgrad.training.private_step(loss, tx, None)  # wrong
vgrad.training.private_step(loss, tx, plan, strategy="hybrid")  # wrong
vgrad.training.train_step(batch_loss, torch.optim.SGD(model.parameters()))  # wrong
vgrad.dp.Plan(60, 0.1, 1.0, 1.0, steps=10, delta=1e-5, accountant="moments")  # wrong
vgrad.optim.schedules.cyclic(0.1, 1.0, mode="triangle")  # wrong
vgrad.optim.muon(0.1, adjust_lr_fn="none")  # wrong
vgrad.optim.adamw(0.1, beta=0.9)  # wrong

# Ensembles.
fmodels, stacked, none = vgrad.stack([model, model])
found = vgrad.ensemble_grad(batch_loss, strategy="hybrid")(stacked, none, x, y)
assert_type(found, vgrad.ensemble.EnsembleGrads)
both, aux = vgrad.ensemble_grad(batch_loss, has_aux=True)(stacked, none, x, y)
assert_type(both.losses, Tensor)
each = vgrad.ensemble.ensemble_clipped_grad(loss, max_norm=[1.0, 2.0])
assert_type(each(stacked, none, x, y).nonfinite, Tensor)
assert_type(vgrad.ensemble.predict(fmodels, stacked, none, x).mean, Tensor)
vgrad.ensemble_grad(batch_loss, strategy="recorded")  # wrong
print(found.loss)  # wrong
vgrad.ensemble.predict(fmodels, stacked, none, x, chunk_size="auto")  # wrong
print(vgrad.ensemble.predict(fmodels, stacked, none, x).median)  # wrong
