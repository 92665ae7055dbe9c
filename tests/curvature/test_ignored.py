"""Positions whose label is ignored, as the prompt of a text, have no curvature."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad import attribution, curvature

CLASSES, LENGTH, SAMPLES = 4, 5, 5


class Words(nn.Module):
    """Logits `[B, C, T]` of the next word."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, 3), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.table(x).cumsum(1).tanh()).mT


torch.manual_seed(0)
MODEL = Words().double()
FMODEL, PARAMS, BUFFERS = vgrad.make_functional_with_buffers(
    MODEL, disable_autograd_tracking=True
)
X = torch.randint(CLASSES, (SAMPLES, LENGTH))
Y = torch.randint(CLASSES, (SAMPLES, LENGTH))
Y[:, :2], Y[1, :4], Y[3] = -100, -100, -100  # prompts; all of one sample
BATCHES = [(X[:2], Y[:2]), (X[2:], Y[2:])]
GIVEN = PARAMS, BUFFERS, BATCHES


def flat(tree):
    return torch.cat([each.flatten() for each in tree.values()])


def exact(*, mean, empirical=False):
    """The matrix by its definition, position by position."""
    params, total = [*MODEL.parameters()], 0.0
    for x, y in zip(X.split(1), Y, strict=True):
        output, positions = MODEL(x)[0], (y != -100).nonzero().flatten()
        rows = [
            torch.cat(
                [
                    grad.flatten()
                    for grad in torch.autograd.grad(number, params, retain_graph=True)
                ]
            )
            for number in output.flatten()
        ]
        jac = torch.stack(rows).view(CLASSES, LENGTH, -1)
        share = max(1, len(positions)) if mean else 1
        p, gradient = output.softmax(0).detach(), 0.0
        for t in positions:
            hessian = p[:, t].diag() - torch.outer(p[:, t], p[:, t])
            if not empirical:
                total = total + jac[:, t].T @ hessian @ jac[:, t] / share
            error = p[:, t] - F.one_hot(y[t], CLASSES)
            gradient = gradient + jac[:, t].T @ error / share
        if empirical and len(positions):
            total = total + torch.outer(gradient, gradient)
    return total / SAMPLES


def loss(**options):
    return vgrad.sample_loss(FMODEL, nn.CrossEntropyLoss(**options))


LOSSES = [
    (True, vgrad.sample_loss(FMODEL, F.cross_entropy)),
    (True, loss()),
    (False, loss(reduction="sum")),
]


@pytest.mark.parametrize(("mean", "of"), LOSSES)
@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_the_matrix_of_a_loss_leaves_them_out(mean, of, strategy):
    matrix, options = exact(mean=mean), {"strategy": strategy}
    found = curvature.diagonal(curvature.ggn(of), *GIVEN, **options)
    oracle.assert_exact(flat(found), matrix.diagonal())
    whole = curvature.full(curvature.ggn(of), *GIVEN)
    vector = {name: torch.randn_like(value) for name, value in PARAMS.items()}
    damped = matrix + torch.eye(len(matrix)).double()
    oracle.assert_exact(
        flat(whole.solve(vector, damping=1.0)), torch.linalg.solve(damped, flat(vector))
    )
    product = curvature.vector_product(curvature.ggn(of), *GIVEN)
    oracle.assert_exact(flat(product(vector)), matrix @ flat(vector))
    empirical = curvature.diagonal(curvature.empirical_fisher(of), *GIVEN)
    oracle.assert_exact(flat(empirical), exact(mean=mean, empirical=True).diagonal())


def test_drawn_targets_have_it_on_average():
    fisher = curvature.fisher(LOSSES[0][1], seed=0, samples=4000)
    found = curvature.diagonal(fisher, *GIVEN)
    oracle.assert_exact(flat(found), exact(mean=True).diagonal(), 0.1)


def test_an_index_of_the_loss_is_the_one_that_counts():
    other = [(x, y.where(y != -100, 3)) for x, y in BATCHES]
    kept = [(x, y.where(y != 3, -100)) for x, y in BATCHES]
    one = curvature.diagonal(curvature.ggn(loss(ignore_index=3)), *GIVEN[:2], other)
    same = curvature.diagonal(curvature.ggn(loss()), *GIVEN[:2], kept)
    oracle.assert_exact(flat(one), flat(same))
    with pytest.raises(ValueError, match="from 0 to 3, or 3 for a position to ignore"):
        curvature.diagonal(curvature.ggn(loss(ignore_index=3)), *GIVEN)


def test_a_model_and_a_likelihood_take_targets_where_they_are_told_to():
    matrix = curvature.ggn(FMODEL, "categorical", targets=True)
    found = curvature.diagonal(matrix, *GIVEN)
    oracle.assert_exact(flat(found), exact(mean=False).diagonal())
    inputs = [(x,) for x, _ in BATCHES]
    for of in (LOSSES[2][1], FMODEL):  # all positions count
        every = curvature.ggn(of, None if of is not FMODEL else "categorical")
        plain = curvature.diagonal(every, *GIVEN[:2], inputs)
        assert bool((flat(plain) > flat(found) + 1e-6).any())


def test_kronecker_factors_solve_for_the_outputs_that_count():
    """The factor of the outputs, which the bias of the last layer has alone."""
    blocks = curvature.kfac(curvature.ggn(LOSSES[2][1]), *GIVEN)
    unit = {name: torch.zeros_like(value) for name, value in PARAMS.items()}
    unit["head.bias"] = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    found = blocks.solve(unit, damping=1.0)["head.bias"]
    matrix = exact(mean=False)[-CLASSES:, -CLASSES:] + torch.eye(CLASSES).double()
    oracle.assert_exact(found, torch.linalg.solve(matrix, unit["head.bias"]))


def test_a_posterior_counts_the_others():
    posterior = curvature.laplace(
        FMODEL, "categorical", *GIVEN, structure="full", prior_precision=2.0
    )
    expected = SAMPLES * exact(mean=False) + 2 * torch.eye(len(exact(mean=False)))
    likelihood = F.cross_entropy(MODEL(X), Y, reduction="sum").detach()
    weights = flat(PARAMS)
    evidence = (
        -likelihood
        - weights @ weights
        - (torch.linalg.slogdet(expected / 2).logabsdet / 2)
    )
    oracle.assert_exact(posterior.log_marginal_likelihood(), evidence)
    one = posterior.log_likelihood(BATCHES)
    probabilities = posterior.predict(X).log()
    counts = (Y != -100).unsqueeze(1)
    logs = probabilities.gather(1, Y.unsqueeze(1).where(counts, 0)).where(counts, 0)
    oracle.assert_exact(one, logs.sum() / SAMPLES)


def test_influence_solves_by_it():
    of = LOSSES[0][1]
    matrix = curvature.full(curvature.ggn(of), *GIVEN)
    rows = torch.tensor([0, 1, 2, 4])  # with labels
    queries, train = (X[rows[:2]], Y[rows[:2]]), [(X[rows], Y[rows])]
    scores = attribution.influence(
        of, PARAMS, BUFFERS, queries, train, curvature=matrix, damping=0.5
    )
    grads = oracle.loss_gradients(of, PARAMS, BUFFERS, (X[rows], Y[rows]))
    g = torch.cat([each.flatten(1) for each in grads.values()], 1)
    whole = exact(mean=True)
    solved = torch.linalg.solve(whole + 0.5 * torch.eye(len(whole)), g.mT)
    oracle.assert_exact(scores, g[:2] @ solved)
