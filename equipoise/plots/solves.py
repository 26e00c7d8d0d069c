"""Statistics of solves over training, which several figures show."""

from equipoise.plots.logs import LogError, Run

DIRECTIONS = ("forward", "backward")


def solve_points(run: Run, direction: str, key: str) -> list[tuple[int, float]]:
    """(step, value) of a statistic of the forward or backward solves; empty if only the other direction has any.

    Raises:
        LogError: If the run logs no solve at all: its model is not a DEQ, or it has not logged yet.
    """
    if not any(run.points("train", name, "solves") for name in DIRECTIONS):
        raise LogError(
            run,
            f"{run.path} logs no solves: its model solves for no equilibrium, or the run is too young. "
            "Take a run of a DEQ, written by `equipoise train RECIPE --out RUN`.",
        )
    return run.points("train", direction, key)
