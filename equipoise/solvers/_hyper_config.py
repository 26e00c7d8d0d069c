"""Settings of a learned solver."""

from dataclasses import dataclass

from equipoise._errors import require_count, unknown_name

COMPRESSIONS = {"sequence": ("last", "mean", "sketch"), "images": ("lowest", "sketch"), "any": ("sketch",)}
"""Kinds of states, and how their residuals can be put into few numbers; the first is the default."""

WEIGHTS = ("shift", "softmax", "free", "corrected", "least_squares", "newest")

WARM = ("keep", "replace")


@dataclass(frozen=True)
class HyperConfig:
    """All that a learned solver is but its weights.

    Attributes:
        kind: "sequence" for leaves (N, T, d), "images" for leaves (N, C, H, W) from the highest resolution to the
            lowest, "any" for anything else.
        state: Features, channels, or all numbers of a system, by leaf.
        source: Features, channels or numbers of the input that the initialiser reads; None for no initialiser.
        hidden: Inner size of the initialiser.
        compression: How a residual becomes a few numbers: "last" or "mean" (over positions), "lowest" (resolution),
            "sketch" (any state); None for the first that suits the kind.
        compressed: How many numbers.
        width: Inner size of the step network.
        memory: Iterates combined, as in `Anderson`.
        weights: "shift" (learned, moved so that they sum to one), "softmax" (learned, between 0 and 1), "free"
            (learned, any sum), "corrected" (Anderson's, plus learned ones that sum to zero), "least_squares"
            (Anderson's), "newest" (all on the newest iterate).
        mixing: Whether the step length is learned; it is 1 otherwise.
        plain_sum: Add the sum of all residuals times the step length, instead of their weighted sum.
        products: Whether the step network also sees inner products of residuals.
        local: Of sequences: weights and a step length for each position, from its own residuals, instead of one set
            for all. What a position gets does not depend on later ones.
        rank: Inner size of a linear map of residuals that is added to images; 0 for none. It stands for what further
            plain steps would add, so that fewer are needed, and weights are of its results. Of images, if it is above
            0, a matrix over the channels of a pixel, whole, at each resolution.
        reach: Of sequences: how many positions it looks at, a position's own and those before it.
        warm: What becomes of a start that is not zero: "keep" it, or "replace" it by the learned one.
    """

    kind: str
    state: tuple[int, ...]
    source: int | None = None
    hidden: int = 100
    compression: str | None = None
    compressed: int = 64
    width: int = 64
    memory: int = 6
    weights: str = "shift"
    mixing: bool = True
    plain_sum: bool = False
    products: bool = True
    local: bool = False
    rank: int = 0
    reach: int = 3
    warm: str = "keep"

    def __post_init__(self) -> None:
        if self.kind not in COMPRESSIONS:
            raise unknown_name("kind of state", self.kind, COMPRESSIONS)
        object.__setattr__(self, "state", tuple(self.state))
        for name in ("hidden", "compressed", "width", "memory", "reach"):
            require_count("HyperAnderson", name, getattr(self, name))
        require_count("HyperAnderson", "rank", self.rank, low=0)
        for size in (*self.state, *([] if self.source is None else [self.source])):
            require_count("HyperAnderson", "sizes of state and source", size)
        if not self.state:
            raise ValueError("HyperAnderson: state must name the size of at least one leaf.")
        if self.compression is None:
            object.__setattr__(self, "compression", COMPRESSIONS[self.kind][0])
        if self.compression not in COMPRESSIONS[self.kind]:
            raise unknown_name(f"compression of {self.kind}", self.compression, COMPRESSIONS[self.kind])
        if self.weights not in WEIGHTS:
            raise unknown_name("kind of weights", self.weights, WEIGHTS)
        if self.local and self.kind != "sequence":
            raise ValueError(
                f"HyperAnderson: local concerns positions of sequences; the state is of kind {self.kind!r}."
            )
        if self.local and self.compression == "mean":
            raise ValueError('HyperAnderson: a mean over positions has no place where each is by itself; use "last".')
        if self.plain_sum and self.weights == "newest":
            raise ValueError(
                'HyperAnderson: plain_sum adds the residuals of remembered steps; "newest" remembers none.'
            )
        if self.warm not in WARM:
            raise unknown_name("way with a start", self.warm, WARM)

    @property
    def learns_weights(self) -> bool:
        """Whether the weights of iterates are learned."""
        return self.weights in ("shift", "softmax", "free", "corrected")

    @property
    def solves(self) -> bool:
        """Whether weights begin with those of least squares."""
        return self.weights in ("corrected", "least_squares")

    @property
    def learns_steps(self) -> bool:
        """Whether there is a step network at all."""
        return self.learns_weights or self.mixing
