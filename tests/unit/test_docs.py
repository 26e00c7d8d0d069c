"""The documentation says what is true: its snippets run, its links resolve, its quoted messages are ours."""

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise import (
    DEQ,
    Anderson,
    Broyden,
    Implicit,
    Shine,
    Status,
    Stop,
    fixed_point,
    override,
)
from equipoise.adjoints import ADJOINTS
from equipoise.solvers import SOLVERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + PAGES
MOST_LINES = 150
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    line: int  # of its first line in the page, from 1
    code: str
    run: bool


def python_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    blocks = []
    for fence in FENCE.finditer(text):
        if fence["language"] != "python":
            continue
        before = text[: fence.start()].rstrip().rsplit("\n", 1)[-1].strip()
        line = text.count("\n", 0, fence.start("body")) + 1
        blocks.append(Block(line, fence["body"], before != "<!-- not run -->"))
    return blocks


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


WITH_PYTHON = [path for path in WRITTEN if any(block.run for block in python_blocks(path))]


@pytest.fixture
def untouched() -> Iterator[None]:
    """Put back what a snippet may change for everyone: default dtype, random state, registries."""
    dtype, state = torch.get_default_dtype(), torch.random.get_rng_state()
    solvers, adjoints = dict(SOLVERS), dict(ADJOINTS)
    yield
    torch.set_default_dtype(dtype)
    torch.random.set_rng_state(state)
    for registry, before in ((SOLVERS, solvers), (ADJOINTS, adjoints)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=relative)
def test_snippets_run(path, untouched):
    torch.manual_seed(0)
    module = types.ModuleType("snippets")
    for block in python_blocks(path):
        if block.run:
            # Blank lines in front, so that a traceback points at the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), module.__dict__)
    assert len(module.__dict__) > len(types.ModuleType("empty").__dict__)


def test_the_pages_that_must_have_snippets_have_them():
    names = {relative(path) for path in WITH_PYTHON}
    assert {"README.md", "docs/quickstart.md", "docs/extending.md", "docs/failures.md"} <= names
    maths = {relative(path) for path in (DOCS / "maths").glob("*.md")}
    assert maths <= names


def nav_pages() -> list[str]:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = config[config.index("\nnav:") :]
    return re.findall(r":\s+(\S+\.md)\s*$", nav, re.MULTILINE)


def test_nav_and_pages_agree():
    pages = nav_pages()
    assert len(pages) == len(set(pages))
    assert set(pages) == {path.relative_to(DOCS).as_posix() for path in PAGES}


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=relative)
def test_pages_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def links(path: Path) -> list[str]:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`", "", text)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", target)]


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", WRITTEN, ids=relative)
def test_relative_links_resolve(path):
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{relative(path)} links to {link}, which does not exist"
        if path.is_relative_to(DOCS):
            assert target.is_relative_to(DOCS), f"{relative(path)} links to {link}, which the site does not contain"
        if anchor:
            assert anchor in anchors(target), f"{relative(path)} links to {link}: no such heading"


def test_readme_shows_the_two_commands_and_a_short_first_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.split("#")[0].strip() for fence in FENCE.finditer(readme) for line in fence["body"].splitlines()]
    assert "make demo" in commands
    assert "make test" in commands
    first = [line for line in python_blocks(ROOT / "README.md")[0].code.splitlines() if line.strip()]
    assert len(first) <= 10


def test_every_public_name_has_an_api_entry():
    entries = set()
    for path in (DOCS / "api").glob("*.md"):
        entries |= set(re.findall(r"^::: equipoise\.(\w+)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert entries >= set(equipoise.__all__)
    assert all(hasattr(equipoise, name) for name in entries)


@pytest.mark.parametrize(("page", "registry"), [("solvers", SOLVERS), ("adjoints", ADJOINTS)])
def test_registered_names_are_listed(page, registry):
    text = (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("Names for"))
    assert re.findall(r"`(\w+)`", line) == sorted(registry)


def test_every_status_is_explained():
    text = (DOCS / "failures.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (yes|no) \|", text, re.MULTILINE))
    assert rows == {status.name: "yes" if status.ok else "no" for status in Status}


def test_defaults_of_stop_are_those_in_the_table():
    text = (DOCS / "how-to-choose.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    stop = Stop()
    assert float(rows["rtol"].split()[0]) == stop.rtol
    assert float(re.findall(r"adjoint: ([\d.e-]+)", rows["rtol"])[0]) == Implicit().stop.rtol
    for name in ("atol", "max_steps", "check_every", "plateau", "diverge"):
        assert float(rows[name]) == getattr(stop, name)
    for name in ("norm", "select"):
        assert rows[name] == f'`"{getattr(stop, name)}"`'


class Shrink(torch.nn.Module):
    def forward(self, z, x):
        return 0.5 * z + x


def through(adjoint, **options):
    a = torch.ones(3, 2, requires_grad=True)
    value = fixed_point(lambda z: 0.5 * z + a, torch.zeros(3, 2), adjoint=adjoint).value
    return torch.autograd.grad(value.sum(), a, **options)


def empty_override():
    with override(torch.nn.Linear(2, 2), stop=Stop()):
        pass


Z = torch.zeros(3, 2)
# What raises, and how its message begins; both ends are pinned, so neither can change alone.
MESSAGES = [
    (lambda: fixed_point(torch.cos, Z, solver="andersen"), "unknown solver 'andersen'; did you mean 'anderson'?"),
    (lambda: fixed_point(torch.cos, Z, solver=Anderson), "solver is the class Anderson; pass an instance"),
    (lambda: fixed_point(lambda z: z[:1], Z), "f(z) has shape (1, 2), but z0 has (3, 2); shapes must be equal."),
    (
        lambda: fixed_point(torch.cos, Z.long()),
        "z0: leaf 0 has dtype torch.int64; a state must be real floating point.",
    ),
    (lambda: DEQ(Shrink())(), "the start of the solve is unknown"),
    (lambda: through(Implicit(), create_graph=True), "create_graph=True through the Implicit adjoint"),
    (
        lambda: torch.func.vmap(lambda a: fixed_point(lambda z: 0.5 * z + a, Z).value)(Z[:, :1]),
        "a torch.func transform (grad, vmap, jvp, ...) around a solve needs",
    ),
    (lambda: through(Shine()), "adjoint=Shine(...) reuses Broyden's matrix"),
    (lambda: Stop(check_every=200), "Stop: check_every=200 exceeds max_steps=100"),
    (lambda: fixed_point(torch.cos, Z, collect="alpha"), "unknown quantity to collect 'alpha'"),
    (empty_override, "override: Linear contains no DEQ."),
]


@pytest.mark.parametrize(("act", "begins"), MESSAGES, ids=[begins[:30] for _, begins in MESSAGES])
def test_quoted_messages_are_ours(act, begins):
    assert f"`{begins}`" in (DOCS / "failures.md").read_text(encoding="utf-8")
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        act()
    assert str(raised.value).startswith(begins)


def test_any_order_claim_holds_for_a_plain_sum():
    """`torch.func.hessian` differentiates forward over reverse; a sum makes the cotangent an expanded tensor."""
    tight = Stop(rtol=1e-13, max_steps=100)
    z0 = torch.zeros(3, 2, dtype=torch.float64)

    def total(a):
        adjoint = Implicit(any_order=True, stop=tight)
        return fixed_point(lambda z: torch.cos(a * z), z0, adjoint=adjoint, stop=tight).value.sum()

    a = torch.tensor(0.5, dtype=torch.float64)
    root = float(fixed_point(lambda z: torch.cos(a * z), z0[:1, :1], stop=tight).value.detach())
    s, c = torch.sin(a * root), torch.cos(a * root)
    first = -s * root / (1 + a * s)  # z' from z = cos(a·z)
    slope = root + a * first  # (a·z)'
    second = -(c * slope * slope + 2 * s * first) / (1 + a * s)
    assert torch.func.hessian(total)(a) == pytest.approx(6 * float(second), rel=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
def test_compile_claim_holds_when_finished_rows_are_dropped():
    """The batch shrinks, so the cell is compiled again, with symbolic sizes; its graph must allow several VJPs."""
    torch.manual_seed(0)
    layer, x = DEQ(Shrink()), torch.randn(16, 4)
    easy_first = torch.cat([torch.zeros(12, 4), x[12:]])  # twelve systems start at their root
    layer.compile_cell(backend="aot_eager")
    easy_first.requires_grad_()
    layer(easy_first).value.sum().backward()
    assert torch.allclose(easy_first.grad, torch.full_like(x, 2.0), rtol=1e-3)


def test_shine_refine_claim_holds_for_one_step():
    """One plain step of the adjoint equation multiplies the error by Jᵀ, whose norm is 0.8 here."""
    torch.manual_seed(0)
    w = torch.randn(6, 6, dtype=torch.float64)
    w = 0.8 * w / torch.linalg.matrix_norm(w, 2)
    b, g = torch.randn(1, 6, dtype=torch.float64, requires_grad=True), torch.randn(1, 6, dtype=torch.float64)
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - w.mT, g[0])
    errors = []
    for refine in (0, 1):
        solution = fixed_point(
            lambda z: z @ w.mT + b, torch.zeros_like(b), solver=Broyden(), adjoint=Shine(refine), stop=Stop(max_steps=4)
        )
        errors.append(float((torch.autograd.grad(solution.value, b, g)[0][0] - exact).norm()))
    assert errors[1] <= 0.8 * errors[0] * (1 + 1e-9)


def test_citation_and_changelog_name_the_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [equipoise.__version__]
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
