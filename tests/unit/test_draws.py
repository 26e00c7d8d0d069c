"""Draws by row: all shares of a batch together see what the whole batch would have seen."""

import pytest
import torch

from equipoise import DEQ, Anderson, Picard, Stop, jacobian_penalty
from equipoise._draws import Rows, rand_rows, randn_rows, rows_of
from equipoise.models import create_model
from equipoise.nn import AttentionDropout, SequenceDropout, VariationalDropout

SPLITS = [[(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 2), (2, 6)], [(0, 5), (5, 5), (5, 6)]]


def in_shares(split, draw, total=6, seed=3):
    """What `draw(rows)` gives for each share, each from the same seed, joined."""
    parts = []
    for start, stop in split:
        torch.manual_seed(seed)
        with rows_of(Rows(start, stop, total)):
            parts.append(draw(Rows(start, stop, total)))
    return torch.cat(parts)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("inside", [1, 4])
def test_shares_together_draw_what_the_whole_batch_draws(split, inside):
    """`inside`: rows flattened with something else, as (B·T, d)."""
    torch.manual_seed(3)
    uniform, normal = torch.rand(6 * inside, 5), torch.randn(6 * inside, 5)

    def both(rows):
        shape = (rows.count * inside, 5)
        return torch.stack([rand_rows(shape), randn_rows(torch.empty(shape))], dim=1)

    drawn = in_shares(split, both)
    assert torch.equal(drawn[:, 0], uniform)
    assert torch.equal(drawn[:, 1], normal)


def test_outside_of_a_share_nothing_changes():
    torch.manual_seed(0)
    expected = torch.rand(3, 4), torch.randn(3, 4, dtype=torch.float64), torch.rand(1)
    torch.manual_seed(0)
    drawn = rand_rows((3, 4)), randn_rows(torch.empty(3, 4, dtype=torch.float64)), torch.rand(1)
    assert all(map(torch.equal, drawn, expected))


def test_shares_are_left_with_the_same_generator():
    """So that what all rows share, drawn later, is the same in all of them."""
    after = []
    for split in SPLITS[:3]:
        for start, stop in split:
            torch.manual_seed(0)
            with rows_of(Rows(start, stop, 6)):
                rand_rows((stop - start, 7))
                randn_rows(torch.empty(stop - start, 3))
            after.append(torch.rand(4))
    assert all(torch.equal(draw, after[0]) for draw in after)


def test_contexts_nest_and_end():
    def fail():
        torch.manual_seed(0)
        assert torch.equal(rand_rows((1, 2)), whole[1:2])
        raise ZeroDivisionError

    torch.manual_seed(0)
    whole = torch.rand(4, 2)
    with rows_of(Rows(0, 4, 4)):
        with pytest.raises(ZeroDivisionError), rows_of(Rows(1, 2, 4)):
            fail()
        torch.manual_seed(0)
        assert torch.equal(rand_rows((4, 2)), whole)


def test_a_draw_that_does_not_fit_the_rows_says_what_to_do():
    with rows_of(Rows(0, 2, 4)), pytest.raises(ValueError, match=r"shape \(3, 5\).*2 rows.*shared_by_systems=True"):
        rand_rows((3, 5))
    with rows_of(Rows(0, 4, 4)):
        assert rand_rows((3, 5)).shape == (3, 5)  # one share: there is nothing to tell apart


@pytest.mark.parametrize(("total", "count"), [(8, 2), (7, 3), (2, 5), (0, 2), (1, 1)])
def test_shares_cover_the_batch_evenly(total, count):
    shares = [Rows.share(total, rank, count) for rank in range(count)]
    assert [row for rows in shares for row in range(rows.start, rows.stop)] == list(range(total))
    sizes = [rows.count for rows in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] >= min(total, 1)
    assert sum(rows.weight for rows in shares) == pytest.approx(1.0 if total else 0.0)
    with pytest.raises(ValueError, match="are not among"):
        Rows(0, total + 1, total)


@pytest.mark.parametrize("split", SPLITS)
def test_dropout_masks_are_those_of_the_whole_batch(split):
    x = torch.ones(6, 4, 8)
    layers = SequenceDropout(0.5), AttentionDropout(0.3), VariationalDropout(0.5, shared=(-1,))
    for layer in layers:
        torch.manual_seed(3)
        expected = layer(x)
        drawn = in_shares(split, lambda rows, layer=layer: layer(x[rows.start : rows.stop]))
        assert torch.equal(drawn, expected)
        assert 0 < (expected == 0).float().mean() < 1


@pytest.mark.parametrize(
    "layer", [VariationalDropout(0.5, shared=0), VariationalDropout(0.5, shared_by_systems=True)], ids=repr
)
def test_what_all_rows_share_is_the_same_in_every_share(layer):
    table = torch.ones(7, 5)
    torch.manual_seed(3)
    expected = layer(table)
    for start, stop in SPLITS[1]:
        torch.manual_seed(3)
        with rows_of(Rows(start, stop, 6)):
            assert torch.equal(layer(table), expected)


def test_the_penalty_is_the_mean_of_those_of_the_shares():
    """Of a cell with dropout, whose masks are drawn first; float64, to 1e-12."""
    cell = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), SequenceDropout(0.3)).double()
    deq = DEQ(_Injected(cell), solver=Anderson(), stop=Stop(rtol=1e-12, max_steps=60))
    x = torch.randn(6, 3, 4, dtype=torch.float64)

    def penalty(rows):
        return rows.weight * jacobian_penalty(deq(x[rows.start : rows.stop]), probes=2)[None]

    whole, halves, uneven = (in_shares(split, penalty).sum() for split in SPLITS[:3])
    assert torch.allclose(halves, whole, rtol=1e-12, atol=0)
    assert torch.allclose(uneven, whole, rtol=1e-12, atol=0)


class _Injected(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, z, x):
        return 0.5 * self.inner(z) + x


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deq_transformer_small", {"d_model": 8, "heads": 2, "d_inner": 8, "dropout": 0.2, "attention_dropout": 0.2}),
        ("deq_transformer_small", {"d_model": 8, "heads": 2, "d_inner": 8, "dropout": 0.2, "chunk_size": 2}),
        (
            "deq_trellisnet_small",
            {"embedding_size": 4, "hidden_size": 4, "dropout_words": 0.2, "dropconnect": 0.3, "dropout_hidden": 0.2},
        ),
        ("lstm_ptb_small", {"widths": [6, 6], "embedding_size": 6}),
        ("tcn_ptb_small", {"channels": 6, "embedding_size": 6, "levels": 2}),
        (
            "transformer_xl_ptb_small",
            {"embedding_size": 8, "heads": 2, "inner_size": 8, "layers": 2, "attention_dropout": 0.2},
        ),
    ],
)
def test_the_losses_of_a_model_do_not_depend_on_the_split(name, settings):
    """With every dropout on; a fixed number of plain iterations, so that float32 rounding stays below 1e-5."""
    model = create_model(name, vocab_size=11, **settings).train()
    for deq in (module for module in model.modules() if isinstance(module, DEQ)):
        deq.plan = deq.plan.replace(solver=Picard(), stop=Stop(rtol=0, max_steps=5))
    tokens, targets = torch.randint(11, (2, 6, 5))

    def losses(rows):
        part = slice(rows.start, rows.stop)
        with torch.no_grad():
            return model(tokens[part], targets=targets[part]).losses

    whole = in_shares(SPLITS[0], losses)
    with torch.no_grad():
        still = model.eval()(tokens, targets=targets).losses
    model.train()
    assert not torch.allclose(whole, still, rtol=1e-3)  # dropout does something
    for split in SPLITS[1:3]:
        assert torch.allclose(in_shares(split, losses), whole, rtol=1e-5, atol=0)
