"""The DEQ-Transformer: its layer by the definition, equilibria, memory, twins, gradients, sizes."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.functional import layer_norm

from equipoise import Implicit, Phantom, Picard, Plan, Reversible, Stop, Unroll, jacobian_penalty, override
from equipoise._draws import Rows, rows_of
from equipoise._scope import SolveScope
from equipoise.models.deq_transformer import (
    WT103_VOCABULARY,
    DEQTransformer,
    DEQTransformerConfig,
    TransformerCell,
    deq_transformer_copy_memory,
)
from equipoise.models.registry import create_model, list_models
from tests.gradients import EXACT, ROBUST, TIGHT, all_converged, normal, relative_error
from tests.problems import every_solver

VOCAB, D = 23, 8
TIGHT_PLAN = Plan(ROBUST, EXACT, TIGHT)
STREAM = torch.randint(VOCAB, (3, 13), generator=torch.Generator().manual_seed(7))
TOKENS, TARGETS = STREAM[:, :7], STREAM[:, 1:8]


def build(**options):
    """A small model in float64 with a spectral radius around 0.5: a strong bias keeps normalised sums away from 0."""
    torch.manual_seed(3)
    options = {"d_model": D, "heads": 2, "d_inner": 12, "init_std": 0.2, "plan": TIGHT_PLAN, **options}
    model = DEQTransformer(DEQTransformerConfig(VOCAB, **options)).double()
    with torch.no_grad():
        for table in model.embedding.tables:
            table.mul_(100)
        for projection in model.embedding.projections:
            projection.mul_(30)
        biases = {model.deq.cell.attention.output.bias: 3.0, model.injection.bias: 0.3, model.softmax.biases[0]: 0.3}
        for bias, size in biases.items():
            bias.copy_(size * torch.randn_like(bias))
    return model


VARIANTS = {
    "post": {},
    "pre": {"pre_norm": True},
    "plain_weights": {"weight_norm": False},
    "local": {"local_size": 3},
    "adaptive": {"cutoffs": (5, 12), "div_val": 2},
    "chunks": {"ffn_chunks": 5},
}


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


def plain_norm(x):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + 1e-5)


def plain_layer(cell, z, u, z0, u0, *, pre_norm=False, standard=False):
    """f by the definition, with distances looked up one by one."""
    attention, size = cell.attention, D // 2
    seen = torch.cat([z0, z], dim=1)
    if pre_norm:
        seen = plain_norm(seen)
    q, k, v = (seen @ attention.qkv.weight.T + torch.cat([u0, u], dim=1)).split(D, dim=-1)
    past, length = z0.shape[1], z.shape[1]
    heads = []
    for h in range(2):
        part = slice(h * size, (h + 1) * size)
        query = q[:, past:, part]
        scores = z.new_full((z.shape[0], length, past + length), -math.inf)
        for i in range(length):
            for j in range(past + i + 1):
                angle = (past + i - j) * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
                encoded = (attention.position.weight @ torch.cat([angle.sin(), angle.cos()]))[part]
                content = ((query[:, i] + attention.content_bias[h]) * k[:, j, part]).sum(-1)
                scores[:, i, j] = (content + (query[:, i] + attention.position_bias[h]) @ encoded) / math.sqrt(size)
        heads.append(torch.softmax(scores, dim=-1) @ v[..., part])
    attended = torch.cat(heads, dim=-1) @ attention.output.weight.T + attention.output.bias

    def feed(a):
        widen, narrow = cell.feed_forward.widen, cell.feed_forward.narrow
        return torch.relu(a @ widen.weight.T + widen.bias) @ narrow.weight.T + narrow.bias

    if not pre_norm:
        a = plain_norm(z + attended)
        return plain_norm(a + feed(a))
    a = z + attended
    return (a if standard else plain_norm(a)) + feed(plain_norm(a))


@pytest.mark.parametrize("options", [{}, {"pre_norm": True}, {"pre_norm": True, "standard_residual": True}], ids=str)
@pytest.mark.parametrize("past", [0, 4])
def test_the_layer_equals_the_definition(options, past):
    model = build(**options)
    cell = model.deq.cell
    z, z0 = normal(3, 7, D, seed=1), normal(3, past, D, seed=2)
    u0 = normal(3, past, 3 * D, seed=3)
    inputs = model.inputs(TOKENS, (z0, u0) if past else None)
    embedded = model.embedding.tables[0][TOKENS] * math.sqrt(D)
    u = embedded @ model.injection.weight.T + model.injection.bias
    names = {"pre_norm": options.get("pre_norm", False), "standard": options.get("standard_residual", False)}
    want = plain_layer(cell, z, u, z0, u0, **names)
    assert relative_error(cell(z, *inputs), want) <= 1e-12


def test_layer_norm_has_no_scale_and_shift():
    cell = TransformerCell(DEQTransformerConfig(VOCAB, d_model=D, heads=2, d_inner=12))
    names = {name.split(".")[-1] for name, _ in cell.named_parameters()}
    assert names == {"weight_g", "weight_v", "bias", "content_bias", "position_bias"}
    x = normal(2, 3, D)
    assert relative_error(layer_norm(x, (D,), eps=1e-5), plain_norm(x)) <= 1e-14


# Equilibria


def test_output_is_an_equilibrium(variant):
    model = build(**variant)
    output = model(TOKENS, TARGETS)
    z = output.solution.value
    assert all_converged(output.solution.stats)
    assert relative_error(model.deq.cell(z, *model.inputs(TOKENS)), z) <= 1e-12
    logs = model(TOKENS).logits
    assert logs.shape == (3, 7, VOCAB)
    assert output.logits is None
    assert relative_error(output.losses, -logs.gather(2, TARGETS[..., None])[..., 0]) <= 1e-11
    assert float(output.loss.detach()) == pytest.approx(float(output.losses.detach().mean()))


def test_causality_at_the_equilibrium(variant):
    model = build(**variant).eval()
    changed = TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(TOKENS).logits, model(changed).logits
    assert float((before - after)[:, :4].abs().max()) <= 1e-9
    assert float((before - after)[:, 4].abs().max()) > 1e-3


@pytest.mark.parametrize("name", every_solver())
def test_every_solver_finds_the_same(name):
    model = build().eval()
    with torch.no_grad():
        want = model(TOKENS).logits
        with override(model, solver=every_solver()[name], stop=Stop(rtol=1e-12, max_steps=400, plateau=None)):
            output = model(TOKENS)
    assert all_converged(output.solution.stats)
    assert relative_error(output.logits, want) <= 1e-9


# Memory


@pytest.mark.parametrize("cuts", [(5, 13), (4, 7, 13), (1, 13)])
def test_segments_with_memory_equal_one_long_segment(variant, cuts):
    model = build(**variant, memory_length=13).eval()
    with torch.no_grad():
        whole = model(STREAM).logits
        parts, memory, start = [], None, 0
        for end in cuts:
            output = model(STREAM[:, start:end], memory=memory)
            parts.append(output.logits)
            memory, start = output.memory, end
    assert relative_error(torch.cat(parts, dim=1), whole) <= 1e-9


def test_decoding_token_by_token_equals_recomputation(variant):
    model = build(**variant, memory_length=13).eval()
    with torch.no_grad():
        memory = model(STREAM[:, :4]).memory  # a prompt
        for t in range(4, 9):
            logs, memory = model.step(STREAM[:, t], memory)
            assert relative_error(logs, model(STREAM[:, : t + 1]).logits[:, -1]) <= 1e-9
    assert not logs.requires_grad
    logs, memory = model.step(STREAM[:, 0])
    assert relative_error(logs, model(STREAM[:, :1]).logits[:, 0].detach()) <= 1e-9


def test_memory_is_the_last_positions_detached():
    model = build(memory_length=5)
    first = model(STREAM[:, :3], STREAM[:, 1:4])
    assert [tuple(part.shape) for part in first.memory] == [(3, 3, D), (3, 3, 3 * D)]
    second = model(STREAM[:, 3:7], memory=first.memory)
    assert not any(part.requires_grad for part in second.memory)
    states, injections = second.memory
    assert torch.equal(states, torch.cat([first.solution.value, second.solution.value], dim=1)[:, -5:])
    assert torch.equal(injections[:, -4:], model.inputs(STREAM[:, 3:7])[0])
    assert torch.equal(injections[:, 0], first.memory[1][:, -1])


def test_memory_length_may_change():
    model = build(memory_length=2).eval()
    with torch.no_grad():
        model.memory_length = 13
        memory = model(STREAM[:, :6]).memory
        assert memory[0].shape[1] == 6
        assert relative_error(model(STREAM[:, 6:], memory=memory).logits, model(STREAM).logits[:, 6:]) <= 1e-9
        model.memory_length = 0
        assert model(STREAM[:, :6]).memory is None


def test_memory_enters_the_gradient_of_the_weights():
    """Keys and values of memory are computed outside of the solve; their gradient must not get lost."""
    model = build(memory_length=4)
    memory = model(STREAM[:, :4]).memory
    weight = model.deq.cell.attention.qkv.weight_v
    got = torch.autograd.grad(model(TOKENS, TARGETS, memory).loss, weight)[0]
    with override(model, solver=Picard(), adjoint=Unroll(), stop=Stop(rtol=0, max_steps=80, select="last")):
        want = torch.autograd.grad(model(TOKENS, TARGETS, memory).loss, weight)[0]
    assert relative_error(got, want) <= 1e-8


# Chunks

CHUNK_VARIANTS = {
    **VARIANTS,
    "dropout": {"dropout": 0.3},
    "all_dropouts": {"dropout": 0.3, "attention_dropout": 0.3, "pre_norm": True},
    "attention_dropout_pieces": {"attention_dropout": 0.3, "dropout": 0.1, "ffn_chunks": 3},
}


@pytest.mark.parametrize(("name", "chunk"), [*((name, 3) for name in CHUNK_VARIANTS), ("all_dropouts", 1)])
def test_chunks_equal_the_one_shot_solve_in_value_and_gradient(name, chunk):
    """With memory, and with the masks of the whole segment: drawn in the same order, in the same shapes."""
    results = []
    for size in (None, chunk):
        model = build(**CHUNK_VARIANTS[name], memory_length=6, chunk_size=size)
        memory = model.eval()(STREAM[:, :4]).memory
        torch.manual_seed(11)
        output = model.train()(STREAM[:, 4:12], STREAM[:, 5:13], memory)
        grads = torch.autograd.grad(output.loss, list(model.parameters()))
        results.append((output, dict(zip(dict(model.named_parameters()), grads, strict=True))))
    (one, true), (many, mine) = results
    assert relative_error(many.losses, one.losses) <= 1e-10
    assert relative_error(many.solution.value, one.solution.value) <= 1e-10
    for kept, wanted in zip(many.memory, one.memory, strict=True):
        assert relative_error(kept, wanted) <= 1e-10
    for key, want in true.items():
        assert float((mine[key] - want).norm()) <= 1e-8 * (float(want.norm()) + 1e-3), key
    stats = many.solution.stats
    assert all_converged(stats)
    assert stats.residual.shape == (3,)
    assert stats.nfe > one.solution.stats.nfe


@pytest.mark.parametrize("chunk", [None, 3])
def test_dropout_of_a_row_does_not_depend_on_how_the_batch_is_split(chunk):
    model = build(dropout=0.3, attention_dropout=0.3, memory_length=4, chunk_size=chunk)
    memory = model.eval()(STREAM[:, :4]).memory
    model.train()
    torch.manual_seed(2)
    whole = model(TOKENS, TARGETS, memory).losses
    for rows in (Rows(0, 2, 3), Rows(2, 3, 3)):
        mine = slice(rows.start, rows.stop)
        torch.manual_seed(2)
        with rows_of(rows):
            part = model(TOKENS[mine], TARGETS[mine], (memory[0][mine], memory[1][mine])).losses
        assert relative_error(part, whole[mine]) <= 1e-10


@pytest.mark.parametrize("past", [0, 4])
def test_gradients_cross_from_chunk_to_chunk(past):
    """A loss on the last chunk alone reaches the words of the first, as in the one-shot solve."""
    results = []
    for size in (None, 3):
        model = build(memory_length=6, chunk_size=size)
        memory = model(STREAM[:, :past]).memory if past else None
        words = []
        handle = model.embedding.register_forward_hook(lambda m, arguments, out, words=words: words.append(out))
        losses = model(TOKENS, TARGETS, memory).losses
        handle.remove()
        results.append(torch.autograd.grad(losses[:, 6].sum(), words[0])[0])
    one, many = results
    assert relative_error(many, one) <= 1e-8
    assert bool((many.abs().amax(dim=(0, 2)) > 1e-6).all())


def test_chunks_without_gradient_and_segments_shorter_than_a_chunk():
    whole, model = build().eval(), build(chunk_size=4).eval()
    with torch.no_grad():
        assert relative_error(model(TOKENS).logits, whole(TOKENS).logits) <= 1e-10
        assert torch.equal(model(TOKENS[:, :4]).logits, whole(TOKENS[:, :4]).logits)


def test_chunks_report_the_worst_status():
    model = build(plan=Plan(Picard(), Implicit(), Stop(rtol=1e-12, max_steps=2)), chunk_size=3)
    solution = model(TOKENS).solution
    assert not bool(solution.stats.ok.any())
    assert float(solution.stats.residual.min()) > 1e-12
    assert solution.stats.steps.tolist() == [6] * 3
    with pytest.raises(ValueError, match="trace cannot be used with chunk_size=3"):
        model(TOKENS, trace=True)


def test_masks_of_attention_maps_are_rows_of_that_of_the_segment():
    cell = build(attention_dropout=0.5).deq.cell
    drop, whole = cell.attention.map_dropout, normal(2, 2, 6, 9, seed=1)
    with SolveScope():
        drop.reserve(whole)
        full = drop(whole)
        assert 0.3 < float((full == 0).double().mean()) < 0.7
        assert torch.equal(drop(whole[:, :, :2, :5]), full[:, :, :2, :5])  # three positions of memory, two queries
        assert torch.equal(drop(whole[:, :, 2:5, :8]), full[:, :, 2:5, :8])
    drop.eval()
    assert drop(whole) is whole


# Twins


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_explicit_twin_is_the_layer_applied_so_often(variant, depth):
    model = build(**variant)
    twin = model.explicit(depth)
    output = twin(TOKENS, TARGETS)
    inputs = model.inputs(TOKENS)
    z = torch.zeros(3, 7, D, dtype=torch.float64)
    for _ in range(depth):
        z = model.deq.cell(z, *inputs)
    _, _, losses = model.readout(z, TARGETS)
    assert relative_error(output.losses, losses) <= 1e-13
    parameters = list(model.parameters())
    mine = torch.autograd.grad(output.loss, parameters, allow_unused=True, materialize_grads=True)
    true = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
    assert relative_error(mine, true) <= 1e-12


def test_the_twin_of_a_chunked_model_takes_a_segment_as_a_whole():
    whole, model = build(), build(chunk_size=2)
    assert torch.equal(model.explicit(3)(TOKENS).logits, whole.explicit(3)(TOKENS).logits)
    assert model.config.chunk_size == 2


def test_the_twin_shares_parameters_and_nothing_else():
    model = build(dropout=0.3, memory_length=4)
    twin = model.explicit(3, checkpoint=True)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all(one is other for one, other in pairs)
    twin.eval()
    assert model.deq.cell.dropout.training
    assert isinstance(model.deq.plan.adjoint, Implicit)
    with torch.no_grad():
        model.embedding.tables[0].mul_(2)
    assert twin.softmax.table(0) is model.embedding.tables[0]
    with pytest.raises(ValueError, match="depth must be an integer of at least 1, got 0"):
        model.explicit(0)


def test_a_checkpointed_twin_has_the_same_gradient():
    model = build(dropout=0.2, memory_length=3)
    memory = model(STREAM[:, :3]).memory
    grads = []
    for checkpoint in (False, True):
        torch.manual_seed(5)
        loss = model.explicit(4, checkpoint)(TOKENS, TARGETS, memory).loss
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    assert relative_error(*grads) <= 1e-13


# Gradients


def test_gradients_of_all_parameters_equal_the_unrolled_truth(variant):
    model = build(**variant, memory_length=3)
    memory = model(STREAM[:, :3]).memory
    named = dict(model.named_parameters())
    got = torch.autograd.grad(model(TOKENS, TARGETS, memory).loss, list(named.values()))
    unrolled = model.explicit(80)
    want = torch.autograd.grad(unrolled(TOKENS, TARGETS, memory).loss, list(named.values()))
    for name, one, other in zip(named, got, want, strict=True):
        assert float(one.abs().max()) > 0, name
        assert float((one - other).norm()) <= 1e-8 * (float(other.norm()) + 1e-3), name


@pytest.mark.parametrize("adjoint", [Implicit(any_order=True, solver=ROBUST, stop=TIGHT), Unroll(checkpoint=True)])
def test_other_exact_adjoints_agree(adjoint):
    model = build()
    parameters = list(model.parameters())
    want = torch.autograd.grad(model(TOKENS, TARGETS).loss, parameters)
    with override(model, adjoint=adjoint, solver=Picard(), stop=Stop(rtol=1e-13, max_steps=300)):
        got = torch.autograd.grad(model(TOKENS, TARGETS).loss, parameters)
    assert relative_error(got, want) <= 1e-8


def test_reversible_and_phantom_adjoints_run():
    model = build()
    parameters = list(model.parameters())
    want = torch.autograd.grad(model(TOKENS, TARGETS).loss, parameters)
    with override(model, adjoint=Phantom(steps=30), stop=TIGHT):
        assert relative_error(torch.autograd.grad(model(TOKENS, TARGETS).loss, parameters), want) <= 1e-3
    with override(model, adjoint=Reversible(), stop=Stop(rtol=0, max_steps=45, select="last")):
        assert relative_error(torch.autograd.grad(model(TOKENS, TARGETS).loss, parameters), want) <= 1e-3


@pytest.mark.parametrize("chunks", [2, 5])
def test_recomputed_pieces_change_nothing(chunks):
    results = []
    for pieces in (1, chunks):
        model = build(ffn_chunks=pieces, dropout=0.2)
        torch.manual_seed(11)
        output = model(TOKENS, TARGETS)
        torch.manual_seed(12)
        loss = output.loss + 0.1 * jacobian_penalty(output.solution)
        results.append((output.losses, torch.autograd.grad(loss, list(model.parameters()))))
    assert relative_error(results[1][0], results[0][0]) <= 1e-11
    assert relative_error(results[1][1], results[0][1]) <= 1e-9


def test_recomputed_pieces_keep_no_inner_activation():
    kept = []
    for pieces in (1, 4):
        model = build(ffn_chunks=pieces, d_inner=400, dropout=0.1)
        inputs, z, sizes = model.inputs(TOKENS), normal(3, 7, D).requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            model.deq.cell(z, *inputs)
        kept.append(sizes.count(3 * 7 * 400 // pieces))
    assert kept[0] > 0
    assert kept[1] == 0


def test_the_jacobian_penalty_reaches_the_parameters():
    model = build()
    output = model(TOKENS, TARGETS)
    penalty = jacobian_penalty(output.solution, probes=2)
    grads = torch.autograd.grad(penalty, [model.deq.cell.feed_forward.widen.weight_v, model.injection.weight])
    assert all(float(grad.abs().max()) > 0 for grad in grads)


# Dropout


def test_the_layer_is_deterministic_within_a_forward():
    model = build(dropout=0.3, attention_dropout=0.2)
    output = model(TOKENS, TARGETS)
    problem, z = output.solution.problem, output.solution.value
    with torch.no_grad():
        first, second = (problem.evaluate(problem.start(z))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all_converged(output.solution.stats)  # with a new mask at each step it could not
    other = model(TOKENS, TARGETS)
    assert not torch.allclose(other.solution.value, z)


def test_gradient_with_dropout_is_that_of_the_masks_drawn():
    model = build(dropout=0.3, attention_dropout=0.2)
    parameters = list(model.parameters())
    torch.manual_seed(21)
    got = torch.autograd.grad(model(TOKENS, TARGETS).loss, parameters)
    torch.manual_seed(21)
    want = torch.autograd.grad(model.explicit(120)(TOKENS, TARGETS).loss, parameters)
    assert relative_error(got, want) <= 1e-7


def test_masks_of_embedding_and_output_are_shared_over_time():
    model = build(dropout=0.4)
    output = model(TOKENS)
    dropped = (output.hidden == 0).all(dim=1)  # (B, d)
    assert torch.equal(output.hidden == 0, dropped[:, None].expand(3, 7, D))
    assert 0 < int(dropped.sum()) < dropped.numel()
    kept = ~dropped[:, None].expand(3, 7, D)
    assert relative_error(output.hidden[kept], output.solution.value[kept] / 0.6) <= 1e-13
    model.eval()
    output = model(TOKENS)
    assert torch.equal(output.hidden, output.solution.value)


# Precision, copies


def test_autocast_keeps_the_state_in_float32():
    plan = Plan(stop=Stop(rtol=1e-2, max_steps=40), adjoint=Implicit(stop=Stop(rtol=1e-2, max_steps=40)))
    model = build(plan=plan, memory_length=4)
    want = model(TOKENS, TARGETS).losses
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(TOKENS, TARGETS)
        again = model(TOKENS, TARGETS, output.memory)
    assert output.solution.value.dtype == output.losses.dtype == again.losses.dtype == torch.float32
    assert relative_error(output.losses, want) <= 0.1  # eight bits and a loose solve
    (output.loss + again.loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_and_state_dicts_round_trip():
    model = build(memory_length=4, cutoffs=(5, 12), div_val=2)
    want = model(TOKENS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(TOKENS).logits, want)
    fresh = DEQTransformer(model.config).double()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(TOKENS).logits, want)
    assert sum(t.numel() for t in model.state_dict().values()) == sum(p.numel() for p in model.parameters())


def test_options_of_the_solve_are_passed_on():
    model = build().eval()
    output = model(TOKENS, trace=True, collect="iterates")
    assert output.solution.stats.trace.shape[0] == 3
    assert len(output.solution.collected["iterates"]) > 2
    warm = model(TOKENS, z0=output.solution.value.detach())
    assert int(warm.solution.stats.steps.max()) <= 1


# Sizes and presets


def parameter_count(module):
    return sum(parameter.numel() for parameter in module.parameters())


SIZES = {  # name: block, injection, word vectors, all
    "deq_transformer_wt103": (69_753_000, 1_472_100, 25_057_350, 97_691_888),
    "deq_transformer_wt103_reg": (69_753_000, 1_472_100, 25_057_350, 97_691_888),
    "deq_transformer_wt103_preln_reg": (69_753_000, 1_472_100, 25_057_350, 97_691_888),
    "deq_transformer_small": (3_760_000, 751_500, 133_867_500, 138_646_735),
    "deq_transformer_medium": (42_330_400, 692_640, 128_512_800, 171_803_575),
    "deq_transformer_copy_memory": (10_188, 3_168, 320, 14_006),
}
PLANS = {"wt103": (30, 35), "wt103_reg": (12, 13), "wt103_preln_reg": (14, 14), "small": (30, 35), "medium": (30, 35)}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = create_model(name)
    tables = sum(table.numel() for table in model.embedding.tables)
    got = (parameter_count(model.deq), parameter_count(model.injection), tables, parameter_count(model))
    assert got == SIZES[name]


def test_published_sizes_are_met():
    block, injection, tables, total = SIZES["deq_transformer_wt103"]
    assert (round(block / 1e6, 1), round(injection / 1e6, 2)) == (69.8, 1.47)
    assert (round(tables / 1e6, 1), round(total / 1e6, 1)) == (25.1, 97.7)
    block, injection, _, total = SIZES["deq_transformer_small"]
    assert (round((block + injection) / 1e6, 2), round(total / 1e6, 1)) == (4.51, 138.6)
    block, injection, tables, total = SIZES["deq_transformer_medium"]
    assert (round((block + injection) / 1e6), round(total / 1e6)) == (43, 172)
    assert round((total - WT103_VOCABULARY) / 1e6, 1) == 171.5  # without the biases of the softmax


def test_presets_are_registered_with_their_settings():
    assert set(list_models("deq_transformer*")) == set(SIZES)
    with torch.device("meta"):
        for short, (forward, backward) in PLANS.items():
            model = create_model(f"deq_transformer_{short}")
            plan = model.deq.plan
            assert (plan.stop.max_steps, plan.stop.rtol) == (forward, 1e-3)
            assert (plan.adjoint.stop.max_steps, plan.adjoint.stop.rtol) == (backward, 1e-3)
            assert model.config.vocab_size == WT103_VOCABULARY
        reg = create_model("deq_transformer_wt103_preln_reg").config
    assert (reg.dropout, reg.attention_dropout, reg.memory_length, reg.pre_norm) == (0.06, 0.01, 300, True)
    model = create_model("deq_transformer_small", vocab_size=50, d_model=20, d_inner=30, memory_length=7)
    assert (model.memory_length, model.embedding.tables[0].shape) == (7, (50, 20))


def test_the_copy_memory_model_learns():
    model = deq_transformer_copy_memory()
    tokens = torch.randint(10, (4, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with override(model, adjoint=Implicit(stop=Stop(rtol=0, max_steps=8)), stop=Stop(rtol=0, max_steps=8)):
        for _ in range(20):
            output = model(tokens, tokens)
            assert output.memory is None
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            losses.append(float(output.loss.detach()))
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)
    assert losses[-1] < 0.7 * losses[0]


# Bad input


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="did you mean 'd_inner'"):
        create_model("deq_transformer_small", d_iner=3)
    with pytest.raises(ValueError, match="standard_residual concerns pre_norm=True"):
        DEQTransformerConfig(VOCAB, standard_residual=True)
    with pytest.raises(ValueError, match="ffn_chunks=600 exceeds d_inner=512"):
        DEQTransformerConfig(VOCAB, ffn_chunks=600)
    with pytest.raises(ValueError, match="chunk_size must be an integer of at least 1, got 0"):
        DEQTransformerConfig(VOCAB, chunk_size=0)
    with pytest.raises(ValueError, match="dropout must be a number in"):
        DEQTransformerConfig(VOCAB, dropout=1.0)
    with pytest.raises(TypeError, match="plan must be a Plan"):
        DEQTransformerConfig(VOCAB, plan="anderson")


def test_bad_input_is_refused():
    model = build(memory_length=4)
    memory = model(TOKENS).memory
    with pytest.raises(ValueError, match="tokens must be integers of shape"):
        model(TOKENS[0])
    with pytest.raises(ValueError, match="tokens must be integers of shape"):
        model(TOKENS.double())
    with pytest.raises(ValueError, match="B = 2"):
        model(TOKENS[:2], memory=memory)
    with pytest.raises(ValueError, match="memory has shapes"):
        model(TOKENS, memory=(memory[0], memory[0]))
    with pytest.raises(ValueError, match="one per stream"):
        model.step(TOKENS)
