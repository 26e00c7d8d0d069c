"""Fixed-point problems with known roots: the fixtures (a) to (l) that solver and gradient tests share.

Everything is built in float64 from a seed of its own and cast at the end, so one seed is one problem in every dtype;
`root` is the float64 root of the problem as cast.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import equipoise as eq


@dataclass
class Case:
    """A problem z = f(z, *inputs).

    Attributes:
        f: The map.
        z0: Start.
        inputs: Arguments of f after the state.
        root: The solution in float64 (a tree like z0), or None if there is none to compare with.
        in_dims: Which axis of each input indexes systems.
        batch_dims: Leading axes of the state that index systems.
        W: The weight among the inputs, if there is one.
        x: The injected input among the inputs, if there is one.
    """

    f: Callable[..., Any]
    z0: Any
    inputs: tuple[Any, ...] = ()
    root: Any = None
    in_dims: tuple[int | None, ...] | None = None
    batch_dims: int = 1
    W: Tensor | None = None
    x: Tensor | None = None
    name: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def solve(self, solver="anderson", *, compact: bool = True, **options) -> eq.Solution:
        """`fixed_point` on this problem; `compact=False` calls all inputs shared, so that rows are never dropped."""
        options.setdefault("in_dims", self.in_dims if compact else None)
        options.setdefault("batch_dims", self.batch_dims)
        return eq.fixed_point(self.f, self.z0, *self.inputs, solver=solver, **options)

    def rows(self, index) -> "Case":
        """The same problem on some of its systems, in the order given (`batch_dims` must be 1)."""
        index = torch.as_tensor(index)

        def take(tree, dim=0):
            if dim is None or tree is None:
                return tree
            return torch.utils._pytree.tree_map(lambda leaf: leaf.index_select(dim, index), tree)

        dims = self.in_dims or (None,) * len(self.inputs)
        inputs = tuple(take(item, dim) for item, dim in zip(self.inputs, dims, strict=True))
        x = next((new for old, new in zip(self.inputs, inputs, strict=True) if old is self.x), self.x)
        return dataclasses.replace(self, z0=take(self.z0), inputs=inputs, root=take(self.root), x=x)

    def error(self, value) -> Tensor:
        """Largest relative error of `value` against the root, over systems and leaves, in float64."""
        got, want = torch.utils._pytree.tree_leaves(value), torch.utils._pytree.tree_leaves(self.root)
        errors = []
        for a, b in zip(got, want, strict=True):
            a, b = a.detach().double().flatten(self.batch_dims), b.double().flatten(self.batch_dims)
            errors.append((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-300))
        return torch.stack([error.max() for error in errors]).max()


class Counted:
    """f, with the number of its calls and the batch size of each."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f, self.sizes = f, []

    def __call__(self, z, *inputs):
        self.sizes.append(torch.utils._pytree.tree_leaves(z)[0].shape[0])
        return self.f(z, *inputs)

    @property
    def calls(self) -> int:
        return len(self.sizes)


def counted(case: Case) -> tuple[Case, Counted]:
    """The case with a counting f, and the counter."""
    counter = Counted(case.f)
    return dataclasses.replace(case, f=counter), counter


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def scaled_weight(n: int, norm: float, seed: int) -> Tensor:
    """A Gaussian matrix of spectral norm `norm`."""
    W = gaussian(n, n, seed=seed)
    return W * (norm / torch.linalg.matrix_norm(W, 2))


def tanh_f(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.T + x)


def linear_f(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    return z @ W.T + x


def diagonal_f(z: Tensor, d: Tensor, x: Tensor) -> Tensor:
    return d * z + x


def graded_f(z: Tensor, a: Tensor, W: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(a * (z @ W.T) + x)


def _tanh_each(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    """tanh(Wz + x) for one W or one per system."""
    return torch.tanh((W @ z[:, :, None])[:, :, 0] + x)


def tanh_jacobian(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    """∂ tanh(Wz + x)/∂z at z, (N, n, n)."""
    return (1 - _tanh_each(z, W, x).square())[:, :, None] * W


def tanh_root(W: Tensor, x: Tensor) -> Tensor:
    """The root of tanh(Wz + x) by Newton's method with dense Jacobians and halved steps, in float64.

    W is (n, n), or (N, n, n) for one matrix per system.
    """
    z = torch.zeros_like(x)
    identity = torch.eye(W.shape[-1], dtype=W.dtype)
    for _ in range(60):
        g = _tanh_each(z, W, x) - z
        if bool((g.norm(dim=1) <= 1e-15 * (1 + z.norm(dim=1))).all()):
            break
        step = torch.linalg.solve(identity - tanh_jacobian(z, W, x), g[:, :, None])[:, :, 0]
        length = torch.ones_like(g[:, :1])
        for _ in range(20):
            new = z + length * step
            worse = (_tanh_each(new, W, x) - new).norm(dim=1, keepdim=True) > g.norm(dim=1, keepdim=True)
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        z = z + length * step
    assert float((_tanh_each(z, W, x) - z).norm(dim=1).max()) < 1e-12 * max(1.0, float(z.norm()))
    return z


def tanh_case(W: Tensor, x: Tensor, dtype: torch.dtype, name: str) -> Case:
    """tanh(Wz + x) for float64 W and x; the root belongs to the tensors as cast to `dtype`."""
    W, x = W.to(dtype), x.to(dtype)
    root = tanh_root(W.double(), x.double())
    return Case(tanh_f, torch.zeros_like(x), (W, x), root, (None, 0), W=W, x=x, name=name)


def tanh_map(n: int = 10, batch: int = 4, norm: float = 0.9, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """(a) f(z, W, x) = tanh(Wz + x) with ‖W‖₂ = norm: a contraction for norm < 1."""
    return tanh_case(scaled_weight(n, norm, seed), gaussian(batch, n, seed=seed + 1000), dtype, "tanh")


def tanh_map_with_radius(
    n: int = 10, batch: int = 4, radius: float = 0.9, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """(a) f(z, W, x) = tanh(Wz + x), W scaled so that the largest ρ(∂f/∂z) at the roots is `radius`.

    The input is kept small: tanh then stays away from saturation, where no scale of W would give a large radius.
    """
    W, x = gaussian(n, n, seed=seed), 0.3 * gaussian(batch, n, seed=seed + 1000)
    W = W / torch.linalg.eigvals(W).abs().max()
    scale = radius
    for _ in range(200):
        measured = spectral_radius_of_tanh(scale * W, x)
        if abs(measured / radius - 1) < 1e-12:
            break
        scale = scale * radius / measured
    assert abs(measured / radius - 1) < 1e-8, f"no scale of W gives radius {radius}: reached {measured}"
    return tanh_case(scale * W, x, dtype, "tanh_radius")


def spectral_radius_of_tanh(W: Tensor, x: Tensor) -> float:
    """The largest spectral radius of the Jacobians of tanh(Wz + x) at its roots."""
    return float(torch.linalg.eigvals(tanh_jacobian(tanh_root(W, x), W, x)).abs().max())


def linear_map(
    n: int = 10, batch: int = 4, norm: float = 0.9, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """(b) f(z, W, x) = Wz + x: root and gradients in closed form."""
    W, x = scaled_weight(n, norm, seed).to(dtype), gaussian(batch, n, seed=seed + 1000).to(dtype)
    return linear_case(W, x, "linear")


def linear_case(W: Tensor, x: Tensor, name: str) -> Case:
    identity = torch.eye(W.shape[0], dtype=torch.float64)
    root = torch.linalg.solve(identity - W.double(), x.double().T).T.contiguous()
    return Case(linear_f, torch.zeros_like(x), (W, x), root, (None, 0), W=W, x=x, name=name)


def repelling_map(
    n: int = 6, batch: int = 3, factor: float = -1.5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """(c) f(z, x) = −1.5 z + x: the root x / 2.5 repels the plain iteration."""
    x = gaussian(batch, n, seed=seed + 1000).to(dtype)
    root = x.double() / (1 - factor)
    return Case(partial(_affine, factor), torch.zeros_like(x), (x,), root, (0,), x=x, name="repelling")


def _affine(factor: float, z: Tensor, x: Tensor) -> Tensor:
    return factor * z + x


def repelling_tanh_map(
    n: int = 8, batch: int = 3, low: float = -2.5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """tanh(Wz + x), W symmetric with eigenvalues in [low, −0.2]: the only root, with ρ(J) > 1 there.

    For a positive diagonal D and a negative definite W the eigenvalues of DW are negative, so I − J is never singular.
    """
    basis = torch.linalg.qr(gaussian(n, n, seed=seed))[0]
    W = basis @ torch.diag(torch.linspace(low, -0.2, n, dtype=torch.float64)) @ basis.T
    return tanh_case(W, 0.3 * gaussian(batch, n, seed=seed + 1000), dtype, "repelling_tanh")


def rotation_map(
    n: int = 4, batch: int = 3, scale: float = 0.95, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """(d) f(z, W, x) = Wz + x, W = scale times a rotation: complex eigenvalues of modulus `scale` only."""
    blocks = []
    for angle in torch.linspace(0.7, 2.1, n // 2, dtype=torch.float64):
        c, s = angle.cos(), angle.sin()
        blocks.append(torch.stack([torch.stack([c, -s]), torch.stack([s, c])]))
    W = (scale * torch.block_diag(*blocks)).to(dtype)
    return linear_case(W, gaussian(batch, n, seed=seed + 1000).to(dtype), "rotation")


def ill_scaled_map(
    n: int = 8,
    batch: int = 3,
    high: float = 0.999,
    low: float = 0.001,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """(e) f(z, d, x) = d·z + x with d from `low` to `high`: 1 − d spans three orders of magnitude."""
    d = (1 - torch.logspace(*torch.log10(torch.tensor([1 - high, 1 - low], dtype=torch.float64)).tolist(), n)).to(dtype)
    x = gaussian(batch, n, seed=seed + 1000).to(dtype)
    root = x.double() / (1 - d.double())
    return Case(diagonal_f, torch.zeros_like(x), (d, x), root, (None, 0), W=d, x=x, name="ill_scaled")


def mixed_batch(n: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """(f) f(z, a, x) = a·z + x with one factor per system: easy, divergent under the plain iteration, slow, easy."""
    a = torch.tensor([[0.3], [-3.0], [0.8], [0.1]], dtype=dtype)
    x = gaussian(4, n, seed=seed + 1000).to(dtype)
    return Case(diagonal_f, torch.zeros_like(x), (a, x), x.double() / (1 - a.double()), (0, 0), x=x, name="mixed")


def graded_batch(batch: int = 32, n: int = 6, hard: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """f(z, a, W, x) = tanh(a·Wz + x), ‖W‖₂ = 1, one a per system: a few hard systems among many easy ones."""
    a = 0.05 + 0.25 * torch.rand(batch, 1, dtype=torch.float64, generator=generator(seed))
    a[torch.linspace(1, batch - 2, hard).long()] = 0.95
    a, W, x = (t.to(dtype) for t in (a, scaled_weight(n, 1.0, seed), gaussian(batch, n, seed=seed + 1000)))
    root = tanh_root(a.double()[:, :, None] * W.double(), x.double())
    return Case(graded_f, torch.zeros_like(x), (a, W, x), root, (0, None, 0), W=W, x=x, name="graded")


def nan_after(case: Case, calls: int, rows: tuple[int, ...] | None = None, value: float = float("nan")) -> Case:
    """(g) The case with an f that returns NaN, in all systems or in some, after so many sound calls."""
    made = [0]

    def f(z, *inputs):
        made[0] += 1
        image = case.f(z, *inputs)
        if made[0] <= calls:
            return image
        broken = image.clone()
        broken[slice(None) if rows is None else list(rows)] = value
        return broken

    return dataclasses.replace(case, f=f, name=f"{case.name}_nan")


def from_root(case: Case) -> Case:
    """(h) The case, started at its root."""
    dtype = torch.utils._pytree.tree_leaves(case.z0)[0].dtype
    return dataclasses.replace(case, z0=torch.utils._pytree.tree_map(lambda leaf: leaf.to(dtype, copy=True), case.root))


def multiscale_map(
    batch: int = 3, norm: float = 0.9, dtype: torch.dtype = torch.float64, seed: int = 0, tree: str = "list"
) -> Case:
    """(j) One tanh map on a state in pieces: leaves of different shapes, all coupled.

    Args:
        tree: "tensor", "tuple", "list", "dict" or "nested".
    """
    shapes = [(2, 4, 2), (3, 2), (5,)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = tanh_map(sum(sizes), batch, norm, dtype, seed)

    def pack(vector: Tensor):
        pieces = [p.reshape(-1, *shape) for p, shape in zip(vector.split(sizes, dim=1), shapes, strict=True)]
        if tree == "tensor":
            return vector
        if tree == "dict":
            return dict(zip("abc", pieces, strict=True))
        if tree == "nested":
            return {"fine": (pieces[0], [pieces[1]]), "coarse": pieces[2]}
        return {"tuple": tuple, "list": list}[tree](pieces)

    def unpack(state) -> Tensor:
        leaves = [state] if tree == "tensor" else [leaf.flatten(1) for leaf in _in_order(state, tree)]
        return torch.cat(leaves, dim=1)

    def f(z, W, x):
        return pack(tanh_f(unpack(z), W, x))

    return dataclasses.replace(flat, f=f, z0=pack(flat.z0), root=pack(flat.root), name=f"multiscale_{tree}")


def _in_order(state, tree: str) -> list[Tensor]:
    if tree == "dict":
        return [state[key] for key in "abc"]
    if tree == "nested":
        return [state["fine"][0], state["fine"][1][0], state["coarse"]]
    return list(state)


def sequence_map(
    batch: int = 2, length: int = 5, width: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """(l) A causal map on (B, T, d): each position sees itself and the mean of the past.

    The root is found by long plain iteration in float64: the map contracts by 0.8.
    """
    W = scaled_weight(width, 0.5, seed).to(dtype)
    V = scaled_weight(width, 0.3, seed + 1).to(dtype)
    x = gaussian(batch, length, width, seed=seed + 1000).to(dtype)

    def f(z, W, V, x):
        counts = torch.arange(1, z.shape[1] + 1, dtype=z.dtype)[:, None]
        return torch.tanh(z @ W.T + (z.cumsum(dim=1) / counts) @ V.T + x)

    root = torch.zeros_like(x, dtype=torch.float64)
    for _ in range(300):
        root = f(root, W.double(), V.double(), x.double())
    return Case(f, torch.zeros_like(x), (W, V, x), root, (None, None, 0), W=W, x=x, name="sequence")


def image_map(
    batch: int = 3, channels: int = 4, size: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """A 1×1 convolution on channels_last images, (B, C, H, W): tanh(Wz + x) at each pixel."""
    flat = tanh_map(channels, batch * size * size, 0.8, dtype, seed)

    def pack(pixels: Tensor) -> Tensor:  # (B·H·W, C) → (B, C, H, W), channels last in storage
        return pixels.reshape(batch, size, size, channels).permute(0, 3, 1, 2)

    def f(z, W, x):
        return torch.tanh(torch.nn.functional.conv2d(z, W[:, :, None, None]) + x)

    z0, x = pack(flat.z0), pack(flat.x)
    return Case(f, z0, (flat.W, x), pack(flat.root), (None, 0), W=flat.W, x=x, name="image")


def every_solver() -> dict[str, eq.Solver]:
    """Each registered method, with its options, by a name for test ids."""
    return {
        "picard": eq.Picard(),
        "picard_damped": eq.Picard(damping=0.7),
        "anderson": eq.Anderson(),
        "anderson_mixed": eq.Anderson(memory=4, mixing=0.8),
        "broyden": eq.Broyden(),
        "broyden_memory": eq.Broyden(memory=5),
        "broyden_short": eq.Broyden(step=0.8),
        "broyden_search": eq.Broyden(line_search=True),
        "newton": eq.NewtonKrylov(),
        "ladder": eq.Ladder(),
    }
