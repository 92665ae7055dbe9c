"""Calls of the ops of autocast's lists, by the names in the lists.

A call is the shapes of its tensors and a function of them; the first tensor comes in
the dtype of the test, and differs from sample to sample, the others are float32.
"""

import torch
from torch.nn import functional as F

from vgrad.precision import KINDS


def labels(x):
    return torch.tensor([1, 0], device=x.device)


def zeros(x, *shape):
    return torch.zeros(shape, dtype=torch.long, device=x.device)


def halves(x, *shape):
    return torch.full(shape or (2, 3), 0.5, device=x.device)


def ones(x, *shape):
    return torch.ones(shape or (2, 3), device=x.device)


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


def spread(x):
    """Make a matrix with well separated eigenvalues, positive definite."""
    return x @ x.mT / 8 + torch.diag(torch.arange(1.0, 1 + len(x), device=x.device)).to(
        x.dtype
    )


def spelled(names, module, shape, *options, before=lambda x: x, prefix=""):
    """Call functions of one input by their names in a module."""
    return {
        prefix + name: (
            shape,
            lambda x, n=name: getattr(module, n)(before(x), *options),
        )
        for name in names.split()
    }


def grid(x, op, *options):
    at = torch.linspace(-0.9, 0.9, 2 * 9, device=x.device).reshape(1, 3, 3, 2)
    return op(x, at, *options)


PRODUCTS = {
    "linear": ((2, 3), (4, 3), (4,), F.linear),
    "matmul": ((2, 3), (3, 4), torch.matmul),
    "__matmul__": ((2, 3), (3, 4), lambda x, w: x @ w),
    "__rmatmul__": ((2, 3), (4, 2), lambda x, w: x.__rmatmul__(w)),
    "linalg_matmul": ((2, 3), (3, 4), torch.linalg.matmul),
    "mm": ((2, 3), (3, 4), torch.mm),
    "bmm": ((2, 2, 3), (2, 3, 4), torch.bmm),
    "addmm": ((2, 3), (3, 4), (4,), lambda x, w, b: torch.addmm(b, x, w)),
    "addbmm": ((2, 2, 3), (2, 3, 4), (2, 4), lambda x, w, b: torch.addbmm(b, x, w)),
    "baddbmm": ((2, 2, 3), (2, 3, 4), (4,), lambda x, w, b: torch.baddbmm(b, x, w)),
    "chain_matmul": ((2, 3), (3, 4), (4, 5), torch.chain_matmul),
    "linalg_multi_dot": ((2, 3), (3, 4), (4,), lambda *m: torch.linalg.multi_dot(m)),
    "linalg_vecdot": ((2, 3), (2, 3), torch.linalg.vecdot),
    "prelu": ((2, 3), (1,), F.prelu),
    "scaled_dot_product_attention": (
        *((2, 2, 3, 4),) * 3,
        F.scaled_dot_product_attention,
    ),
    "conv1d": ((2, 3, 8), (4, 3, 3), (4,), F.conv1d),
    "conv2d": ((2, 3, 6, 6), (4, 3, 3, 3), (4,), F.conv2d),
    "conv3d": ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,), F.conv3d),
    "conv_tbc": ((5, 2, 3), (2, 3, 4), (4,), torch.conv_tbc),
    "conv_transpose1d": ((2, 3, 8), (3, 4, 3), (4,), F.conv_transpose1d),
    "conv_transpose2d": ((2, 3, 6, 6), (3, 4, 3, 3), (4,), F.conv_transpose2d),
    "conv_transpose3d": ((1, 2, 4, 4, 4), (2, 3, 2, 2, 2), (3,), F.conv_transpose3d),
    "einsum": ((2, 3), (4, 3), lambda x, w: torch.einsum("bi,oi->bo", x, w)),
    "tensordot": ((2, 3), (3, 4), lambda x, w: torch.tensordot(x, w, 1)),
    "inner": ((2, 3), (4, 3), torch.inner),
    "bilinear": ((2, 3), (5, 3, 3), (5,), lambda x, w, b: F.bilinear(x, x, w, b)),
}

LOSSES = {
    "cross_entropy_loss": ((2, 3), lambda x: F.cross_entropy(x, labels(x))),
    "nll_loss": ((2, 3), lambda x: F.nll_loss(x, labels(x))),
    "nll_loss_nd": ((2, 3), lambda x: torch._C._nn.nll_loss_nd(x, labels(x))),
    "nll_loss2d":
        ((2, 3, 2, 2), lambda x: torch._C._nn.nll_loss2d(x, zeros(x, 2, 2, 2))),
    "mse_loss": ((2, 3), (2, 3), F.mse_loss),
    "l1_loss": ((2, 3), (2, 3), F.l1_loss),
    "smooth_l1_loss": ((2, 3), (2, 3), F.smooth_l1_loss),
    "huber_loss": ((2, 3), (2, 3), F.huber_loss),
    "kl_div": ((2, 3), lambda x: F.kl_div(x, halves(x), reduction="batchmean")),
    "poisson_nll_loss": ((2, 3), lambda x: F.poisson_nll_loss(x, ones(x))),
    "cosine_embedding_loss":
        ((2, 3), (2, 3), lambda x, y: F.cosine_embedding_loss(x, y, ones(x, 2))),
    "hinge_embedding_loss": ((2, 3), lambda x: F.hinge_embedding_loss(x, ones(x))),
    "margin_ranking_loss":
        ((2,), (2,), lambda x, y: F.margin_ranking_loss(x, y, ones(x, 2))),
    "soft_margin_loss": ((2, 3), lambda x: F.soft_margin_loss(x, ones(x))),
    "triplet_margin_loss": ((2, 3), (2, 3), (2, 3), F.triplet_margin_loss),
    "multi_margin_loss": ((2, 3), lambda x: F.multi_margin_loss(x, labels(x))),
    "multilabel_margin_loss":
        ((2, 3), lambda x: F.multilabel_margin_loss(x, zeros(x, 2, 3))),
    "binary_cross_entropy_with_logits":
        ((2, 3), lambda x: F.binary_cross_entropy_with_logits(x, halves(x))),
    "cdist": ((2, 3), (4, 3), torch.cdist),
}  # fmt: skip

GRIDS = {
    "grid_sampler": ((1, 2, 4, 4), lambda x: grid(x, torch.grid_sampler, 0, 0, False)),
    "affine_grid_generator": (
        (1, 2, 3),
        lambda x: F.affine_grid(x, [1, 1, 4, 4], align_corners=False),
    ),
}

CPU_ONLY = {
    "binary_cross_entropy":
        ((2, 3), lambda x: F.binary_cross_entropy(x.sigmoid(), halves(x))),
    "ctc_loss": ((5, 2, 4), lambda x: F.ctc_loss(x.log_softmax(2), TARGETS, *LENGTHS)),
    "grid_sampler_2d":
        ((1, 2, 4, 4), lambda x: grid(x, torch.grid_sampler_2d, 0, 0, False)),
    "grid_sampler_3d":
        ((1, 1, 2, 2, 2),
         lambda x: torch.grid_sampler_3d(x, torch.zeros(1, 2, 2, 2, 3), 0, 0, False)),
    "prod": ((2, 3), lambda x: x.prod(1)),
    "avg_pool3d": ((1, 2, 4, 4, 4), lambda x: F.avg_pool3d(x, 2)),
    "adaptive_avg_pool3d": ((1, 2, 4, 4, 4), lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive_max_pool3d": ((1, 2, 4, 4, 4), lambda x: F.adaptive_max_pool3d(x, 2)),
    "max_pool3d": ((1, 2, 4, 4, 4), lambda x: F.max_pool3d(x, 2)),
    "max_unpool2d":
        ((1, 1, 2, 2),
         lambda x: F.max_unpool2d(x, torch.tensor([[[[0, 2], [8, 10]]]]), 2)),
    "max_unpool3d":
        ((1, 1, 1, 1, 2), lambda x: F.max_unpool3d(x, torch.tensor([[[[[0, 2]]]]]), 2)),
    "fractional_max_pool2d": (
        (1, 2, 4, 4),
        lambda x: F.fractional_max_pool2d(
            x, 2, output_size=2, _random_samples=halves(x, 1, 2, 2).to(x.dtype)
        ),
    ),
    "fractional_max_pool3d": (
        (1, 2, 4, 4, 4),
        lambda x: F.fractional_max_pool3d(
            x, 2, output_size=2, _random_samples=halves(x, 1, 2, 3).to(x.dtype)
        ),
    ),
    "reflection_pad1d": ((1, 2, 4), lambda x: F.pad(x, (1, 1), "reflect")),
    "reflection_pad2d": ((1, 2, 4, 4), lambda x: F.pad(x, (1,) * 4, "reflect")),
    "replication_pad1d": ((1, 2, 4), lambda x: F.pad(x, (1, 1), mode="replicate")),
    "replication_pad2d": ((1, 2, 4, 4), lambda x: F.pad(x, (1,) * 4, "replicate")),
    "replication_pad3d": ((1, 2, 4, 4, 4), lambda x: F.pad(x, (1,) * 6, "replicate")),
    "quantile": ((9,), lambda x: torch.quantile(x, 0.3)),
    "nanquantile": ((9,), lambda x: torch.nanquantile(x, 0.3)),
    "polar": ((4,), (4,), torch.polar),
    "view_as_complex": ((4, 2), torch.view_as_complex),
    "stft":
        ((16,), lambda x: torch.stft(x, 4, window=torch.ones(4), return_complex=True)),
    "fake_quantize_per_tensor_affine":
        ((2, 3), lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)),
    "cholesky_solve": ((3, 2), (3, 3), lambda x, w: torch.cholesky_solve(x, spread(w))),
    "orgqr": ((4, 3), (3,), torch.orgqr),
    "ormqr": ((4, 3), (3,), (4, 2), torch.ormqr),
    "lu_solve":
        ((3, 2), (3, 3),
         lambda x, w: torch.lu_solve(x, *torch.linalg.lu_factor(spread(w)))),
    "triangular_solve":
        ((3, 2), (3, 3), lambda x, w: torch.triangular_solve(x, spread(w))),
    "linalg_householder_product": ((4, 3), (3,), torch.linalg.householder_product),
    "linalg_lstsq": ((4, 3), (4, 2), lambda x, y: torch.linalg.lstsq(x, y).solution),
    "linalg_solve": ((3, 3), (3, 2), lambda x, w: torch.linalg.solve(spread(x), w)),
    "linalg_tensorinv":
        ((6, 6), lambda x: torch.linalg.tensorinv(spread(x).reshape(6, 2, 3), ind=1)),
    "linalg_tensorsolve":
        ((6, 6), (6,),
         lambda x, w: torch.linalg.tensorsolve(spread(x).reshape(6, 2, 3), w)),
    "stack": ((3,), (3,), lambda *x: torch.stack(x)),
    "cat": ((3,), (3,), lambda *x: torch.cat(x)),
    "index_copy": ((2, 3), (2, 3), lambda x, w: torch.index_copy(x, 0, labels(x), w)),
    **spelled(
        "trace inverse pinverse cholesky cholesky_inverse svd qr geqrf _lu_with_info",
        torch, (4, 4), before=spread),
    **spelled(
        """cholesky cholesky_ex cond eig eigh eigvals eigvalsh inv inv_ex matrix_rank qr
        svd svdvals""",
        torch.linalg, (4, 4), before=spread, prefix="linalg_"),
    **{name: ((4, 4), getattr(torch.fft, name.removeprefix("fft_")))
       for name in KINDS["cpu"] if name.startswith("fft_")},
}  # fmt: skip

NORMS = {
    "layer_norm": ((2, 3), (3,), (3,), lambda x, w, b: F.layer_norm(x, (3,), w, b)),
    "rms_norm": ((2, 3), (3,), lambda x, w: F.rms_norm(x, (3,), w)),
    "group_norm": ((2, 4, 5), (4,), (4,), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "instance_norm":
        ((2, 4, 5), (4,), (4,), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "batch_norm":
        ((2, 4, 5), (4,), (4,), lambda x, w, b: F.batch_norm(x, b, b.abs() + 1, w, b)),
}  # fmt: skip

STEPPED = {
    "lstm": recurrent(torch.lstm, 4, 5, 2),
    "gru": recurrent(torch.gru, 3, 5, 2),
    "rnn_tanh": recurrent(torch.rnn_tanh, 1, 5, 2),
    "rnn_relu": recurrent(torch.rnn_relu, 1, 5, 2),
    "lstm_cell": recurrent(torch.lstm_cell, 4, 2),
    "gru_cell": recurrent(torch.gru_cell, 3, 2),
    "rnn_tanh_cell": recurrent(torch.rnn_tanh_cell, 1, 2),
    "rnn_relu_cell": recurrent(torch.rnn_relu_cell, 1, 2),
}

COMPOSITE = {
    "cov": ((3, 4), torch.cov),
    "corrcoef": ((3, 4), torch.corrcoef),
    "matrix_power": ((3, 3), lambda x: torch.matrix_power(x, 2)),
    "linalg_matrix_power": ((3, 3), lambda x: torch.linalg.matrix_power(x, 2)),
    "linalg_pinv": ((3, 3), lambda x: torch.linalg.pinv(spread(x))),
}

CPU = {**PRODUCTS, **LOSSES, **GRIDS, **CPU_ONLY, **NORMS, **STEPPED, **COMPOSITE}

SHARED = {**PRODUCTS, **LOSSES, **GRIDS, **NORMS, **STEPPED, **COMPOSITE}


def positive(x):
    return x.abs() + 1


def resized(*shape, **options):
    return shape, lambda x: F.interpolate(x, scale_factor=2, **options)


CUDA = {
    **{name: SHARED[name] for name in KINDS["cuda"] if name in SHARED},
    "mv": ((2, 3), (3,), torch.mv),
    "addmv": ((2, 3), (3,), (2,), lambda x, w, b: torch.addmv(b, x, w)),
    "addr": ((2,), (3,), (2, 3), lambda x, w, b: torch.addr(b, x, w)),
    "convolution":
        ((2, 3, 8), (4, 3, 3), (4,),
         lambda *x: torch.convolution(*x, (1,), (0,), (1,), False, (0,), 1)),
    "native_layer_norm":
        ((2, 3), lambda x: torch.native_layer_norm(x, (3,), None, None, 0)),
    "softmax": ((2, 3), lambda x: F.softmax(x, -1)),
    "log_softmax": ((2, 3), lambda x: F.log_softmax(x, -1)),
    "softplus": ((2, 3), F.softplus),
    "logsumexp": ((2, 3), lambda x: x.logsumexp(1)),
    "special_softmax": ((2, 3), lambda x: torch.special.softmax(x, -1)),
    "special_log_softmax": ((2, 3), lambda x: torch.special.log_softmax(x, -1)),
    "special_logsumexp": ((2, 3), lambda x: torch.special.logsumexp(x, -1)),
    "pow": ((2, 3), lambda x: x**2),
    "__pow__": ((2, 3), lambda x: x**2),
    "__rpow__": ((2, 3), lambda x: 2**x),
    "__rdiv__": ((2, 3), lambda x: x.__rdiv__(2)),
    "__rtruediv__": ((2, 3), lambda x: 2 / (x.abs() + 1)),
    "cumsum": ((2, 3), lambda x: x.cumsum(1)),
    "cumprod": ((2, 3), lambda x: x.cumprod(1)),
    "prod": ((2, 3), lambda x: x.prod(1)),
    "norm": ((2, 3), torch.norm),
    "frobenius_norm": ((2, 3), lambda x: torch.frobenius_norm(x, (0, 1))),
    "nuclear_norm": ((2, 3), lambda x: torch.nuclear_norm(x.float())),
    "linalg_norm": ((2, 3), torch.linalg.norm),
    "linalg_vector_norm": ((2, 3), torch.linalg.vector_norm),
    "linalg_matrix_norm": ((2, 3), torch.linalg.matrix_norm),
    "renorm": ((2, 3), lambda x: torch.renorm(x, 2, 0, 1.0)),
    "dist": ((2, 3), (2, 3), torch.dist),
    "pdist": ((2, 3), F.pdist),
    "cosine_similarity": ((2, 3), (2, 3), F.cosine_similarity),
    "pairwise_distance": ((2, 3), (2, 3), F.pairwise_distance),
    "addcdiv": ((2, 3), (2, 3), (2, 3), torch.addcdiv),
    "addcmul": ((2, 3), (2, 3), (2, 3), torch.addcmul),
    "atan2": ((2, 3), (2, 3), torch.atan2),
    "arctan2": ((2, 3), (2, 3), torch.arctan2),
    "cross": ((2, 3), (2, 3), torch.cross),
    "dot": ((3,), (3,), torch.dot),
    "vdot": ((3,), (3,), torch.vdot),
    "index_put": ((2, 3), (2, 3), lambda x, w: x.index_put((labels(x),), w)),
    "scatter_add": ((2, 3), (2, 3), lambda x, w: x.scatter_add(0, zeros(x, 2, 3), w)),
    "sum_to_size": ((2, 3), lambda x: x.sum_to_size(1, 3)),
    "trapz": ((2, 3), torch.trapz),
    "trapezoid": ((2, 3), torch.trapezoid),
    "cumulative_trapezoid": ((2, 3), torch.cumulative_trapezoid),
    "upsample_nearest1d": resized(1, 2, 4),
    "upsample_nearest2d": resized(1, 2, 4, 4),
    "upsample_nearest3d": resized(1, 2, 4, 4, 4),
    "_upsample_nearest_exact1d": resized(1, 2, 4, mode="nearest-exact"),
    "_upsample_nearest_exact2d": resized(1, 2, 4, 4, mode="nearest-exact"),
    "_upsample_nearest_exact3d": resized(1, 2, 4, 4, 4, mode="nearest-exact"),
    "upsample_linear1d": resized(1, 2, 4, mode="linear"),
    "upsample_bilinear2d": resized(1, 2, 4, 4, mode="bilinear"),
    "upsample_trilinear3d": resized(1, 2, 4, 4, 4, mode="trilinear"),
    "upsample_bicubic2d": resized(1, 2, 4, 4, mode="bicubic"),
    "_upsample_bilinear2d_aa": resized(1, 2, 4, 4, mode="bilinear", antialias=True),
    "_upsample_bicubic2d_aa": resized(1, 2, 4, 4, mode="bicubic", antialias=True),
    **spelled("exp expm1 sinh cosh tan sum square", torch, (2, 3)),
    **spelled("log log10 log1p log2 reciprocal rsqrt", torch, (2, 3), before=positive),
    **spelled("acos arccos asin arcsin erfinv", torch, (2, 3), before=torch.sigmoid),
    **spelled("expm1 log1p erfinv", torch.special, (2, 3), before=torch.sigmoid,
              prefix="special_"),
}  # fmt: skip

UNLISTED = {
    "add": ((2, 3), (2, 3), torch.add),
    "mul": ((2, 3), (3,), lambda x, w: x * w),
    "mv": ((2, 3), lambda x: torch.mv(x, x[0])),
    "dot": ((3,), lambda x: torch.dot(x, x)),
    "outer": ((2,), (3,), torch.outer),
    "softmax": ((2, 3), lambda x: F.softmax(x, -1)),
    "log_softmax": ((2, 3), lambda x: F.log_softmax(x, -1)),
    "exp": ((2, 3), torch.exp),
    "sum": ((2, 3), torch.sum),
    "norm": ((2, 3), torch.norm),
    "gelu": ((2, 3), F.gelu),
    "where": ((2, 3), (2, 3), lambda x, w: torch.where(w > 0, x, w)),
    "embedding": ((4, 3), lambda x: F.embedding(labels(x), x)),
    "embedding_bag": ((4, 3), lambda x: F.embedding_bag(labels(x)[None], x)),
    "avg_pool2d": ((1, 2, 4, 4), lambda x: F.avg_pool2d(x, 2)),
    "max_pool2d": ((1, 2, 4, 4), lambda x: F.max_pool2d(x, 2)),
    "interpolate": ((1, 2, 4, 4), lambda x: F.interpolate(x, scale_factor=2)),
    "pad": ((1, 2, 4, 4), lambda x: F.pad(x, (1, 1))),
    "pad_circular": ((1, 2, 4, 4), lambda x: F.pad(x, (1, 1, 1, 1), "circular")),
    "one number": ((3,), (3,), lambda x, w: torch.inner(x, w.to(x.dtype))),
    "and one": (
        (2, 3),
        (2, 3),
        lambda x, w: torch.tensordot(x, w.to(x.dtype), ([0, 1], [0, 1])),
    ),
    "no sum": ((2,), (3,), lambda x, w: torch.einsum("i,j->ij", x, w)),
}

UNFAKED = """
    chain_matmul conv_tbc lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell kl_div margin_ranking_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss bilinear grid_sampler cov corrcoef
    linalg_pinv affine_grid_generator renorm pdist _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
""".split()
"""What needs a real GPU, or has no batching rule."""


def pooled(name, sides, *options):
    op = getattr(F, name)
    return (1, 2, *(4,) * sides), lambda x: op(x, *options)


PYTHON = {
    **{name: pooled(name, n, 2)
       for name, n in (("adaptive_avg_pool2d", 2), ("adaptive_avg_pool3d", 3))},
    **{f"{kind}_pool{n}d_with_indices": pooled(f"{kind}_pool{n}d_with_indices", n, 2)
       for n in (1, 2, 3) for kind in ("max", "adaptive_max")},
    **{f"lp_pool{n}d": pooled(f"lp_pool{n}d", n, 2.0, 2) for n in (1, 2, 3)},
    **{
        f"fractional_max_pool{n}d_with_indices": (
            (1, 2, *(4,) * n),
            lambda x, n=n: getattr(F, f"fractional_max_pool{n}d_with_indices")(
                x, 2, 2, _random_samples=halves(x, 1, 2, n).to(x.dtype)
            ),
        )
        for n in (2, 3)
    },
    **spelled(
        """celu elu glu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu
        sigmoid silu softsign tanh tanhshrink normalize""",
        F, (2, 4)),
    **spelled("softmax softmin log_softmax", F, (2, 3), -1),
    **spelled("dropout dropout2d alpha_dropout feature_alpha_dropout", F, (1, 2, 4, 4),
              0.5, False),
    "dropout1d": ((1, 2, 4), lambda x: F.dropout1d(x, 0.5, False)),
    "dropout3d": ((1, 2, 4, 4, 4), lambda x: F.dropout3d(x, 0.5, False)),
    "threshold": ((2, 3), lambda x: F.threshold(x, 0.1, 0.2)),
    "affine_grid": GRIDS["affine_grid_generator"],
    "grid_sample":
        ((1, 2, 4, 4), lambda x: grid(x, F.grid_sample, "bilinear", "zeros", False)),
    "cross_entropy": LOSSES["cross_entropy_loss"],
    "gaussian_nll_loss": ((2, 3), (2, 3), lambda x, y: F.gaussian_nll_loss(x, y, 1.0)),
    "multilabel_soft_margin_loss":
        ((2, 3), lambda x: F.multilabel_soft_margin_loss(x, halves(x))),
    "triplet_margin_with_distance_loss":
        (*((2, 3),) * 3, F.triplet_margin_with_distance_loss),
    "embedding": UNLISTED["embedding"],
    "embedding_bag": UNLISTED["embedding_bag"],
    "pad": UNLISTED["pad"],
    "interpolate": UNLISTED["interpolate"],
    "upsample": ((1, 2, 4, 4), lambda x: F.upsample(x, scale_factor=2)),
    "upsample_bilinear":
        ((1, 2, 4, 4), lambda x: F.upsample_bilinear(x, scale_factor=2)),
    "upsample_nearest": ((1, 2, 4, 4), lambda x: F.upsample_nearest(x, scale_factor=2)),
    "fold": ((1, 8, 9), lambda x: F.fold(x, (4, 4), 2)),
    "unfold": ((1, 2, 4, 4), lambda x: F.unfold(x, 2)),
    "local_response_norm": ((1, 2, 4, 4), lambda x: F.local_response_norm(x, 2)),
    "max_unpool1d":
        ((1, 1, 2), lambda x: F.max_unpool1d(x, torch.tensor([[[0, 2]]]), 2)),
    "multi_head_attention_forward": (
        (3, 1, 4), (12, 4), (12,), (4, 4), (4,),
        lambda x, w_in, b_in, w_out, b_out: F.multi_head_attention_forward(
            *(x, x, x, 4, 2, w_in, b_in, None, None, False, 0.0, w_out, b_out)
        ),
    ),
}  # fmt: skip
if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    PYTHON["linear_cross_entropy"] = (
        *((2, 3), (4, 3)),
        lambda x, w: F.linear_cross_entropy(x, w.to(x.dtype), labels(x)),
    )
PYTHON |= {name: CPU[name] for name in CPU if hasattr(F, name) and name not in PYTHON}
"""Functions that `torch.nn.functional` defines in Python, among others."""
