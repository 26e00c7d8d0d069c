"""Adjoints: one strategy per file, known by name through the registry."""

from equipoise.adjoints.base import ADJOINTS, Adjoint, as_adjoint, register_adjoint
from equipoise.adjoints.implicit import Implicit
from equipoise.adjoints.neumann import Neumann
from equipoise.adjoints.phantom import OneStep, Phantom
from equipoise.adjoints.reversible import Reversible
from equipoise.adjoints.shine import Shine
from equipoise.adjoints.unroll import Unroll

__all__ = [
    "ADJOINTS",
    "Adjoint",
    "Implicit",
    "Neumann",
    "OneStep",
    "Phantom",
    "Reversible",
    "Shine",
    "Unroll",
    "as_adjoint",
    "register_adjoint",
]
