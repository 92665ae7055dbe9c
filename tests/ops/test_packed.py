"""Recurrent nets on packed sequences, whose lengths samples share or not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import vgrad
from tests import losses, oracle
from tests.losses import randn

ONE = torch.tensor([5, 3, 5, 1, 3, 2])
SORTED = torch.tensor(
    [[5, 3, 3], [5, 3, 3], [4, 4, 4], [5, 2, 1], [5, 3, 3], [4, 4, 4]]
)
UNSORTED = SORTED[:, [1, 0, 2]]


def loss_of(body, batch_first, ordered, total):
    def loss(params, buffers, x, lengths):
        if not lengths.ndim:
            x, lengths = x[None], lengths[None]
        words = rnn.pack_padded_sequence(
            x if batch_first else x.transpose(0, 1),
            lengths,
            batch_first=batch_first,
            enforce_sorted=ordered,
        )
        found, state = torch.func.functional_call(body, params, (words,))
        options = {"padding_value": 0.3, "total_length": total}
        y, lengths = rnn.pad_packed_sequence(found, batch_first, **options)
        states = (state,) if isinstance(state, torch.Tensor) else state
        y = y.sin() if batch_first else y.sin().transpose(0, 1)
        first, second, _ = y.shape
        weights = torch.arange(1.0, 1 + first * second).view(first, second, 1)
        kept = sum(each.square().sum() for each in states)
        return (y * weights).sum() + kept * (lengths * lengths.argsort()).sum().add(1)

    return loss


@pytest.mark.filterwarnings("error:.*:vgrad.FallbackWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"num_layers": 2}),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "ordered", "parts"),
    [
        (ONE, False, (2, 2, 1, 1)),
        (SORTED, True, (3, 2, 1)),
        (UNSORTED, False, (3, 2, 1)),
    ],
)
@pytest.mark.parametrize(
    ("batch_first", "total", "strategy"), [(True, None, "auto"), (False, 7, "vmap")]
)
def test_it_is_exact(
    kind, options, lengths, ordered, parts, batch_first, total, strategy
):
    torch.manual_seed(0)
    body = kind(4, 3, batch_first=batch_first, dtype=torch.float64, **options)
    params = {name: each.detach() for name, each in body.named_parameters()}
    loss = loss_of(body, batch_first, ordered, total)
    batch = randn(6, *lengths.shape[1:], 5, 4), lengths
    losses.assert_quantities(loss, params, batch, tolerance=1e-11, strategy=strategy)
    told = vgrad.explain(vgrad.per_sample_norm(loss))(params, {}, *batch)
    assert (told.strategy, told.parts) == ("recorded", parts)


def test_lengths_that_all_share_split_nothing():
    body = nn.GRU(4, 3, batch_first=True, dtype=torch.float64)
    params = {name: each.detach() for name, each in body.named_parameters()}

    def loss(params, buffers, x):
        words = rnn.pack_padded_sequence(x, [5, 2], batch_first=True)
        found, state = torch.func.functional_call(body, params, (words,))
        return found.data.square().sum() + state.sum()

    batch = (randn(3, 2, 5, 4),)
    losses.assert_quantities(loss, params, batch, tolerance=1e-11)
    told = vgrad.explain(vgrad.per_sample_norm(loss))(params, {}, *batch)
    assert (told.strategy, told.parts) == ("recorded", (3,))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("padded", [False, True])
def test_sequences_of_one_length_are_captured(kind, padded):
    body = kind(4, 3, batch_first=True, dtype=torch.float64)
    fmodel, params, _ = vgrad.make_functional_with_buffers(body)

    def loss(params, buffers, x, lengths):
        words = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        found, state = fmodel(params, buffers, words)
        if padded:
            found = rnn.PackedSequence(found.data.tanh(), found.batch_sizes)
            return rnn.pad_packed_sequence(found, True)[0].square().sum()
        return found.data.square().sum() + state[0].sum()

    compiled = vgrad.compile(vgrad.per_sample_grad(loss), fallback="error")
    for lengths in ([5, 2], [5, 2], [5, 2], [4, 3]):
        batch = randn(3, 2, 5, 4), torch.tensor([lengths] * 3)
        found = compiled(params, {}, *batch)
        oracle.assert_exact(found, oracle.loss_gradients(loss, params, {}, batch, 3))
    [report] = compiled.reports()
    assert (report.backend, report.calls, report.redos) == ("replay", 3, 1)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([6, 5], "index 5 out of range"),
        ([0, 0], "has to be greater than 0"),
        ([2, 3], "sorted in decreasing order"),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(lengths, words):
    def loss(params, buffers, x, lengths):
        return rnn.pack_padded_sequence(x * params["w"], lengths, True).data.sum()

    batch = randn(3, 2, 5, 4), torch.tensor([lengths] * 3)
    with pytest.raises((RuntimeError, IndexError), match=words):
        vgrad.per_sample_grad(loss)({"w": randn(4)}, {}, *batch)
