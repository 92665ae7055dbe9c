"""Members that read values: one answer of all, or groups that run apart."""

import pytest
import torch
from torch import optim
from torch._C import _functorch as functorch
from torch.nn import functional as F

import vgrad
from tests.ensemble.test_contract import (
    CASES,
    batch_of,
    build,
    gradients,
    layers,
    named,
)
from tests.losses import Case, randn
from tests.oracle import assert_exact
from vgrad.ensemble import ensemble_forward, ensemble_grad, predict, share
from vgrad.generators import sample_keys
from vgrad.training import EnsembleState, ensemble_train_step

EXACT, MEMBERS = 1e-12, 7
every_strategy = pytest.mark.parametrize("strategy", ["auto", "vmap", "hybrid"])
ONCE, TWICE, COUNTS = (CASES[name] for name in ("asks_once", "asks_twice", "counts"))
X, Y = batch_of(ONCE)


def built(case, count=MEMBERS, seed=1):
    """Return modules, and a function and entries of the same ones stacked."""
    if not isinstance(case, Case):
        case = Case(layers(case), ONCE.batch, F.mse_loss)
    return build(case, count, seed)


def outputs(models):
    return torch.stack([model(X) for model in models])


@every_strategy
def test_aux_and_scales_keep_the_order_of_members(strategy):
    models, fmodel, params, buffers = built(TWICE)

    def loss(params, buffers, x, y):
        out = fmodel(params, buffers, x)
        return F.mse_loss(out, y), {"out": out, "bias": params["last.bias"]}

    scales = torch.arange(1.0, MEMBERS + 1, dtype=torch.float64)
    compute = ensemble_grad(loss, strategy=strategy, has_aux=True)
    found, aux = compute(params, buffers, X, Y, loss_scale=scales)
    expected = gradients(models, TWICE.run, [(X, Y)] * MEMBERS, scales)
    assert_exact((found.grads, found.losses), expected, EXACT)
    assert_exact(aux["out"], outputs(models), EXACT)
    assert torch.equal(aux["bias"], params["last.bias"])


@every_strategy
def test_groups_may_not_leave_several_values_in_a_shared_buffer(strategy):
    _, fmodel, params, buffers = built(COUNTS)
    params, buffers = share(params, buffers, ["ways"])
    forward = ensemble_forward(fmodel, strategy=strategy, shared=["ways"])
    with pytest.raises(ValueError, match="one value in the buffer 'ways'"):
        forward.with_buffers(params, buffers, X)
    alike = {**params, "first.bias": params["first.bias"].abs()}
    _, left = forward.with_buffers(alike, buffers, X)
    assert left["ways"].tolist() == [0, 1]


def test_chunks_and_predictions_split_too():
    models, fmodel, params, buffers = built(ONCE)
    forward = ensemble_forward(fmodel, chunk_size=2)
    assert_exact(forward(params, buffers, X), outputs(models), EXACT)
    found = predict(fmodel, params, buffers, X, kind="value")
    assert_exact(found.mean, outputs(models).mean(0), EXACT)


@every_strategy
def test_steps_are_those_of_the_modules(strategy):
    models, fmodel, params, buffers = built(COUNTS)
    tx, ways = vgrad.optim.sgd(0.6), set()
    state = EnsembleState.create(tx, params, buffers, seed=1)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    step = ensemble_train_step(loss, tx, strategy=strategy)
    for number in range(6):
        batch = randn(5, 4, seed=number), randn(5, 2, seed=10 + number)
        state, _ = step(state, *batch)
        for model in models:
            optimizer = optim.SGD(model.parameters(), lr=0.6)
            optimizer.zero_grad()
            COUNTS.run(model, *batch).backward()
            optimizer.step()
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


@pytest.mark.parametrize("strategy", ["vmap", "hybrid"])
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("name", DRAWS)
def test_groups_see_the_same_numbers(name, randomness, strategy):
    """If they differ by member: by keys, from a number of torch's generator."""

    def found(*, asks, keyed=False, strategy=strategy):
        def forward(self, x):
            h = DRAWS[name](self.first(x))
            if asks:
                h = h + 0 if self.first.bias.sum() > 0 else 0 + h
                h = h + 0 if h[0, 0] > h[0, 1] else 0 + h
            return self.last(h)

        _, fmodel, params, buffers = built(forward)
        loss = vgrad.batch_loss(fmodel, F.mse_loss)
        compute = ensemble_grad(loss, strategy=strategy, randomness=randomness)
        torch.manual_seed(0)
        if keyed:
            keys = sample_keys(int(torch.randint(2**62, ())), 0, MEMBERS)
            compute = compute.keyed(keys)
        return compute(params, buffers, X, Y).grads

    own = randomness == "different"
    grads = found(asks=True)
    assert_exact(grads, found(asks=False, keyed=own), 1e-14)
    assert grads["first.weight"].any()


def drops(self, x):
    """Drop layers at random, and return which."""
    h, drawn = self.first(x), []
    for layer in (F.relu, torch.tanh, torch.sin):
        drawn.append(torch.rand((), dtype=torch.float64))
        h = layer(h) if drawn[-1] > 0.5 else h
    return self.last(h), torch.stack(drawn)


@every_strategy
def test_no_number_is_drawn_twice(strategy):
    _, fmodel, params, buffers = built(drops)
    forward = ensemble_forward(fmodel, strategy=strategy)
    torch.manual_seed(0)
    drawn = [forward(params, buffers, X)[1].flatten() for _ in range(3)]
    everything = torch.cat([*drawn, torch.rand(60, dtype=torch.float64)])
    assert len(everything.unique()) == len(everything)
    assert len({tuple(row) for row in (drawn[0] > 0.5).view(-1, 3).tolist()}) > 2


def test_members_share_numbers_and_the_groups_of_a_group_too():
    _, fmodel, params, buffers = built(drops)

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
    for seed in range(30):
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

    params = {"a": torch.tensor([[-1.0], [1.0], [1.0]]), "b": torch.ones(3, 1)}
    compute = ensemble_grad(loss, strategy="hybrid")
    away = params | {"a": -torch.ones(3, 1)}  # where `b` is found to receive none
    assert not compute(away, {}, torch.ones(1)).grads["b"].any()
    with pytest.raises(vgrad.UnsupportedOp, match="hides its graph"):
        compute(params, {}, torch.ones(1))
    with pytest.warns(vgrad.FallbackWarning, match="hides its graph"):
        found = ensemble_grad(loss)(params, {}, torch.ones(1))
    assert found.grads["b"].tolist() == [[0], [1], [1]]


def chooses(self, x):
    """Members with a positive bias have shapes that depend on values."""
    h = self.first(x)
    drawn = torch.rand(3, dtype=torch.float64)
    if self.first.bias.sum() > 0:
        h = h[(h > 0).all(1)].sum(0) + h
    return self.last(h * drawn), drawn


@pytest.mark.parametrize("function", ["ensemble_forward", "ensemble_grad"])
def test_auto_runs_alone_the_members_that_cannot_run_at_once(function):
    models, fmodel, params, buffers = built(chooses)

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

    def run(model, known):
        h = model.first(X)
        if model.first.bias.sum() > 0:
            h = h[(h > 0).all(1)].sum(0) + h
        return model.last(h * known)

    if function == "ensemble_forward":
        expected = [run(*pair) for pair in zip(models, drawn, strict=True)]
        assert_exact(found, torch.stack(expected), EXACT)
    else:
        square = lambda *pair: run(*pair).square().sum()  # noqa: E731
        expected, _ = gradients(models, square, [(known,) for known in drawn])
        assert_exact(found.grads, expected, EXACT)
    assert len(drawn.unique()) == drawn.numel()
    after = vgrad.explain(compute)(params, buffers, X)
    compute(params, buffers, X)  # without a second warning
    assert (told.strategy, told.why) == (after.strategy, after.why)
    assert told.strategy == "loop"
    assert (len(told.splits), after.splits) == (1, ())


def own_generator(self, x):
    h = self.first(x) + torch.rand(3, generator=GENERATOR, dtype=torch.float64)
    return self.last(h if self.first.bias.sum() > 0 else -h)


GENERATOR = torch.Generator()
ERRORS = [
    (drops, {"randomness": "error"}, 'randomness="error"'),
    (own_generator, {"strategy": "vmap"}, "torch.Generator of the loss's own.*lo"),
]


@pytest.mark.parametrize(("forward", "options", "message"), ERRORS)
def test_errors_of_a_member_are_raised_as_they_are(forward, options, message):
    _, fmodel, params, buffers = built(forward)
    with pytest.raises(RuntimeError, match=message):
        ensemble_forward(fmodel, **options)(params, buffers, X)


def test_a_warning_names_the_line_where_groups_are_small():
    models, fmodel, params, buffers = built(CASES["weighs"], 16)
    forward = ensemble_forward(fmodel, strategy="hybrid")
    text = r"^ensemble_forward: members take different branches at .*test_contract.py:"
    with pytest.warns(vgrad.FallbackWarning, match=text + r"\d+; 16 of them run in 16"):
        found = forward(params, buffers, X)
    assert_exact(found, outputs(models), EXACT)
    forward(params, buffers, X)  # without a second warning


def test_an_explanation_has_the_lines_where_members_split():
    _, fmodel, params, buffers = built(TWICE)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    for compute, batch in (
        (ensemble_forward(fmodel), (X,)),
        (ensemble_grad(loss), (X, Y)),
    ):
        told = vgrad.explain(compute)(params, buffers, *batch)
        assert all("test_contract.py:" in where for where, _ in told.splits)
        assert [times for _, times in told.splits] == [1, 1]
        assert told.groups == 3
        assert told.forms == (("linear", "baddbmm"),) * 6
        text = "7 members run in 3 groups. They take different branches at\n  "
        assert f"{text}{told.splits[0][0]} (1 x)\n" in str(told)
    alike = {**params, "first.bias": torch.full_like(params["first.bias"], -99)}
    told = vgrad.explain(ensemble_forward(fmodel))(alike, buffers, X)
    assert (told.groups, told.splits) == (1, ())
    assert "branches" not in str(told)


@pytest.mark.compiled
@every_strategy
def test_a_graph_asks_again_and_gives_way(strategy):
    _, fmodel, params, buffers = built(ONCE)
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
    _, fmodel, params, buffers = built(COUNTS)
    params["first.bias"] = params["first.bias"].abs()
    loss, tx = vgrad.batch_loss(fmodel, F.mse_loss), vgrad.optim.sgd(0.05)
    steps = ensemble_train_step(loss, tx), vgrad.compile(ensemble_train_step(loss, tx))
    states = [EnsembleState.create(tx, params, buffers, seed=1)] * 2
    for number in range(4):
        states = [step(s, X, Y)[0] for step, s in zip(steps, states, strict=True)]
        assert_exact(states[1].params, states[0].params, 0)
        assert_exact(states[1].buffers, states[0].buffers, 0)
        if number == 2:
            turned = -states[0].params["first.bias"].abs()
            params = states[0].params | {"first.bias": turned}
            states = [state._replace(params=params) for state in states]
