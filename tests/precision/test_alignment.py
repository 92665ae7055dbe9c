"""What products a model makes, against hand-computed sizes and torch's own counter."""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vgrad
from tests.losses import Net
from tests.oracle import assert_exact
from vgrad.precision import alignment_report


def run(function, **shapes):
    """Make a module of one function and its parameters."""
    return Net(function, **{name: torch.ones(shape) for name, shape in shapes.items()})


TWICE = nn.Linear(6, 6)


def report(module, *args, **kwargs):
    return alignment_report(
        *vgrad.make_functional_with_buffers(module), *args, **kwargs
    )


def on_meta(module, *args):
    fmodel, *given = vgrad.make_functional_with_buffers(module)
    given = vgrad.tree.map_tensors(lambda x: x.to("meta"), [*given, *args])
    return alignment_report(fmodel, *given)


def only(found):
    (row,) = found.rows
    return row


def ones(*shapes):
    return [torch.ones(shape) for shape in shapes]


def buffered():
    model = run(lambda self, x: x @ self.basis)
    model.register_buffer("basis", torch.ones(8, 9))
    return model


def attend(self, q, k, v=None, **options):
    return F.scaled_dot_product_attention(q, k, k if v is None else v, **options)


ROWS = {
    "a linear layer multiplies batch, outputs and inputs": (
        nn.Linear(30, 10), ones((4, 5, 30)),
        ("addmm", "weight", (20, 10, 30), (20, 16, 32))),
    # With 4 instead of 3 input channels a group has 4 * 6 = 24 of them.
    "a grouped convolution pads its channels": (
        nn.Conv2d(12, 20, (3, 2), groups=4), ones((5, 12, 9, 8)),
        ("convolution", "weight", (245, 5, 18), (245, 8, 24))),
    "a first convolution pads its channels": (
        nn.Conv2d(3, 16, 3), ones((2, 3, 8, 8)),
        ("convolution", "weight", (72, 16, 27), (72, 16, 72))),
    "a transposed convolution multiplies its inputs": (
        nn.ConvTranspose1d(6, 10, 4, stride=2, groups=2), ones((3, 6, 7)),
        ("convolution", "weight", (21, 20, 3), (21, 24, 8))),
    "a parameter on the left leaves the batch on the right": (
        run(lambda self, x: self.w @ x, w=(10, 12)), ones((12, 3)),
        ("mm", "w", (10, 3, 12), (16, 3, 16))),
    "a product of two parameters has no batch": (
        run(lambda self: self.up @ self.down, up=(10, 3), down=(3, 12)), [],
        ("mm", "up, down", (10, 12, 3), (16, 16, 8))),
    "equal products of one parameter are one row": (
        nn.Sequential(TWICE, nn.ReLU(), TWICE), ones((4, 6)),
        ("addmm", "0.weight", (4, 6, 6), (4, 8, 8))),
    "a buffer is named too": (
        buffered(), ones((2, 8)), ("mm", "basis", (2, 9, 8), (2, 16, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_one_product_has_its_sizes(name):
    module, inputs, expected = ROWS[name]
    row = only(report(module, *inputs))
    assert row == (*expected, 1.0)


def test_aligned_sizes_report_nothing_unless_a_larger_multiple_is_asked_for():
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.Flatten(2), nn.LSTM(64, 24, batch_first=True)
    )
    found = on_meta(model, torch.ones(3, 8, 10, 10))
    assert all(row.size == row.padded for row in found.rows)
    assert (len(found.rows), found.misaligned) == (3, 0.0)
    assert report(nn.Linear(32, 24), torch.ones(2, 32)).misaligned == 0.0
    found = report(nn.Linear(32, 24), torch.ones(2, 32), multiple=16)
    assert only(found).padded == (2, 32, 32)
    assert found.misaligned == 1.0


def heads(need_weights):
    model = run(lambda self, x: self.inner(x, x, x, need_weights=need_weights)[0])
    model.inner = nn.MultiheadAttention(24, 2, batch_first=True)
    return model


FUSED = "_scaled_dot_product_flash_attention_for_cpu"
TABLES = {
    "attention": (run(attend), ones((2, 3, 10, 16), (2, 3, 24, 16), (2, 3, 24, 8)), [
        ("bmm", "", (10, 24, 16), (16, 24, 16), 6),
        ("bmm", "", (10, 8, 24), (16, 8, 24), 6)]),
    **{
        f"heads {inside}": (heads(inside == "bmm"), ones((3, 5, 24)), [
            ("mm", "inner.in_proj_weight", (15, 72, 24), (15, 72, 24), 1),
            (inside, "", (5, 5, 12), (8, 8, 16), 6),
            (inside, "", (5, 12, 5), (8, 16, 8), 6),
            ("addmm", "inner.out_proj.weight", (15, 24, 24), (15, 24, 24), 1)])
        for inside in ("bmm", FUSED)
    },
    "lstm": (nn.LSTM(12, 10, num_layers=2, bidirectional=True), ones((7, 3, 12)), [
        row for number, inputs, padded in ((0, 12, 16), (1, 20, 24))
        for name in (f"l{number}", f"l{number}_reverse")
        for row in (
            ("addmm", f"weight_ih_{name}", (3, 40, inputs), (3, 40, padded), 7),
            ("addmm", f"weight_hh_{name}", (3, 40, 10), (3, 40, 16), 7))]),
    "a cell": (nn.GRUCell(8, 10), ones((3, 8)), [
        ("addmm", "weight_ih", (3, 30, 8), (3, 32, 8), 1),
        ("addmm", "weight_hh", (3, 30, 10), (3, 32, 16), 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_the_products_inside_of_an_op_have_their_sizes(name):
    module, inputs, expected = TABLES[name]
    rows = (on_meta if name == "lstm" else report)(module, *inputs).rows
    assert {row[:4] for row in rows} == {row[:4] for row in expected}
    work = {row[:4]: math.prod(row[2]) * row[4] for row in expected}
    total = sum(work.values())
    expected = {row: part / total for row, part in work.items()}
    assert {row[:4]: row.share for row in rows} == pytest.approx(expected)


FLAT, BATCHED = ((4, 5), (5, 6), (4, 6, 5, 1)), ((3, 4, 5), (3, 5, 6), (4, 6, 5, 3))
ONES = torch.ones(4, 6)
PRODUCTS = {
    "vector on the right": (lambda x, y: x @ y, (4, 5), (5,), (4, 1, 5, 1)),
    "batched": (torch.matmul, (1, 2, 4, 5), (3, 1, 5, 6), (4, 6, 5, 6)),
    "addmm": (lambda x, y: torch.addmm(ONES[0], x, y, beta=2), *FLAT),
    "baddbmm": (lambda x, y: torch.baddbmm(ONES[0], x, y), *BATCHED),
    "tensordot":
        (lambda x, y: torch.tensordot(x, y, dims=([0, 2], [1, -1])),
         *((3, 4, 5), (6, 3, 5), (4, 6, 15, 1))),
    "einsum":
        (lambda x, y: torch.einsum("bqhd, bkhd -> bhqk", x, y),
         *((2, 4, 3, 5), (2, 6, 3, 5), (4, 6, 5, 6))),
    "mapped": (torch.vmap(lambda x, y: x @ y, (0, None)), (4, 5), (5, 6), (4, 6, 5, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_spelling_of_a_product_has_its_sizes_and_operations(name):
    function, left, right, expected = PRODUCTS[name]
    model = run(lambda self, x, y: (function(x, y), x.new_ones(7, 7).mv(x.new_ones(7))))
    *size, count = expected
    row, other = report(model, torch.ones(left), torch.ones(right)).rows
    assert row.size == tuple(size)
    assert row.share / other.share == pytest.approx(math.prod(size) * count / 49)


def test_whole_models_take_the_operations_that_torch_counts():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
        nn.ConvTranspose2d(6, 12, 2, stride=2),
        nn.Flatten(2),
        run(lambda self, x: x.mT),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(12, 1),
    )
    x = torch.randn(2, 3, 6, 6)
    for mode in (True, False):
        model.train(mode)
        # Torch does not count its fused kernel for CPUs.
        kernel = sdpa_kernel(SDPBackend.MATH)
        with kernel, FlopCounterMode(display=False) as counter:
            model(x.clone().requires_grad_())
        total, shares = counter.get_total_flops(), Counter()
        for row in report(model, x).rows:
            shares["bmm" if "attention" in row.op else row.op] += row.share
        for op, count in counter.get_flop_counts()["Global"].items():
            assert shares.pop(op.__name__) * total == pytest.approx(count)
        assert not shares


def test_policies_autocast_losses_and_tensors_without_values_change_no_row():
    model = nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x, y = torch.ones(4, 12), torch.tensor([0, 1, 2, 0])
    plain = alignment_report(fmodel, params, buffers, x)
    for policy in ("mixed_bfloat16", "bfloat16", "float64"):
        mixed = vgrad.precision.policy_for(fmodel, policy)
        assert alignment_report(mixed, params, buffers, x) == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert alignment_report(fmodel, params, buffers, x) == plain
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    assert alignment_report(loss, params, buffers, x, y) == plain
    meta = {name: value.to("meta") for name, value in params.items()}
    assert alignment_report(fmodel, meta, buffers, x.to("meta")) == plain
    with torch.inference_mode():
        values = {name: value.clone() for name, value in params.items()}
        assert alignment_report(fmodel, values, buffers, x.clone()) == plain


def test_random_numbers_gradients_and_inputs_stay_as_they_were():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    copies = {name: value.clone() for name, value in (params | buffers).items()}
    state = torch.get_rng_state()
    alignment_report(fmodel, params, buffers, torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert_exact(params | buffers, copies, 0)
    assert all(value.grad is None for value in params.values())


def test_the_table_shows_sizes_and_what_they_are_padded_to():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
    found = report(model, torch.ones(16, 64))
    assert found.misaligned == pytest.approx(10 / (64 + 10))
    assert str(found).splitlines() == [
        "13.5% of the work is misaligned",
        "",
        "op     operand   M, N, K       padded to     share",
        "addmm  0.weight  (16, 32, 64)  (16, 32, 64)  86.5%",
        "addmm  1.weight  (16, 10, 32)  (16, 16, 32)  13.5%",
    ]


MODEL = nn.Linear(3, 2)
FMODEL, PARAMS = vgrad.make_functional(MODEL)
WHOLE, ROW = FMODEL.with_buffers, torch.ones(1, 3)
REFUSED = [
    (lambda: alignment_report(MODEL, PARAMS, {}, ROW), TypeError,
     r"alignment_report\(fmodel\).*got a Linear"),
    (lambda: alignment_report(FMODEL, PARAMS, {}, ROW), TypeError,
     "got a BufferlessModel"),
    (lambda: alignment_report(WHOLE, PARAMS, ROW), TypeError,
     r"alignment_report\(buffers\).*got a Tensor"),
    (lambda: alignment_report(WHOLE, PARAMS, {}, ROW, multiple=0), ValueError,
     r"alignment_report\(multiple=0\)"),
    (lambda: report(MODEL, torch.ones(4, 5)), RuntimeError,
     "shapes cannot be multiplied"),
    (lambda: report(nn.LSTM(3, 2), torch.ones(4, 3)), RuntimeError,
     "a recurrent net on the device meta, got mkldnn_rnn_layer"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_has_no_products_of_batches_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.is_grad_enabled()
