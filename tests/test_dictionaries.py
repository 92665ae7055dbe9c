"""Every function of dictionaries, called in every way that must not change a number.

A row is a function of a `Way`, which hands out the same dictionaries each time in
another order, or copies of them, and which is called under the mode of that name.
"""

import copy
import dataclasses
import inspect
import random
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad import attribution, curvature, dp, ensemble, optim, precision, training


class Net(nn.Module):
    """Parameters of one shape and buffers of one shape, so that no mix-up can raise."""

    def __init__(self):
        super().__init__()
        for place, name in enumerate("abcd"):
            weight = torch.randn(3, 3, dtype=torch.float64) / (1 + place)
            self.register_parameter(name, nn.Parameter(weight))
        for name in "xyz":
            self.register_buffer(name, torch.randn(3, dtype=torch.float64))

    def forward(self, x):
        x = torch.tanh(x @ self.a + self.x)
        x = torch.tanh(x @ self.b * self.y)
        return x @ self.c + torch.tanh(x + self.z) @ self.d


torch.manual_seed(0)
NETS = [Net() for _ in range(3)]
SPLIT = partial(vgrad.make_functional_with_buffers, disable_autograd_tracking=True)
FMODEL, PARAMS, BUFFERS = SPLIT(NETS[0])
VECTOR = {name: each.detach() for name, each in NETS[2].named_parameters()}
STACKED, MEMBERS, MEMBER_BUFFERS = vgrad.stack(NETS[:2], disable_autograd_tracking=True)
X, Y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
LOSS = vgrad.sample_loss(FMODEL, F.cross_entropy)
BATCH = vgrad.batch_loss(FMODEL, F.cross_entropy)
OF_MEMBER = vgrad.sample_loss(STACKED, F.cross_entropy)
OF_MEMBERS = vgrad.batch_loss(STACKED, F.cross_entropy)
TX = optim.adam(0.1)
PLAN = dp.Plan(12, 0.5, 1.0, 1.0, 4, 1e-3)
KEY = dp.secret_key(seed=0)
NUMBERS = dict(zip("abcd", (0.1, 0.2, 0.3, 0.4), strict=True))
GROUPS = {"one": ["a", "c"], "two": ["b", "d"]}
QUERY, DATA = (X[:2], Y[:2]), [(X[:4], Y[:4]), (X[4:], Y[4:])]
INPUTS = [(x,) for x, _ in DATA]

MODES = {
    "reversed": nullcontext,
    "shuffled": nullcontext,
    "loss scale": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "inference tensors": torch.inference_mode,
    "tracked, no_grad": torch.no_grad,
    "tracked, inference_mode": torch.inference_mode,
    "tracked": nullcontext,
}


class Way:
    """Dictionaries as a mode has them; parameters `moved` a little for a difference."""

    def __init__(self, mode=None, moved=0.0):
        self.mode, self.moved, self.scaled = mode, moved, False
        self.random, self.leaves = random.Random(0), {}

    def turn(self, entries):
        names = list(entries)
        if self.mode == "reversed":
            names.reverse()
        elif self.mode == "shuffled":
            self.random.shuffle(names)
        copied = self.mode == "inference tensors"
        return {n: entries[n].clone() if copied else entries[n] for n in names}

    def turned(self, tree):
        """Reorder every dictionary of a state by itself."""
        if isinstance(tree, dict):
            names = self.turn(dict.fromkeys(tree, torch.zeros(1)))
            return {name: self.turned(tree[name]) for name in names}
        if isinstance(tree, tuple):
            parts = [self.turned(each) for each in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        return tree

    def trained(self, entries):
        entries = {n: each + self.moved * each.cos() for n, each in entries.items()}
        if self.mode and self.mode.startswith("tracked"):
            self.leaves = self.leaves or {n: v.clone() for n, v in entries.items()}
            entries = {n: v.requires_grad_() for n, v in self.leaves.items()}
        return self.turn(entries)

    @property
    def model(self):
        return self.trained(PARAMS), self.turn(BUFFERS)

    @property
    def members(self):
        return self.trained(MEMBERS), self.turn(MEMBER_BUFFERS)

    @property
    def vector(self):
        return self.turn(VECTOR)

    @property
    def options(self):
        self.scaled = True  # else it is of no use to try
        scale = precision.StaticLossScale(1024.0)
        return {"loss_scale": scale} if self.mode == "loss scale" else {}


ROWS = {}
WITHOUT_DERIVATIVE = {
    "add_gaussian_noise": "rounded to a grid",
    "plan_noise": "rounded to a grid",
    "freeze": "what is frozen",
    "share": "leaves of their own",
    "take": "leaves of their own",
    "to_device": "leaves of their own",
    "to_module": "copies of values",
    "unstack": "copies of values",
    "write_grads_": "the gradients of a module",
    "store": "files",
    "linear_operator": "numpy's arrays",
    "as_torch": "the parameters of a module",
    "predict": "No graph is kept",
    "ensemble_grad": "as with torch.autograd.grad",
    "train_step": "states",
    "private_step": "states",
    "ensemble_train_step": "states",
    "save": "files",
}
"""Rows whose results are no smooth function of the arguments, and what they are."""


def row(function):
    ROWS[function.__name__] = function
    return function


def rows(**functions):
    ROWS.update(functions)


# Quantities of samples.

TRANSFORMS = {
    "per_sample_grad": vgrad.per_sample_grad,
    "per_sample_grad, vmap": partial(vgrad.per_sample_grad, strategy="vmap"),
    "per_sample_grad, loop": partial(vgrad.per_sample_grad, strategy="loop"),
    "per_sample_norm": vgrad.per_sample_norm,
    "per_sample_norm, groups": partial(vgrad.per_sample_norm, groups=GROUPS),
    "per_sample_norm, names": partial(vgrad.per_sample_norm, groups="parameter"),
    "per_sample_gram": vgrad.per_sample_gram,
    "per_sample_gram, groups": partial(vgrad.per_sample_gram, groups=GROUPS),
    "per_sample_projection": partial(vgrad.per_sample_projection, dim=4, seed=0),
    "per_sample_projection, sides": partial(
        vgrad.per_sample_projection, dim=(2, 2), seed=0
    ),
    "gradient_moments": vgrad.gradient_moments,
    "clipped_grad": partial(vgrad.clipped_grad, max_norm=0.5),
    "clipped_grad, passes": partial(vgrad.clipped_grad, max_norm=0.5, passes=2),
    "clipped_grad, layers": partial(
        vgrad.clipped_grad, max_norm=0.5, clipping="per_layer"
    ),
    "clipped_grad, automatic": partial(
        vgrad.clipped_grad, max_norm=0.5, clipping="automatic"
    ),
}
for name, make in TRANSFORMS.items():
    rows(**{name: lambda w, make=make: make(LOSS, **w.options)(*w.model, X, Y)})
rows(
    weighted_grad=lambda w: vgrad.weighted_grad(LOSS, **w.options)(
        X[:, 0], *w.model, X, Y
    ),
    freeze=lambda w: vgrad.freeze(*w.model, ["a", "c"]),
    sample_loss=lambda w: LOSS(*w.model, X[0], Y[0]),
    batch_loss=lambda w: (BATCH(*w.model, X, Y), BATCH.with_buffers(*w.model, X, Y)[0]),
    make_functional=lambda w: FMODEL(*w.model, X),
    to_module=lambda w: dict(FMODEL.to_module(*w.model).state_dict()),
    explain=lambda w: sorted(
        str(row.names) + str(row.form)
        for row in vgrad.explain(vgrad.per_sample_norm(LOSS, **w.options))(
            *w.model, X, Y
        ).rows
    ),
    check_rule=lambda w: vgrad.testing.check_rule(LOSS, *w.model, X, Y, expanded=True),
)


@row
def clipped_grad_of_names(way):
    options = {"max_norm": way.turned(NUMBERS), "clipping": "per_layer", **way.options}
    return vgrad.clipped_grad(LOSS, **options)(*way.model, X, Y)


@row
def per_sample_projection_of_sides(way):
    sides = way.turned({name: (each[:2], None) for name, each in VECTOR.items()})
    return vgrad.per_sample_projection(LOSS, sides, **way.options)(*way.model, X, Y)


@row
def compiled(way):
    transform = vgrad.compile(vgrad.clipped_grad(LOSS, max_norm=0.5, **way.options))
    return [transform(*way.model, X, Y) for _ in range(3)]


@row
def write_grads_(way):
    net = copy.deepcopy(NETS[0])
    vgrad.write_grads_(net, way.vector)
    return {name: each.grad for name, each in net.named_parameters()}


# Curvature and attribution.

GGN = curvature.ggn(FMODEL, "categorical")
MATRICES = {
    "ggn": (GGN, INPUTS),
    "fisher": (curvature.fisher(FMODEL, "categorical", seed=0), INPUTS),
    "empirical_fisher": (curvature.empirical_fisher(FMODEL, "categorical"), DATA),
}


def of_matrix(way, matrix):
    vector = way.vector
    several = {name: torch.stack([each, 2 * each]) for name, each in vector.items()}
    parts = matrix.eigenvalues()
    return {
        "product": matrix.product(vector),
        "solve": matrix.solve(vector, damping=0.1),
        "several": matrix.solve(several, damping=0.1),
        "trace": matrix.trace(),
        "logdet": matrix.logdet(damping=0.1),
        "eigenvalues": {name: each.sort().values for name, each in parts.items()},
    }


MAKERS = {
    "kfac": curvature.kfac,
    "kfac, reduce": partial(curvature.kfac, weight_sharing="reduce"),
    "ekfac": curvature.ekfac,
    "full": curvature.full,
}
for name, (matrix, data) in MATRICES.items():
    for function in (curvature.diagonal, curvature.trace):
        compute = partial(function, matrix)
        rows(
            **{
                f"{function.__name__}, {name}": lambda w, f=compute, d=data: f(
                    *w.model, d, **w.options
                )
            }
        )
    for kind, make in MAKERS.items():
        compute = partial(make, matrix)
        rows(
            **{
                f"{kind}, {name}": lambda w, f=compute, d=data: of_matrix(
                    w, f(*w.model, d, **w.options)
                )
            }
        )
    rows(
        **{
            f"vector_product, {name}": lambda w, m=matrix, d=data: (
                curvature.vector_product(m, *w.model, d)(w.vector)
            )
        }
    )


def matrix_of(way, kind):
    if kind == "iterative":
        product = curvature.vector_product(GGN, *way.model, INPUTS)
        return curvature.iterative(product, way.model[0], tolerance=1e-12)
    return getattr(curvature, kind)(GGN, *way.model, INPUTS, **way.options)


rows(
    hessian_vector_product=lambda w: curvature.hessian_vector_product(
        BATCH, *w.model, DATA
    )(w.vector),
    iterative=lambda w: matrix_of(w, "iterative").solve(w.vector, damping=0.5),
    per_sample_jacobian=lambda w: curvature.per_sample_jacobian(FMODEL, **w.options)(
        *w.model, X
    ),
)


@row
def linear_operator(way):
    params, vector = way.model[0], way.vector
    product = curvature.vector_product(GGN, *way.model, INPUTS)
    flat = torch.cat([vector[name].flatten() for name in params]).numpy()
    found = torch.from_numpy(curvature.linear_operator(product, params) @ flat)
    return dict(zip(params, found.split(9), strict=True))


def posterior(way, structure, **options):
    found = curvature.laplace(
        FMODEL, "categorical", *way.model, DATA, structure=structure, **options
    )
    return {
        "covariance": found.covariance(X, **way.options),
        "sample": found.sample(2, seed=0),
        "predict": found.predict(X),
        "evidence": found.log_marginal_likelihood(),
        "likelihood": found.log_likelihood(DATA),
        "fitted": round(found.fit_prior().prior_precision, 9),
    }


for kind in ("kfac", "ekfac", "diagonal", "full"):
    rows(**{f"laplace, {kind}": lambda w, k=kind: posterior(w, k, **w.options)})
for kind in ("kfac", "ekfac", "full"):
    rows(**{f"laplace of {kind}": lambda w, k=kind: posterior(w, matrix_of(w, k))})
rows(
    laplace_of_priors=lambda w: posterior(
        w, "kfac", prior_precision=w.turned(NUMBERS), **w.options
    ),
)
for kind in ("kfac", "ekfac", "full", "iterative"):
    rows(
        **{
            f"influence, {kind}": lambda w, k=kind: attribution.influence(
                LOSS, *w.model, QUERY, DATA,
                curvature=matrix_of(w, k), damping=0.5, **w.options,
            ),
            f"self_influence, {kind}": lambda w, k=kind: attribution.self_influence(
                LOSS, *w.model, DATA,
                curvature=matrix_of(w, k), damping=0.5, **w.options,
            ),
        }
    )  # fmt: skip
for options in ({}, {"groups": "parameter", "rank": 2}, {"top": 2}):
    rows(
        **{
            f"influence, {[*options]}": lambda w, o=options: attribution.influence(
                LOSS, *w.model, QUERY, DATA, **o, **w.options
            )
        }
    )
rows(
    self_influence=lambda w: attribution.self_influence(
        LOSS, *w.model, DATA, **w.options
    ),
    margin=lambda w: attribution.margin(FMODEL)(*w.model, X[0], Y[0]),
    trak=lambda w: attribution.trak(
        FMODEL, *w.model, QUERY, DATA, dim=8, seed=0, ridge=1.0, **w.options
    ),
)


@row
def store(way):
    project = vgrad.per_sample_projection(LOSS, 4, seed=0, **way.options)
    with tempfile.TemporaryDirectory() as folder:
        found = attribution.Store.write(folder, project, *way.model, DATA)
        found.check(LOSS, *way.model)
        matrix = found.curvature(GGN, *way.model, INPUTS, **way.options)
        options = {"curvature": matrix, "damping": 0.5, **way.options}
        return {
            "files": [dict(each) for each in found],
            "project": found.project(LOSS, *way.model, X, Y, **way.options),
            "fisher": found.empirical_fisher().trace(),
            "curvature": matrix.trace(),
            "scores": attribution.influence(LOSS, *way.model, QUERY, found, **options),
        }


# Optimizers; `tests/optim/test_contract.py` has all of them.


@row
def step(way):
    params = way.trained(PARAMS)
    state = TX.init(params)
    for size in (1.0, -0.5):
        grads = way.turn({name: size * each for name, each in VECTOR.items()})
        params, state = optim.step(TX, grads, way.turned(state), way.turn(params))
    return params


rows(
    apply_updates=lambda w: optim.apply_updates(w.model[0], w.vector),
    global_norm=lambda w: optim.global_norm(w.model[0]),
    state_dict=lambda w: optim.load_state_dict(
        w.model[0], w.turn(optim.state_dict(w.model[0]))
    ),
    evaluation_parameters=lambda w: optim.evaluation_parameters(
        optim.schedule_free_sgd(0.1).init(w.model[0]), w.model[0]
    ),
)


def optimized(way, tx=None):
    with torch.inference_mode(False), torch.no_grad():
        named = dict(copy.deepcopy(NETS[0]).named_parameters())
        optimizer = torch.optim.Adam([named[name] for name in "cadb"], lr=0.1)
        if tx is not None:
            optimizer = optim.as_torch(tx, way.turned(named))
        for name, each in named.items():
            each.grad = VECTOR[name].clone()
        for _ in range(2):
            optimizer.step()
    return named, optimizer


@row
def as_torch(way):
    named, _ = optimized(way, TX)
    return {name: each.detach() for name, each in named.items()}


# Ensembles.

rows(
    ensemble_forward=lambda w: vgrad.ensemble_forward(STACKED)(*w.members, X),
    predict=lambda w: ensemble.predict(STACKED, *w.members, X),
    member=lambda w: ensemble.member(w.members[0], 1),
    share=lambda w: ensemble.share(*w.members, ["a", "y"]),
    take=lambda w: ensemble.take(w.members[0], [1, 1, 0]),
    unstack=lambda w: [
        dict(each.state_dict()) for each in ensemble.unstack(STACKED, *w.members)
    ],
    ensemble_per_sample_grad=lambda w: ensemble.ensemble_per_sample_grad(
        OF_MEMBER, **w.options
    )(*w.members, X, Y),
    ensemble_clipped_grad=lambda w: ensemble.ensemble_clipped_grad(
        OF_MEMBER, max_norm=0.5, **w.options
    )(*w.members, X, Y),
)
for strategy in ("vmap", "hybrid", "loop"):
    rows(
        **{
            f"ensemble_grad, {strategy}": lambda w, s=strategy: vgrad.ensemble_grad(
                OF_MEMBERS, strategy=s
            )(*w.members, X, Y)
        }
    )


@row
def for_members(way):
    tx, params = vgrad.for_members(TX), way.members[0]
    grads = {name: each.detach().sin() for name, each in MEMBERS.items()}
    return optim.step(tx, way.turn(grads), way.turned(tx.init(params)), params)[0]


# Steps, and privacy.


def stepped(way, step, state):
    for _ in range(2):
        params, buffers = way.turn(state.params), way.turn(state.buffers)
        state = state._replace(params=params, buffers=buffers)
        state, _ = step(state, X, Y)
    return state.params, state.buffers


GROUPED = dataclasses.replace(PLAN, max_norm=dp.group_clip({"[ab]": 1.0, "[cd]": 2.0}))
STEPS = {
    "train_step": (training.train_step, BATCH),
    "train_step, samples": (training.train_step, LOSS),
    "private_step": (partial(training.private_step, plan=PLAN), LOSS),
    "private_step, groups": (partial(training.private_step, plan=GROUPED), LOSS),
}
for name, (make, loss) in STEPS.items():
    rows(
        **{
            name: lambda w, make=make, loss=loss: stepped(
                w,
                make(loss, tx=TX, **w.options),
                training.TrainState.create(TX, *w.model, seed=0),
            )
        }
    )
rows(
    ensemble_train_step=lambda w: stepped(
        w,
        training.ensemble_train_step(OF_MEMBERS, TX, **w.options),
        training.EnsembleState.create(TX, *w.members, seed=0),
    ),
    add_gaussian_noise=lambda w: dp.add_gaussian_noise(
        w.model[0], vgrad.Sensitivity(1.0), noise_multiplier=1.0, key=KEY, step=0
    ),
    plan_noise=lambda w: PLAN.add_noise(
        w.model[0], vgrad.Sensitivity(1 / 6), key=KEY, step=0
    ),
    unit_loss=lambda w: vgrad.per_sample_grad(dp.unit_loss(LOSS), **w.options)(
        *w.model, X.view(3, 2, 3), Y.view(3, 2), torch.ones(3, 2, dtype=torch.bool)
    ),
)


@row
def save(way):
    with tempfile.TemporaryDirectory() as folder:
        training.save(folder, training.TrainState.create(TX, *way.model, seed=0))
        like = training.TrainState.create(TX, *way.model, seed=1)
        found = training.load(folder, like)
    return found.params, found.buffers, found.optimizer


# Precision.

rows(
    policy_for=lambda w: precision.policy_for(FMODEL, "p=f64,c=f64,o=f32")(*w.model, X),
    loss_under=lambda w: precision.loss_under("p=f64,c=f64,o=f32", BATCH)(
        *w.model, X, Y
    ),
    all_finite=lambda w: precision.all_finite(w.model[0]),
    select_tree=lambda w: precision.select_tree(
        torch.tensor(True), w.model[0], w.vector
    ),
    scale=lambda w: precision.StaticLossScale(8.0).scale(w.model[0]),
    alignment_report=lambda w: len(
        precision.alignment_report(FMODEL, *w.model, X).rows
    ),
    to_device=lambda w: vgrad.to_device(w.model[0], "cpu"),
)


def leaves(tree, place=""):
    """Yield the tensors and values of a result, by name."""
    if hasattr(tree, "_fields"):
        tree = tree._asdict()
    elif isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    elif dataclasses.is_dataclass(tree):
        tree = vars(tree)
    if isinstance(tree, Mapping):
        for name, each in tree.items():
            yield from leaves(each, f"{place}.{name}")
    else:
        yield place, tree


NAMES = {"params", "buffers", "grads", "sums", "updates", "product", "pred"}


def test_every_function_that_takes_dictionaries_has_a_row():
    public = [
        (name, getattr(room, name))
        for room in (vgrad, attribution, curvature, dp, ensemble, optim, precision)
        for name in (*room.__all__, "check_rule")
        if inspect.isfunction(getattr(room, name, None))
    ]
    taking = {n for n, each in public if NAMES & {*inspect.signature(each).parameters}}
    assert not taking - {name.split(",")[0] for name in ROWS}


def called(name, way):
    torch.manual_seed(0)
    with MODES.get(way.mode, nullcontext)():
        return dict(leaves(ROWS[name](way)))


def assert_derivatives(name, found, way):
    """Derivatives are right, or refused; constants do not depend on parameters."""
    step = 1e-5
    if name.split(",")[0] in WITHOUT_DERIVATIVE:
        return
    ends = [called(name, Way(moved=moved)) for moved in (step, -step)]
    for place, value in found.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            continue
        one, other = (end[place].detach().double() for end in ends)
        exact = ((one - other) / (2 * step)).nan_to_num().sum()
        if not value.requires_grad:
            assert exact.abs() < 1e-6, f"{place} is a constant without a word"
            continue
        try:
            slopes = torch.autograd.grad(
                value.nan_to_num().sum(),
                [*way.leaves.values()],
                retain_graph=True,
                materialize_grads=True,
                allow_unused=True,
            )
        except RuntimeError as error:
            if "expected a result that is not differentiated again" in str(error):
                continue
            raise
        pairs = zip(slopes, way.leaves.values(), strict=True)
        along = sum((slope * leaf.detach().cos()).sum() for slope, leaf in pairs)
        torch.testing.assert_close(along.double(), exact, rtol=1e-4, atol=1e-5)


FEW = ("reversed", "inference tensors", "tracked")


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=[] if m in FEW else [pytest.mark.more]) for m in MODES],
)
@pytest.mark.parametrize("name", ROWS)
def test_names_decide_and_no_mode_changes_a_number(name, mode):
    expected, way = called(name, plain := Way()), Way(mode)
    if mode == "loss scale" and not plain.scaled:
        return
    found = called(name, way)
    oracle.assert_exact(found, expected, 1e-9)
    if mode == "tracked":
        assert_derivatives(name, found, way)
