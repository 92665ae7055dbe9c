"""Calls of the ops of autocast's lists, by the names in the lists.

A call is the shapes of its tensors and a function of them; the first tensor comes in
the dtype of the test, and differs from sample to sample, the others are float32.
"""

import torch
from torch import fft, linalg, special
from torch.nn import functional as F

from vgrad.precision import KINDS


def labels(x):
    return torch.tensor([1, 0], device=x.device)


def zeros(x, *shape):
    return torch.zeros(shape or (2, 3), dtype=torch.long, device=x.device)


def halves(x, *shape):
    return torch.full(shape or (2, 3), 0.5, device=x.device)


def ones(x, *shape):
    return torch.ones(shape or (2, 3), device=x.device)


def two(x):
    return ones(x, 2)


def positive(x):
    return x.abs() + 1


def spread(x):
    """Make a matrix with well separated eigenvalues, positive definite."""
    apart = torch.diag(torch.arange(1.0, 1 + len(x), device=x.device))
    return x @ x.mT / 8 + apart.to(x.dtype)


def spelled(names, module, *shapes, options=(), before=lambda x: x, prefix=""):
    """Call functions by their names in a module; options may be functions of x."""

    def call(name):
        def run(x, *rest):
            more = (each(x) if callable(each) else each for each in options)
            return getattr(module, name)(before(x), *rest, *more)

        return run

    return {prefix + name: (*shapes, call(name)) for name in names.split()}


def sides(n, batch=1, channels=2):
    return batch, channels, *(4,) * n


def fractional(n, suffix=""):
    op = getattr(F, f"fractional_max_pool{n}d{suffix}")

    def call(x):
        drawn = halves(x, 1, 2, n).to(x.dtype)
        return op(x, 2, output_size=2, _random_samples=drawn)

    return sides(n), call


TARGETS = torch.ones(2, 2, dtype=torch.long)
LENGTHS = torch.tensor([5, 5]), torch.tensor([2, 2])
STEPS = (True, 1, 0.0, False, False, False)
"""Biases, one layer, no dropout, evaluation, one direction, time first."""


def recurrent(op, gates, *lead):
    """Call a recurrent kernel, through time or one step, of 3 -> 4 features."""

    def call(x, w_ih, w_hh, b_ih, b_hh, h):
        hidden = (h, h) if gates == 4 else h
        if len(lead) == 1:
            return op(x, hidden, w_ih, w_hh, b_ih, b_hh)
        return op(x, hidden, [w_ih, w_hh, b_ih, b_hh], *STEPS)

    weights = (4 * gates, 3), (4 * gates, 4), (4 * gates,), (4 * gates,)
    return (*lead, 3), *weights, (2, 4) if len(lead) == 1 else (1, 2, 4), call


def grid(x, op, *options):
    at = torch.linspace(-0.9, 0.9, 2 * 9, device=x.device).reshape(1, 3, 3, 2)
    return op(x, at, *options)


MATRIX, ROWS, PAIR = (2, 3), (3,), ((2, 3), (2, 3))
PRODUCTS = {
    "linear": (MATRIX, (4, 3), (4,), F.linear),
    **spelled("matmul mm", torch, MATRIX, (3, 4)),
    **spelled("matmul", linalg, MATRIX, (3, 4), prefix="linalg_"),
    "__matmul__": (MATRIX, (3, 4), lambda x, w: x @ w),
    "__rmatmul__": (MATRIX, (4, 2), lambda x, w: x.__rmatmul__(w)),
    "bmm": ((2, 2, 3), (2, 3, 4), torch.bmm),
    "addmm": (MATRIX, (3, 4), (4,), lambda x, w, b: torch.addmm(b, x, w)),
    "addbmm": ((2, 2, 3), (2, 3, 4), (2, 4), lambda x, w, b: torch.addbmm(b, x, w)),
    "baddbmm": ((2, 2, 3), (2, 3, 4), (4,), lambda x, w, b: torch.baddbmm(b, x, w)),
    "chain_matmul": (MATRIX, (3, 4), (4, 5), torch.chain_matmul),
    "linalg_multi_dot": (MATRIX, (3, 4), (4,), lambda *m: linalg.multi_dot(m)),
    "linalg_vecdot": (*PAIR, linalg.vecdot),
    "prelu": (MATRIX, (1,), F.prelu),
    **spelled("scaled_dot_product_attention", F, *((2, 2, 3, 4),) * 3),
    **{f"conv{n}d": ((2, 3, *(6,) * n), (4, 3, *(3,) * n), (4,), op)
       for n, op in ((1, F.conv1d), (2, F.conv2d), (3, F.conv3d))},
    **{f"conv_transpose{n}d": ((2, 3, *(4,) * n), (3, 4, *(3,) * n), (4,), op) for n, op
       in ((1, F.conv_transpose1d), (2, F.conv_transpose2d), (3, F.conv_transpose3d))},
    "conv_tbc": ((5, 2, 3), (2, 3, 4), (4,), torch.conv_tbc),
    "einsum": (MATRIX, (4, 3), lambda x, w: torch.einsum("bi,oi->bo", x, w)),
    "tensordot": (MATRIX, (3, 4), lambda x, w: torch.tensordot(x, w, 1)),
    "inner": (MATRIX, (4, 3), torch.inner),
    "bilinear": (MATRIX, (5, 3, 3), (5,), lambda x, w, b: F.bilinear(x, x, w, b)),
}  # fmt: skip

LOSSES = {
    "cross_entropy_loss": (MATRIX, lambda x: F.cross_entropy(x, labels(x))),
    **spelled("nll_loss multi_margin_loss", F, MATRIX, options=(labels,)),
    **spelled("nll_loss_nd", torch._C._nn, MATRIX, options=(labels,)),
    "nll_loss2d":
        ((2, 3, 2, 2), lambda x: torch._C._nn.nll_loss2d(x, zeros(x, 2, 2, 2))),
    **spelled("mse_loss l1_loss smooth_l1_loss huber_loss", F, *PAIR),
    "kl_div": (MATRIX, lambda x: F.kl_div(x, halves(x), reduction="batchmean")),
    **spelled("poisson_nll_loss hinge_embedding_loss soft_margin_loss", F, MATRIX,
              options=(ones,)),
    **spelled("cosine_embedding_loss", F, *PAIR, options=(two,)),
    **spelled("margin_ranking_loss", F, (2,), (2,), options=(two,)),
    **spelled("triplet_margin_loss", F, MATRIX, *PAIR),
    **spelled("multilabel_margin_loss", F, MATRIX, options=(zeros,)),
    **spelled("binary_cross_entropy_with_logits", F, MATRIX, options=(halves,)),
    "cdist": (MATRIX, (4, 3), torch.cdist),
}  # fmt: skip

GRIDS = {
    "grid_sampler": (sides(2), lambda x: grid(x, torch.grid_sampler, 0, 0, False)),
    "affine_grid_generator":
        ((1, 2, 3), lambda x: F.affine_grid(x, [1, 1, 4, 4], align_corners=False)),
}  # fmt: skip

CPU_ONLY = {
    "binary_cross_entropy":
        (MATRIX, lambda x: F.binary_cross_entropy(x.sigmoid(), halves(x))),
    "ctc_loss": ((5, 2, 4), lambda x: F.ctc_loss(x.log_softmax(2), TARGETS, *LENGTHS)),
    "grid_sampler_2d":
        (sides(2), lambda x: grid(x, torch.grid_sampler_2d, 0, 0, False)),
    "grid_sampler_3d":
        ((1, 1, 2, 2, 2),
         lambda x: torch.grid_sampler_3d(x, torch.zeros(1, 2, 2, 2, 3), 0, 0, False)),
    **spelled("prod", torch, MATRIX, options=(1,)),
    **spelled("avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d",
              F, sides(3), options=(2,)),
    "max_unpool2d":
        ((1, 1, 2, 2),
         lambda x: F.max_unpool2d(x, torch.tensor([[[[0, 2], [8, 10]]]]), 2)),
    "max_unpool3d":
        ((1, 1, 1, 1, 2), lambda x: F.max_unpool3d(x, torch.tensor([[[[[0, 2]]]]]), 2)),
    **{f"fractional_max_pool{n}d": fractional(n) for n in (2, 3)},
    **{f"reflection_pad{n}d": (sides(n), lambda x, n=n: F.pad(x, (1, 1) * n, "reflect"))
       for n in (1, 2)},
    **{f"replication_pad{n}d":
       (sides(n), lambda x, n=n: F.pad(x, (1, 1) * n, mode="replicate"))
       for n in (1, 2, 3)},
    **spelled("quantile nanquantile", torch, (9,), options=(0.3,)),
    "polar": ((4,), (4,), torch.polar),
    "view_as_complex": ((4, 2), torch.view_as_complex),
    "stft":
        ((16,), lambda x: torch.stft(x, 4, window=torch.ones(4), return_complex=True)),
    **spelled("fake_quantize_per_tensor_affine", torch, MATRIX,
              options=(0.1, 0, -128, 127)),
    **{name: ((3, 2), (3, 3), lambda x, w, op=op: op(x, spread(w)))
       for name, op in (("cholesky_solve", torch.cholesky_solve),
                        ("triangular_solve", torch.triangular_solve))},
    "lu_solve": ((3, 2), (3, 3),
                 lambda x, w: torch.lu_solve(x, *linalg.lu_factor(spread(w)))),
    "orgqr": ((4, 3), (3,), torch.orgqr),
    "ormqr": ((4, 3), (3,), (4, 2), torch.ormqr),
    "linalg_householder_product": ((4, 3), (3,), linalg.householder_product),
    "linalg_lstsq": ((4, 3), (4, 2), lambda x, y: linalg.lstsq(x, y).solution),
    "linalg_solve": ((3, 3), (3, 2), lambda x, w: linalg.solve(spread(x), w)),
    "linalg_tensorinv":
        ((6, 6), lambda x: linalg.tensorinv(spread(x).reshape(6, 2, 3), ind=1)),
    "linalg_tensorsolve":
        ((6, 6), (6,), lambda x, w: linalg.tensorsolve(spread(x).reshape(6, 2, 3), w)),
    "stack": (ROWS, ROWS, lambda *x: torch.stack(x)),
    "cat": (ROWS, ROWS, lambda *x: torch.cat(x)),
    "index_copy": (*PAIR, lambda x, w: torch.index_copy(x, 0, labels(x), w)),
    **spelled(
        "trace inverse pinverse cholesky cholesky_inverse svd qr geqrf _lu_with_info",
        torch, (4, 4), before=spread),
    **spelled(
        """cholesky cholesky_ex cond eig eigh eigvals eigvalsh inv inv_ex matrix_rank qr
        svd svdvals""",
        linalg, (4, 4), before=spread, prefix="linalg_"),
    **{name: ((4, 4), getattr(fft, name.removeprefix("fft_")))
       for name in KINDS["cpu"] if name.startswith("fft_")},
}  # fmt: skip

NORMS = {
    "layer_norm": (MATRIX, ROWS, ROWS, lambda x, w, b: F.layer_norm(x, (3,), w, b)),
    "rms_norm": (MATRIX, ROWS, lambda x, w: F.rms_norm(x, (3,), w)),
    "group_norm": ((2, 4, 5), (4,), (4,), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "instance_norm":
        ((2, 4, 5), (4,), (4,), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "batch_norm":
        ((2, 4, 5), (4,), (4,), lambda x, w, b: F.batch_norm(x, b, b.abs() + 1, w, b)),
}  # fmt: skip

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
STEPPED = {name: recurrent(getattr(torch, name), n, 5, 2) for name, n in GATES.items()}
STEPPED |= {
    f"{name}_cell": recurrent(getattr(torch, f"{name}_cell"), n, 2)
    for name, n in GATES.items()
}

COMPOSITE = {
    **spelled("cov corrcoef", torch, (3, 4)),
    **spelled("matrix_power", torch, (3, 3), options=(2,)),
    **spelled("matrix_power", linalg, (3, 3), options=(2,), prefix="linalg_"),
    **spelled("pinv", linalg, (3, 3), before=spread, prefix="linalg_"),
}

SHARED = {**PRODUCTS, **LOSSES, **GRIDS, **NORMS, **STEPPED, **COMPOSITE}
CPU = {**SHARED, **CPU_ONLY}


def resized(n, **options):
    return sides(n), lambda x: F.interpolate(x, scale_factor=2, **options)


CUDA = {
    **{name: SHARED[name] for name in KINDS["cuda"] if name in SHARED},
    "mv": (MATRIX, ROWS, torch.mv),
    "addmv": (MATRIX, ROWS, (2,), lambda x, w, b: torch.addmv(b, x, w)),
    "addr": ((2,), ROWS, MATRIX, lambda x, w, b: torch.addr(b, x, w)),
    "convolution":
        ((2, 3, 8), (4, 3, 3), (4,),
         lambda *x: torch.convolution(*x, (1,), (0,), (1,), False, (0,), 1)),
    "native_layer_norm":
        (MATRIX, lambda x: torch.native_layer_norm(x, (3,), None, None, 0)),
    **spelled("softmax log_softmax", F, MATRIX, options=(-1,)),
    **spelled("softmax log_softmax logsumexp", special, MATRIX, options=(-1,),
              prefix="special_"),
    "softplus": (MATRIX, F.softplus),
    **spelled("logsumexp cumsum cumprod prod", torch, MATRIX, options=(1,)),
    "pow": (MATRIX, lambda x: x**2),
    "__pow__": (MATRIX, lambda x: x**2),
    "__rpow__": (MATRIX, lambda x: 2**x),
    "__rdiv__": (MATRIX, lambda x: x.__rdiv__(2)),
    "__rtruediv__": (MATRIX, lambda x: 2 / positive(x)),
    "frobenius_norm": (MATRIX, lambda x: torch.frobenius_norm(x, (0, 1))),
    "nuclear_norm": (MATRIX, lambda x: torch.nuclear_norm(x.float())),
    **spelled("norm vector_norm matrix_norm", linalg, MATRIX, prefix="linalg_"),
    **spelled("renorm", torch, MATRIX, options=(2, 0, 1.0)),
    "pdist": (MATRIX, F.pdist),
    **spelled("cosine_similarity pairwise_distance", F, *PAIR),
    **spelled("dist atan2 arctan2 cross", torch, *PAIR),
    **spelled("addcdiv addcmul", torch, MATRIX, *PAIR),
    **spelled("dot vdot", torch, ROWS, ROWS),
    "index_put": (*PAIR, lambda x, w: x.index_put((labels(x),), w)),
    "scatter_add": (*PAIR, lambda x, w: x.scatter_add(0, zeros(x), w)),
    "sum_to_size": (MATRIX, lambda x: x.sum_to_size(1, 3)),
    **{f"upsample_nearest{n}d": resized(n) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": resized(n, mode="nearest-exact")
       for n in (1, 2, 3)},
    "upsample_linear1d": resized(1, mode="linear"),
    "upsample_bilinear2d": resized(2, mode="bilinear"),
    "upsample_trilinear3d": resized(3, mode="trilinear"),
    "upsample_bicubic2d": resized(2, mode="bicubic"),
    "_upsample_bilinear2d_aa": resized(2, mode="bilinear", antialias=True),
    "_upsample_bicubic2d_aa": resized(2, mode="bicubic", antialias=True),
    **spelled("""exp expm1 sinh cosh tan sum square norm trapz trapezoid
              cumulative_trapezoid""", torch, MATRIX),
    **spelled("log log10 log1p log2 reciprocal rsqrt", torch, MATRIX, before=positive),
    **spelled("acos arccos asin arcsin erfinv", torch, MATRIX, before=torch.sigmoid),
    **spelled("expm1 log1p erfinv", special, MATRIX, before=torch.sigmoid,
              prefix="special_"),
}  # fmt: skip

UNLISTED = {
    "add": (*PAIR, torch.add),
    "mul": (MATRIX, ROWS, lambda x, w: x * w),
    "mv": (MATRIX, lambda x: torch.mv(x, x[0])),
    "dot": (ROWS, lambda x: torch.dot(x, x)),
    "outer": ((2,), ROWS, torch.outer),
    **spelled("softmax log_softmax", F, MATRIX, options=(-1,)),
    **spelled("exp sum norm", torch, MATRIX),
    "gelu": (MATRIX, F.gelu),
    "where": (*PAIR, lambda x, w: torch.where(w > 0, x, w)),
    "embedding": ((4, 3), lambda x: F.embedding(labels(x), x)),
    "embedding_bag": ((4, 3), lambda x: F.embedding_bag(labels(x)[None], x)),
    **spelled("avg_pool2d max_pool2d", F, sides(2), options=(2,)),
    "interpolate": resized(2),
    "pad": (sides(2), lambda x: F.pad(x, (1, 1))),
    "pad_circular": (sides(2), lambda x: F.pad(x, (1, 1, 1, 1), "circular")),
    "one number": (ROWS, ROWS, lambda x, w: torch.inner(x, w.to(x.dtype))),
    "and one":
        (*PAIR, lambda x, w: torch.tensordot(x, w.to(x.dtype), ([0, 1], [0, 1]))),
    "no sum": ((2,), ROWS, lambda x, w: torch.einsum("i,j->ij", x, w)),
}  # fmt: skip

UNFAKED = """
    chain_matmul conv_tbc lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell kl_div margin_ranking_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss bilinear grid_sampler cov corrcoef
    linalg_pinv affine_grid_generator renorm pdist _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
""".split()
"""What needs a real GPU, or has no batching rule."""

PYTHON = {
    **spelled("celu normalize silu tanhshrink", F, (2, 4)),
    **spelled("softmax log_softmax", F, MATRIX, options=(-1,)),
    **spelled("dropout alpha_dropout", F, sides(2), options=(0.5, False)),
    "grid_sample":
        (sides(2), lambda x: grid(x, F.grid_sample, "bilinear", "zeros", False)),
    "cross_entropy": LOSSES["cross_entropy_loss"],
    **spelled("gaussian_nll_loss", F, *PAIR, options=(1.0,)),
    **spelled("triplet_margin_with_distance_loss", F, MATRIX, *PAIR),
    **{name: UNLISTED[name] for name in ("embedding", "embedding_bag", "pad")},
    "interpolate": UNLISTED["interpolate"],
    "fold": ((1, 8, 9), lambda x: F.fold(x, (4, 4), 2)),
    **spelled("unfold local_response_norm", F, sides(2), options=(2,)),
    **spelled("max_pool3d_with_indices adaptive_avg_pool3d", F, sides(3), options=(2,)),
    **spelled("lp_pool2d", F, sides(2), options=(2.0, 2)),
    "fractional_max_pool2d_with_indices": fractional(2, "_with_indices"),
    "multi_head_attention_forward": (
        (3, 1, 4), (12, 4), (12,), (4, 4), (4,),
        lambda x, w_in, b_in, w_out, b_out: F.multi_head_attention_forward(
            *(x, x, x, 4, 2, w_in, b_in, None, None, False, 0.0, w_out, b_out)
        ),
    ),
}  # fmt: skip
if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    PYTHON["linear_cross_entropy"] = (
        *(MATRIX, (4, 3)),
        lambda x, w: F.linear_cross_entropy(x, w.to(x.dtype), labels(x)),
    )
"""Functions that `torch.nn.functional` defines in Python."""
