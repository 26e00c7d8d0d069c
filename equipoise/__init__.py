"""equipoise: deep equilibrium models for PyTorch.

A deep equilibrium model outputs the fixed point z* = f(z*, x) of one layer, found by a root solver and differentiated
implicitly, so that training memory does not grow with depth. Wrap a layer with `DEQ`, or call `fixed_point` on a
function.
"""

from equipoise import nn, theory
from equipoise._fixed_point import fixed_point
from equipoise._module import DEQ, Plan, override
from equipoise._problem import Problem
from equipoise._scope import SolveScoped, solve_constant
from equipoise._solution import EquilibriumError, EquilibriumWarning, Solution, Stats, Status
from equipoise._stop import Stop
from equipoise.adjoints import Adjoint, Implicit, Neumann, OneStep, Phantom, Reversible, Shine, Unroll, register_adjoint
from equipoise.diagnostics import audit_gradient, memory_report, spectral_radius
from equipoise.penalties import fixed_point_correction, jacobian_penalty
from equipoise.solvers import GMRES, Anderson, Broyden, Ladder, NewtonKrylov, Picard, Solver, register_solver

__version__ = "0.1.0"

__all__ = [
    "DEQ",
    "GMRES",
    "Adjoint",
    "Anderson",
    "Broyden",
    "EquilibriumError",
    "EquilibriumWarning",
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
    "memory_report",
    "nn",
    "override",
    "register_adjoint",
    "register_solver",
    "solve_constant",
    "spectral_radius",
    "theory",
]
