"""The weights kept in this repository load, fit their cards, and stay small."""

from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.solvers import load_solver

ROOT = Path(__file__).resolve().parents[2] / "pretrained"
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir())
MIB = 2**20


def sizes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_there_are_some_and_all_are_small():
    assert FOLDERS
    assert max(map(sizes, FOLDERS)) <= 16 * MIB
    assert sum(map(sizes, FOLDERS)) <= 48 * MIB


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_loads_and_its_card_is_about_it(folder):
    model = equipoise.load(folder)
    count = sum(p.numel() for p in model.parameters())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{count:,} parameters" in card
    assert "| test |" in card
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("folder", [f for f in FOLDERS if (f / "hyper").exists()], ids=lambda folder: folder.name)
def test_its_learned_solver_was_fitted_to_it(folder):
    model = equipoise.load(folder)
    solver = load_solver(folder, model)
    base = sum(p.numel() for p in model.parameters())
    assert 0 < solver.num_parameters <= (0.04 if base > 1_000_000 else 0.05) * base  # a small model's takes more
    assert f"{solver.num_parameters:,}" in (folder / "README.md").read_text(encoding="utf-8")
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="fitted to another model"):
        load_solver(folder, model)
