"""The report of the demo: what its numbers are, and how they were measured."""

import shlex
from pathlib import Path
from typing import Any

from equipoise.plots import Chart
from equipoise.plots.report import Page


def size(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def summary(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table: a column for each model, a row for each number."""
    models = results["models"].values()
    depth = _depth(results)
    kept = {row["name"]: size(row["graph"] + row["history"]) for row in results["inspection"]["memory"]}
    rows = []
    for place in range(2):
        found = [list(model["scores"].items())[place] for model in models]
        rows.append(["solver steps, or layers", *(steps for steps, _ in found)])
        rows.append(["→ validation loss", *(f"{score['loss']:.3f}" for _, score in found)])
        rows.append(["→ residual, p95", *(f"{score['solve_residual_p95']:.1e}" for _, score in found)])
    rows += [
        ["last training batch", *(f"{m['train_loss']:.3f}" for m in models)],
        ["f forward, per step", *(f"{m['forward']['nfe']:.1f}" for m in models)],
        ["f backward, per step", *(f"{m['backward'].get('nfe', m['forward']['nfe']):.1f}" for m in models)],
        ["memory of a step", kept["DEQ"], kept[f"{depth} layers"]],
        ["training steps", *(f"{m['steps']:,}" for m in models)],
        ["training time", *(f"{m['seconds']:.0f} s" for m in models)],
    ]
    return ["", *results["models"]], rows


def page(results: dict[str, Any], charts: dict[str, Chart], out: Path) -> Page:
    """The report.

    Args:
        results: Of the demo.
        charts: By name.
        out: Folder of the demo, for the commands to go on with.
    """
    deq = next(iter(results["models"].values()))
    page = Page("One layer, as an equilibrium and as a stack")
    page.text(
        f"A Transformer layer ({deq['parameters']:,} parameters with its embedding) learns to predict the next "
        "character of the Python language reference. As a DEQ, its output is the equilibrium of the layer: a solver "
        "finds it, and the gradient comes from the implicit function theorem. As the explicit twin, the layer is "
        f"applied {_depth(results)} times and trained by backpropagation. Same recipe, same start, same batches."
    )
    page.verdicts(results["verdicts"])
    _numbers(page, results)
    page.heading("Text from both")
    page.text(
        f"What comes after “{results['prompt'].strip()}”, at temperature {results['temperature']:g} and with the same "
        "seed. Each character solves for its own position only, from the memory of past ones: one layer's worth."
    )
    page.texts(results["texts"])
    _training(page, results, charts)
    _equilibrium(page, results["inspection"], charts)
    _cost(page, results["inspection"], charts)
    _learned(page, results, charts)
    _commands(page, results, out)
    _environment(page, results)
    return page


def _depth(results: dict[str, Any]) -> str:
    _, twin = results["models"].values()
    return next(iter(twin["scores"]))


def _numbers(page: Page, results: dict[str, Any]) -> None:
    data, deq = results["data"], next(iter(results["models"].values()))
    page.heading("In numbers")
    page.table(*summary(results))
    page.note(
        f"Losses are in nats per character, on {data['valid_scored_tokens']:,} held-out characters; training text has "
        f"{data['train_tokens']:,}, of {data['vocabulary']} kinds. The second loss is that of the same weights with "
        f"{list(deq['scores'])[1]} solver steps, or as many layers. A residual is ‖f(z) − z‖ / ‖f(z)‖ of a sequence, "
        "and p95 its 95th percentile: the DEQ should not depend on the number of steps, and the twin, which was "
        "trained for its own depth, need not be anywhere near an equilibrium. “f backward” counts vector-Jacobian "
        "products, one a layer for the twin. "
        "Memory is what autograd keeps for the backward pass, and the solver's history; weights are not counted. Both "
        "were trained at the same time, with one thread each; times have the evaluations in them."
    )


def _training(page: Page, results: dict[str, Any], charts: dict[str, Chart]) -> None:
    recipe, deq = results["recipe"], next(iter(results["models"].values()))
    failed = " and ".join(f"{deq['failed'][way]:,} of {count:,} {way}" for way, count in deq["solved"].items())
    page.heading("Training")
    page.charts(charts["training"], charts["nfe"], charts["residual"])
    page.note(
        f"Both begin with {recipe['warmup']['steps']:,} steps as a stack of {recipe['warmup']['layers']} layers, which "
        "is quick and a good start for the equilibrium. Tolerances of training are loose: relative residuals of "
        f"{recipe['stop']['rtol']:g} forward, {recipe['adjoint']['stop']['rtol']:g} backward; {failed} solves (of "
        f"sequences) missed them. On {100 * recipe['penalty']['probability']:.0f} % of its steps the DEQ has a "
        f"Jacobian penalty of weight {recipe['penalty']['weight']:g}, which keeps the equilibrium easy to find; the "
        "twin has none. Training losses are those of single batches, not smoothed."
    )


def _equilibrium(page: Page, inspection: dict[str, Any], charts: dict[str, Chart]) -> None:
    radius, gradient = inspection["spectral_radius"], inspection["gradient"]
    stable = "plain iteration converges to it, too" if radius["max"] < 1 else "plain iteration need not converge to it"
    page.heading("The equilibrium")
    page.text(
        f"The spectral radius of the layer's Jacobian at the equilibrium is {radius['median']:.2f} (median of "
        f"{len(radius['values'])} sequences; the largest is {radius['max']:.2f}): {stable}. The gradient that the "
        f"model is trained with, against a tight solve in float64: cosine {gradient['cosine']:.4f}, relative error "
        f"{gradient['relative_error']:.1e}."
    )
    page.charts(charts["convergence"], charts["steps"])
    page.note("On held-out text, with the trained weights. A system is a sequence; solves start from zeros.")


def _cost(page: Page, inspection: dict[str, Any], charts: dict[str, Chart]) -> None:
    page.heading("Memory and time of a training step")
    page.charts(charts["memory"], charts["time"])
    page.text(
        "A stack keeps a graph for every layer. The equilibrium keeps that of one evaluation, and the solver's history "
        "while it runs, whatever the number of steps; its time goes with that number. “DEQ, penalty” is a step on "
        "which the Jacobian penalty is drawn: it takes second derivatives."
    )
    page.note(
        "Memory is counted: bytes of the tensors that autograd saves between forward and backward pass, and of the "
        "solver's own history, the larger of the two solves. Time is the median of three passes on one batch, with "
        "one thread. Stacks of all depths have the trained weights of the DEQ."
    )
    for note in inspection["notes"]:
        page.note(note)


def _learned(page: Page, results: dict[str, Any], charts: dict[str, Chart]) -> None:
    learned, deq = results["learned"], next(iter(results["models"].values()))
    steps, faster = learned["steps"], learned["speedup"]
    page.heading("A solver that learned from this model")
    page.text(
        f"{learned['parameters']:,} parameters ({100 * learned['parameters'] / deq['parameters']:.1f} % of the "
        "model's; larger models need a smaller share) guess where the equilibrium is, and map what is left over of "
        "each step; weights of steps are Anderson's. They were fitted "
        f"to the trained model in {learned['fit_steps']:,} steps and {learned['seconds']:.0f} s, from its own "
        "equilibria and without labels; the model did not change. To a relative residual of "
        f"{learned['residual']:g} the learned solver takes {steps['learned']:.1f} steps, Anderson "
        f"{steps['anderson']:.1f}."
    )
    page.charts(charts["pareto"])
    said = (
        "does not get there within these numbers of steps"
        if faster is None
        else f"takes {100 / faster:.0f} % of the time that Anderson does"
    )
    page.note(
        "Perplexity on held-out text, and time per batch, after each number of solver steps; the single point is the "
        f"layer applied {_depth(results)} times. To the perplexity that Anderson has after {learned['at']} steps, "
        f"within half a percent, the learned solver {said}."
    )


def _commands(page: Page, results: dict[str, Any], out: Path) -> None:
    deq, twin, figures = (shlex.quote(str(out / name)) for name in ("deq", "twin", "figures"))
    command, again = results["commands"].values()
    steps = 2 * next(iter(results["models"].values()))["steps"]
    page.heading("To go on")
    page.commands(
        [
            "# train on from here, to twice the steps; Ctrl-C saves, and the same command goes on",
            f"{command} --resume --set train.steps={steps}",
            "# score other step budgets",
            f"equipoise evaluate {deq} --which latest --sweep stop.max_steps=1:31:5",
            "# more text",
            f"equipoise generate {deq} --prompt {shlex.quote(results['prompt'])} --length 500 --temperature 0.7",
            "# look into the model again; draw the figures",
            f"equipoise inspect {deq} --which latest",
            f"equipoise plot all {deq} {twin} --out {figures}",
            "# score with the learned solver",
            f"equipoise evaluate {deq} --which latest --solver hyper:{deq} --steps 4 --steps 8",
            "# how the two were trained, and the solver fitted",
            command,
            again,
            results["learning"],
        ]
    )
    page.note("In a checkout that is not installed, `python -m equipoise` stands for `equipoise`.")


def _environment(page: Page, results: dict[str, Any]) -> None:
    found = results["inspection"]["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    commit = f", commit {found['commit'][:10]}" if found.get("commit") else ""
    changed = " with changes" if found.get("modified") else ""
    page.heading("Environment")
    page.note(
        f"equipoise {found['equipoise']}{commit}{changed}; Python {found['python']}; {packages}; {found['platform']}, "
        f"{', '.join(found['devices'])}. The whole demo took {results['seconds']:.0f} s."
    )
