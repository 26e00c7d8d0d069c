"""The public surface, pinned: a new name is a decision, not an accident."""

import inspect
import subprocess
import sys

import pytest

import equipoise as eq

PUBLIC = [
    "DEQ",
    "GMRES",
    "Adjoint",
    "Anderson",
    "Broyden",
    "CapturedForward",
    "EquilibriumError",
    "EquilibriumWarning",
    "HyperAnderson",
    "Implicit",
    "Ladder",
    "Neumann",
    "NewtonKrylov",
    "OneStep",
    "Phantom",
    "Picard",
    "Plan",
    "Problem",
    "Reversible",
    "Shine",
    "Solution",
    "SolveScoped",
    "Solver",
    "Stats",
    "Status",
    "Stop",
    "Unroll",
    "audit_gradient",
    "fixed_point",
    "fixed_point_correction",
    "jacobian_penalty",
    "load",
    "memory_report",
    "nn",
    "override",
    "register_adjoint",
    "register_solver",
    "solve_constant",
    "spectral_radius",
    "theory",
]


def test_the_exact_list_of_public_names():
    assert sorted(eq.__all__) == sorted(PUBLIC)
    assert len(eq.__all__) == len(set(eq.__all__)) <= 40


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_and_is_documented(name):
    item = getattr(eq, name)
    assert inspect.getdoc(item)


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(getattr(eq, name))])
def test_public_functions_are_fully_annotated(name):
    signature = inspect.signature(getattr(eq, name))
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_version():
    major, minor, patch = eq.__version__.split(".")
    assert all(part.isdigit() for part in (major, minor, patch[:1]))


def test_the_entry_points_have_the_promised_arguments():
    names = list(inspect.signature(eq.fixed_point).parameters)
    expected = "f z0 inputs solver adjoint stop batch_dims in_dims context trace collect throw"
    assert names == expected.split()
    names = list(inspect.signature(eq.DEQ).parameters)
    assert names == [
        "cell",
        "solver",
        "adjoint",
        "stop",
        "eval_plan",
        "batch_dims",
        "in_dims",
        "initial_state",
        "engine",
    ]


def test_import_is_light():
    """Only torch and what it brings: the heavy and the optional enter where they are used."""
    heavy = ["matplotlib", "accelerate", "transformers", "scipy", "sklearn", "typer", "torchmetrics", "PIL"]
    script = (
        "import sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import equipoise\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        f"print(sorted(new & set({heavy!r})))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]", result.stdout
