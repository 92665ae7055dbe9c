"""What products a model makes, against hand-computed sizes and torch's own counter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import wrap_torch_function
from torch.utils.flop_counter import FlopCounterMode

import vgrad
from vgrad.lowering import cells
from vgrad.precision import alignment_report


class Run(nn.Module):
    """A module of one function and its parameters."""

    def __init__(self, function, **params):
        super().__init__()
        self.function = function
        for name, shape in params.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, *args):
        return self.function(self, *args)


def report(module, *args, **kwargs):
    return alignment_report(
        *vgrad.make_functional_with_buffers(module), *args, **kwargs
    )


def sizes(found):
    return [(row.names, row.op, row.m, row.n, row.k, row.count) for row in found.rows]


def only(found):
    (row,) = found.rows
    return row


def test_a_linear_layer_is_a_product_of_batch_outputs_and_inputs():
    row = only(report(nn.Linear(30, 10), torch.ones(4, 5, 30)))
    assert row[:6] == (("weight",), "linear", 20, 10, 30, 1)
    assert row.flops == 2 * 20 * 10 * 30
    assert row.share == 1.0
    assert row.pad == {"N": 16, "K": 32}
    assert row.advice == (
        "pad weight from 10 to 16 rows",
        "pad weight from 30 to 32 columns",
    )


def test_a_batch_needs_no_padding_and_aligned_sizes_report_nothing():
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.Flatten(2), nn.LSTM(64, 24, batch_first=True)
    )
    found = report(model, torch.ones(3, 8, 10, 10))
    assert [row.pad for row in found.rows] == [{}] * 3
    assert found.misaligned == 0.0
    assert str(found).endswith("nothing to pad")


def test_sixteen_is_asked_for_where_the_caller_says_so():
    model = nn.Linear(32, 24)
    assert report(model, torch.ones(2, 32)).misaligned == 0.0
    found = report(model, torch.ones(2, 32), multiple=16)
    assert only(found).pad == {"N": 32}
    assert found.misaligned == 1.0


def test_a_grouped_convolution_counts_its_groups():
    row = only(report(nn.Conv2d(12, 20, (3, 2), groups=4), torch.ones(5, 12, 9, 8)))
    positions = 7 * 7
    assert row[:6] == (("weight",), "conv2d", 5 * positions, 5, 3 * 3 * 2, 4)
    assert row.flops == 2 * 5 * positions * 20 * 3 * 3 * 2
    # With 4 instead of 3 input channels there are 4 * 6 = 24 of them.
    assert row.pad == {"N": 8, "K": 24}
    assert row.advice == (
        "pad weight from 5 to 8 output channels in each of 4 groups",
        "pad weight from 3 to 4 input channels in each of 4 groups",
    )


def test_a_first_convolution_is_told_its_channels():
    row = only(report(nn.Conv2d(3, 16, 3), torch.ones(2, 3, 8, 8)))
    assert row.pad == {"K": 72}
    assert row.advice == ("pad weight from 3 to 8 input channels",)


def test_a_transposed_convolution_multiplies_its_inputs():
    model = nn.ConvTranspose1d(6, 10, 4, stride=2, groups=2)
    row = only(report(model, torch.ones(3, 6, 7)))
    assert row[:6] == (("weight",), "conv_transpose1d", 3 * 7, 5 * 4, 3, 2)
    assert row.pad == {"N": 24, "K": 8}
    assert row.advice == (
        "pad weight from 5 to 6 output channels in each of 2 groups",
        "pad weight from 3 to 8 input channels in each of 2 groups",
    )


def test_attention_is_two_products_a_head_and_has_no_batch_dimension():
    model = Run(lambda self, *args: F.scaled_dot_product_attention(*args))
    q, k, v = (
        torch.ones(2, 3, 10, 16),
        torch.ones(2, 3, 24, 16),
        torch.ones(2, 3, 24, 8),
    )
    scores, values = report(model, q, k, v).rows
    assert scores[:6] == ((), "scaled_dot_product_attention", 10, 24, 16, 6)
    assert values[:6] == ((), "scaled_dot_product_attention", 10, 8, 24, 6)
    assert scores.flops == 2 * 6 * 10 * 24 * 16
    assert scores.pad == values.pad == {"M": 16}
    assert scores.advice == ("pad M of scaled_dot_product_attention from 10 to 16",)


def test_grouped_heads_count_as_many_as_the_queries_have():
    model = Run(
        lambda self, q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    )
    found = report(model, torch.ones(2, 6, 8, 16), torch.ones(2, 3, 24, 16))
    assert [row.count for row in found.rows] == [12, 12]


@pytest.mark.parametrize("need_weights", [True, False])
def test_what_runs_inside_of_multi_head_attention_is_seen(need_weights):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(24, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=need_weights)[0]

    found = report(Attention(), torch.ones(3, 5, 24))
    inside = "bmm" if need_weights else "scaled_dot_product_attention"
    assert sizes(found) == [
        (("inner.in_proj_weight",), "linear", 15, 72, 24, 1),
        ((), inside, 5, 5, 12, 6),
        ((), inside, 5, 12, 5, 6),
        (("inner.out_proj.weight",), "linear", 15, 24, 24, 1),
    ]
    assert found.rows[1].pad == {"M": 8, "N": 8, "K": 16}


def test_an_lstm_multiplies_inputs_at_once_and_states_step_by_step():
    model = nn.LSTM(12, 10, num_layers=2, bidirectional=True)
    found = report(model, torch.ones(7, 3, 12))
    names = ["l0", "l0_reverse", "l1", "l1_reverse"]
    expected = []
    for name, inputs in zip(names, [12, 12, 20, 20], strict=True):
        expected += [
            ((f"weight_ih_{name}",), "lstm", 21, 40, inputs, 1),
            ((f"weight_hh_{name}",), "lstm", 3, 40, 10, 7),
        ]
    assert sizes(found) == expected
    assert found.rows[1].flops == 2 * 7 * 3 * 40 * 10
    assert found.rows[1].pad == {"K": 16}
    assert found.rows[1].advice == ("pad weight_hh_l0 from 10 to 16 columns",)


def test_projections_and_packed_sequences_have_the_sizes_of_their_steps():
    model = nn.LSTM(8, 16, proj_size=4, batch_first=True)
    packed = nn.utils.rnn.pack_sequence([torch.ones(n, 8) for n in (5, 3, 3)])
    # The batches of the steps are 3, 3, 3, 1, 1.
    steps = Run(lambda self, data, batches: self.net(make(data, batches))[0].data)
    steps.net = model
    make = nn.utils.rnn.PackedSequence
    found = report(steps, packed.data, packed.batch_sizes)
    assert sizes(found) == [
        (("net.weight_ih_l0",), "lstm", 11, 64, 8, 1),
        (("net.weight_hh_l0",), "lstm", 3, 64, 4, 3),
        (("net.weight_hh_l0",), "lstm", 1, 64, 4, 2),
        (("net.weight_hr_l0",), "lstm", 3, 4, 16, 3),
        (("net.weight_hr_l0",), "lstm", 1, 4, 16, 2),
    ]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_take_the_operations_of_their_steps(kind):
    torch.manual_seed(0)
    model = kind(5, 7, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 4, 5)
    h = torch.zeros(4, 3, 7)
    mode = "rnn_tanh" if kind is nn.RNN else kind.__name__.lower()
    with FlopCounterMode(display=False) as counter:
        cells.steps(
            mode,
            x,
            (h, h) if kind is nn.LSTM else (h,),
            list(model._flat_weights),
            num_layers=2,
            bidirectional=True,
            dropout=0.0,
            training=True,
            batch_first=True,
        )
    flops = sum(row.flops for row in report(model, x).rows)
    assert flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)]
)
def test_a_cell_is_two_products_whose_gates_are_padded_alike(kind, gates):
    first, second = report(kind(8, 10), torch.ones(3, 8)).rows
    assert first[:1] + first[2:6] == (("weight_ih",), 3, 10 * gates, 8, 1)
    assert second[:1] + second[2:6] == (("weight_hh",), 3, 10 * gates, 10, 1)
    # 4 x 10 is a multiple of 8; three gates need 16 each, one needs 16 as well.
    assert first.pad == ({} if gates == 4 else {"N": 16 * gates})
    assert (
        first.advice
        == {
            4: (),
            3: ("pad weight_ih from 10 to 16 rows in each of 3 gates",),
            1: ("pad weight_ih from 10 to 16 rows",),
        }[gates]
    )


PRODUCTS = {
    "vector on the right": (lambda x, y: x @ y, (4, 5), (5,), (4, 1, 5, 1)),
    "vector on the left": (lambda x, y: x @ y, (5,), (5, 6), (1, 6, 5, 1)),
    "matrices": (lambda x, y: torch.mm(x, mat2=y), (4, 5), (5, 6), (4, 6, 5, 1)),
    "folded": (lambda x, y: x @ y, (3, 4, 5), (5, 6), (12, 6, 5, 1)),
    "folded, turned": (lambda x, y: x @ y, (4, 5), (3, 5, 6), (4, 18, 5, 1)),
    "batched": (torch.matmul, (1, 2, 4, 5), (3, 1, 5, 6), (4, 6, 5, 6)),
    "bmm": (torch.bmm, (3, 4, 5), (3, 5, 6), (4, 6, 5, 3)),
    "mv": (lambda x, y: x.mv(y), (4, 5), (5,), (4, 1, 5, 1)),
    "addmm": (
        lambda x, y: torch.addmm(torch.ones(6), x, y, beta=2),
        *((4, 5), (5, 6), (4, 6, 5, 1)),
    ),
    "in place": (
        lambda x, y: torch.ones(4, 6).addmm_(mat1=x, mat2=y),
        *((4, 5), (5, 6), (4, 6, 5, 1)),
    ),
    "addmv": (
        lambda x, y: torch.addmv(torch.ones(4), x, y),
        *((4, 5), (5,), (4, 1, 5, 1)),
    ),
    "baddbmm": (
        lambda x, y: torch.baddbmm(torch.ones(6), x, y),
        *((3, 4, 5), (3, 5, 6), (4, 6, 5, 3)),
    ),
    "tensordot": (
        lambda x, y: torch.tensordot(x, y, dims=2),
        *((3, 4, 5), (4, 5, 6), (3, 6, 20, 1)),
    ),
    "tensordot by places": (
        lambda x, y: torch.tensordot(x, y, dims=([0, 2], [1, -1])),
        *((3, 4, 5), (6, 3, 5), (4, 6, 15, 1)),
    ),
    "einsum": (
        lambda x, y: torch.einsum("bqhd, bkhd -> bhqk", x, y),
        *((2, 4, 3, 5), (2, 6, 3, 5), (4, 6, 5, 6)),
    ),
    "einsum without an output": (
        lambda x, y: torch.einsum("...ij,jk", x, y),
        *((7, 4, 5), (5, 6), (28, 6, 5, 1)),
    ),
    "einsum of a list": (
        lambda x, y: torch.einsum("ij,kj->ki", [x, y]),
        *((4, 5), (6, 5), (4, 6, 5, 1)),
    ),
    "einsum of places": (
        lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]),
        *((4, 5), (5, 6), (4, 6, 5, 1)),
    ),
    "einsum over an ellipsis": (
        lambda x, y: torch.einsum("...i,...j->...ij", x, y).sum() + x @ x[0, 0],
        *((3, 4, 5), (4, 5), (12, 1, 5, 1)),
    ),
    "linear of a vector": (F.linear, (4, 5), (5,), (4, 1, 5, 1)),
    "linear": (F.linear, (2, 4, 5), (6, 5), (8, 6, 5, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_spelling_of_a_product_has_its_sizes_and_operations(name):
    function, left, right, expected = PRODUCTS[name]
    model = Run(lambda self, x, y: function(x, y))
    x, y = torch.ones(left), torch.ones(right)
    row = only(report(model, x, y))
    assert row[2:6] == expected
    with FlopCounterMode(display=False) as counter:
        function(x.clone().requires_grad_(), y)
    # Torch counts neither products with vectors nor those in place.
    if 1 not in expected[:3] and name != "in place":
        assert row.flops == counter.get_total_flops()
    assert row.flops == 2 * row.m * row.n * row.k * row.count


def test_ops_of_the_users_own_are_looked_into_whatever_their_name():
    @wrap_torch_function(lambda weight, x: (weight, x))
    def linear(weight, x):
        return (x @ weight).relu()

    row = only(
        report(Run(lambda self, x: linear(self.w, x), w=(8, 3)), torch.ones(2, 8))
    )
    assert row[:6] == (("w",), "matmul", 2, 3, 8, 1)


def test_elementwise_products_and_inner_products_of_vectors_are_no_rows():
    model = Run(lambda self, x: torch.einsum("bi,bi->bi", x, x) * (x[0] @ x[0]))
    found = report(model, torch.ones(3, 5))
    assert found.rows == ()
    assert found.misaligned == 0.0
    assert "0.0% of 0" in str(found)


def test_int8_products_are_seen():
    model = Run(lambda self, x: torch._int_mm(x, x.t()))
    row = only(report(model, torch.ones(24, 16, dtype=torch.int8), multiple=16))
    assert row[1:6] == ("_int_mm", 24, 24, 16, 1)


def test_a_bilinear_form_multiplies_pairs_of_inputs():
    row = only(report(nn.Bilinear(3, 5, 4), torch.ones(7, 3), torch.ones(7, 5)))
    assert row[:6] == (("weight",), "bilinear", 7, 4, 15, 1)
    assert row.pad == {"N": 8, "K": 24}
    assert row.advice == (
        "pad weight from 4 to 8 outputs",
        "pad weight from 5 to 8 features of the second input",
    )


def test_whole_models_take_the_operations_that_torch_counts():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
        nn.ConvTranspose2d(6, 12, 2, stride=2),
        nn.Flatten(2),
        Run(lambda self, x: x.mT),
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
        flops = sum(row.flops for row in report(model, x).rows)
        assert flops == counter.get_total_flops()
    shares = [row.share for row in report(model, x).rows]
    assert sum(shares) == pytest.approx(1.0)


def test_equal_products_of_one_parameter_are_one_row():
    layer = nn.Linear(6, 6)
    found = report(nn.Sequential(layer, nn.ReLU(), layer), torch.ones(4, 6))
    assert sizes(found) == [(("0.weight",), "linear", 4, 6, 6, 2)]
    assert only(found).flops == 2 * 2 * 4 * 6 * 6


def test_tied_parameters_go_by_the_name_that_the_dictionary_has():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 16)
            self.head = nn.Linear(16, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model, x = Tied(), torch.arange(4)
    row = only(report(model, x))
    assert row.names == ("embed.weight",)
    assert row.advice == ("pad embed.weight from 10 to 16 rows",)
    fmodel, _, _ = vgrad.make_functional_with_buffers(model)
    whole = only(alignment_report(fmodel, model.state_dict(), {}, x))
    assert whole.names == ("embed.weight", "head.weight")


def test_views_and_casts_keep_the_name_and_the_sides_of_a_parameter():
    def run(self, x):
        half = self.w.t().to(torch.bfloat16)
        copy = torch.clone(input=x), self.w.clone()
        return x @ self.w.t(), x.bfloat16() @ half, F.linear(*copy)

    rows = report(Run(run, w=(10, 32)), torch.ones(4, 32)).rows
    assert [row.names for row in rows] == [("w",)] * 2
    assert [row.count for row in rows] == [2, 1]
    for row in rows:
        assert row.pad == {"N": 16}
        assert row.advice == ("pad w from 10 to 16 rows",)


def test_a_parameter_on_the_left_leaves_the_batch_on_the_right():
    row = only(report(Run(lambda self, x: self.w @ x, w=(10, 12)), torch.ones(12, 3)))
    assert row[2:5] == (10, 3, 12)
    assert row.pad == {"M": 16, "K": 16}
    assert row.advice == (
        "pad w from 10 to 16 rows",
        "pad w from 12 to 16 columns",
    )


def test_a_product_of_two_parameters_has_no_batch_dimension():
    model = Run(lambda self: self.up @ self.down, up=(10, 3), down=(3, 12))
    row = only(report(model))
    assert row.names == ("up", "down")
    assert row.pad == {"M": 16, "N": 16, "K": 8}
    assert row.advice == (
        "pad up from 10 to 16 rows",
        "pad down from 12 to 16 columns",
        "pad up from 3 to 8 columns",
        "pad down from 3 to 8 rows",
    )


def test_parameters_in_one_block_of_memory_are_told_apart():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    )
    block = torch.zeros(sum(each.numel() for each in params.values()))
    parts = block.split([each.numel() for each in params.values()])
    views = {
        name: part.view_as(params[name])
        for name, part in zip(params, parts, strict=True)
    }
    found = alignment_report(fmodel, views, buffers, torch.ones(2, 8))
    assert [row.names for row in found.rows] == [("0.weight",), ("1.weight",)]


def test_a_buffer_is_named_too():
    model = Run(lambda self, x: x @ self.basis)
    model.register_buffer("basis", torch.ones(8, 9))
    assert only(report(model, torch.ones(2, 8))).names == ("basis",)


def test_a_policy_and_autocast_change_no_row():
    model = nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x = torch.ones(4, 12)
    plain = alignment_report(fmodel, params, buffers, x)
    for policy in ("mixed_bfloat16", "bfloat16", "float64"):
        mixed = vgrad.precision.policy_for(fmodel, policy)
        assert alignment_report(mixed, params, buffers, x) == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert alignment_report(fmodel, params, buffers, x) == plain


def test_a_batch_loss_is_reported_like_its_model():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(8, 3))
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    x, y = torch.ones(4, 8), torch.tensor([0, 1, 2, 0])
    found = alignment_report(loss, params, buffers, x, y)
    assert found == alignment_report(fmodel, params, buffers, x)


def test_tensors_without_values_give_the_same_report():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 10))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x = torch.ones(2, 3, 4, 4)
    meta = {name: value.to("meta") for name, value in params.items()}
    assert alignment_report(fmodel, meta, buffers, x.to("meta")) == alignment_report(
        fmodel, params, buffers, x
    )


def test_random_numbers_gradients_and_inputs_stay_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    copies = {name: value.clone() for name, value in (params | buffers).items()}
    state = torch.get_rng_state()
    alignment_report(fmodel, params, buffers, torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    for name, value in (params | buffers).items():
        assert torch.equal(value, copies[name])
        assert value.grad is None


def test_the_table_ends_in_plain_advice():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
    found = report(model, torch.ones(16, 64))
    assert found.misaligned == pytest.approx(10 / (64 + 10))
    assert str(found).splitlines() == [
        "13.5% of 75,776 floating-point operations are in products with a size that is "
        "no multiple of 8",
        "",
        "parameter  op       M   N   K  count   flops  share  pad to",
        "0.weight   linear  16  32  64      1  65,536  86.5%",
        "1.weight   linear  16  10  32      1  10,240  13.5%  N=16",
        "",
        "pad 1.weight from 10 to 16 rows",
    ]


def test_a_failing_forward_pass_leaves_no_mode_behind():
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        report(model, torch.ones(4, 5))
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.is_grad_enabled()


def test_what_is_no_function_of_params_and_buffers_is_refused():
    model = nn.Linear(3, 2)
    fmodel, params = vgrad.make_functional(model)
    x = torch.ones(1, 3)
    with pytest.raises(TypeError, match=r"alignment_report\(fmodel\).*got a Linear"):
        alignment_report(model, params, {}, x)
    with pytest.raises(TypeError, match="got a BufferlessModel"):
        alignment_report(fmodel, params, {}, x)
    fmodel = fmodel.with_buffers
    with pytest.raises(TypeError, match=r"alignment_report\(buffers\).*got a Tensor"):
        alignment_report(fmodel, params, x)
    with pytest.raises(ValueError, match=r"alignment_report\(multiple=0\)"):
        alignment_report(fmodel, params, {}, x, multiple=0)


def test_products_of_single_samples_are_refused():
    model = Run(lambda self, x: torch.vmap(lambda row: row @ self.w)(x), w=(3, 2))
    with pytest.raises(ValueError, match="outside of the transforms.*matmul inside"):
        report(model, torch.ones(4, 3))
