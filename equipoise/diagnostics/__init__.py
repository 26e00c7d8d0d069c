"""Looking at equilibria: stability, gradient quality, memory, words."""

from equipoise.diagnostics.audit import GradientAudit, audit_gradient
from equipoise.diagnostics.explain import explain
from equipoise.diagnostics.memory import MemoryReport, memory_report
from equipoise.diagnostics.spectral import spectral_radius

__all__ = ["GradientAudit", "MemoryReport", "audit_gradient", "explain", "memory_report", "spectral_radius"]
