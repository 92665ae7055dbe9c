"""Members that ask for values: one answer of all, or groups that run apart."""

import copy

import pytest
import torch
from torch import nn, optim
from torch._C import _functorch as functorch
from torch.nn import functional as F

import vgrad
from tests.losses import randn
from tests.oracle import assert_exact
from vgrad.ensemble import (
    ensemble_forward,
    ensemble_grad,
    predict,
    share,
    stack,
)
from vgrad.training import EnsembleState, ensemble_train_step

EXACT = 1e-12
MEMBERS = 7
every_strategy = pytest.mark.parametrize("strategy", ["auto", "vmap", "hybrid"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=torch.float64)
        self.last = nn.Linear(3, 2, dtype=torch.float64)


class AsksOnce(Net):
    def forward(self, x):
        h = self.first(x)
        return self.last(h.tanh() if self.first.bias.sum() > 0 else h.relu() * 2)


class AsksTwice(Net):
    def forward(self, x):
        h = self.first(x)
        if h.sum() > 0:
            h = h * 2 if h[0, 0] > h[0, 1] else h.exp()
        return self.last(h)


class Repeats(Net):
    def forward(self, x):
        h = self.first(x)
        for _ in range(1 + int(h.abs().mean() * 3)):
            h = F.linear(h, self.first.weight[:, :3]).sin()
        return self.last(h)


class Weighs(Net):
    def forward(self, x):
        h = self.first(x)
        return self.last(h * h.sum().item()) + float(h[0, 0]) * h[:, :2]


class ByLists(Net):
    def forward(self, x):
        chosen = [n for n, bias in enumerate(self.first.bias.tolist()) if bias > 0]
        return self.last(self.first(x).tanh()) + self.first.weight[:, chosen].sum()


class Catches(Net):
    def forward(self, x):
        try:
            positive = bool(self.first.bias.sum() > 0)
        except Exception:
            positive = True
        return self.last(self.first(x) * (2 if positive else 3))


class Counts(Net):
    """Leaves in its buffers which way it went."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ways", torch.zeros(2))

    def forward(self, x):
        way = int(self.first.bias.sum() > 0)
        self.ways = self.ways + F.one_hot(torch.tensor(way), 2)
        return self.last(self.first(x) * (1 + way))


MODELS = {
    each.__name__: each
    for each in (AsksOnce, AsksTwice, Repeats, Weighs, ByLists, Catches, Counts)
}
every_model = pytest.mark.parametrize("name", MODELS)
X, Y = randn(5, 4), randn(5, 2, seed=1)


def build(make, count=MEMBERS):
    torch.manual_seed(0)
    models = [make() for _ in range(count)]
    return models, *stack(copy.deepcopy(models))


def named(models, kind="parameters"):
    """Stack what each module has now."""
    each = [dict(getattr(model, f"named_{kind}")()) for model in models]
    return {name: torch.stack([one[name].detach() for one in each]) for name in each[0]}


def gradients(models, x, y, run=F.mse_loss):
    """Plain autograd on one module after the other; `x[e]` is of member e."""
    losses = []
    for number, model in enumerate(models):
        model.zero_grad()
        losses.append(run(model(x[number]), y[number]))
        losses[-1].backward()
    found = {
        name: torch.stack(
            [
                torch.zeros_like(p) if p.grad is None else p.grad
                for p in (dict(model.named_parameters())[name] for model in models)
            ]
        )
        for name, _ in models[0].named_parameters()
    }
    return found, torch.stack(losses).detach()


def of_each(x, count=MEMBERS):
    """Give each member a batch of its own."""
    return torch.stack([x * (1 + n / 3) - n / 5 for n in range(count)])


@every_model
@every_strategy
@pytest.mark.parametrize("in_dims", [None, 0])
def test_outputs_buffers_and_gradients_are_those_of_the_modules(
    name, strategy, in_dims
):
    models, fmodel, params, buffers = build(MODELS[name])
    x, y = (X, Y) if in_dims is None else (of_each(X), of_each(Y))
    each_x, each_y = (
        x if in_dims == 0 else x.expand(MEMBERS, *x.shape) for x in (x, y)
    )
    options = {"strategy": strategy, "in_dims": in_dims}
    found, left = ensemble_forward(fmodel, **options).with_buffers(params, buffers, x)
    expected = torch.stack([m(x) for m, x in zip(models, each_x, strict=True)])
    assert_exact(found, expected, EXACT)
    assert_exact(left, named(models, "buffers"), EXACT)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    found = ensemble_grad(loss, **options)(params, buffers, x, y)
    grads, losses = gradients(models, each_x, each_y)
    assert_exact(found.grads, grads, EXACT)
    assert_exact(found.losses, losses, EXACT)
    assert_exact(found.buffers, left, EXACT)


@every_strategy
def test_aux_and_scales_keep_the_order_of_members(strategy):
    models, fmodel, params, buffers = build(AsksTwice)

    def loss(params, buffers, x, y):
        out = fmodel(params, buffers, x)
        return F.mse_loss(out, y), {"out": out, "bias": params["last.bias"]}

    scales = torch.arange(1.0, MEMBERS + 1, dtype=torch.float64)
    compute = ensemble_grad(loss, strategy=strategy, has_aux=True)
    found, aux = compute(params, buffers, X, Y, loss_scale=scales)
    grads, losses = gradients(models, [X] * MEMBERS, [Y] * MEMBERS)
    grads = {n: torch.einsum("e,e...->e...", scales, g) for n, g in grads.items()}
    assert_exact(found.grads, grads, EXACT)
    assert_exact(found.losses, losses, EXACT)
    assert_exact(aux["out"], torch.stack([model(X) for model in models]), EXACT)
    assert torch.equal(aux["bias"], params["last.bias"])


@every_strategy
def test_what_members_share_is_shared_by_their_groups(strategy):
    models, fmodel, params, buffers = build(AsksOnce)
    for model in models[1:]:
        model.last.load_state_dict(models[0].last.state_dict())
    shared = ["last.*"]
    params, buffers = share(params, buffers, shared)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    compute = ensemble_grad(loss, strategy=strategy, shared=shared)
    found = compute(params, buffers, X, Y).grads
    expected, _ = gradients(models, [X] * MEMBERS, [Y] * MEMBERS)
    expected |= {n: g.sum(0) for n, g in expected.items() if n.startswith("last")}
    assert_exact(found, expected, EXACT)


@every_strategy
def test_groups_may_not_leave_several_values_in_a_shared_buffer(strategy):
    _, fmodel, params, buffers = build(Counts)
    params, buffers = share(params, buffers, ["ways"])
    forward = ensemble_forward(fmodel, strategy=strategy, shared=["ways"])
    with pytest.raises(ValueError, match="one value in the buffer 'ways'"):
        forward.with_buffers(params, buffers, X)
    alike = {**params, "first.bias": params["first.bias"].abs()}
    _, left = forward.with_buffers(alike, buffers, X)
    assert left["ways"].tolist() == [0, 1]


def test_chunks_and_predictions_split_too():
    models, fmodel, params, buffers = build(AsksOnce)
    expected = torch.stack([model(X) for model in models])
    forward = ensemble_forward(fmodel, chunk_size=2)
    assert_exact(forward(params, buffers, X), expected, EXACT)
    found = predict(fmodel, params, buffers, X, kind="value")
    assert_exact(found.mean, expected.mean(0), EXACT)


@every_strategy
def test_steps_are_those_of_the_modules(strategy):
    models, fmodel, params, buffers = build(Counts)
    rates = torch.linspace(0.3, 0.9, MEMBERS, dtype=torch.float64)
    tx = vgrad.for_members(vgrad.optim.sgd, lr=rates, momentum=0.9)
    state = EnsembleState.create(tx, params, buffers, seed=1)
    still = 3
    state = state._replace(active=torch.arange(MEMBERS) != still)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    step = ensemble_train_step(loss, tx, strategy=strategy)
    plain = [
        optim.SGD(model.parameters(), lr=float(rate), momentum=0.9)
        for model, rate in zip(models, rates, strict=True)
    ]
    ways = set()
    for number in range(6):
        x, y = randn(5, 4, seed=number), randn(5, 2, seed=10 + number)
        state, metrics = step(state, x, y)
        _, losses = gradients(models, [x] * MEMBERS, [y] * MEMBERS)
        assert_exact(metrics["loss"], losses, EXACT)
        for member, each in enumerate(plain):
            if member != still:
                each.step()
        models[still].ways.zero_()
        assert_exact(state.params, named(models), EXACT)
        assert_exact(state.buffers, named(models, "buffers"), EXACT)
        ways.add(tuple((model.first.bias.sum() > 0).item() for model in models))
    assert len(ways) > 1  # a member changes its way


DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "dropout of features": lambda h: F.dropout1d(h[:, :, None], 0.5).flatten(1),
    "rand": lambda h: h * torch.rand(3, dtype=h.dtype),
    "randn_like": lambda h: h + torch.randn_like(h),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(-1, 2),
    "a scalar": lambda h: h * torch.rand((), dtype=h.dtype),
}


def drawing(draw, *, asks):
    """Draw before a question and, as often, after it."""

    class Draws(Net):
        def forward(self, x):
            h = draw(self.first(x))
            if asks:
                h = h + 0 if self.first.bias.sum() > 0 else 0 + h
                h = h + 0 if h[0, 0] > h[0, 1] else 0 + h
            return self.last(h)

    return Draws


@pytest.mark.parametrize("strategy", ["vmap", "hybrid"])
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("name", DRAWS)
def test_groups_see_the_numbers_that_all_drew(name, randomness, strategy):
    found = []
    for asks in (True, False):
        _, fmodel, params, buffers = build(drawing(DRAWS[name], asks=asks))
        loss = vgrad.batch_loss(fmodel, F.mse_loss)
        compute = ensemble_grad(loss, strategy=strategy, randomness=randomness)
        torch.manual_seed(0)
        found.append(compute(params, buffers, X, Y).grads)
    assert_exact(*found, 1e-14)
    assert found[0]["first.weight"].any()


class Drops(Net):
    """Drops layers at random, and says which."""

    def forward(self, x):
        h, drawn = self.first(x), []
        for layer in (F.relu, torch.tanh, torch.sin):
            drawn.append(torch.rand((), dtype=torch.float64))
            h = layer(h) if drawn[-1] > 0.5 else h
        return self.last(h), torch.stack(drawn)


@every_strategy
def test_no_number_is_drawn_twice(strategy):
    _, fmodel, params, buffers = build(Drops)
    forward = ensemble_forward(fmodel, strategy=strategy)
    torch.manual_seed(0)
    drawn = [forward(params, buffers, X)[1].flatten() for _ in range(3)]
    everything = torch.cat([*drawn, torch.rand(60, dtype=torch.float64)])
    assert len(everything.unique()) == len(everything)
    assert len({tuple(row) for row in (drawn[0] > 0.5).view(-1, 3).tolist()}) > 2


def test_members_share_numbers_and_the_groups_of_a_group_too():
    _, fmodel, params, buffers = build(Drops)

    def loss(params, buffers, x):
        out, drawn = fmodel(params, buffers, x)
        if params["first.bias"].sum() > 0:
            out = out + torch.rand(())
        return out.square().sum() * torch.rand(()), drawn

    compute = ensemble_grad(loss, strategy="hybrid", randomness="same", has_aux=True)
    _, drawn = compute(params, buffers, X)
    assert torch.equal(drawn, drawn[:1].expand_as(drawn))


def test_a_layer_that_all_members_drop_is_not_taken_for_one_that_hides_its_graph():
    def loss(params, buffers, x):
        kept = torch.rand(()) > 0.5
        out = x * params["a"] + x * params["b"] if kept else x * params["a"]
        return out.sum()

    params = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    compute, seen = ensemble_grad(loss), set()
    for seed in range(12):
        torch.manual_seed(seed)
        grads = compute(params, {}, torch.ones(3)).grads
        seen.add(tuple(bool(row.any()) for row in grads["b"]))
        assert grads["a"].eq(1).all()
    assert len(seen) == 4


def test_a_gradient_hidden_on_one_branch_is_not_taken_for_zero():
    def loss(params, buffers, x):
        out, b = x * params["a"], params["b"]
        if params["a"].sum() > 0:
            out = out + x * (b.detach() if functorch.is_batchedtensor(b) else b)
        return out.sum()

    params = {"a": torch.tensor([[-1.0], [1.0]]), "b": torch.ones(2, 1)}
    with pytest.raises(vgrad.UnsupportedOp, match="hides its graph"):
        ensemble_grad(loss, strategy="hybrid")(params, {}, torch.ones(1))
    with pytest.warns(vgrad.FallbackWarning, match="hides its graph"):
        found = ensemble_grad(loss)(params, {}, torch.ones(1))
    assert found.grads["b"].tolist() == [[0], [1]]


def test_numbers_of_an_own_generator_are_refused_where_members_split():
    generator = torch.Generator()

    class Own(Net):
        def forward(self, x):
            noise = torch.rand(3, generator=generator, dtype=torch.float64)
            h = self.first(x) + noise
            return self.last(h if self.first.bias.sum() > 0 else -h)

    _, fmodel, params, buffers = build(Own)
    with pytest.raises(RuntimeError, match="torch.Generator of the loss's own.*loop"):
        ensemble_forward(fmodel, strategy="vmap")(params, buffers, X)


class Chooses(Net):
    """Members with a positive bias have shapes that depend on values."""

    def forward(self, x):
        h = self.first(x)
        self.drawn = torch.rand(3, dtype=torch.float64)
        if self.first.bias.sum() > 0:
            h = h[(h > 0).all(1)].sum(0) + h
        return self.last(h * self.drawn), self.drawn


@pytest.mark.parametrize("function", ["ensemble_forward", "ensemble_grad"])
def test_auto_runs_alone_what_cannot_run_at_once(function):
    models, fmodel, params, buffers = build(Chooses)

    def loss(params, buffers, x):
        out, drawn = fmodel(params, buffers, x)
        return out.square().sum(), drawn

    if function == "ensemble_forward":
        compute = ensemble_forward(fmodel)
    else:
        compute = ensemble_grad(loss, has_aux=True)
    told = vgrad.explain(compute)(params, buffers, X)
    line = r"test_questions.py:\d+: __getitem__: "
    with pytest.warns(vgrad.FallbackWarning, match=f"^{function}: runs one .*{line}"):
        found, drawn = compute(params, buffers, X)
    plain = iter(drawn)
    for known, model in zip(plain, models, strict=True):
        h = model.first(X)
        if model.first.bias.sum() > 0:
            h = h[(h > 0).all(1)].sum(0) + h
        model.zero_grad()
        model.out = model.last(h * known)
        model.out.square().sum().backward()
    if function == "ensemble_forward":
        assert_exact(found, torch.stack([model.out for model in models]), EXACT)
    else:
        grads = {
            n: torch.stack([dict(m.named_parameters())[n].grad for m in models])
            for n in params
        }
        assert_exact(found.grads, grads, EXACT)
    assert len(drawn.unique()) == drawn.numel()
    after = vgrad.explain(compute)(params, buffers, X)
    compute(params, buffers, X)  # without a second warning
    assert (told.strategy, told.why) == (after.strategy, after.why)
    assert told.strategy == "loop"
    assert (len(told.splits), after.splits) == (1, ())


def test_numbers_seen_alone_are_those_drawn_at_once():
    found = []
    for strategy in ("auto", "hybrid"):

        class Stops(Net):
            def forward(self, x, strategy=strategy):
                h = F.dropout(self.first(x), 0.5)
                if h.sum() > 0 and strategy == "auto":
                    (h > 0).nonzero()
                return self.last(h)

        _, fmodel, params, buffers = build(Stops)
        forward = ensemble_forward(fmodel, strategy=strategy)
        torch.manual_seed(0)
        if strategy == "auto":
            with pytest.warns(vgrad.FallbackWarning, match="one member after another"):
                found.append(forward(params, buffers, X))
        else:
            found.append(forward(params, buffers, X))
    assert_exact(*found, 1e-14)


def test_errors_of_a_member_are_raised_as_they_are():
    class Wrong(Net):
        def forward(self, x):
            return self.last(x)

    _, fmodel, params, buffers = build(Wrong)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ensemble_forward(fmodel)(params, buffers, X)

    class Writes(Net):
        def forward(self, x):
            self.first.bias.data.add_(1)
            return self.last(self.first(x))

    _, fmodel, params, buffers = build(Writes)
    with pytest.raises(RuntimeError, match="changes nothing it is given"):
        ensemble_forward(fmodel)(params, buffers, X)

    _, fmodel, params, buffers = build(Drops)
    with pytest.raises(RuntimeError, match='randomness="error"'):
        ensemble_forward(fmodel, randomness="error")(params, buffers, X)


def test_a_warning_names_the_line_where_groups_are_small():
    models, fmodel, params, buffers = build(Weighs, 16)
    forward = ensemble_forward(fmodel, strategy="hybrid")
    text = r"^ensemble_forward: members take different branches at .*test_questions.py:"
    with pytest.warns(vgrad.FallbackWarning, match=text + r"\d+; 16 of them run in 16"):
        found = forward(params, buffers, X)
    assert_exact(found, torch.stack([model(X) for model in models]), EXACT)
    forward(params, buffers, X)  # without a second warning


def test_explain_says_where_members_split():
    _, fmodel, params, buffers = build(AsksTwice)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    for compute, batch in (
        (ensemble_forward(fmodel), (X,)),
        (ensemble_grad(loss), (X, Y)),
    ):
        told = vgrad.explain(compute)(params, buffers, *batch)
        first, second = told.splits
        for where, times in (first, second):
            assert "test_questions.py:" in where
            assert times == 1
        assert told.groups == 3
        assert told.forms == (("linear", "baddbmm"),) * 6
        text = "7 members run in 3 groups. They take different branches at\n  "
        assert f"{text}{first[0]} (1 x)\n" in str(told)
    _, seven, *given = build(Weighs)
    assert vgrad.explain(ensemble_forward(seven))(*given, X).groups == MEMBERS
    alike = {**params, "first.bias": torch.full_like(params["first.bias"], -99)}
    told = vgrad.explain(ensemble_forward(fmodel))(alike, buffers, X)
    assert (told.groups, told.splits) == (1, ())
    assert "branches" not in str(told)


@every_strategy
def test_inside_of_transforms_of_torch(strategy):
    models, fmodel, params, buffers = build(AsksOnce)
    forward = ensemble_forward(fmodel, strategy=strategy)

    def total(params, x):
        return (forward(params, buffers, x) ** 2).sum()

    found = torch.func.grad(total)(params, X)
    expected, _ = gradients(
        models, [X] * MEMBERS, [Y] * MEMBERS, lambda out, _: out.square().sum()
    )
    assert_exact(found, expected, EXACT)
    batches = torch.stack([X, -X, X * 2])
    found = torch.vmap(lambda x: forward(params, buffers, x))(batches)
    expected = [torch.stack([model(x) for model in models]) for x in batches]
    assert_exact(found, torch.stack(expected), EXACT)


@pytest.mark.compiled
@every_strategy
def test_a_graph_asks_again_and_gives_way(strategy):
    _, fmodel, params, buffers = build(AsksOnce)
    positive = {**params, "first.bias": params["first.bias"].abs()}
    negative = {**params, "first.bias": -params["first.bias"].abs()}
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    for make, batch in (
        (lambda: ensemble_forward(fmodel, strategy=strategy), (X,)),
        (lambda: ensemble_grad(loss, strategy=strategy), (X, Y)),
    ):
        eager, found = make(), vgrad.compile(make())
        for given in (positive, positive, negative, positive):
            both = (each(given, buffers, *batch) for each in (found, eager))
            assert_exact(*both, 0)
        (report,) = found.reports()
        assert (report.backend, report.calls, report.redos) == ("replay", 3, 1)
        split = vgrad.compile(make())
        with pytest.warns(vgrad.CompileWarning, match="members take different branch"):
            last = split(params, buffers, *batch)
        assert_exact(last, eager(params, buffers, *batch), 0)


@pytest.mark.compiled
def test_compiled_steps_ask_again():
    _, fmodel, params, buffers = build(Counts)
    params["first.bias"] = params["first.bias"].abs()
    loss, tx = vgrad.batch_loss(fmodel, F.mse_loss), vgrad.optim.sgd(0.5)
    eager = ensemble_train_step(loss, tx)
    found = vgrad.compile(ensemble_train_step(loss, tx))
    start = EnsembleState.create(tx, params, buffers, seed=1)
    one = other = start
    for number in range(4):
        one, _ = eager(one, X, Y)
        other, _ = found(other, X, Y)
        assert_exact(one.params, other.params, 0)
        assert_exact(one.buffers, other.buffers, 0)
        if number == 2:
            turned = -one.params["first.bias"].abs()
            one, other = (
                each._replace(params={**each.params, "first.bias": turned})
                for each in (one, other)
            )
