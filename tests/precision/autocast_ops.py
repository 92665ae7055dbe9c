"""Calls of the ops of autocast's lists, by the names in the lists.

A line has the names of ops, the shapes of the tensors `x`, `a`, `b`, ... and the call,
where `{}` is the name as its module has it. `x` comes in the dtype of the test, and
differs from sample to sample; the others are float32.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fft, linalg, special  # noqa: F401
from torch.nn import functional as F

from tests.tables import rows
from vgrad.precision import KINDS
from vgrad.torch_private import kernels


class Call(NamedTuple):
    """An op called: `run(x, a, b, ...)`."""

    name: str
    shapes: list[list[int]]
    run: Callable


def calls(text):
    """Read the lines of a table."""
    found = {}
    for names, shapes, call in rows(text):
        sizes = [[*map(int, shape.split(","))] for shape in shapes.split()]
        letters = ", ".join("xabcde"[: len(sizes)])
        for name in names.split():
            inside = re.sub("^(linalg|special|fft)_", "", name)
            run = eval(f"lambda {letters}: {call.replace('{}', inside)}", globals())
            found[name] = Call(name, sizes, run)
    return found


def labels(x):
    return torch.tensor([1, 0], device=x.device)


def zeros(x, *shape):
    return torch.zeros(shape or (2, 3), dtype=torch.long, device=x.device)


def halves(x, *shape):
    return torch.full(shape or (2, 3), 0.5, device=x.device)


def ones(x, *shape):
    return torch.ones(shape or (2, 3), device=x.device)


def positive(x):
    return x.abs() + 1


def spread(x):
    """Make a matrix with well separated eigenvalues, positive definite."""
    apart = torch.diag(torch.arange(1.0, 1 + len(x), device=x.device))
    return x @ x.mT / 8 + apart.to(x.dtype)


def places(x):
    return torch.linspace(-0.9, 0.9, 2 * 9, device=x.device).reshape(1, 3, 3, 2)


def resized(x, **options):
    return F.interpolate(x, scale_factor=2, **options)


def fractional(op, x):
    drawn = halves(x, 1, 2, x.ndim - 2).to(x.dtype)
    return op(x, 2, output_size=2, _random_samples=drawn)


def heads(x, w_in, b_in, *out):
    options = None, None, False, 0.0
    return F.multi_head_attention_forward(x, x, x, 4, 2, w_in, b_in, *options, *out)


TARGETS = torch.ones(2, 2, dtype=torch.long)
LENGTHS = torch.tensor([5, 5]), torch.tensor([2, 2])
STEPS = (True, 1, 0.0, False, False, False)
"""Biases, one layer, no dropout, evaluation, one direction, time first."""

STEPPED = calls("""
    lstm | 5,2,3 16,3 16,4 16 16 1,2,4 | torch.lstm(x, (e, e), [a, b, c, d], *STEPS)
    gru | 5,2,3 12,3 12,4 12 12 1,2,4 | torch.gru(x, e, [a, b, c, d], *STEPS)
    rnn_tanh rnn_relu | 5,2,3 4,3 4,4 4 4 1,2,4 | torch.{}(x, e, [a, b, c, d], *STEPS)
    lstm_cell | 2,3 16,3 16,4 16 16 2,4 | torch.lstm_cell(x, (e, e), a, b, c, d)
    gru_cell | 2,3 12,3 12,4 12 12 2,4 | torch.gru_cell(x, e, a, b, c, d)
    rnn_tanh_cell rnn_relu_cell | 2,3 4,3 4,4 4 4 2,4 | torch.{}(x, e, a, b, c, d)
""")
SHARED = STEPPED | calls("""
    linear | 2,3 4,3 4 | F.linear(x, a, b)
    matmul mm | 2,3 3,4 | torch.{}(x, a)
    linalg_matmul | 2,3 3,4 | linalg.matmul(x, a)
    __matmul__ | 2,3 3,4 | x @ a
    __rmatmul__ | 2,3 4,2 | x.__rmatmul__(a)
    bmm | 2,2,3 2,3,4 | torch.bmm(x, a)
    addmm | 2,3 3,4 4 | torch.addmm(b, x, a)
    addbmm | 2,2,3 2,3,4 2,4 | torch.addbmm(b, x, a)
    baddbmm | 2,2,3 2,3,4 4 | torch.baddbmm(b, x, a)
    chain_matmul | 2,3 3,4 4,5 | torch.chain_matmul(x, a, b)
    linalg_multi_dot | 2,3 3,4 4 | linalg.multi_dot([x, a, b])
    linalg_vecdot | 2,3 2,3 | linalg.vecdot(x, a)
    prelu | 2,3 1 | F.prelu(x, a)
    scaled_dot_product_attention | 2,2,3,4 2,2,3,4 2,2,3,4 | F.{}(x, a, b)
    conv1d | 2,3,6 4,3,3 4 | F.conv1d(x, a, b)
    conv2d | 2,3,6,6 4,3,3,3 4 | F.conv2d(x, a, b)
    conv3d | 2,3,6,6,6 4,3,3,3,3 4 | F.conv3d(x, a, b)
    conv_transpose1d | 2,3,4 3,4,3 4 | F.conv_transpose1d(x, a, b)
    conv_transpose2d | 2,3,4,4 3,4,3,3 4 | F.conv_transpose2d(x, a, b)
    conv_transpose3d | 2,3,4,4,4 3,4,3,3,3 4 | F.conv_transpose3d(x, a, b)
    conv_tbc | 5,2,3 2,3,4 4 | torch.conv_tbc(x, a, b)
    einsum | 2,3 4,3 | torch.einsum("bi,oi->bo", x, a)
    tensordot | 2,3 3,4 | torch.tensordot(x, a, 1)
    inner | 2,3 4,3 | torch.inner(x, a)
    bilinear | 2,3 5,3,3 5 | F.bilinear(x, x, a, b)

    cross_entropy_loss cross_entropy | 2,3 | F.cross_entropy(x, labels(x))
    embedding | 4,3 | F.embedding(labels(x), x)
    embedding_bag | 4,3 | F.embedding_bag(labels(x)[None], x)
    nll_loss multi_margin_loss | 2,3 | F.{}(x, labels(x))
    nll_loss_nd | 2,3 | torch._C._nn.nll_loss_nd(x, labels(x))
    nll_loss2d | 2,3,2,2 | torch._C._nn.nll_loss2d(x, zeros(x, 2, 2, 2))
    mse_loss l1_loss smooth_l1_loss huber_loss | 2,3 2,3 | F.{}(x, a)
    kl_div | 2,3 | F.kl_div(x, halves(x), reduction="batchmean")
    poisson_nll_loss hinge_embedding_loss soft_margin_loss | 2,3 | F.{}(x, ones(x))
    cosine_embedding_loss | 2,3 2,3 | F.{}(x, a, ones(x, 2))
    margin_ranking_loss | 2 2 | F.{}(x, a, ones(x, 2))
    triplet_margin_loss | 2,3 2,3 2,3 | F.{}(x, a, b)
    multilabel_margin_loss | 2,3 | F.{}(x, zeros(x))
    binary_cross_entropy_with_logits | 2,3 | F.{}(x, halves(x))
    cdist | 2,3 4,3 | torch.cdist(x, a)

    layer_norm | 2,3 3 3 | F.layer_norm(x, (3,), a, b)
    rms_norm | 2,3 3 | F.rms_norm(x, (3,), a)
    group_norm | 2,4,5 4 4 | F.group_norm(x, 2, a, b)
    instance_norm | 2,4,5 4 4 | F.instance_norm(x, weight=a, bias=b)
    batch_norm | 2,4,5 4 4 | F.batch_norm(x, b, b.abs() + 1, a, b)

    grid_sampler | 1,2,4,4 | torch.grid_sampler(x, places(x), 0, 0, False)
    affine_grid_generator | 1,2,3 | F.affine_grid(x, [1, 1, 4, 4], align_corners=False)
    linalg_pinv linalg_polar | 3,3 | linalg.{}(spread(x))
    prod | 2,3 | torch.prod(x, 1)
""")
FFT = " ".join(sorted(x for x in kernels.autocast_ops("cpu") if x[:4] == "fft_"))
CPU = (
    SHARED
    | calls(f"{FFT} | 4,4 | fft.{{}}(x)")
    | calls("""
    binary_cross_entropy | 2,3 | F.binary_cross_entropy(x.sigmoid(), halves(x))
    ctc_loss | 5,2,4 | F.ctc_loss(x.log_softmax(2), TARGETS, *LENGTHS)
    grid_sampler_2d | 1,2,4,4 | torch.{}(x, places(x), 0, 0, False)
    grid_sampler_3d | 1,1,2,2,2 | torch.{}(x, torch.zeros(1, 2, 2, 2, 3), 0, 0, False)
    avg_pool3d adaptive_avg_pool3d max_pool3d | 1,2,4,4,4 | F.{}(x, 2)
    adaptive_max_pool3d | 1,2,4,4,4 | F.{}(x, 2)
    max_unpool2d | 1,1,2,2 | F.{}(x, torch.tensor([[[[0, 2], [8, 10]]]]), 2)
    max_unpool3d | 1,1,1,1,2 | F.{}(x, torch.tensor([[[[[0, 2]]]]]), 2)
    fractional_max_pool2d | 1,2,4,4 | fractional(F.{}, x)
    fractional_max_pool3d | 1,2,4,4,4 | fractional(F.{}, x)
    reflection_pad1d | 1,2,4 | F.pad(x, (1, 1), "reflect")
    reflection_pad2d | 1,2,4,4 | F.pad(x, (1, 1, 1, 1), "reflect")
    replication_pad1d | 1,2,4 | F.pad(x, (1, 1), mode="replicate")
    replication_pad2d | 1,2,4,4 | F.pad(x, (1, 1, 1, 1), mode="replicate")
    replication_pad3d | 1,2,4,4,4 | F.pad(x, (1,) * 6, mode="replicate")
    quantile nanquantile | 9 | torch.{}(x, 0.3)
    polar | 4 4 | torch.polar(x, a)
    view_as_complex | 4,2 | torch.view_as_complex(x)
    stft | 16 | torch.stft(x, 4, window=torch.ones(4), return_complex=True)
    fake_quantize_per_tensor_affine | 2,3 | torch.{}(x, 0.1, 0, -128, 127)
    cholesky_solve triangular_solve | 3,2 3,3 | torch.{}(x, spread(a))
    lu_solve | 3,2 3,3 | torch.lu_solve(x, *linalg.lu_factor(spread(a)))
    orgqr | 4,3 3 | torch.orgqr(x, a)
    ormqr | 4,3 3 4,2 | torch.ormqr(x, a, b)
    linalg_householder_product | 4,3 3 | linalg.{}(x, a)
    linalg_lstsq | 4,3 4,2 | linalg.lstsq(x, a).solution
    linalg_solve | 3,3 3,2 | linalg.solve(spread(x), a)
    linalg_tensorinv | 6,6 | linalg.{}(spread(x).reshape(6, 2, 3), ind=1)
    linalg_tensorsolve | 6,6 6 | linalg.{}(spread(x).reshape(6, 2, 3), a)
    stack cat | 3 3 | torch.{}((x, a))
    index_copy | 2,3 2,3 | torch.index_copy(x, 0, labels(x), a)
    trace inverse pinverse svd qr geqrf _lu_with_info | 4,4 | torch.{}(spread(x))
    cholesky cholesky_inverse | 4,4 | torch.{}(spread(x))
    linalg_cholesky linalg_cholesky_ex linalg_cond | 4,4 | linalg.{}(spread(x))
    linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv | 4,4 | linalg.{}(spread(x))
    linalg_inv_ex linalg_matrix_rank linalg_qr linalg_svd | 4,4 | linalg.{}(spread(x))
    linalg_eig linalg_svdvals | 4,4 | linalg.{}(spread(x))
""")
)
CUDA = {name: SHARED[name] for name in KINDS["cuda"] if name in SHARED} | calls("""
    mv | 2,3 3 | torch.mv(x, a)
    addmv | 2,3 3 2 | torch.addmv(b, x, a)
    addr | 2 3 2,3 | torch.addr(b, x, a)
    convolution | 2,3,8 4,3,3 4 | torch.{}(x, a, b, (1,), (0,), (1,), False, (0,), 1)
    native_layer_norm | 2,3 | torch.native_layer_norm(x, (3,), None, None, 0)
    softmax log_softmax | 2,3 | F.{}(x, -1)
    special_softmax special_log_softmax special_logsumexp | 2,3 | special.{}(x, -1)
    softplus | 2,3 | F.softplus(x)
    logsumexp cumsum cumprod | 2,3 | torch.{}(x, 1)
    pow __pow__ | 2,3 | x**2
    __rpow__ | 2,3 | 2**x
    __rdiv__ | 2,3 | x.__rdiv__(2)
    __rtruediv__ | 2,3 | 2 / positive(x)
    frobenius_norm | 2,3 | torch.frobenius_norm(x, (0, 1))
    nuclear_norm | 2,3 | torch.nuclear_norm(x.float())
    linalg_norm linalg_vector_norm linalg_matrix_norm | 2,3 | linalg.{}(x)
    renorm | 2,3 | torch.renorm(x, 2, 0, 1.0)
    pdist | 2,3 | F.pdist(x)
    cosine_similarity | 2,3 2,3 | F.{}(x, a)
    dist atan2 arctan2 cross | 2,3 2,3 | torch.{}(x, a)
    addcdiv addcmul | 2,3 2,3 2,3 | torch.{}(x, a, b)
    dot vdot | 3 3 | torch.{}(x, a)
    index_put | 2,3 2,3 | x.index_put((labels(x),), a)
    scatter_add | 2,3 2,3 | x.scatter_add(0, zeros(x), a)
    upsample_nearest1d | 1,2,4 | resized(x)
    upsample_nearest2d | 1,2,4,4 | resized(x)
    upsample_nearest3d | 1,2,4,4,4 | resized(x)
    _upsample_nearest_exact1d | 1,2,4 | resized(x, mode="nearest-exact")
    _upsample_nearest_exact2d | 1,2,4,4 | resized(x, mode="nearest-exact")
    _upsample_nearest_exact3d | 1,2,4,4,4 | resized(x, mode="nearest-exact")
    upsample_linear1d | 1,2,4 | resized(x, mode="linear")
    upsample_bilinear2d | 1,2,4,4 | resized(x, mode="bilinear")
    upsample_trilinear3d | 1,2,4,4,4 | resized(x, mode="trilinear")
    upsample_bicubic2d | 1,2,4,4 | resized(x, mode="bicubic")
    _upsample_bilinear2d_aa | 1,2,4,4 | resized(x, mode="bilinear", antialias=True)
    _upsample_bicubic2d_aa | 1,2,4,4 | resized(x, mode="bicubic", antialias=True)
    exp expm1 sinh cosh tan sum square norm | 2,3 | torch.{}(x)
    log log10 log1p log2 reciprocal rsqrt | 2,3 | torch.{}(positive(x))
    acos arccos asin arcsin erfinv | 2,3 | torch.{}(x.sigmoid())
    special_expm1 special_log1p special_erfinv | 2,3 | special.{}(x.sigmoid())
""")
COMPOSITE = calls("""
    cov corrcoef | 3,4 | torch.{}(x)
    matrix_power | 3,3 | torch.{}(x, 2)
    linalg_matrix_power | 3,3 | linalg.{}(x, 2)
    sum_to_size | 2,3 | x.sum_to_size(1, 3)
    trapz trapezoid cumulative_trapezoid | 2,3 | torch.{}(x)
    pairwise_distance | 2,3 2,3 | F.{}(x, a)
    fft_ihfft2 | 4,4 | fft.{}(x)
    linalg_vander | 3 | linalg.{}(x)
""")
LATER = calls("linalg_matrix_sqrth | 3,3 | linalg.{}(spread(x))")
MISSING = {
    name
    for name in ("cholesky", "qr", "linalg_polar", "linalg_matrix_sqrth")
    if not hasattr(torch.ops.aten, name)
}
"""Ops that this torch does not have yet, or not any more."""
UNLISTED = calls("""
    add | 2,3 2,3 | torch.add(x, a)
    mul | 2,3 3 | x * a
    mv | 2,3 | torch.mv(x, x[0])
    dot | 3 | torch.dot(x, x)
    outer | 2 3 | torch.outer(x, a)
    softmax log_softmax | 2,3 | F.{}(x, -1)
    exp sum norm | 2,3 | torch.{}(x)
    gelu | 2,3 | F.gelu(x)
    where | 2,3 2,3 | torch.where(a > 0, x, a)
    avg_pool2d max_pool2d | 1,2,4,4 | F.{}(x, 2)
    interpolate | 1,2,4,4 | resized(x)
    pad | 1,2,4,4 | F.pad(x, (1, 1))
    pad_circular | 1,2,4,4 | F.pad(x, (1, 1, 1, 1), "circular")
    one_number | 3 3 | torch.inner(x, a.to(x.dtype))
    and_one | 2,3 2,3 | torch.tensordot(x, a.to(x.dtype), ([0, 1], [0, 1]))
    no_sum | 2 3 | torch.einsum("i,j->ij", x, a)
""")
PYTHON = {
    name: (SHARED | UNLISTED)[name]
    for name in ("embedding", "embedding_bag", "interpolate", "pad", "cross_entropy")
} | calls("""
    celu normalize silu tanhshrink | 2,4 | F.{}(x)
    softmax log_softmax | 2,3 | F.{}(x, -1)
    dropout alpha_dropout | 1,2,4,4 | F.{}(x, 0.5, False)
    grid_sample | 1,2,4,4 | F.grid_sample(x, places(x), "bilinear", "zeros", False)
    gaussian_nll_loss | 2,3 2,3 | F.{}(x, a, 1.0)
    triplet_margin_with_distance_loss | 2,3 2,3 2,3 | F.{}(x, a, b)
    fold | 1,8,9 | F.fold(x, (4, 4), 2)
    unfold local_response_norm | 1,2,4,4 | F.{}(x, 2)
    max_pool3d_with_indices adaptive_avg_pool3d | 1,2,4,4,4 | F.{}(x, 2)
    lp_pool2d | 1,2,4,4 | F.lp_pool2d(x, 2.0, 2)
    fractional_max_pool2d_with_indices | 1,2,4,4 | fractional(F.{}, x)
    multi_head_attention_forward | 3,1,4 12,4 12 4,4 4 | heads(x, a, b, c, d)
""")
if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    PYTHON |= calls(
        "linear_cross_entropy | 2,3 4,3 | F.{}(x, a.to(x.dtype), labels(x))"
    )
"""Functions that `torch.nn.functional` defines in Python."""

UNFAKED = """
    chain_matmul conv_tbc lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell kl_div margin_ranking_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss bilinear grid_sampler cov corrcoef
    linalg_pinv affine_grid_generator renorm pdist _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d embedding_bag fft_ihfft2
    linalg_vander
""".split()
"""What needs a real GPU, or has no batching rule."""
