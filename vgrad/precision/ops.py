"""What autocast does to which op on which device: torch's lists, by torch's names.

A name is that of the function a model calls, such as `linear` for `F.linear`; `x @ y`
is `__matmul__`. Ops without an autocast kernel of their own that reach one inside are
listed with what becomes of them.
"""

from enum import Enum

from vgrad.torch_private.kernels import has_autocast


class Kind(Enum):
    """What is done around an op while autocast is on."""

    LOW = "inputs in the low dtype"
    PRODUCT = "inputs in the low dtype, unless they are summed up to one number"
    FLOAT32 = "inputs in float32"
    WIDEST = "inputs in the widest dtype among them"
    NORM = "computed in float32, in the dtype of its input afterwards"
    STEPS = "time steps of linear maps, each in the low dtype"
    INSIDE = "left to torch, for what is called inside"
    REFUSED = "raises"


def _table(**kinds: str) -> dict[str, Kind]:
    return {name: Kind[kind] for kind, names in kinds.items() for name in names.split()}


_PRODUCTS = """
    linear matmul __matmul__ __rmatmul__ linalg_matmul mm bmm addmm addbmm baddbmm
    chain_matmul linalg_multi_dot linalg_vecdot prelu scaled_dot_product_attention
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
"""

_LOSSES = """
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss
    huber_loss kl_div poisson_nll_loss cosine_embedding_loss hinge_embedding_loss
    margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    multilabel_margin_loss binary_cross_entropy_with_logits cdist
"""

_COMPOSITE = """
    cov corrcoef matrix_power linalg_matrix_power linalg_pinv affine_grid_generator
"""

_CPU = _table(
    LOW=_PRODUCTS,
    FLOAT32=_LOSSES
    + """
        binary_cross_entropy ctc_loss grid_sampler grid_sampler_2d grid_sampler_3d prod
        avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d max_unpool2d
        max_unpool3d fractional_max_pool2d fractional_max_pool3d reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d replication_pad3d quantile
        nanquantile polar view_as_complex stft trace inverse pinverse cholesky
        cholesky_inverse cholesky_solve svd qr geqrf orgqr ormqr lu_solve _lu_with_info
        triangular_solve fake_quantize_per_tensor_affine linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
        linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals
        linalg_tensorinv linalg_tensorsolve fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2
        fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft
        fft_ihfft
    """,
    WIDEST="stack cat index_copy",
    NORM="layer_norm rms_norm group_norm instance_norm batch_norm",
    STEPS="""
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    PRODUCT="inner tensordot",
    INSIDE=_COMPOSITE + "einsum bilinear",
)

_CUDA = _table(
    LOW=_PRODUCTS
    + """
        einsum mv addmv addr convolution lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell
    """,
    FLOAT32=_LOSSES
    + """
        layer_norm native_layer_norm group_norm rms_norm softmax log_softmax softplus
        exp expm1 log log10 log1p log2 logsumexp pow __pow__ __rpow__ reciprocal rsqrt
        __rdiv__ __rtruediv__ square special_softmax special_log_softmax
        special_logsumexp special_expm1 special_log1p special_erfinv acos arccos asin
        arcsin cosh erfinv sinh tan sum cumsum cumprod prod norm frobenius_norm
        nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm dist pdist
        cosine_similarity upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """,
    WIDEST="""
        addcdiv addcmul atan2 arctan2 bilinear cross dot vdot inner tensordot
        grid_sampler index_put scatter_add
    """,
    NORM="batch_norm instance_norm",
    INSIDE=_COMPOSITE
    + "sum_to_size trapz trapezoid cumulative_trapezoid pairwise_distance",
    REFUSED="binary_cross_entropy",
)

if not has_autocast("rms_norm", "cuda"):  # before torch 2.12
    del _CUDA["rms_norm"]

KINDS: dict[str, dict[str, Kind]] = {"cpu": _CPU, "cuda": _CUDA}
"""By device type and name; what is in no list runs in the dtypes it is given."""
