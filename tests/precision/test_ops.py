"""Op by op: autocast under transforms is what torch's autocast is without them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.oracle import assert_exact
from tests.precision.autocast_ops import CPU, CUDA, PYTHON, STEPPED, UNFAKED, UNLISTED
from vgrad.precision import KINDS, AutocastMode, Kind, autocast
from vgrad.torch_private import modes

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


def lstm_by_cells(x, w_ih, w_hh, b_ih, b_hh, h):
    """What `torch.lstm` does, which some CPUs refuse to do in low precision."""
    outputs, state = [], (h[0], h[0])
    for each in x:
        state = torch.lstm_cell(each, state, w_ih, w_hh, b_ih, b_hh)
        outputs.append(state[0])
    return torch.stack(outputs), state[0][None], state[1][None]


def drawn(spec, seed=0):
    """Return the op and 3 samples of its first input, then the others."""
    generator = torch.Generator().manual_seed(seed)
    first, *rest = spec[:-1]
    tensors = [torch.randn(3, *first, generator=generator)]
    tensors += [torch.randn(*shape, generator=generator) for shape in rest]
    return spec[-1], tensors


def leaves(output):
    return [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]


def check(spec, low, dtype, tolerance, device="cpu", reference=None):
    """Compare an op in `vmap` and in `vjp` with torch's autocast, sample by sample."""
    op, (x, *rest) = drawn(spec)
    x, rest = x.to(device, dtype), [each.to(device) for each in rest]
    try:
        with torch.autocast(device, low):
            expected = [leaves((reference or op)(one, *rest)) for one in x]
    except RuntimeError:  # torch has no such kernel
        return False
    expected = [torch.stack(each) for each in zip(*expected, strict=True)]
    with autocast(device, low):
        mapped = expected
        if op is not torch.chain_matmul:  # for which torch has no batching rule
            mapped = leaves(torch.vmap(lambda one: op(one, *rest))(x))
        *_, alone = torch.func.vjp(
            lambda one: (one.sum(), leaves(op(one, *rest))), x[0], has_aux=True
        )
    for found, exact in ((mapped, expected), (alone, [each[0] for each in expected])):
        assert [each.dtype for each in found] == [each.dtype for each in exact]
        assert_exact(found, exact, tolerance)
    return True


def check_either(spec, name, low, device="cpu", reference=None):
    """Compare an op of the lists for both dtypes of its input, of which one may run."""
    exact = KINDS[device][name] in (Kind.FLOAT32, Kind.WIDEST)
    tolerance = 1e-5 if exact else 3 * torch.finfo(low).eps
    given = tolerance, device, reference
    assert any([check(spec, low, dtype, *given) for dtype in (torch.float32, low)])


in_both = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)


@in_both
@pytest.mark.parametrize("name", KINDS["cpu"])
def test_an_op_of_the_table_is_what_torch_makes_of_it(name, low):
    reference = lstm_by_cells if name == "lstm" else None
    check_either(CPU[name], name, low, reference=reference)


@in_both
@pytest.mark.parametrize("name", UNLISTED)
def test_an_op_in_no_list_keeps_its_rules_for_dtypes(name, low):
    check(UNLISTED[name], low, torch.float32, 1e-6)
    check(UNLISTED[name], low, low, 2 * torch.finfo(low).eps)


@pytest.fixture
def in_cuda_autocast():
    """Pretend that there is a GPU: tensors without numbers, which have dtypes."""
    torch.set_autocast_enabled("cuda", True)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.autocast_increment_nesting()
    with FakeTensorMode():
        yield
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_dtype("cuda", before)
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("name", [name for name in CUDA if name not in UNFAKED])
def test_an_op_of_the_table_for_cuda_has_the_dtype_of_torch(name, in_cuda_autocast):
    *shapes, op = CUDA[name]
    rest = [torch.empty(shape, device="cuda") for shape in shapes[1:]]
    for dtype in (torch.float32, torch.float16):
        one = torch.empty(shapes[0], dtype=dtype, device="cuda")
        batch = torch.empty(3, *shapes[0], dtype=dtype, device="cuda")
        expected = [each.dtype for each in leaves(op(one, *rest))]
        with AutocastMode():
            found = torch.vmap(op, (0, *(None for _ in rest)))(batch, *rest)
        assert [each.dtype for each in leaves(found)] == expected


def test_what_torch_refuses_to_autocast_is_refused_under_transforms(in_cuda_autocast):
    x = torch.empty(3, 2, device="cuda")
    with (
        AutocastMode(),
        pytest.raises(RuntimeError, match="safe to autocast.*takes logits"),
    ):
        torch.vmap(F.binary_cross_entropy)(x, x)


INTERNAL = {
    "cpu": {
        "_addmm_activation": "the fused layers of a TransformerEncoderLayer",
        "_native_multi_head_attention": "the same, which transforms do not take",
        "_convolution": "convolutions, which are cast before",
        "_grid_sampler_2d_cpu_fallback": "grid_sampler_2d, which is cast before",
        "mkldnn_rnn_layer": "lstm, which runs in steps",
        "multilabel_margin_loss_forward": "multilabel_margin_loss, cast before",
    },
    "cuda": {
        "_convolution": "convolutions, which are cast before",
        "cudnn_convolution": "convolutions, which are cast before",
        "cudnn_convolution_transpose": "convolutions, which are cast before",
        "_scaled_dot_product_flash_attention": "attention, which is cast before",
        "_thnn_fused_gru_cell": "gru_cell, which is cast before",
        "_thnn_fused_lstm_cell": "lstm_cell, which is cast before",
    },
}
if torch._C._has_cudnn:  # a build for CUDA, with or without a GPU
    INTERNAL["cuda"]["_cudnn_rnn"] = "lstm, gru and the others, which are cast before"
"""Ops with a kernel of autocast that no function of a model calls, and who does."""


@pytest.mark.parametrize(("device", "key"), [("cpu", "CPU"), ("cuda", "CUDA")])
def test_the_table_has_every_op_that_torch_autocasts(device, key):
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{key}")
    ops = {each.removeprefix("aten::").split(".")[0] for each in kernels}
    assert ops - KINDS[device].keys() == INTERNAL[device].keys()


def test_every_op_of_the_tables_is_tested():
    assert CPU.keys() == KINDS["cpu"].keys()
    assert CUDA.keys() | {"binary_cross_entropy"} == KINDS["cuda"].keys()


def test_what_an_op_is_told_to_write_to_is_written():
    x, weight = torch.randn(2, 3), torch.randn(3, 4)
    written = torch.zeros(2, 4)

    def run(scale):
        torch.mm(x, weight, out=written)
        return scale * written.sum()

    with autocast("cpu", torch.bfloat16):
        found = torch.vmap(run)(torch.ones(2))
    assert torch.equal(written, x @ weight)
    assert found.tolist() == [float(written.sum())] * 2


UNCALLED = {
    "scaled_mm": "needs types of numbers of its own",
    "scaled_grouped_mm": "needs types of numbers of its own",
    "grouped_mm": "needs memory of a layout of its own",
    "rrelu": "has no batching rule",
    "gumbel_softmax": "draws random numbers",
    "assert_int_or_pair": "computes nothing",
}


def test_every_python_function_is_called():
    names = {
        name for name in dir(F) if modes.is_python(getattr(F, name)) and name[0] != "_"
    }
    assert names - UNCALLED.keys() <= PYTHON.keys()


@pytest.mark.parametrize("name", sorted(PYTHON.keys() - CPU.keys()))
def test_what_a_python_function_calls_is_what_torch_makes_of_it(name):
    for dtype in (torch.float32, torch.bfloat16):
        assert check(PYTHON[name], torch.bfloat16, dtype, 3 * 2**-7)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@in_both
@pytest.mark.parametrize("name", sorted(CUDA.keys() - STEPPED.keys()))
def test_a_gpu_makes_of_an_op_what_torch_does(name, low):
    check_either(CUDA[name], name, low, "cuda")
