"""A mask leaves samples out: what is left is the quantity of the others alone."""

import pytest
import torch

import vgrad
from tests import losses, oracle
from tests.compiled import problems

MASK = torch.tensor([True, False, True, True, False, True, False])
every_transform = pytest.mark.parametrize("name", problems.TRANSFORMS)
every_strategy = pytest.mark.parametrize(
    "strategy", ["auto", "recorded", "vmap", "loop"]
)


def clipped_sums(grads, kind, bound):
    """The documented formulas, over gradients {name: [B, ...]}."""
    if kind == "flat":
        return oracle.clipped(grads, bound)
    if kind == "automatic":
        return oracle.weighted(grads, bound / (oracle.norms(grads) + 0.01))
    layers = {name.rpartition(".")[0] for name in grads}
    found = {}
    for layer in layers:
        part = {n: g for n, g in grads.items() if n.rpartition(".")[0] == layer}
        found.update(oracle.clipped(part, bound / len(layers) ** 0.5))
    return {name: found[name] / 3 for name in grads}


def gram(grads, others):
    return sum(g.flatten(1) @ others[n].flatten(1).T for n, g in grads.items())


def expected(name, grads, alone):
    """What a quantity is by definition, and what of the result it is compared with."""
    if name == "grad":
        return grads
    if name == "norm":
        return {"": oracle.norms(grads)}
    if name == "norm of parameters":
        return {each: oracle.norms({each: grad}) for each, grad in grads.items()}
    if name == "gram":
        return {"": gram(grads, grads)}
    if name == "weighted":
        weights = torch.linspace(-1, 2, len(MASK), dtype=torch.float64)[MASK]
        return oracle.weighted(grads, weights)
    if name in problems.CLIPPED:
        return clipped_sums(grads, name, 0.7)
    if name == "moments":
        return {n: torch.stack([g.mean(0), g.var(0)]) for n, g in grads.items()}
    assert name == "projection"  # compared elsewhere
    return {"": alone}


def compared(name, found):
    if name in problems.CLIPPED:
        return found.grads
    if name == "moments":
        pairs = {n: (mean, found.variance[n]) for n, mean in found.mean.items()}
        return {n: torch.stack(pair) for n, pair in pairs.items()}
    return {"": found} if isinstance(found, torch.Tensor) else found


@every_strategy
@every_transform
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("net", ["mlp", "tied"])
def test_the_quantity_is_that_of_the_samples_that_count(
    net, chunk_size, name, strategy
):
    built = losses.build(net, len(MASK))
    make = problems.TRANSFORMS[name]
    compute = make(built.loss, strategy=strategy, chunk_size=chunk_size)
    found = problems.call(name, compute, built.given, MASK)
    grads = {n: grad[MASK] for n, grad in built.expected.items()}
    alone = losses.rows(built.batch, MASK)
    if name == "gram, cross":
        others = {n: grad[:2] for n, grad in built.expected.items()}
        exact = {"": gram(grads, others)}
    else:
        plain = make(built.loss, strategy="loop")
        given = built.params, built.buffers, *alone
        whole = plain(*given) if name == "projection" else None
        exact = expected(name, grads, whole)
    oracle.assert_exact(compared(name, found), exact)
    if name in problems.CLIPPED:
        norms = oracle.norms(grads)
        oracle.assert_exact(found.norms, norms)
        parts = [norms > 0.7]
        if name == "per_layer":
            layers = {n.rpartition(".")[0]: {} for n in grads}
            for n, grad in grads.items():
                layers[n.rpartition(".")[0]][n] = grad
            share = 0.7 / len(layers) ** 0.5
            parts = [oracle.norms(each) > share for each in layers.values()]
        assert int(found.clipped) == int(torch.stack(parts).any(0).sum())
        assert int(found.nonfinite) == 0
        assert found.losses.shape == norms.shape


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", problems.HAS_AUX)
def test_aux_and_losses_are_those_of_the_samples_that_count(name, chunk_size, strategy):
    def loss(params, buffers, x, g):
        return problems.sites(params, buffers, x, g), {"sum": x.sum(), "g": g}

    given = problems.sites_params(), {}, *problems.sites_batch(len(MASK))
    options = {"strategy": strategy, "chunk_size": chunk_size, "has_aux": True}
    compute = problems.TRANSFORMS[name](loss, **options)
    found, aux = problems.call(name, compute, given, MASK)
    _, _, x, g = given
    oracle.assert_exact(aux["g"], g[MASK], 0)
    torch.testing.assert_close(aux["sum"], x[MASK].sum((1, 2)))
    if name in problems.CLIPPED:
        losses = [
            problems.sites(given[0], {}, *each) for each in zip(x, g, strict=True)
        ]
        torch.testing.assert_close(found.losses, torch.stack(losses)[MASK])


@every_strategy
@every_transform
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("planted", problems.PLANTED)
def test_samples_left_out_change_no_bit_whatever_they_hold(
    planted, chunk_size, name, strategy
):
    params, size = problems.sites_params(), 7
    mask = torch.arange(size) < 5
    make = problems.TRANSFORMS[name]
    compute = make(problems.sites, strategy=strategy, chunk_size=chunk_size)
    plain = problems.call(
        name, compute, (params, {}, *problems.sites_batch(size)), mask
    )
    batch = problems.sites_batch(size, planted, planted)
    found = problems.call(name, compute, (params, {}, *batch), mask)
    if name.startswith("gram"):
        # Where one sample is far out of range, products of a chunk are in float64.
        oracle.assert_exact(found, plain, 1e-6)
        return
    if name in problems.CLIPPED:
        # Sums over fewer rows may be rounded in another order.
        oracle.assert_exact(found.grads, plain.grads, 1e-6)
        found, plain = (each._replace(grads={}) for each in (found, plain))
    oracle.assert_exact(found, plain, 0)


@every_strategy
@every_transform
def test_a_mask_may_leave_out_all(name, strategy):
    params, batch = problems.sites_params(), problems.sites_batch(3, "nan")
    compute = problems.TRANSFORMS[name](problems.sites, strategy=strategy)
    found = problems.call(name, compute, (params, {}, *batch), torch.zeros(3) > 0)
    if name in ("weighted", *problems.CLIPPED):
        sums = found if name == "weighted" else found.grads
        oracle.assert_exact(sums, {n: torch.zeros_like(p) for n, p in params.items()})
    elif name == "moments":
        assert all(bool(each.isnan().all()) for each in found.mean.values())
        assert all(bool(each.isnan().all()) for each in found.variance.values())
    elif name == "gram":
        assert found.shape == (0, 0)
    else:
        assert not any(map(len, losses.pytree.tree_leaves(found)))
    if name in problems.CLIPPED:
        assert found.norms.shape == found.losses.shape == (0,)
        assert int(found.clipped) == int(found.nonfinite) == 0


BAD = {
    "numbers": (torch.tensor([2, 1, 1]), "boolean .* got torch.int64 (3,)"),
    "weights": (torch.ones(3), "boolean .* got torch.float32 (3,)"),
    "too short": (torch.ones(2) > 0, "shape (3,), .* got torch.bool (2,)"),
    "a column": (torch.ones(3, 1) > 0, "shape (3,), .* got torch.bool (3, 1)"),
    "a list": ([True, False, True], "got list"),
}


@pytest.mark.parametrize("bad", BAD)
@every_transform
def test_what_is_no_mask_of_the_batch_is_refused(name, bad):
    mask, text = BAD[bad]
    text = text.replace("(", r"\(").replace(")", r"\)")
    compute = problems.TRANSFORMS[name](problems.sites)
    given = problems.sites_params(), {}, *problems.sites_batch(3)
    with pytest.raises(
        ValueError, match=rf"{compute.options.function}\(.*mask.*{text}"
    ):
        problems.call(name, compute, given, mask)


@every_strategy
@every_transform
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_draws_what_it_draws_for_the_whole_batch(randomness, name, strategy):
    loss, params, buffers, draw = problems.built("dropout", torch.float64)
    batch, kept = draw(7), MASK
    options = {"strategy": strategy, "randomness": randomness}
    make = problems.TRANSFORMS[name]
    torch.manual_seed(5)
    found = problems.call(name, make(loss, **options), (params, buffers, *batch), kept)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    whole = vgrad.per_sample_grad(loss, **options)(params, buffers, *batch)
    if name in ("gram, cross", "projection"):
        torch.manual_seed(5)
        plain = problems.call(name, make(loss, **options), (params, buffers, *batch))
        assert torch.equal(after, torch.get_rng_state())
        oracle.assert_exact(found, plain[kept])
        return
    assert torch.equal(after, torch.get_rng_state())
    grads = {n: grad[kept] for n, grad in whole.items()}
    oracle.assert_exact(compared(name, found), expected(name, grads, None))


def test_counts_are_of_the_samples_that_count_in_whatever_order_they_ran():
    def branching(params, buffers, x):
        loss = (params["w"] * x).sum()
        return 2 * loss if x[0] > 0 else loss

    x = torch.tensor([[-1.0, 1.0], [1.0, torch.nan], [-1.0, 2.0]])
    mask = torch.tensor([True, True, False])
    clipped = vgrad.clipped_grad(branching, max_norm=0.5)
    found = clipped({"w": torch.ones(2)}, {}, x.flip(0), mask=mask.flip(0))
    other = clipped({"w": torch.ones(2)}, {}, x, mask=mask)
    for each in (found, other):
        assert (int(each.nonfinite), int(each.clipped)) == (1, 1)
