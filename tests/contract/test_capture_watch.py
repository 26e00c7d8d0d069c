"""What a captured solve does besides its replays: little, and what a recording depends on is noticed all the same."""

import dataclasses

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _capture, _fingerprint, _recording
from tests.captured import FIXED, Launches, Silent, Tanh, assert_close, deq_of, inputs_of, recordings_of

# Host work


def transformer(weight_norm=False):
    """A DEQ-Transformer's equilibrium and inputs: a tensor, a tuple of two, and None."""
    from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig

    plan = eq.Plan(eq.Anderson(), eq.Implicit(solver=eq.Anderson(), stop=FIXED), FIXED)
    config = DEQTransformerConfig(9, d_model=8, heads=2, d_inner=12, weight_norm=weight_norm, plan=plan)
    model = DEQTransformer(config)
    with torch.no_grad():
        inputs = model.inputs(torch.randint(9, (3, 5)))
    model.deq.engine = "captured"
    return model.deq, inputs


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(_recording, "tape_for", Silent)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=str)
@pytest.mark.parametrize("stop", [FIXED, eq.Stop(rtol=1e-3, max_steps=8)], ids=["fixed", "tolerance"])
def test_launches_of_inference(silent, solver, stop):
    """The start, two copies (float, bool), three tensors to return; with a tolerance, four operations to ask once."""
    deq, inputs = transformer()
    deq.plan = deq.plan.replace(solver=solver, stop=stop)
    with torch.no_grad():
        for _ in range(2):
            deq(*inputs)
        with Launches() as launched:
            deq(*inputs)
    assert len(launched.names) <= (6 if stop.fixed_budget else 10), launched.names


def test_launches_of_training(silent):
    """As many forward; backward the cotangent, the gradients (one dtype: one launch), two tensors of statistics."""
    deq, inputs = transformer()
    injection = inputs[0].clone().requires_grad_()
    wanted = [injection, *deq.parameters()]
    for _ in range(3):
        with Launches() as launched:
            value = deq(injection, *inputs[1:]).value
        cotangent = torch.ones_like(value)
        with Launches() as returned:
            torch.autograd.grad(value, wanted, cotangent, allow_unused=True)
    assert len(launched.names) <= 6, launched.names
    assert len(returned.names) <= 4, returned.names


def test_keys_are_made_once(monkeypatch):
    """Inputs in new tensors, and updates of parameters in place, need no look at the whole cell."""
    made = []
    monkeypatch.setattr(_capture, "key_of", lambda *args: made.append(1) or _fingerprint.key_of(*args))
    deq = deq_of(Tanh(), stop=FIXED)
    for seed in range(4):
        with torch.no_grad():
            deq(inputs_of(seed=seed))
            deq.cell.weight.mul_(0.9)
    assert len(made) == 2  # and one to see whether the cell has changed itself
    deq.plan = dataclasses.replace(deq.plan)
    with torch.no_grad():
        deq(inputs_of())
        assert len(made) == 2
        deq.cell.unknown = object()  # something that no recording depends on, as far as can be seen
        for _ in range(2):
            deq(inputs_of())
    assert len(made) == 3 + 1  # another attribute: a new key, and a recording
    assert deq.capture.recorded == 2
    deq.cell.unknown = object()
    with torch.no_grad():
        for _ in range(2):
            deq(inputs_of())
    assert len(made) == 5  # the key is the old one
    assert deq.capture.recorded == 2


def test_dropped_recordings_are_not_taken(monkeypatch):
    monkeypatch.setattr(_capture, "MOST_SHAPES", 1)
    deq = deq_of(Tanh(), stop=FIXED)
    for batch in (2, 3, 2, 3):
        with torch.no_grad():
            value = deq(inputs_of(batch=batch)).value
        deq.engine = "eager"
        assert_close(value, deq(inputs_of(batch=batch)).value, 1e-12)
        deq.engine = "captured"
    assert deq.capture.recorded == 4
    assert len(recordings_of(deq)) == 1


# What is noticed


class Several(nn.Module):
    """Attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6).double()
        self.scale, self.name, self.table = 1, "plain", torch.ones(6, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(6, dtype=torch.float64))
        self.absent = None

    def forward(self, z, x):
        z = torch.tanh(0.3 * self.mix(z) * self.table + x + self.shift) * self.scale
        return z if self.absent is None else z + self.absent


def transpose(cell):
    cell.mix.weight.data = cell.mix.weight.data.T


def rename(cell):
    """The same value by another name."""
    cell.other = cell.__dict__.pop("name")


def hook(cell):
    cell.mix.register_forward_hook(lambda *args: None)


def subclass(cell):
    cell.__class__ = type("Other", (Several,), {"forward": lambda self, z, x: 0.5 * torch.tanh(z) + x})


CHANGES = {
    "replaced storage": lambda cell: setattr(cell.mix.weight, "data", cell.mix.weight.data * 0.5),
    "the same storage in another order": transpose,
    "frozen": lambda cell: cell.mix.weight.requires_grad_(False),
    "another parameter": lambda cell: setattr(cell.mix, "bias", nn.Parameter(cell.mix.bias.detach() + 1)),
    "no parameter": lambda cell: setattr(cell.mix, "bias", None),
    "a new parameter": lambda cell: setattr(cell, "absent", nn.Parameter(torch.ones(6, dtype=torch.float64))),
    "another module": lambda cell: setattr(cell, "mix", nn.Linear(6, 6).double()),
    "another buffer": lambda cell: setattr(cell, "shift", cell.shift + 1),
    "another tensor": lambda cell: setattr(cell, "table", cell.table * 2),
    "a replaced tensor": lambda cell: setattr(cell.table, "data", cell.table * 2),
    "a new attribute": lambda cell: setattr(cell, "more", 1),
    "a renamed attribute": rename,
    "another number": lambda cell: setattr(cell, "scale", 0.5),
    "another kind of number": lambda cell: setattr(cell, "scale", 1.0),
    "another mode": lambda cell: cell.mix.eval(),
    "another class": subclass,
    "another dictionary": lambda cell: setattr(cell, "__dict__", dict(vars(cell))),
    "a hook": hook,
    "the same again": lambda cell: None,
}
HARMLESS = {"another dictionary", "the same again"}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_cell_are_noticed(change):
    torch.manual_seed(0)
    cell, x = Several(), inputs_of()
    watch = _fingerprint.Watch(cell)
    assert watch.unchanged()
    deq = deq_of(cell, stop=FIXED)
    with torch.no_grad():
        deq(x)
        deq(x)
    CHANGES[change](cell)
    assert watch.unchanged() == (change == "the same again")
    deq.engine = "eager"
    expected = deq(x).value
    deq.engine = "captured"
    with torch.no_grad():
        if change == "a hook":
            with pytest.warns(eq.EquilibriumWarning, match="hooks, which a replay would not call"):
                value = deq(x).value
        else:
            value = deq(x).value
    assert_close(value, expected.detach(), 1e-12)
    assert deq.capture.recorded == 1 + (change not in {*HARMLESS, "a hook"})


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "plain", "given"])
def test_changes_of_inputs_are_noticed(kind):
    class Taking(nn.Module):
        def forward(self, z, x, more):
            if isinstance(more, dict):
                return 0.5 * torch.tanh(z) + x + sum(value for name, value in more.items() if name != "not")
            return 0.5 * torch.tanh(z) + x + (more if isinstance(more, float) else sum(more))

    x, one = inputs_of(), torch.ones(5, 6, dtype=torch.float64)
    given = {
        "tuple": [(x, one), (x, one, one), (x.T.contiguous().T, one)],
        "list": [[x, one], (x, one)],
        "dict": [{"a": x, "b": one}, {"a": x, "not": one}, {"b": x, "a": one}],
        "plain": [1.0, 2.0, float("nan")],
        "given": [(x,), (x.float(),), (x[:1],)],
    }[kind]
    deq = deq_of(Taking(), stop=FIXED, in_dims=None)
    for more in given:
        values = []
        for engine in ("eager", "captured", "captured"):
            deq.engine = engine
            with torch.no_grad():
                values.append(deq(x, more).value)
        assert_close(values[1:], [values[0]] * 2, 1e-12)
    assert deq.capture.recorded == len(given)
    assert deq.capture.replayed == 2 * len(given)


def test_settings_of_torch_and_of_the_solve_are_noticed():
    deq, x = deq_of(Tanh(dtype=torch.float32), stop=FIXED), inputs_of(dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    with torch.no_grad():
        deq(x)
        try:
            torch.set_float32_matmul_precision("high" if before != "high" else "highest")
            deq(x)
        finally:
            torch.set_float32_matmul_precision(before)
        deq(x)
        assert deq.capture.recorded == 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            deq(x)
        assert deq.capture.recorded == 3
        deq.in_dims = None
        deq(x)
        deq.batch_dims = 0
        deq(x)
        deq(x, z0=torch.zeros(5, 6))
        assert deq.capture.recorded == 5
        deq.plan = deq.plan.replace(stop=eq.Stop(rtol=0, max_steps=8))
        deq(x)
    deq(x)
    assert deq.capture.recorded == 7
    assert not deq.capture.fallbacks
