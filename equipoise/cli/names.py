"""What can be named in recipes and options, each with a line on what it is."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equipoise


def known_names() -> dict[str, dict[str, str]]:
    """Names and descriptions by kind."""
    from equipoise.adjoints import ADJOINTS
    from equipoise.bench import CASES
    from equipoise.data.images import IMAGES
    from equipoise.models import MODELS
    from equipoise.solvers import SOLVERS
    from equipoise.tasks import TASKS

    registries = {"models": MODELS, "tasks": TASKS, "solvers": SOLVERS, "adjoints": ADJOINTS}
    names = {kind: _described(registry) for kind, registry in registries.items()}
    data = {"corpora": corpora(), "images": _described(IMAGES)}
    files = {"recipes": recipes(), "ablations": recipes("recipes/ablations"), "hyper": learned_solvers()}
    return {**names, **data, **files, "figures": _figures(), "benchmarks": _described(CASES)}


def corpora() -> dict[str, str]:
    """Corpora known by name."""
    from equipoise.data.text import CORPORA, EMBEDDED

    found = {name: _subject(corpus.how_to_get) for name, corpus in CORPORA.items()}
    found[EMBEDDED] = "the language reference that comes with Python; needs no files"
    return dict(sorted(found.items()))


def _subject(how_to_get: str) -> str:
    """What a sentence on getting a corpus says that it is."""
    return re.split(r"[;(]|, ", how_to_get.removeprefix("Get it: "), maxsplit=1)[0].strip().rstrip(".")


def recipes(place: str = "recipes") -> dict[str, str]:
    """Recipes by path; the first comment says what each is."""
    return {str(path): _first_comment(path) for path in recipe_files(place)}


def learned_solvers() -> dict[str, str]:
    """Recipes for learned solvers by name, for `hyper --recipe`."""
    return {name: _first_comment(path) for name, path in learned_recipes().items()}


def learned_recipes() -> dict[str, Path]:
    """The files of recipes for learned solvers by name."""
    return {path.stem: path for place in ("recipes/hyper", "recipes/hyper/more") for path in recipe_files(place)}


def recipe_files(place: str) -> list[Path]:
    """Recipes in the working folder, else in the checkout of the package, else in the installed package."""
    package = Path(equipoise.__file__).resolve().parent
    folders = (root / place for root in (Path(), package.parent, package))
    return next((found for folder in folders if (found := sorted(folder.glob("*.toml")))), [])


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


def _figures() -> dict[str, str]:
    try:
        import equipoise.plots  # noqa: F401  registers the figures
        from equipoise.plots.registry import FIGURES
    except ImportError:
        return {}
    return _described(FIGURES)


def _described(registry: Mapping[str, Any]) -> dict[str, str]:
    return {name: (inspect.getdoc(registry[name]) or "").partition("\n")[0] for name in sorted(registry)}
