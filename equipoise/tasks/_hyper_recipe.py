"""What a recipe for a learned solver says: its networks, how they are fitted, and what is known of their like."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from equipoise._errors import require_count, require_number, unknown_name
from equipoise.solvers._hyper_config import COMPRESSIONS, WARM, WEIGHTS
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks._hyper_losses import FitSettings


@dataclass(frozen=True)
class Networks:
    """What a new solver consists of; sizes that are None follow from the budget.

    Attributes:
        initialiser: Whether the start is learned.
        weights: See `HyperConfig`; likewise the next ones.
        mixing: Whether the step length is learned.
        plain_sum: Whether residuals are summed without weights.
        products: Whether the step network sees inner products of residuals.
        local: Whether positions of a sequence have weights of their own; None for wherever there are positions.
        memory: Iterates combined.
        compression: How a residual becomes a few numbers; None for what suits the state.
        hidden: Inner size of the initialiser.
        compressed: Numbers that a residual becomes.
        width: Inner size of the step network.
        rank: Inner size of the linear map of residuals that is added to images; 0 for none.
        reach: Of sequences: positions that it looks at.
        warm: What becomes of a start that is not zero: "keep" it, for which each solve looks, or "replace" it; None for
            what suits the model.
        budget: Largest share of the model's parameters.
    """

    initialiser: bool = True
    weights: str = "shift"
    mixing: bool = True
    plain_sum: bool = False
    products: bool = True
    local: bool | None = None
    memory: int = 6
    compression: str | None = None
    hidden: int | None = None
    compressed: int | None = None
    width: int | None = None
    rank: int = 0
    reach: int = 3
    warm: str | None = None
    budget: float = 0.04

    def __post_init__(self) -> None:
        compressions = sorted({name for names in COMPRESSIONS.values() for name in names})
        if self.weights not in WEIGHTS:
            raise unknown_name("kind of weights", self.weights, WEIGHTS)
        if self.compression is not None and self.compression not in compressions:
            raise unknown_name("compression", self.compression, compressions)
        if self.warm is not None and self.warm not in WARM:
            raise unknown_name("way with a start", self.warm, WARM)
        for name in ("memory", "hidden", "compressed", "width", "rank", "reach"):
            if getattr(self, name) is not None:
                require_count("solver", name, getattr(self, name), low=0 if name == "rank" else 1)
        require_number("solver", "budget", self.budget, low=0.0, open_low=True)

    def settings(self) -> dict[str, Any]:
        """As arguments of `hyper_solver_for`."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return values if values.pop("initialiser") else {**values, "source": None}

    def require_of(self, solver: HyperAnderson) -> None:
        """Raise if a solver that is gone on with does not consist of what is asked for; defaults ask for nothing."""
        has = {
            **dataclasses.asdict(solver.config),
            "initialiser": solver.initialiser is not None,
            "budget": self.budget,
        }
        asked, usual = dataclasses.asdict(self), dataclasses.asdict(Networks())
        for name, value in asked.items():
            cut = name == "rank" and 0 < has[name] <= value  # to the budget
            if value != usual[name] and value != has[name] and not cut:
                raise ValueError(
                    f"solver.{name} = {value} cannot be had: the solver that is gone on with has {has[name]}."
                )


@dataclass(frozen=True)
class HyperRecipe:
    """A fit in one file: `[solver]` and `[fit]`, and what is known of its like.

    Attributes:
        solver: What the solver consists of.
        fit: How it is fitted.
        published: What was found of this variant elsewhere, in words.
        worse_than: Names of the variants that were found better, "anderson" among them.
        better_than: Names of those that were found worse.
    """

    solver: Networks = Networks()
    fit: FitSettings = FitSettings()
    published: str = ""
    worse_than: tuple[str, ...] = ()
    better_than: tuple[str, ...] = ()
