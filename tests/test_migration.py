"""The tables of docs/migration.md: both columns run, and what they compute agrees."""

import ast
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.test_docs import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (ROOT / "docs" / "migration.md").read_text()
TABLES = {
    section.partition("\n")[0]: re.findall(r"^\| (`.*`) \| (`.*`) \|$", section, re.M)
    for section in PAGE.partition("\n## Older names")[0].split("\n## ")[1:]
}
OURS = {"vgrad": vgrad, "optim": vgrad.optim, "precision": vgrad.precision}
EXTENSIONS = "BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"
PEERS = {  # what the left column imports
    "torch.func": {
        "torch.func": ["functional_call", "vmap", "grad", "stack_module_state"]
    },
    "functorch": {"functorch": []},
    "BackPACK": {"backpack": ["backpack", "extend"], "backpack.extensions": EXTENSIONS},
    "torch.optim.functional": {"torch.optim.functional": ["sgd", "adamw"]},
    "TorchOpt": {"torchopt": []},
    "optax": {"optax": [], "jax.numpy": []},
    "jmp": {"jmp": [], "jax.numpy": []},
    "Private optimizers": {},
    "Audits": {},
    "Attribution": {},
}


def of_rows(params, buffers, row):
    return (params["w"] @ row + params["b"]).square().sum()


def beginning():
    """Return what both columns begin with."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)) for _ in range(2)
    ]
    params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
    rows = torch.randn(8, 4)
    return OURS | {
        "torch": torch,
        "cross_entropy": F.cross_entropy,
        "models": models,
        "model": models[0],
        "x": torch.randn(32, 20),
        "y": torch.randint(3, (32,)),
        "params": params,
        "grads": {"w": torch.randn(3, 4), "b": torch.randn(3)},
        "tree": {"x": torch.randn(4), "n": torch.arange(3)},
        "other": {"x": torch.zeros(4), "n": torch.arange(3)},
        "rows": rows,
        "of_rows": of_rows,
        "each": vgrad.per_sample_grad(of_rows)(params, {}, rows),
    }


def imported(peer):
    """Return what the left column begins with."""
    names = beginning()
    for module, parts in PEERS[peer].items():
        found = pytest.importorskip(module, reason=f"{peer} is not installed")
        names[module] = found
        names |= {part: getattr(found, part) for part in parts}
        if module == "jax.numpy":
            names["jnp"] = found
            for name in ("params", "grads", "tree", "other", "each"):
                names[name] = {n: found.asarray(t) for n, t in names[name].items()}
    return names


def run(cell, names):
    """Run a cell; return its last line's value, or what it assigns, by name."""
    *before, last = ast.parse("\n".join(re.findall(r"`(.*?)`", cell))).body
    exec(compile(ast.Module(before, []), cell, "exec"), names)
    if isinstance(last, ast.Expr):
        return {"": eval(compile(ast.Expression(last.value), cell, "eval"), names)}
    exec(compile(ast.Module([last], []), cell, "exec"), names)
    assigned = [each for line in (*before, last) for each in ast.walk(line)]
    return {
        each.id: names[each.id]
        for each in assigned
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def numbers(value, names):
    """Return the arrays of a value: of an optimizer its steps, of a schedule rates."""
    if hasattr(value, "init") and hasattr(value, "update"):
        state, steps = value.init(names["params"]), []
        for factor in (1.0, -0.5, 2.0):
            grads = {name: factor * grad for name, grad in names["grads"].items()}
            step, state = value.update(grads, state, params=names["params"])
            steps.append(step)
        return numbers(steps, names)
    if isinstance(value, dict):
        return [each for n in sorted(value) for each in numbers(value[n], names)]
    if isinstance(value, list | tuple):
        return [each for part in value for each in numbers(part, names)]
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, float) or hasattr(value, "__array__"):
        return [np.asarray(value)]
    return []


def rates(schedule, count_as=int):
    return [float(schedule(count_as(count))) for count in range(0, 120, 7)]


def check_same(ours, theirs, own, others):
    left, right = numbers(theirs, others), numbers(ours, own)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        low = {a.dtype.name, b.dtype.name} & {"float16", "bfloat16"}
        assert not low or a.dtype == b.dtype
        scale = np.abs(a.astype(float)).max(initial=0.0)
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6 * scale)
    return len(left)


@pytest.mark.parametrize("peer", TABLES)
def test_the_right_column_runs(peer):
    names = beginning()
    for _, ours in TABLES[peer]:
        run(ours, names)


SLOW = {"optax", "jmp"}  # where they are installed: jax compiles


@pytest.mark.parametrize(
    "peer",
    [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in TABLES],
)
def test_both_columns_agree(peer):
    own, others = beginning(), imported(peer)
    for theirs, ours in TABLES[peer]:
        found, expected = run(ours, own), run(theirs, others)
        compared = 0
        for name in found.keys() & expected.keys():
            a, b = found[name], expected[name]
            if "schedule" in theirs and callable(b):
                a, b = rates(a, torch.tensor), rates(b)
            compared += check_same(a, b, own, others)
        assert compared or "" not in found, theirs
