"""Scores against a float64 loop of plain autograd with dense solves."""

import pytest
import torch

from tests import oracle
from tests.losses import build, rows
from vgrad import attribution

CASES = ["mlp", "cnn", "transformer", "tied", "padding_idx", "two_calls_and_unused"]


class Matrix:
    """A dense curvature matrix, which solves for vectors."""

    def __init__(self, grads):
        flat = flattened(grads)
        self.matrix = flat.T @ flat / len(flat)

    def solve(self, vector, *, damping):
        flat = flattened(vector)
        damped = self.matrix + damping * torch.eye(len(self.matrix)).double()
        solved = torch.linalg.solve(damped, flat.T).T
        parts = solved.split([each[0].numel() for each in vector.values()], 1)
        pairs = zip(vector.items(), parts, strict=True)
        return {name: part.reshape(each.shape) for (name, each), part in pairs}


def flattened(grads):
    return torch.cat([each.flatten(1) for each in grads.values()], 1)


def split(built, size, queries):
    """Return queries, and the rest in two batches."""
    cut = queries + (size - queries) // 2
    whole = range(size)
    parts = whole[:queries], whole[queries:cut], whole[cut:]
    first, *others = (rows(built.batch, torch.tensor(part)) for part in parts)
    return first, others


@pytest.mark.parametrize("name", CASES)
def test_influence_is_that_of_dense_solves(name):
    built = build(name, 9)
    queries, batches = split(built, 9, 3)
    grads = flattened(built.expected)
    matrix = Matrix({"": grads[3:]})
    damped = matrix.matrix + 0.1 * torch.eye(grads.shape[1]).double()
    exact = grads[:3] @ torch.linalg.solve(damped, grads[3:].T)
    given = built.loss, built.params, built.buffers
    found = attribution.influence(
        *given, queries, batches, curvature=matrix, damping=0.1
    )
    oracle.assert_exact(found, exact, 1e-8)
    plain = attribution.influence(*given, queries, batches)
    oracle.assert_exact(plain, grads[:3] @ grads[3:].T)
    own = attribution.self_influence(*given, batches, curvature=matrix, damping=0.1)
    solved = torch.linalg.solve(damped, grads[3:].T).T
    oracle.assert_exact(own, (grads[3:] * solved).sum(1), 1e-8)
