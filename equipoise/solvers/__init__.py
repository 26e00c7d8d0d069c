"""Solvers: one method per file, known by name through the registry."""

from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import SOLVERS, Solver, State, as_solver, register_solver
from equipoise.solvers.broyden import Broyden
from equipoise.solvers.ladder import Ladder
from equipoise.solvers.newton_krylov import GMRES, NewtonKrylov
from equipoise.solvers.picard import Picard

__all__ = [
    "GMRES",
    "SOLVERS",
    "Anderson",
    "Broyden",
    "Ladder",
    "NewtonKrylov",
    "Picard",
    "Solver",
    "State",
    "as_solver",
    "register_solver",
]
