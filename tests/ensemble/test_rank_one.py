"""Members of rank one are separate modules of the weights `(s r^T) * W`."""

import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import vgrad
from tests.losses import Net
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.ensemble import member_seed, predict, rank_one, unstack
from vgrad.training import EnsembleState, ensemble_train_step

E, B = 3, 4


def mlp():
    parts = nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*parts).double()


def convolutions():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, groups=2, padding=1),
        nn.Unflatten(2, (3, 5)),
        nn.Conv2d(4, 4, (2, 3), stride=2, dilation=(1, 2), padding="valid"),
        nn.Unflatten(3, (1, 1)),
        nn.Conv3d(4, 6, 1, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6, 3),
    ).double()


def tied():
    """Tokens of an embedding that all members share, and one weight of two layers."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    forward = lambda self, x: self.last(self.first(self.embed(x)).tanh()).mean(1)  # noqa: E731
    return Net(forward, embed=nn.Embedding(9, 4), first=first, last=last).double()


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64)


OWN = {"own": ["3.*"], "shared": ["1.weight"]}
MODELS = {
    "mlp": (mlp, {}, lambda: numbers(E, B, 5)),
    "own head": (mlp, OWN, lambda: numbers(E, B, 5)),
    "convolutions": (convolutions, {}, lambda: numbers(E, B, 2, 15)),
    "tied": (tied, {"shared": ["embed.*"]}, lambda: torch.randint(9, (E, B, 5))),
}


def effective(entries, names):
    """The entries of a plain module: each weight with its r and s multiplied in."""
    plain = {}
    for name in names:
        path, _, last = name.rpartition(".")
        plain[name] = value = entries["first.weight" if name == "last.weight" else name]
        if last == "weight" and f"{path}.r" in entries:
            r, s = entries[f"{path}.r"], entries[f"{path}.s"]
            groups = r.reshape(-1, 1, value.shape[1])
            rows = groups.expand(-1, len(s) // len(groups), -1).flatten(0, 1)
            matrix = s[:, None] * rows
            plain[name] = matrix.reshape(*matrix.shape, *[1] * (value.ndim - 2)) * value
    return plain


def by_torch(model, params, buffers, shared, data):
    """Train plain modules of the effective weights, by autograd and torch.optim."""
    leaf = lambda x: x.detach().clone().requires_grad_()  # noqa: E731
    common = {n: leaf(params[n]) for n in shared}
    rest = {n: x for n, x in params.items() if n not in common}
    own = [{n: leaf(x[i]) for n, x in rest.items()} for i in range(E)]
    left = [{n: x[i].clone() for n, x in buffers.items()} for i in range(E)]
    leaves = [*common.values(), *(x for each in own for x in each.values())]
    optimizer, losses = torch.optim.Adam(leaves, lr=0.01), []
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]

    def output(i, x):
        entries = effective(common | own[i], names) | left[i]
        return functional_call(model, entries, (x,), tie_weights=False)

    for x, y in data:
        each = [F.cross_entropy(output(i, x[i]), y) for i in range(E)]
        optimizer.zero_grad()
        sum(each).backward()
        optimizer.step()
        losses.append(torch.stack(each).detach())
    values = {n: torch.stack([x[n] for x in own]).detach() for n in rest}
    values |= {n: x.detach() for n, x in common.items()}
    model.eval()
    shares = torch.stack([output(i, data[0][0][0]) for i in range(E)]).softmax(-1)
    left = {n: torch.stack([x[n] for x in left]) for n in buffers}
    return torch.stack(losses), values, left, shares.mean(0)


WAYS = [(name, "hybrid") for name in MODELS]
WAYS += [("mlp", "loop"), ("convolutions", "vmap"), ("mlp", "compiled")]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_steps_are_those_of_modules_of_the_effective_weights(name, way):
    torch.manual_seed(0)
    make, options, inputs = MODELS[name]
    model, data = make(), [(inputs(), torch.randint(3, (B,))) for _ in range(3)]
    fmodel, params, buffers, shared = rank_one(model, E, seed=1, **options)
    with torch.no_grad():  # other numbers than signs
        for vector in [x for n, x in params.items() if n[-2:] in (".r", ".s")]:
            vector *= torch.rand_like(vector) + 0.5
    tx, loss = optim.adam(0.01), vgrad.batch_loss(fmodel, F.cross_entropy)
    options = {"strategy": "hybrid" if way == "compiled" else way, "shared": shared}
    step = ensemble_train_step(loss, tx, in_dims=(0, None), **options)
    step = vgrad.compile(step, fallback="error") if way == "compiled" else step
    state, losses = EnsembleState.create(tx, params, buffers, shared=shared), []
    expected = by_torch(model, params, buffers, shared, data)
    for batch in data:
        state, metrics = step(state, *batch)
        losses.append(metrics["loss"])
    left = state.params, state.buffers
    mean = predict(fmodel, *left, data[0][0][0], shared=shared).mean
    assert_exact((torch.stack(losses), *left, mean), expected)


def test_a_function_makes_all_of_a_member_but_its_weights():
    before = torch.get_rng_state()
    _, params, _, shared = rank_one(mlp, E, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    stacked = vgrad.stack(mlp, seeds=[member_seed(4, i) for i in range(E)])[1]
    assert shared == ("0.weight", "3.weight")
    for name in shared:
        assert_exact(params[name], stacked[name][0], 0)
    assert_exact(params["3.bias"], stacked["3.bias"], 0)
    # More members leave the first ones as they are, and a module stays one.
    model = mlp()
    more = rank_one(mlp, E + 2, seed=4, random=["0.r"])[1]
    few = rank_one(model, E, seed=4, random=["0.r"])[1]
    assert_exact(more["0.r"][:E], few["0.r"], 0)
    assert few["0.r"].abs().eq(1).all()
    assert len({tuple(signs) for signs in few["0.r"].tolist()}) > 1
    assert all(few[name].eq(1).all() for name in ("0.s", "3.r", "3.s"))
    assert_exact(few["3.bias"], model[3].bias.expand(E, -1), 0)
    assert type(model[0]) is nn.Linear


def test_frozen_weights_stay_and_members_come_apart():
    model = mlp()
    model[0].requires_grad_(False)
    fmodel, params, buffers, shared = rank_one(model, E, seed=0)
    assert buffers["0.weight"].shape == (6, 5)
    x, y = numbers(B, 5), numbers(B, 3)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    grads = vgrad.ensemble_grad(loss, shared=shared)(params, buffers, x, y).grads
    assert grads["0.r"].abs().sum(1).gt(0).all()
    expected = vgrad.ensemble_forward(fmodel, shared=shared)(params, buffers, x)
    apart = pickle.loads(pickle.dumps(unstack(fmodel, params, buffers, shared=shared)))
    assert_exact(torch.stack([each(x) for each in apart]), expected)


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)


def with_scale():
    layer = nn.Linear(2, 2)
    layer.r = nn.Parameter(torch.ones(2))
    return layer


REFUSED = [
    (with_scale, {}, "without attributes 'r' and 's', got one with 'r' at ''"),
    (mlp, {"shared": ["0.bias"], "own": ["*.bias"]}, "got '0.bias' in both"),
    (lambda: nn.LSTM(3, 2), {}, "got 'weight_hh_l0 of LSTM', 'weight_ih_l0 of LSTM'"),
    (tied, {}, "expected weights of Linear and Conv.*'embed.weight of Embedding'"),
    (lambda: nn.Conv2d(1, 1, 3, padding_mode="circular"), {}, "padded with zeros"),
    (mlp, {"own": ["*"]}, "Linear and Conv layers, padded with zeros, got none"),
    (mlp, {"random": ["1.r"]}, "expected a pattern that matches a vector"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_other_matrices_and_idle_patterns_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        rank_one(make, E, seed=0, **options)
    if not options:  # the advice works
        whole = nn.Sequential(make(), nn.Linear(2, 2))
        rank_one(whole, E, seed=0, shared=["0.*"])


def test_a_weight_that_other_code_reads_is_refused():
    """It would leave out r and s, without an exception."""
    made = rank_one(encoder, E, seed=0, shared=["self_attn.*"])
    with pytest.raises(RuntimeError, match="of a Linear read by other code.*own="):
        predict(*made[:3], torch.randn(B, 5, 4), shared=made[3])
