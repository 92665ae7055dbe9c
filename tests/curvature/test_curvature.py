"""Curvature against dense matrices of plain autograd in float64."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import STRATEGIES
from vgrad import curvature


class Last(nn.Module):
    """The last position of a recurrent net, or the mean of all positions."""

    def __init__(self, layer, head):
        super().__init__()
        self.layer, self.head = layer, head

    def forward(self, x):
        output = self.layer(x)
        recurrent = isinstance(output, tuple)
        return self.head(output[0][:, -1] if recurrent else output.mean(1))


class Twice(nn.Module):
    """One layer on both halves of an input."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.cat([self.layer(half) for half in x.chunk(2, 1)], 1))


class Tied(nn.Module):
    """An embedding that is the output layer as well."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return F.linear(self.table(x).mean(1).tanh(), self.table.weight)


class Scaled(nn.Module):
    """A layer times one number, which has no dimensions."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.layer(x).tanh()


def attention():
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


NETS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "cnn": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        (2, 4, 4),
    ),
    "grouped": lambda: (
        nn.Sequential(nn.Conv1d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, 2)),
        (4, 3),
    ),
    "segmentation": lambda: (nn.Conv2d(1, 3, 3), (1, 4, 4)),
    "lstm": lambda: (Last(nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 2)), (4, 3)),
    "attention": lambda: (Last(attention(), nn.Linear(4, 2)), (3, 4)),
    "norm": lambda: (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), (4,)),
    "scaled": lambda: (Scaled(), (3,)),
    "twice": lambda: (Twice(), (6,)),
    "tied": lambda: (Tied(), None),
    "words": lambda: (
        nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(9, 2)),
        None,
    ),
}


def problem(name, sizes=(3, 2)):
    """Return a module, its functional form and batches, in float64."""
    torch.manual_seed(0)
    module, shape = NETS[name]()
    module = module.double()

    def batch(size):
        if shape is None:
            return (torch.randint(5, (size, 3)),)
        return (torch.randn(size, *shape).double(),)

    return module, vgrad.make_functional_with_buffers(module), [batch(n) for n in sizes]


def jacobian(module, x):
    """The Jacobian of one sample's output, [K, P], and the output."""
    params, output = list(module.parameters()), module(x)
    rows = []
    for number in output.flatten():
        grads = torch.autograd.grad(
            number, params, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([each.flatten() for each in grads]))
    return torch.stack(rows), output.detach()


def samples(batches):
    return [x[row : row + 1] for (x, *_) in batches for row in range(len(x))]


def dense(module, batches, likelihood):
    """The GGN by its definition, with torch's Hessian of the likelihood."""
    total = 0.0
    for x in samples(batches):
        jac, output = jacobian(module, x)
        classes = output.argmax(1)

        def negative(flat, output=output, classes=classes):
            flat = flat.view_as(output)
            if likelihood == "gaussian":
                return flat.square().sum() / 2
            return F.cross_entropy(flat, classes, reduction="sum")

        total = total + jac.T @ torch.func.hessian(negative)(output.flatten()) @ jac
    return total / len(samples(batches))


def flat(tree):
    return torch.cat([each.flatten() for each in tree.values()])


def like(params, vector):
    sizes = [each.numel() for each in params.values()]
    pairs = zip(params.items(), vector.split(sizes), strict=True)
    return {name: part.view_as(value) for (name, value), part in pairs}


def assembled(product, params):
    """The matrix of a product, column by column."""
    size = sum(each.numel() for each in params.values())
    units = torch.eye(size, dtype=torch.float64)
    return torch.stack([flat(product(like(params, unit))) for unit in units], 1)


CONSTANT = "_ConstantBackward"
"""What keeps no graph, and raises where a derivative is taken."""

every_likelihood = pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
every_net = pytest.mark.parametrize("name", NETS)
both_shapes = pytest.mark.parametrize("name", ["mlp", "segmentation"])
# Columns depend on the shape of outputs, and not on the net.
every_pair = pytest.mark.parametrize(
    ("name", "likelihood"),
    [(name, "categorical") for name in NETS]
    + [("mlp", "gaussian"), ("segmentation", "gaussian")],
)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")  # of attention in vmap
@every_pair
def test_products_diagonal_and_trace_are_those_of_the_dense_matrix(name, likelihood):
    module, (fmodel, params, buffers), batches = problem(name)
    exact = dense(module, batches, likelihood)
    matrix = curvature.ggn(fmodel, likelihood)
    given = params, buffers, batches
    vector = torch.randn(len(exact), dtype=torch.float64)
    found = curvature.vector_product(matrix, *given)(like(params, vector))
    oracle.assert_exact(flat(found), exact @ vector)
    oracle.assert_exact(flat(curvature.diagonal(matrix, *given)), exact.diagonal())
    oracle.assert_exact(curvature.trace(matrix, *given), exact.trace())
    for options in ({"chunk_size": 4}, {"strategy": "vmap"}):
        found = curvature.diagonal(matrix, *given, **options)
        oracle.assert_exact(flat(found), exact.diagonal())
        assert {type(each.grad_fn).__name__ for each in found.values()} == {CONSTANT}


@pytest.mark.parametrize("strategy", ["recorded", "loop"])
@every_net
def test_jacobians_are_those_of_plain_autograd(name, strategy):
    module, (fmodel, params, buffers), [batch, _] = problem(name)
    compute = curvature.per_sample_jacobian(fmodel, strategy=strategy, chunk_size=2)
    found = compute(params, buffers, *batch)
    out = module(*batch).shape[1:]
    for row, x in enumerate(samples([batch])):
        exact, _ = jacobian(module, x)
        own = {n: each[row].reshape(math.prod(out), -1) for n, each in found.items()}
        oracle.assert_exact(torch.cat([*own.values()], 1), exact)
    for each, value in zip(found.values(), params.values(), strict=True):
        assert each.shape == (3, *out, *value.shape)
    with pytest.raises(ValueError, match="expected a sample at least, got an empty"):
        compute(params, buffers, batch[0][:0])


def test_jacobians_by_vmap_can_be_differentiated():
    _, (fmodel, params, buffers), [(x,), _] = problem("mlp")
    compute = curvature.per_sample_jacobian(fmodel, strategy="vmap")
    x.requires_grad_()
    size = sum(each.square().sum() for each in compute(params, buffers, x).values())

    def plain(x):
        return sum(each.square().sum() for each in rows(x).values())

    def rows(x):
        def one(params, x):
            return fmodel(params, buffers, x[None])[0]

        return torch.func.vmap(torch.func.jacrev(one), (None, 0))(params, x)

    (found,) = torch.autograd.grad(size, x)
    oracle.assert_exact(found, torch.autograd.grad(plain(x), x)[0])
    constant = flat(curvature.per_sample_jacobian(fmodel)(params, buffers, x)).sum()
    with pytest.raises(RuntimeError, match='use strategy="vmap"'):
        constant.backward()


@both_shapes
@every_likelihood
def test_drawn_targets_have_the_same_matrix_on_average(name, likelihood):
    module, (fmodel, params, buffers), batches = problem(name)
    exact = dense(module, batches, likelihood).diagonal()
    fisher = curvature.fisher(fmodel, likelihood, seed=0, samples=3000)
    found = flat(curvature.diagonal(fisher, params, buffers, batches))
    oracle.assert_exact(found, exact, 0.15)


def test_a_seed_gives_one_matrix():
    _, (fmodel, params, buffers), batches = problem("mlp")
    state = torch.get_rng_state()
    given = params, buffers, batches
    fishers = [curvature.fisher(fmodel, "categorical", seed=seed) for seed in (0, 0, 1)]
    one, same, other = (flat(curvature.diagonal(each, *given)) for each in fishers)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    for strategy in STRATEGIES:
        found = curvature.diagonal(fishers[0], *given, strategy=strategy)
        oracle.assert_exact(flat(found), one)
    assert torch.equal(state, torch.get_rng_state())
    product = curvature.vector_product(fishers[0], *given)
    matrix = assembled(product, params)
    oracle.assert_exact(matrix.diagonal(), one)
    oracle.assert_exact(matrix, matrix.T)


@every_likelihood
@both_shapes
def test_the_empirical_fisher_is_the_mean_of_outer_products(name, likelihood):
    module, (fmodel, params, buffers), batches = problem(name)

    def target(x):
        output = module(x).detach()
        if likelihood == "gaussian":
            return torch.randn_like(output)
        return torch.randint(output.shape[1], (len(x), *output.shape[2:]))

    batches = [(x, target(x)) for (x,) in batches]
    total = 0.0
    for x, y in batches:
        for row in range(len(x)):
            output, own = module(x[row : row + 1]), y[row : row + 1]
            if likelihood == "gaussian":
                value = (output - own).square().sum() / 2
            else:
                value = F.cross_entropy(output, own, reduction="sum")
            grad = torch.autograd.grad(value, list(module.parameters()))
            grad = torch.cat([each.flatten() for each in grad])
            total = total + torch.outer(grad, grad)
    exact = total / 5
    matrix = curvature.empirical_fisher(fmodel, likelihood)
    product = curvature.vector_product(matrix, params, buffers, batches)
    oracle.assert_exact(assembled(product, params), exact)
    for strategy in STRATEGIES:
        found = curvature.diagonal(matrix, params, buffers, batches, strategy=strategy)
        oracle.assert_exact(flat(found), exact.diagonal())


@both_shapes
@pytest.mark.parametrize(
    ("criterion", "of_classes"),
    [
        (F.cross_entropy, True),
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (F.mse_loss, False),
        (nn.MSELoss(reduction="sum"), False),
    ],
)
def test_a_loss_has_the_curvature_of_its_criterion(name, criterion, of_classes):
    module, (fmodel, params, buffers), batches = problem(name)
    loss, total, outer = vgrad.sample_loss(fmodel, criterion), 0.0, 0.0
    pairs = []
    for (x,) in batches:
        output = module(x).detach()
        shape = (len(x), *output.shape[2:])
        y = torch.randint(3, shape) if of_classes else torch.randn_like(output)
        pairs.append((x, y))
        for row in range(len(x)):
            jac, own = jacobian(module, x[row : row + 1])
            target = y[row : row + 1]

            def value(flat, own=own, target=target):
                return criterion(flat.view_as(own), target)

            hessian = torch.func.hessian(value)(own.flatten())
            grad = jac.T @ torch.func.grad(value)(own.flatten())
            total = total + jac.T @ hessian @ jac / 5
            outer = outer + torch.outer(grad, grad) / 5
    given = params, buffers
    found = curvature.diagonal(curvature.ggn(loss), *given, batches)
    oracle.assert_exact(flat(found), total.diagonal())
    found = curvature.diagonal(curvature.empirical_fisher(loss), *given, pairs)
    oracle.assert_exact(flat(found), outer.diagonal())
    drawn = curvature.fisher(loss, seed=0, samples=3000)
    found = curvature.diagonal(drawn, *given, batches)
    oracle.assert_exact(flat(found), total.diagonal(), 0.15)


@pytest.mark.parametrize("name", ["mlp", "lstm", "attention", "norm"])
def test_products_with_the_hessian(name):
    _, (fmodel, params, buffers), batches = problem(name)
    batches = [(x, torch.randint(2, (len(x),))) for (x,) in batches]
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    names = list(params)

    def whole(*values):
        own = dict(zip(names, values, strict=True))
        parts = [len(x) * loss(own, buffers, x, y) for x, y in batches]
        return sum(parts) / 5

    vector = {n: torch.randn_like(value) for n, value in params.items()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, exact = torch.autograd.functional.vhp(
            whole, tuple(params.values()), tuple(vector.values())
        )
    product = curvature.hessian_vector_product(loss, params, buffers, batches)
    oracle.assert_exact(flat(product(vector)), torch.cat([e.flatten() for e in exact]))


def blocks(matrix, params):
    sizes = [each.numel() for each in params.values()]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    pairs = zip(params, starts, sizes, strict=True)
    return {n: matrix[a : a + size, a : a + size] for n, a, size in pairs}


class Transposed(nn.Module):
    """A layer whose weight is [I, O]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.in_features = 5

    def forward(self, x):
        return x @ self.weight


EXACT = {
    "deep linear": (nn.Linear(5, 4), nn.Linear(4, 3)),
    "one output": (nn.Linear(6, 3), nn.Linear(3, 1)),
    "shared": (nn.Linear(8, 5),),
    "transposed": (Transposed(), nn.Linear(3, 2)),
}
"""Nets for which Kronecker factors lose nothing, with a Gaussian likelihood."""


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("method", [curvature.kfac, curvature.ekfac])
def test_kronecker_factors_are_exact_for_linear_nets(method, name):
    torch.manual_seed(1)
    module = nn.Sequential(*EXACT[name]).double()
    shared = (2, 4) if name == "shared" else ()  # positions, as in images
    width = module[0].in_features
    batches = [(torch.randn(size, *shared, width).double(),) for size in (1, 2, 4)]
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    exact = blocks(dense(module, batches, "gaussian"), params)
    found = method(curvature.ggn(fmodel, "gaussian"), params, buffers, batches)
    oracle.assert_exact(blocks(assembled(found.product, params), params), exact)


class Averaged(nn.Module):
    """A layer at all positions, and their mean."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).flatten(2).mean(2) if x.ndim > 3 else self.layer(x).mean(1)


@pytest.mark.parametrize("method", [curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(3, 2), (4, 3)), (nn.Conv2d(2, 3, 2), (2, 3, 3))]
)
def test_averages_over_positions_are_exact_by_reduce(method, layer, shape):
    torch.manual_seed(0)
    module = nn.Sequential(
        Averaged(layer), nn.Linear(layer.weight.shape[0], 2)
    ).double()
    batches = [(torch.randn(size, *shape).double(),) for size in (2, 3)]
    given = vgrad.make_functional_with_buffers(module)
    exact = blocks(dense(module, batches, "gaussian"), given[1])
    matrix, rest = curvature.ggn(given[0], "gaussian"), (*given[1:], batches)
    errors = []
    for sharing in ("reduce", "expand"):
        found = method(matrix, *rest, weight_sharing=sharing)
        found = blocks(assembled(found.product, given[1]), given[1])
        errors.append([float((found[name] - exact[name]).norm()) for name in exact])
    assert max(errors[0]) < 1e-12
    assert errors[1][0] > 1e-3
    with pytest.raises(ValueError, match="weight_sharing='sum'.*expected one of"):
        method(matrix, *rest, weight_sharing="sum")


@every_pair
def test_corrected_eigenvalues_fit_better_and_keep_the_trace(name, likelihood):
    module, (fmodel, params, buffers), batches = problem(name)
    exact = dense(module, batches, likelihood)
    given = curvature.ggn(fmodel, likelihood), params, buffers, batches
    errors = []
    for method in (curvature.kfac, curvature.ekfac):
        found = assembled(method(*given).product, params)
        own = blocks(found, params).items()
        errors.append({n: float((b - blocks(exact, params)[n]).norm()) for n, b in own})
        rest = found - torch.block_diag(*blocks(found, params).values())
        assert float(rest.abs().max()) < 1e-12
    assert all(errors[1][n] <= errors[0][n] + 1e-10 for n in params)
    oracle.assert_exact(curvature.ekfac(*given).trace(), exact.trace())
    chunked = curvature.ekfac(*given, chunk_size=4).eigenvalues()
    oracle.assert_exact(chunked, curvature.ekfac(*given).eigenvalues(), 1e-8)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("cnn", curvature.kfac),
        ("lstm", curvature.ekfac),
        ("words", curvature.kfac),
    ],
)
def test_solutions_and_determinants_are_those_of_the_matrix(name, method):
    _, (fmodel, params, buffers), batches = problem(name)
    found = method(curvature.ggn(fmodel, "categorical"), params, buffers, batches)
    matrix = assembled(found.product, params)
    damped = matrix + 0.1 * torch.eye(len(matrix)).double()
    vector = torch.randn(len(matrix), dtype=torch.float64)
    solved = found.solve(like(params, vector), damping=0.1)
    oracle.assert_exact(flat(solved), torch.linalg.solve(damped, vector), 1e-8)
    oracle.assert_exact(found.logdet(damping=0.1), torch.logdet(damped), 1e-8)
    oracle.assert_exact(found.trace(), matrix.trace())
    values = torch.cat([*found.eigenvalues().values()]).sort().values
    exact = torch.linalg.eigvalsh(matrix).sort().values
    oracle.assert_exact(values, exact, 1e-8)
    with pytest.raises(ValueError, match=r"damping=0.0\): expected a larger number"):
        found.solve(like(params, vector), damping=0.0)


def captured(side, matrices):
    """Return the mean curvature along the rows of a side, the most first."""
    rotated = matrices if side is None else side @ matrices
    return rotated.square().mean(0).sum(1).sort(descending=True).values


@pytest.mark.parametrize("name", ["mlp", "cnn", "norm", "words"])
def test_sides_are_the_eigenvectors_of_most_curvature(name):
    _, (fmodel, params, buffers), batches = problem(name)
    batches = [(*each, torch.arange(len(each[0])) % 2) for each in batches]
    matrix = curvature.empirical_fisher(fmodel, "categorical")
    blocks = curvature.ekfac(matrix, params, buffers, batches)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    batch = [*map(torch.cat, zip(*batches, strict=True))]
    grads = vgrad.per_sample_grad(loss)(params, buffers, *batch)
    few, every = blocks.sides((2, 1)), blocks.sides((99, 99))
    for sides in (few, every):
        project = vgrad.per_sample_projection(loss, sides, chunk_size=2)
        for each, found in project(params, buffers, *batch).items():
            matrices = grads[each].reshape(len(found), len(grads[each][0]), -1)
            expected = matrices
            for side, whole in zip(sides[each], every[each], strict=True):
                if side is not None:
                    expected = side @ expected
                    most = captured(whole, matrices)[: len(side)]
                    oracle.assert_exact(captured(side, matrices), most)
                expected, matrices = expected.mT, matrices.mT
            oracle.assert_exact(found, expected.flatten(1))
            if sides is every:  # directions without which nothing is lost
                own = blocks.eigenvalues()[each].sort().values
                oracle.assert_exact(found.square().mean(0).sort().values, own)
    sizes = {n: [None if each is None else len(each) for each in few[n]] for n in few}
    assert all(
        max(left, 1) <= 2 and right in (None, 1) for left, right in sizes.values()
    )


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")  # of attention in vmap
@pytest.mark.parametrize("name", ["cnn", "attention", "tied", "scaled"])
def test_the_whole_matrix_is_the_dense_one(name):
    module, (fmodel, params, buffers), batches = problem(name)
    exact = dense(module, batches, "categorical")
    found = curvature.full(
        curvature.ggn(fmodel, "categorical"), params, buffers, batches
    )
    oracle.assert_exact(assembled(found.product, params), exact)
    vector = torch.randn(len(exact), dtype=torch.float64)
    damped = exact + 0.1 * torch.eye(len(exact)).double()
    solved = found.solve(like(params, vector), damping=0.1)
    oracle.assert_exact(flat(solved), torch.linalg.solve(damped, vector), 1e-8)
    assert [each.shape for each in solved.values()] == [
        p.shape for p in params.values()
    ]
    oracle.assert_exact(found.logdet(damping=0.1), torch.logdet(damped), 1e-8)
    oracle.assert_exact(found.trace(), exact.trace())
    values = torch.linalg.eigvalsh(exact)
    oracle.assert_exact(found.eigenvalues()[""], values.clamp(min=0), 1e-8)
    many = {n: torch.stack([each, 2 * each]) for n, each in solved.items()}
    both = found.product(many)
    for name, each in found.product(solved).items():
        oracle.assert_exact(both[name], torch.stack([each, 2 * each]), 1e-8)
    name = max(params, key=lambda name: params[name].ndim)
    with pytest.raises(ValueError, match=r"Full\(vector\): expected shape"):
        found.solve(many | {name: many[name][:, :-1]}, damping=1.0)


def test_a_solver_of_scipy_takes_a_product():
    linalg = pytest.importorskip("scipy.sparse.linalg")
    module, (fmodel, params, buffers), batches = problem("mlp")
    exact = dense(module, batches, "categorical")
    matrix = curvature.ggn(fmodel, "categorical")
    product = curvature.vector_product(matrix, params, buffers, batches)
    operator = curvature.linear_operator(product, params)
    largest = linalg.eigsh(operator, k=2, return_eigenvectors=False)
    expected = torch.linalg.eigvalsh(exact)[-2:]
    oracle.assert_exact(torch.from_numpy(largest).sort().values, expected, 1e-8)


def test_arguments_in_float32_stay_float32():
    module, _, batches = problem("attention")
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module.float())
    batches = [(x.float(),) for (x,) in batches]
    given = curvature.ggn(fmodel, "categorical"), params, buffers, batches
    exact = dense(module.double(), [(x.double(),) for (x,) in batches], "categorical")
    module.float()
    found = curvature.diagonal(*given)
    assert {each.dtype for each in found.values()} == {torch.float32}
    oracle.assert_exact(flat(found), exact.diagonal(), 1e-5)
    vector = {n: torch.randn_like(value) for n, value in params.items()}
    product = flat(curvature.vector_product(*given)(vector))
    oracle.assert_exact(product, exact @ flat(vector).double(), 1e-5)
    values = curvature.kfac(*given).eigenvalues().values()
    assert {each.dtype for each in values} == {torch.float64}
    found = curvature.ekfac(*given).trace()  # rotated in float32
    assert found.dtype == torch.float64
    oracle.assert_exact(found, exact.trace(), 1e-6)


class Branches(nn.Module):
    """A parameter that some samples do not use, or use in another way."""

    def __init__(self, *, both=False):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(1, 4).double()) for _ in range(2))
        self.both = both

    def forward(self, x):
        if x.sum() > 0:
            return F.linear(x, self.v)
        return (x * (self.v if self.both else self.w)).sum(1, keepdim=True)


@pytest.mark.parametrize("method", [curvature.kfac, curvature.ekfac])
def test_samples_that_do_not_use_a_parameter_have_no_positions(method):
    module, x = Branches(), torch.randn(5, 4).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    matrix = curvature.ggn(fmodel, "gaussian")
    parts = x.split(1)
    blocks = method(matrix, params, buffers, [(part,) for part in parts])
    exact = {"w": 0.0, "v": 0.0}
    for part in parts:
        exact["v" if part.sum() > 0 else "w"] += part.T @ part / len(x)
    for name, each in exact.items():
        zero = dict.fromkeys(params, torch.zeros(1, 4))
        columns = [
            blocks.product(zero | {name: unit[None]})[name] for unit in torch.eye(4)
        ]
        oracle.assert_exact(torch.cat(columns), each, 1e-10)
    module.both = True
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    matrix = curvature.ggn(fmodel, "gaussian")
    with pytest.raises(ValueError, match=r"uses of 'v' of one kind"):
        method(matrix, params, buffers, [(part,) for part in parts])


def test_a_model_without_parameters_in_its_output_has_no_curvature():
    module = nn.Identity()
    module.weight = nn.Parameter(torch.ones(3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    given = params, buffers, [(torch.ones(2, 3),)]
    product = curvature.vector_product(curvature.ggn(fmodel, "gaussian"), *given)
    assert not product(params)["weight"].any()


class Op(nn.Module):
    """A function of inputs [B, 3] and two parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        for name in ("a", "b"):
            self.register_parameter(name, nn.Parameter(torch.randn(3, 3).double()))

    def forward(self, x):
        return self.function(x, self.a, self.b)


OPS = {
    "logcumsumexp": lambda x, a, b: (x @ a + b[0]).logcumsumexp(1),
    "prelu": lambda x, a, b: F.prelu(x @ a, b[0]),
    "det": lambda x, a, b: torch.linalg.det(a * x[:, None])[:, None] * b[0, :2],
    "cdist": lambda x, a, b: torch.cdist(x, a) @ b,
    "cdist of parameters": lambda x, a, b: x @ torch.cdist(a, b),
}
"""Ops of which torch maps a backward pass wrongly, or differentiates it so at zero."""


@pytest.mark.parametrize("name", OPS)
def test_ops_whose_backward_pass_torch_maps_wrongly(name):
    torch.manual_seed(0)
    module, x = Op(OPS[name]), torch.randn(3, 3).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    exact = dense(module, [(x,)], "gaussian")
    given = curvature.ggn(fmodel, "gaussian"), params, buffers, [(x,)]
    for strategy in ("recorded", "vmap", "loop"):
        found = curvature.diagonal(*given, strategy=strategy)
        oracle.assert_exact(flat(found), exact.diagonal())
    if "cdist" not in name:  # which torch cannot differentiate twice
        found = assembled(curvature.vector_product(*given), params)
        oracle.assert_exact(found, exact)


class OutsideTorch(torch.autograd.Function):
    """A sine whose backward pass autograd does not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(grad.detach().numpy() * x.detach().cos().numpy())


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_backward_passes_without_a_derivative_are_refused(share):
    def function(x, a, b):
        return (x @ a + share * OutsideTorch.apply(x @ a)) @ b

    torch.manual_seed(1)
    module = Op(function)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    x = torch.ones(2, 3).double()
    given = curvature.ggn(fmodel, "gaussian"), params, buffers, [(x,)]
    exact = dense(module, given[3], "gaussian")
    oracle.assert_exact(flat(curvature.diagonal(*given)), exact.diagonal())
    product = curvature.vector_product(*given)
    with pytest.raises(ValueError, match="whose backward pass can be differentiated"):
        product(params)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_hooks_on_gradients_are_of_one_column():
    def doubled(x, a, b):
        y = x @ a
        if y.requires_grad:
            y.register_hook(lambda grad: 2 * grad)
        return y.tanh() @ b

    module, x = Op(doubled), torch.randn(4, 3).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    found = curvature.per_sample_jacobian(fmodel)(params, buffers, x)
    for row in range(4):
        exact, _ = jacobian(module, x[row : row + 1])
        own = torch.cat([each[row].flatten(1) for each in found.values()], 1)
        oracle.assert_exact(own, exact)
    with pytest.raises(RuntimeError, match="expected one backward pass for each"):
        curvature.per_sample_jacobian(fmodel, strategy="recorded")(params, buffers, x)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")  # of attention in a loop
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["cnn", "attention", "tied"])
def test_a_loss_scale_changes_nothing(name, strategy):
    _, (fmodel, params, buffers), batches = problem(name)
    given = curvature.ggn(fmodel, "categorical"), params, buffers, batches
    scale = {"loss_scale": vgrad.precision.StaticLossScale(1024.0)}
    for joint in (True, False):
        for make in (curvature.kfac, curvature.ekfac):
            options = {"separate_weight_and_bias": joint, "strategy": strategy}
            one, other = (make(*given, **options, **x) for x in ({}, scale))
            assert one.blocks.keys() == other.blocks.keys()
            vector = {n: torch.ones_like(value) for n, value in params.items()}
            oracle.assert_exact(other.product(vector), one.product(vector), 1e-9)


def test_derivatives_of_curvature_are_refused_by_any_means():
    _, (fmodel, params, buffers), [batch, _] = problem("mlp")
    plain = {name: value.detach() for name, value in params.items()}
    matrix = curvature.ggn(fmodel, "categorical")
    message = r"trace: expected a result that is not differentiated again"

    def trace(params, x=batch[0]):
        return curvature.trace(matrix, params, buffers, [(x,)])

    exact = trace(plain)
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(trace)(plain)
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(trace, (plain,), (plain,))
    with pytest.raises(RuntimeError, match=message):
        trace(plain, batch[0].requires_grad_()).backward()
    aside = lambda params: (params["0.bias"].sum(), trace(params))  # noqa: E731
    _, found = torch.func.grad(aside, has_aux=True)(plain)
    oracle.assert_exact(found, exact, 1e-12)
    data = [(*batch, torch.zeros(3, 3))]
    posterior = curvature.laplace(fmodel, "gaussian", plain, buffers, data)
    with pytest.raises(RuntimeError, match=r"Laplace.outputs: expected a result"):
        posterior.predict(*batch).covariance.sum().backward()
