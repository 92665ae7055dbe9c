"""How vgrad, plain torch and five libraries compute curvature and attribution.

A contender is built from a problem and gives a function that is timed. Its result is a
tensor, a dictionary or list in the order of the parameters, or a function that returns
one of them, which is not timed. Peers that are not installed raise
`ModuleNotFoundError` when built. N training samples, Q queries, K outputs, P numbers
of parameters.
"""

import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from vgrad import attribution, curvature

DAMPING, SHIFT = 0.1, 3.0
"""Damping, and the one of Hessians, which are not positive."""


Run = Callable[[], Any]
Build = Callable[["Problem"], Run]
os.environ.setdefault("TQDM_DISABLE", "1")


@dataclass(frozen=True)
class Problem:
    """A net without biases, which peers put into other blocks, and its data."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    batch_size: int
    dim: int
    """Features of TRAK."""

    side: int
    """Features of each side of a layer, for LoGra."""

    @cached_property
    def functional(self) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        return vgrad.make_functional_with_buffers(
            self.model, disable_autograd_tracking=True
        )

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Training data in batches."""
        parts = (tensor.split(self.batch_size) for tensor in self.train)
        return list(zip(*parts, strict=True))

    @cached_property
    def inputs(self) -> list[tuple[Tensor]]:
        return [(x,) for x, _ in self.batches]

    @cached_property
    def vector(self) -> dict[str, Tensor]:
        """A vector to multiply by a matrix, {name: shape}."""
        generator = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            for name, p in self.model.named_parameters()
        }

    @property
    def ridge(self) -> float:
        """The ridge for gradients over sqrt(P), whose kernel is so much smaller."""
        return DAMPING / sum(param.numel() for param in self.params)

    def loader(self, batch_size: int | None = None) -> DataLoader:
        return DataLoader(TensorDataset(*self.train), batch_size or self.batch_size)

    def query_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.queries), len(self.queries[0]))


def loss_of(p: Problem) -> Any:
    """Return the loss of vgrad, its parameters and buffers."""
    fmodel, params, buffers = p.functional
    return vgrad.sample_loss(fmodel, F.cross_entropy), params, buffers


# Jacobians of the queries, [Q, K, P].


def vgrad_jacobian(p: Problem) -> Run:
    fmodel, params, buffers = p.functional
    compute = curvature.per_sample_jacobian(fmodel)
    return lambda: compute(params, buffers, p.queries[0])


def func_jacobian(p: Problem) -> Run:
    """The Jacobian of one sample by `torch.func.jacrev`, mapped over the batch."""
    params = {name: param.detach() for name, param in p.model.named_parameters()}

    def output(params: dict, x: Tensor) -> Tensor:
        return torch.func.functional_call(p.model, params, (x[None],))[0]

    mapped = torch.vmap(torch.func.jacrev(output), in_dims=(None, 0))
    return lambda: mapped(params, p.queries[0])


def laplace_backend(p: Problem, name: str) -> Any:
    from laplace import curvature as backends

    backend = getattr(backends, name)(copy.deepcopy(p.model), "classification")
    backend.model.output_size = p.model(p.queries[0][:1]).shape[-1]
    return backend


def laplace_jacobian(name: str) -> Build:
    def build(p: Problem) -> Run:
        backend = laplace_backend(p, name)
        return lambda: backend.jacobians(p.queries[0])[0].detach()

    return build


# The GGN of the training data: a product, its diagonal, Kronecker factors.


def vgrad_product(p: Problem) -> Run:
    fmodel, params, buffers = p.functional
    matrix = curvature.ggn(fmodel, "categorical")
    product = curvature.vector_product(matrix, params, buffers, p.inputs)
    return lambda: product(p.vector)


def func_product(p: Problem) -> Run:
    """`jvp`, the Hessian of the likelihood, `vjp`: the usual three lines."""
    params = {name: param.detach() for name, param in p.model.named_parameters()}

    def run() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for (x,) in p.inputs:

            def output(params: dict, x: Tensor = x) -> Tensor:
                return torch.func.functional_call(p.model, params, (x,))

            _, pushed = torch.func.jvp(output, (params,), (p.vector,))
            logits, pull = torch.func.vjp(output, params)
            prob = logits.softmax(1)
            seen = prob * (pushed - (prob * pushed).sum(1, keepdim=True))
            (pulled,) = pull(seen / len(p.train[0]))
            total = {n: total.get(n, 0) + grad for n, grad in pulled.items()}
        return total

    return run


def curvlinops_operator(kind: str, p: Problem, **options: Any) -> Any:
    import curvlinops

    loss = nn.CrossEntropyLoss(reduction="mean")
    build = getattr(curvlinops, kind)
    return build(
        p.model, loss, p.params, p.batches, check_deterministic=False, **options
    )


def curvlinops_product(p: Problem) -> Run:
    operator = curvlinops_operator("GGNLinearOperator", p)
    vector = list(p.vector.values())
    return lambda: operator @ vector


def backpack_product(p: Problem) -> Run:
    from backpack.hessianfree.ggnvp import ggn_vector_product

    vector, count = list(p.vector.values()), len(p.train[0])

    def run() -> list[Tensor]:
        total = [torch.zeros_like(part) for part in vector]
        for x, y in p.batches:
            output = p.model(x)
            loss = F.cross_entropy(output, y, reduction="sum") / count
            products = ggn_vector_product(loss, output, p.model, vector)
            for sums, part in zip(total, products, strict=True):
                sums.add_(part)
        return total

    return run


def vgrad_diagonal(p: Problem) -> Run:
    fmodel, params, buffers = p.functional
    matrix = curvature.ggn(fmodel, "categorical")
    return lambda: curvature.diagonal(matrix, params, buffers, p.inputs)


def func_diagonal(p: Problem) -> Run:
    """Squares of Jacobians by `jacrev`, a batch at a time."""
    params = {name: param.detach() for name, param in p.model.named_parameters()}

    def output(params: dict, x: Tensor) -> Tensor:
        return torch.func.functional_call(p.model, params, (x[None],))[0]

    mapped = torch.vmap(torch.func.jacrev(output), in_dims=(None, 0))

    def run() -> dict[str, Tensor]:
        total: dict[str, Any] = {}
        for (x,) in p.inputs:
            prob = p.model(x).softmax(1).detach()
            root = prob.sqrt()
            columns = root.diag_embed() - prob[:, :, None] * root[:, None]
            for name, jacobian in mapped(params, x).items():
                moved = torch.einsum("bck,bc...->bk...", columns, jacobian)
                total[name] = total.get(name, 0) + moved.square().sum((0, 1))
        return {name: value / len(p.train[0]) for name, value in total.items()}

    return run


def laplace_diagonal(name: str, batch_size: int | None = None) -> Build:
    def build(p: Problem) -> Run:
        backend, count = laplace_backend(p, name), len(p.train[0])
        batches = replace(p, batch_size=batch_size or p.batch_size).batches

        def run() -> Tensor:
            parts = [backend.diag(x, y, N=count)[1] for x, y in batches]
            return torch.stack(parts).sum(0) / count

        return run

    return build


def vgrad_kronecker(kind: str, empirical: bool) -> Build:
    def build(p: Problem) -> Run:
        fit = vgrad_fit(p, kind, empirical)

        def run() -> Run:
            blocks = fit()
            return lambda: blocks.product(p.vector)

        return run

    return build


def vgrad_fit(p: Problem, kind: str, empirical: bool) -> Run:
    fmodel, params, buffers = p.functional
    make = curvature.empirical_fisher if empirical else curvature.ggn
    matrix, batches = make(fmodel, "categorical"), p.batches if empirical else p.inputs
    return lambda: getattr(curvature, kind)(matrix, params, buffers, batches)


def curvlinops_kronecker(kind: str, fisher: str) -> Build:
    def build(p: Problem) -> Run:
        vector = list(p.vector.values())

        def run() -> Run:
            operator = curvlinops_operator(kind, p, fisher_type=fisher)
            operator.compute_kronecker_factors()
            if kind.startswith("EK"):
                operator._compute_eigenvectors()
                operator.compute_eigenvalue_correction()
            return lambda: operator @ vector

        return run

    return build


def laplace_kronecker(name: str) -> Build:
    def build(p: Problem) -> Run:
        backend, count = laplace_backend(p, name), len(p.train[0])
        flat = torch.cat([vector.flatten() for vector in p.vector.values()])

        def run() -> Run:
            total: Any = 0
            for x, y in p.batches:
                _, part = backend.kron(x, y, N=count)
                total = part if isinstance(total, int) else total + part
            matrix = total.decompose()
            return lambda: matrix.bmm(flat[None, None], exponent=1)[0, 0] / count

        return run

    return build


# Scores of each training sample for each query, [Q, N].


def vgrad_scores(p: Problem, blocks: Any, damping: float) -> Run:
    loss, params, buffers = loss_of(p)
    return lambda: attribution.influence(
        loss,
        params,
        buffers,
        p.queries,
        p.batches,
        curvature=blocks,
        damping=damping,
    )


def vgrad_ekfac_scores(p: Problem) -> Run:
    return vgrad_scores(p, vgrad_fit(p, "ekfac", True)(), DAMPING)


def vgrad_grad_dot(p: Problem) -> Run:
    return vgrad_scores(p, None, 0.0)


def vgrad_cg(p: Problem) -> Run:
    fmodel, params, buffers = p.functional
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    product = curvature.hessian_vector_product(loss, params, buffers, p.batches)
    return vgrad_scores(p, curvature.iterative(product, params), SHIFT)


def func_gradients(p: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Gradients of samples by `vmap(grad)`, [B, P]."""
    params = {name: param.detach() for name, param in p.model.named_parameters()}

    def loss(params: dict, x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(p.model, params, (x[None],))
        return F.cross_entropy(output, y[None])

    mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return lambda x, y: joined(mapped(params, x, y), 1)


def func_grad_dot(p: Problem) -> Run:
    gradients = func_gradients(p)

    def run() -> Tensor:
        queries = gradients(*p.queries)
        return torch.cat([queries @ gradients(x, y).mT for x, y in p.batches], 1)

    return run


class Kronfluence:
    """An analysis of kronfluence, whose files are in memory where Linux has that."""

    def __init__(self, p: Problem, strategy: str) -> None:
        from kronfluence import arguments
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.task import Task

        class Classes(Task):
            def compute_train_loss(
                self, batch: Any, model: nn.Module, sample: bool = False
            ) -> Tensor:
                assert not sample, "the empirical Fisher matrix has no other targets"
                return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

            def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
                return self.compute_train_loss(batch, model)

        task, dtype = Classes(), p.train[0].dtype
        model = prepare_model(copy.deepcopy(p.model), task)
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = tempfile.TemporaryDirectory(dir=memory)
        self.analyzer = Analyzer(
            "bench",
            model,
            task,
            cpu=True,
            disable_tqdm=True,
            log_level=logging.ERROR,
            output_dir=self.folder.name,
        )
        self.factors = arguments.FactorArguments(
            strategy=strategy,
            use_empirical_fisher=True,
            activation_covariance_dtype=dtype,
            gradient_covariance_dtype=dtype,
            per_sample_gradient_dtype=dtype,
            lambda_dtype=dtype,
        )
        self.scores = arguments.ScoreArguments(
            damping_factor=DAMPING,
            query_gradient_svd_dtype=dtype,
            per_sample_gradient_dtype=dtype,
            precondition_dtype=dtype,
            score_dtype=dtype,
        )
        self.p, self.data = p, TensorDataset(*p.train)

    def fit(self) -> None:
        self.analyzer.fit_all_factors(
            "it",
            self.data,
            per_device_batch_size=self.p.batch_size,
            factor_args=self.factors,
            overwrite_output_dir=True,
        )

    def score(self) -> Tensor:
        self.analyzer.compute_pairwise_scores(
            "it",
            "it",
            TensorDataset(*self.p.queries),
            self.data,
            per_device_query_batch_size=len(self.p.queries[0]),
            per_device_train_batch_size=self.p.batch_size,
            score_args=self.scores,
            overwrite_output_dir=True,
        )
        return self.analyzer.load_pairwise_scores("it")["all_modules"]

    def product(self) -> list[Tensor]:
        """Multiply the vector by the fitted matrix."""
        eigen = self.analyzer.load_eigendecomposition("it")
        lambdas = self.analyzer.load_lambda_matrices("it")
        names = [name.removesuffix(".weight") for name in self.p.vector]
        result = []
        for name, vector in zip(names, self.p.vector.values(), strict=True):
            left = eigen["gradient_eigenvectors"][name].to(vector)
            right = eigen["activation_eigenvectors"][name].to(vector)
            values = lambdas["lambda_matrix"][name].to(vector)
            values = values / lambdas["num_lambda_processed"][name].to(vector)
            result.append(left @ (left.mT @ vector @ right * values) @ right.mT)
        return result


def kronfluence_fit(p: Problem) -> Run:
    analysis = Kronfluence(p, "ekfac")

    def run() -> Run:
        analysis.fit()
        return analysis.product

    return run


def kronfluence_scores(strategy: str) -> Build:
    def build(p: Problem) -> Run:
        analysis = Kronfluence(p, strategy)
        analysis.fit()
        return analysis.score

    return build


def dattri_task(p: Problem, *, margins: bool = False) -> Any:
    """A task whose loss is of one sample or a mean over a batch."""
    from dattri.task import AttributionTask

    model = copy.deepcopy(p.model)

    def loss(params: dict, data: Any) -> Tensor:
        x, y = data
        if y.ndim == 0:
            x, y = x[None], y[None]
        output = torch.func.functional_call(model, params, x)
        if margins:
            logp = output.log_softmax(-1).gather(-1, y[..., None]).squeeze()
            return logp - (1 - logp.exp()).log()
        return F.cross_entropy(output, y)

    state = {name: tensor.detach() for name, tensor in p.model.state_dict().items()}
    return AttributionTask(loss_func=loss, model=model, checkpoints=state)


@contextlib.contextmanager
def in_dtype(p: Problem) -> Iterator[None]:
    """Dattri makes tensors of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(p.train[0].dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def dattri_scores(kind: str, full_batch: bool = False, **options: Any) -> Build:
    def build(p: Problem) -> Run:
        from dattri.algorithm import influence_function

        make = getattr(influence_function, kind)
        size = len(p.train[0]) if full_batch else None
        with in_dtype(p):
            attributor = make(dattri_task(p), **options)
            attributor.cache(p.loader(size))

        def run() -> Tensor:
            with in_dtype(p):
                return attributor.attribute(p.loader(size), p.query_loader()).mT

        return run

    return build


def dattri_fit(p: Problem) -> Run:
    from dattri.algorithm.influence_function import IFAttributorEKFAC

    def run() -> Run:
        with in_dtype(p):
            attributor = IFAttributorEKFAC(dattri_task(p), damping=0.0)
            attributor.cache(p.loader())

        def product() -> list[Tensor]:
            result = []
            for name, vector in p.vector.items():
                layer = name.removesuffix(".weight")
                right, left = attributor.cached_q[layer]
                values = attributor.cached_lambdas[layer]
                moved = left @ vector @ right.T * values
                result.append(left.T @ moved @ right)
            return result

        return product

    return run


def dattri_grad_dot(p: Problem) -> Run:
    from dattri.algorithm.tracin import TracInAttributor

    attributor = TracInAttributor(
        dattri_task(p),
        weight_list=torch.ones(1),
        normalized_grad=False,
        projector_kwargs={"proj_dim": -1, "proj_type": "identity"},
    )

    def run() -> Tensor:
        with in_dtype(p):
            return attributor.attribute(p.loader(), p.query_loader()).mT

    return run


def vgrad_trak(p: Problem) -> Run:
    fmodel, params, buffers = p.functional
    return lambda: attribution.trak(
        fmodel, params, buffers, p.queries, p.batches, dim=p.dim, seed=0, ridge=DAMPING
    )


def dattri_trak(p: Problem) -> Run:
    from dattri.algorithm.trak import TRAKAttributor

    task = dattri_task(p, margins=True)

    def right(params: dict, data: Any) -> Tensor:
        output = torch.func.functional_call(p.model, params, (data[0][None],))
        return output.softmax(-1)[0].gather(0, data[1][None])[0]

    def run() -> Tensor:
        with in_dtype(p):
            projector = {"proj_dim": p.dim, "proj_type": "normal"}
            attributor = TRAKAttributor(task, right, projector, regularization=p.ridge)
            attributor.cache(p.loader())
            return attributor.attribute(p.query_loader()).mT

    return run


def traker(p: Problem) -> Run:
    from trak import TRAKer

    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None

    def run() -> Tensor:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            peer = TRAKer(
                copy.deepcopy(p.model),
                "image_classification",
                len(p.train[0]),
                save_dir=folder,
                device="cpu",
                proj_dim=p.dim,
                use_half_precision=False,
                logging_level=logging.ERROR,
                lambda_reg=p.ridge * p.dim,  # of projections without a scale
            )
            state = p.model.state_dict()
            peer.load_checkpoint(state, model_id=0)
            for batch in p.batches:
                peer.featurize(batch, num_samples=len(batch[0]))
            peer.finalize_features()
            count = len(p.queries[0])
            peer.start_scoring_checkpoint("it", state, 0, count)
            peer.score(p.queries, num_samples=count)
            return torch.from_numpy(peer.finalize_scores("it").copy()).mT

    return run


def vgrad_logra(p: Problem) -> Run:
    loss, params, buffers = loss_of(p)
    compute = vgrad.per_sample_projection(
        loss, dim=(p.side, p.side), seed=0, kind="gaussian"
    )
    return lambda: torch.cat(
        [torch.cat([*compute(params, buffers, *b).values()], 1) for b in p.batches]
    )


def dattri_logra(p: Problem) -> Run:
    """Dictionaries are read by name; of tensors it would take the first sample."""
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(p.model)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y)

    def loss(model: nn.Module, data: dict[str, Tensor], device: str) -> Tensor:
        return model(**data)

    rows = [dict(x=x, y=y) for x, y in zip(*p.train, strict=True)]
    model = Named()
    task = AttributionTask(loss, model, model.state_dict())

    def run() -> Tensor:
        with in_dtype(p):
            peer = LoGraAttributor(
                task,
                hessian="Identity",
                proj_dim=p.side**2,
                offload="none",
                cache_dir=tempfile.gettempdir(),  # a file in any case
            )
            peer.cache(DataLoader(rows, p.batch_size))
            manager = peer.offload_manager
            parts = [manager.retrieve_gradients(i) for i in range(len(p.batches))]
            return torch.cat([torch.cat(list(rows), 1) for rows in parts])

    return run


PRECISION = 1.0
"""Of the Gaussian prior."""


def vgrad_laplace(p: Problem) -> Any:
    fmodel, params, buffers = p.functional
    return curvature.laplace(
        fmodel,
        "categorical",
        params,
        buffers,
        p.batches,
        structure="kfac",
        prior_precision=PRECISION,
    )


def vgrad_evidence(p: Problem) -> Run:
    return lambda: vgrad_laplace(p).log_marginal_likelihood()


def vgrad_predictive(p: Problem) -> Run:
    posterior = vgrad_laplace(p)
    return lambda: posterior.covariance(p.queries[0])


def laplace_posterior(p: Problem, name: str) -> Any:
    from laplace import Laplace
    from laplace import curvature as backends

    posterior = Laplace(
        copy.deepcopy(p.model),
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        prior_precision=PRECISION,
        backend=getattr(backends, name),
    )
    posterior.fit(p.loader())
    return posterior


def laplace_evidence(name: str) -> Build:
    return lambda p: lambda: laplace_posterior(p, name).log_marginal_likelihood()


def laplace_predictive(name: str) -> Build:
    def build(p: Problem) -> Run:
        posterior = laplace_posterior(p, name)
        return lambda: posterior._glm_predictive_distribution(p.queries[0])[1]

    return build


def joined(values: Any, leading: int) -> Tensor:
    """Return the numbers of a result, parameters one after another."""
    while callable(values):
        values = values()
    if isinstance(values, Tensor):
        return values.detach()
    values = values.values() if isinstance(values, dict) else values
    return torch.cat([value.detach().flatten(leading) for value in values], leading)
