"""equipoise: deep equilibrium models for PyTorch.

A deep equilibrium model outputs the fixed point z* = f(z*, x) of one layer, found by a root solver and differentiated
implicitly, so that training memory does not grow with depth. Wrap a layer with `DEQ`, or call `fixed_point` on a
function.
"""

from typing import TYPE_CHECKING

from equipoise import nn, theory
from equipoise._fixed_point import fixed_point
from equipoise._forward import CapturedForward
from equipoise._module import DEQ, Plan, override
from equipoise._problem import Problem
from equipoise._scope import SolveScoped, solve_constant
from equipoise._solution import EquilibriumError, EquilibriumWarning, Solution, Stats, Status
from equipoise._stop import Stop
from equipoise.adjoints import Adjoint, Implicit, Neumann, OneStep, Phantom, Reversible, Shine, Unroll, register_adjoint
from equipoise.diagnostics import audit_gradient, memory_report, spectral_radius
from equipoise.penalties import fixed_point_correction, jacobian_penalty
from equipoise.solvers import (
    GMRES,
    Anderson,
    Broyden,
    HyperAnderson,
    Ladder,
    NewtonKrylov,
    Picard,
    Solver,
    register_solver,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__version__ = "0.1.0"


def load(path: "str | Path", device: "torch.device | str" = "cpu", which: str = "best") -> "torch.nn.Module":
    """A trained model, in eval mode, from the folder of a run or of a checkpoint; no other file is needed.

    Args:
        path: Folder of a run or of a checkpoint.
        device: Where the model goes.
        which: Of a run: "best" or "latest" checkpoint.
    """
    from equipoise.train.load import load as load_model  # the zoo and the training system stay unloaded until needed

    return load_model(path, device, which)


__all__ = [
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
