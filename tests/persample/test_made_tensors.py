"""Losses that make a tensor for all samples, and write into it what differs among them.

`out = torch.zeros(n); out[t] = y` is one tensor for all samples until `y` comes, then
one for each: its views, and all that is read of it, are those of a sample by itself.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # noqa: F401, in texts

import vgrad
from tests import losses, oracle
from tests.losses import assert_gradients, assert_quantities, randn

pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")

zeros, ones, empty, full, arange = (
    partial(getattr(torch, name), dtype=torch.float64)
    for name in ("zeros", "ones", "empty", "full", "arange")
)
PARAMS = {"a.w": randn(3, 3), "s.w": randn(3, seed=1), "t.w": randn(4, 3, seed=2)}
BUFFERS = {"c": randn(4, 3, seed=3), "n": torch.tensor([0, 2, 1, 3])}
X = randn(5, 4, 3, seed=4)
K = torch.tensor([[0, 1, 2, 3], [1, 1, 2, 0], [3, 3, 3, 3], [0, 2, 0, 2], [2, 1, 0, 3]])

# `h` are the rows of a layer, and `z` what a program makes of them.
START = "h = torch.tanh(F.linear(x, a_w)) * s_w\n"
END = "\nvalue = (F.linear(z, a_w) * torch.cos(z)).sum()"

WRITES = {
    # Ways to make a tensor, and ways to write into it.
    "rows": "z = zeros(4, 3)\nfor t in range(4): z[t] = h[t]",
    "a loop that reads its past": """
z = empty(5, 3)
z[0] = s_w
for t in range(4): z[t + 1] = torch.tanh(F.linear(z[t].clone(), a_w) + h[t])""",
    "new_zeros, of a buffer": "z = c.new_zeros(4, 3); z[1:3] += h[:2]",
    "full and add_": "z = full((4, 3), 0.5); z.add_(h, alpha=2)",
    "ones and mul_": "z = ones(4, 3); z *= h",
    "arange and sub_": "z = arange(3.0); z -= h[0]; z = z * h",
    "a result of an op": "z = c * 2 + 1; z[::2] = h[1::2]",
    "clone of a buffer": "z = c.clone(); z[:, 1].copy_(h[:, 2])",
    "clone of a parameter": "z = t_w.clone(); z[0] = h[0]; z[1:] *= 2",
    "an op of a parameter": "z = t_w * 2; z[2] = 0.0; z = z + h; w = a_w * 3; "
    "w[0] = h[1]; z = z @ w",
    "an op with a rule": "z = F.linear(c, a_w); z += h",
    "a parameter is written": "z = zeros(4, 3); z[1] = s_w; z[2] = h[0]",
    "a transpose": "z = c.t().clone(); z[0] = h[:, 0]; z = z.t() * 1",
    "a transposed copy": "z = ones(3, 4).t(); z[0] = h[0]; z.reshape(-1)[4:] *= 2",
    "copy_": "z = torch.empty_like(c); z.copy_(h.flip(0))",
    "index_put_": "z = zeros(4, 3); z.index_put_((k,), h, accumulate=True)",
    "scatter_add_": "z = zeros(4, 3); z.scatter_add_(0, k[:, None].expand(4, 3), h)",
    "scatter_add_ of constants": """
d = zeros(4)
d.scatter_add_(0, k, ones(4))
z = h / (1 + d)[:, None]""",
    "scatter_reduce_": "z = zeros(4, 3); "
    "z.scatter_reduce_(0, k[:, None].expand(4, 3), h, 'amax', include_self=False)",
    "index_add_": "z = zeros(4, 3); z.index_add_(0, k, h, alpha=0.5)",
    "index_copy_": "z = zeros(4, 3); z.index_copy_(0, n, h)",
    "masked_fill_": "z = c * 1; z.masked_fill_(x > 0, 0.25); z = z * h",
    "masked_scatter_": "z = c * 1; z.masked_scatter_(n[:, None] > 1, h[:2])",
    "a mask": "m = torch.zeros(4, dtype=torch.bool); m[k[:2]] = True; z = h * m[:, None]",
    "a mask of each": "z = zeros(4, 3); z[x > 0] = 2.0; z = z * h",
    "an index of each": "z = zeros(4, 3); z[k] = h[:1] * 2; z[k, n % 3] += 1; z = z * h",
    "an index of one number": "z = zeros(4, 3); z[k[1]] = h[0]",
    "a scalar": "z = zeros(4, 3); z[1] = h.sum(); z[2, 1] = h[0, 0]; z.add_(x.sum())",
    "fill_": "z = zeros(4, 3); z[1:].fill_(h[0, 1])",
    "a sum in parts": "z = zeros(3)\nfor t in range(4): z += h[t]",
    "torch.ops": "z = zeros(4, 3); torch.ops.aten.add_(z, h)",
    "foreach": "y = [zeros(3), ones(3)]; torch._foreach_add_(y, [h[0], h[1]]); "
    "z = torch.stack(y)",
    "inplace=True": "z = F.relu(c.clone().add_(h), inplace=True)",
    "rows that are iterated": "z = zeros(4, 3)\nwith torch.no_grad():\n"
    "  for row, y in zip(z, h): row += y\nz = z * h",
    # Aliases, made before the write and after it.
    "slices of slices": "z = zeros(6, 4); z[1:5][:, 1:][::2] = h[:2]; "
    "z = z[1:5, 1:]",
    "views before": """
z = zeros(12)
a, b, first = z.view(4, 3), z[3:], z.narrow(0, 0, 3)
a[0] = h[0]
b += h.flatten()[3:]
z = a + first + b[:3]""",
    "detach": "z = zeros(4, 3); y = z.detach(); y[0] = h[1]; z = z * h",
    "data": "z = zeros(4, 3); z.data[0] = h[1].detach(); z = z * h",
    "data, of rows": "y = zeros(4, 3); z = y.data; y[1] = h[0]; z = z * h",
    "expand": "y = zeros(3); z = y.expand(4, 3); y += h[0]; z = z * h",
    "overlapping slices": "z = zeros(5, 3); z[:3] += h[:3]; z[1:4] *= h[1:]; z = z[:4]",
    "moves in place": "z = zeros(4, 3); z[1:] = h[1:]; z[:2] = z[2:].clone()",
    # Reads before and after.
    "a copy before": "z = ones(4, 3); y = z.clone(); z += h; z = y * z",
    "a value before": """
z = zeros(4, 3)
if z.sum() == 0 and int(z.any()) == 0: z[0] = h[0]
z[1] = 3 if len(z) == 4 else h[2]""",
    "under no_grad": "z = zeros(4, 3)\nwith torch.no_grad(): z[0] = h[0]\nz = z * h",
    "out": "y = empty(4, 3)\nwith torch.no_grad(): torch.add(h, c, out=y)\nz = y * h",
    "out of slices": "d = x.new_zeros(5, 3); torch.cumsum(x, 0, out=d[1:]); z = d[1:] * h",
    "out of two": "y, j = empty(4), torch.empty(4, dtype=torch.long); "
    "torch.max(x, 1, out=(y, j)); z = h[j] * y[:, None]",
    "a closure of the loss": """
z = zeros(4, 3)
def write(t): z[t] = h[t]
[write(t) for t in range(3)]""",
    "a checkpoint": """
def region(y):
    out = zeros(4, 3)
    out[1:] = F.linear(y, a_w)[1:].sin()
    return out
z = checkpoint(region, h * 1, use_reentrant=False)""",
    "a gradient inside": """
def energy(y):
    out = zeros(4)
    out[1:] = (y * c).sum(1)[1:].sin()
    return out.sum()
z = torch.func.grad(energy)(h) * h""",
}


def program(text):
    return losses.written(START + text.strip("\n") + END, globals(), "xk")


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_recorded_as_a_loop_runs_them(name):
    loss = program(WRITES[name])
    exact = assert_gradients(
        loss, PARAMS, (X, K), buffers=BUFFERS, strategy="recorded"
    )
    clip = vgrad.clipped_grad(loss, max_norm=1.0)
    found = clip(PARAMS, BUFFERS, X, K)
    oracle.assert_exact(found.grads, oracle.clipped(exact, 1.0))
