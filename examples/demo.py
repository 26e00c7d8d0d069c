"""Wrap a layer, train it as a DEQ and as its unrolled twin, and look at both.

    python -m examples.demo --out runs/demo

A small transformer block predicts the next character of the Python language reference, which every Python carries
in `pydoc_data`. The same layer is trained as an equilibrium and as a weight-tied network of fixed depth, from the same
initial weights on the same batches. Prints a table and writes two figures, `results.json` and `report.html`.
"""

import argparse
import base64
import copy
import html
import io
import json
import platform
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

import equipoise as eq

WIDTH, HEADS, INNER, LENGTH, BATCH = 64, 4, 128, 64, 16
DEPTH = 16  # of the unrolled twin
DEPTHS = (1, 2, 4, 8, 16, 30)  # for the memory figure
BUDGETS = (12, 60)  # evaluation budgets: a perplexity that depends on them is not an equilibrium's


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer; the input is injected into queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = eq.nn.weight_norm(nn.Linear(WIDTH, 3 * WIDTH))
        self.out = eq.nn.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.up = eq.nn.weight_norm(nn.Linear(WIDTH, INNER))
        self.down = eq.nn.weight_norm(nn.Linear(INNER, WIDTH))

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:2], WIDTH))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        heads = (self.mix(z) + x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, d)
        seen = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        a = layer_norm(z + self.out(seen), (WIDTH,))
        return layer_norm(a + self.down(torch.relu(self.up(a))), (WIDTH,))


class CharacterModel(nn.Module):
    """Embeddings, one equilibrium layer, linear output."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, 3 * WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, 3 * WIDTH))
        self.deq = eq.DEQ(Block(), stop=eq.Stop(rtol=1e-3, max_steps=40), adjoint=eq.Implicit(stop=eq.Stop(rtol=1e-3)))
        self.head = nn.Linear(WIDTH, vocabulary)

    def solve(self, tokens: Tensor, **options: Any) -> eq.Solution:
        return self.deq(self.symbols(tokens) + self.places, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.solve(tokens).value)


def unrolled(depth: int) -> eq.Plan:
    """The plan of the weight-tied network of this depth."""
    return eq.Plan(eq.Picard(), eq.Unroll(), eq.Stop(rtol=0, max_steps=depth, select="last"))


def read_text() -> tuple[Tensor, Tensor, int]:
    """Training and validation characters as numbers, and the size of the alphabet."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    alphabet = sorted(set(text))
    numbers = {character: i for i, character in enumerate(alphabet)}
    data = torch.tensor([numbers[character] for character in text])
    split = int(0.9 * len(data))
    return data[:split], data[split:], len(alphabet)


def batches(data: Tensor, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random windows and the same windows one character later."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[int(s) : int(s) + LENGTH + 1] for s in starts])
        found.append((rows[:, :-1], rows[:, 1:]))
    return found


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model: CharacterModel, data: list[tuple[Tensor, Tensor]], name: str) -> dict[str, Any]:
    """Adam with a cosine schedule; returns loss curve, steps and time."""
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(data))
    losses, forward, backward, started = [], [], [], time.perf_counter()
    for step, (tokens, targets) in enumerate(data, start=1):
        solution = model.solve(tokens)
        loss = loss_of(model.head(solution.value), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        forward.append(solution.stats.nfe)
        backward.append(solution.backward.nfe if solution.backward else solution.stats.nfe)
        if step % 50 == 0 or step == len(data):
            print(f"  {name}: step {step}/{len(data)}, loss {sum(losses[-50:]) / len(losses[-50:]):.3f}", flush=True)
    last = slice(-50, None)
    return {
        "losses": losses,
        "train_loss": sum(losses[last]) / len(losses[last]),
        "forward_evaluations": sum(forward[last]) / len(forward[last]),
        "backward_evaluations": sum(backward[last]) / len(backward[last]),
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def evaluate(model: CharacterModel, data: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    model.eval()
    losses, residuals = [], []
    for tokens, targets in data:
        solution = model.solve(tokens)
        losses.append(loss_of(model.head(solution.value), targets).item())
        residuals.append(solution.stats.residual.max().item())
    model.train()
    return {"loss": sum(losses) / len(losses), "residual": max(residuals)}


def memory(model: CharacterModel, batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Bytes that one training step keeps: autograd graph, solver history."""
    tokens, targets = batch
    report = eq.memory_report(model, tokens, lambda logits: loss_of(logits, targets))
    return report.graph, report.history


@torch.no_grad()
def convergence(model: CharacterModel, tokens: Tensor) -> dict[str, list[float]]:
    """Median relative residual against steps, for each solver, on the trained layer."""
    curves = {}
    solvers = {"plain iteration": eq.Picard(), "Anderson": eq.Anderson(), "Broyden": eq.Broyden()}
    for name, solver in solvers.items():
        with eq.override(model, solver=solver, stop=eq.Stop(rtol=0, max_steps=30)):
            trace = model.solve(tokens, trace=True).stats.trace
        curves[name] = trace[:, :-1].median(dim=0).values.tolist()
    return curves


def run(steps: int) -> dict[str, Any]:
    """Train and measure both models."""
    torch.manual_seed(0)
    train_data, valid_data, vocabulary = read_text()
    data, held_out = batches(train_data, steps, seed=1), batches(valid_data, 8, seed=2)
    first = CharacterModel(vocabulary)
    deq, twin = first, copy.deepcopy(first)
    twin.deq.plan = unrolled(DEPTH)
    plan, threads = deq.deq.plan, torch.get_num_threads()
    results: dict[str, Any] = {
        "environment": f"torch {torch.__version__}, Python {platform.python_version()}, {threads} threads",
        "data": f"Python language reference (pydoc_data): {len(train_data)} training characters, {vocabulary} "
        f"distinct, {8 * BATCH * LENGTH} scored",
        "parameters": sum(p.numel() for p in deq.parameters()),
        "models": {},
    }
    for name, model in (("DEQ", deq), (f"unrolled twin, {DEPTH} layers", twin)):
        print(f"training: {name}")
        row = train(model, data, name)
        row["graph_bytes"], row["history_bytes"] = memory(model, data[0])
        if model is deq:
            row["valid"] = {}
            for budget in BUDGETS:
                with eq.override(model, stop=eq.Stop(rtol=0, max_steps=budget)):
                    row["valid"][budget] = evaluate(model, held_out)
        else:
            row["valid"] = {DEPTH: evaluate(model, held_out)}
        results["models"][name] = row
    audit = eq.audit_gradient(deq, data[0][0][:4])
    results["audit"] = str(audit)
    results["spectral_radius"] = eq.spectral_radius(deq.solve(data[0][0][:4])).max().item()
    results["convergence"] = convergence(deq, held_out[0][0])
    results["memory"] = {"DEQ": memory(deq, data[0])}
    for depth in DEPTHS:
        deq.deq.plan = unrolled(depth)
        results["memory"]["1 layer" if depth == 1 else f"{depth} layers"] = memory(deq, data[0])
    deq.deq.plan = plan
    return results


def table(results: dict[str, Any]) -> list[list[str]]:
    head = ["model", "train loss", "valid loss (residual)", "f fwd / bwd", "kept memory", "time"]
    rows = [head]
    for name, row in results["models"].items():
        valid = "; ".join(f"K={k}: {v['loss']:.3f} ({v['residual']:.0e})" for k, v in row["valid"].items())
        kept = (row["graph_bytes"] + row["history_bytes"]) / 2**20
        work = f"{row['forward_evaluations']:.0f} / {row['backward_evaluations']:.0f}"
        rows.append([name, f"{row['train_loss']:.3f}", valid, work, f"{kept:.1f} MiB", f"{row['seconds']:.0f} s"])
    return rows


def show(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def draw(results: dict[str, Any], out: Path) -> dict[str, str]:
    """The figures as files, and as text to put into a page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.alpha": 0.3, "figure.constrained_layout.use": True})
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinguishable without colour vision
    figures = {}

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for (name, curve), colour, marker in zip(results["convergence"].items(), colours, "o^s", strict=False):
        axes.semilogy(range(len(curve)), curve, color=colour, marker=marker, markersize=4, label=name)
    axes.set(xlabel="step", ylabel="relative residual (median)", title="Finding the equilibrium of the trained layer")
    axes.legend(frameon=False)
    figures["convergence"] = figure

    figure, axes = plt.subplots(figsize=(6, 3.6))
    names = list(results["memory"])
    graph = [results["memory"][name][0] / 2**20 for name in names]
    history = [results["memory"][name][1] / 2**20 for name in names]
    axes.bar(names, graph, color=colours[0], label="autograd graph")
    axes.bar(names, history, bottom=graph, color=colours[1], hatch="//", label="solver history")
    axes.set(ylabel="MiB kept per training step", title="Memory of a training step")
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(frameon=False)
    figures["memory"] = figure

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for (name, row), colour in zip(results["models"].items(), colours, strict=False):
        losses = torch.tensor(row["losses"])
        window = min(20, len(losses))
        smooth = losses.unfold(0, window, 1).mean(dim=1)
        axes.plot(range(window, len(losses) + 1), smooth.tolist(), color=colour, label=name)
    axes.set(xlabel="training step", ylabel="loss (nats per character)", title="Training")
    axes.legend(frameon=False)
    figures["training"] = figure

    embedded = {}
    for name, made in figures.items():
        made.savefig(out / f"{name}.png", dpi=150)
        buffer = io.BytesIO()
        made.savefig(buffer, format="png", dpi=110)
        embedded[name] = base64.b64encode(buffer.getvalue()).decode()
        plt.close(made)
    return embedded


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>equipoise demo</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 0.9rem; }}
th, td {{ text-align: left; padding: 0.4rem 0.8rem 0.4rem 0; border-bottom: 1px solid #ddd; }}
img {{ max-width: 100%; height: auto; }} .note {{ color: #555; font-size: 0.9rem; }}
</style></head><body>
<h1>One layer, as an equilibrium and as a stack</h1>
<p>A transformer block ({parameters:,} parameters in all) learns to predict the next character. Once its output is the
equilibrium of the layer, found by a solver and differentiated implicitly; once the layer is stacked {depth} times with
the same weights and trained by ordinary backpropagation. Same start, same batches.</p>
<div class="scroll">{table}</div>
<p class="note">{data}. Loss in nats per character. K is the evaluation budget of the solver: an equilibrium gives the
same loss at both. f fwd / bwd counts evaluations of the layer and of its VJPs per training step. Kept memory is the
autograd graph plus the solver's history. {environment}.</p>
<h2>Convergence</h2><img alt="relative residual against steps" src="data:image/png;base64,{convergence}">
<p>Spectral radius of the layer's Jacobian at the equilibrium (largest of four samples): {radius:.2f}.</p>
<h2>Memory</h2><img alt="memory of a training step" src="data:image/png;base64,{memory}">
<p>A stack keeps one graph per layer. The equilibrium keeps the graph of one evaluation, and the solver's history while
it runs, whatever the number of steps.</p>
<h2>Training</h2><img alt="training loss" src="data:image/png;base64,{training}">
<p class="note">{audit}.</p>
</body></html>
"""


def page(results: dict[str, Any], figures: dict[str, str]) -> str:
    head, *rows = table(results)
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return PAGE.format(
        parameters=results["parameters"],
        depth=DEPTH,
        table=f"<table><tr>{cells}</tr>{body}</table>",
        data=html.escape(results["data"]),
        environment=html.escape(results["environment"]),
        radius=results["spectral_radius"],
        audit=html.escape(results["audit"][0].upper() + results["audit"][1:]),
        **figures,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for the report (default: runs/demo)"
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (default: 300)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)  # before training, so that a bad path is known at once
    results = run(options.steps)
    print("\n" + show(table(results)) + "\n")
    print(results["audit"])
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    (options.out / "report.html").write_text(page(results, draw(results, options.out)))
    print(f"report: {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
