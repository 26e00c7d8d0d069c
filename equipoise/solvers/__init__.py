"""Solvers: one method per file, known by name through the registry."""

from equipoise.solvers._hyper_choice import hyper_solver_for
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers._hyper_file import WrongModelError, fingerprint, load_solver, named_solver, save_solver
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import SOLVERS, Solver, State, as_solver, register_solver
from equipoise.solvers.broyden import Broyden
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.solvers.ladder import Ladder
from equipoise.solvers.newton_krylov import GMRES, NewtonKrylov
from equipoise.solvers.picard import Picard

__all__ = [
    "GMRES",
    "SOLVERS",
    "Anderson",
    "Broyden",
    "HyperAnderson",
    "HyperConfig",
    "Ladder",
    "NewtonKrylov",
    "Picard",
    "Solver",
    "State",
    "WrongModelError",
    "as_solver",
    "fingerprint",
    "hyper_solver_for",
    "load_solver",
    "named_solver",
    "register_solver",
    "save_solver",
]
