"""Settings: TOML and overrides to dataclasses and back, and what is said when they are wrong."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from equipoise import GMRES, Anderson, Broyden, Implicit, Ladder, Neumann, NewtonKrylov, Picard, Plan, Stop, Unroll
from equipoise.adjoints import ADJOINTS, Adjoint
from equipoise.solvers import SOLVERS, Solver
from equipoise.train import Adam, ConfigError, Cosine, LearningRate, Optimiser, PlanSchedule, StepDecay
from equipoise.train.config import (
    Table,
    from_data,
    from_json,
    load_config,
    parse_override,
    read_toml,
    to_data,
    to_json,
    with_overrides,
)


@dataclass(frozen=True)
class Train:
    steps: int = 100
    lr: float = 1e-3
    mode: Literal["fast", "slow"] = "fast"
    betas: tuple[float, float] = (0.9, 0.999)
    sizes: tuple[int, ...] = ()
    clip: float | None = None
    compile: bool = False
    label: str | None = None
    where: Path = Path("runs")

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}.")


@dataclass(frozen=True)
class Recipe:
    name: str
    train: Train = Train(steps=7)
    solver: Solver = Anderson()
    adjoint: Adjoint = Implicit()
    stop: Stop = Stop()
    eval_plan: Plan | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    schedule: LearningRate = Cosine()
    optimiser: Optimiser = Adam()


def write(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def load(tmp_path, text, *overrides):
    return load_config(Recipe, write(tmp_path, text), overrides)


def message(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *overrides)
    return str(error.value)


def test_a_file_with_everything(tmp_path):
    config = load(
        tmp_path,
        """
        name = "demo"
        [train]
        lr = 1
        betas = [0.5, 0.9]
        sizes = [3, 4, 5]
        mode = "slow"
        clip = 0.25
        where = "elsewhere"
        [solver]
        name = "anderson"
        memory = 8
        [adjoint]
        name = "implicit"
        solver = "broyden"
        stop = {max_steps = 35}
        [stop]
        max_steps = 30
        diverge = inf
        [eval_plan]
        solver = {name = "picard", damping = 0.5}
        [extra]
        anything = [1, "two"]
        [schedule]
        name = "step"
        at = [15, 20]
        unit = "epoch"
        [optimiser]
        name = "sgd"
        lr = 20
        """,
    )
    train = Train(7, 1.0, "slow", (0.5, 0.9), (3, 4, 5), 0.25, where=Path("elsewhere"))
    assert config.train == train
    assert isinstance(config.train.lr, float)
    assert config.solver == Anderson(memory=8)
    # What a nested table leaves out keeps the value of the field's own default: the adjoint's rtol is 1e-4.
    assert config.adjoint == Implicit(solver=Broyden(), stop=Stop(rtol=1e-4, max_steps=35))
    assert config.stop == Stop(max_steps=30, diverge=math.inf)
    assert config.eval_plan == Plan(solver=Picard(damping=0.5))
    assert config.extra == {"anything": [1, "two"]}
    assert config.schedule == StepDecay(at=(15, 20), unit="epoch")
    assert (type(config.optimiser).__name__, config.optimiser.lr) == ("SGD", 20.0)


def test_nested_solvers_by_name_and_by_table(tmp_path):
    config = load(
        tmp_path,
        'name = "x"\n[solver]\nname = "ladder"\nstages = ["picard", {name = "anderson", memory = 3}, '
        '{name = "newton", linear = {max_steps = 4}}]\n'.replace("newton", _name_of(NewtonKrylov)),
    )
    assert config.solver == Ladder((Picard(), Anderson(memory=3), NewtonKrylov(GMRES(max_steps=4))))


def _name_of(cls):
    return next(name for name, known in SOLVERS.items() if known is cls)


def test_sections_not_named_change_the_default_and_names_start_from_the_class(tmp_path):
    @dataclass(frozen=True)
    class Holder:
        solver: Solver = Anderson(memory=3, mixing=0.5)

    assert from_data(Holder, {"solver": {"memory": 4}}).solver == Anderson(memory=4, mixing=0.5)
    assert from_data(Holder, {"solver": {"name": "anderson", "memory": 4}}).solver == Anderson(memory=4)
    assert from_data(Holder, {"solver": "anderson"}).solver == Anderson()
    assert from_data(Holder, {}).solver == Anderson(memory=3, mixing=0.5)
    assert load(tmp_path, 'name = "x"\ntrain = {lr = 0.5}').train.steps == 7


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("a.b=3", ("a", "b"), 3),
        ("a = 1e-3", ("a",), 1e-3),
        ("a.b.c=true", ("a", "b", "c"), True),
        ("a=anderson", ("a",), "anderson"),
        ('a="3"', ("a",), "3"),
        ("a=[1, 2]", ("a",), [1, 2]),
        ('a={name="picard", damping=0.5}', ("a",), {"name": "picard", "damping": 0.5}),
        ("a=x=y", ("a",), "x=y"),
        ("a=", ("a",), ""),
        ("a=1\nb=2", ("a",), "1\nb=2"),
    ],
)
def test_overrides_are_toml_or_bare_strings(text, keys, value):
    assert parse_override(text) == (keys, value)


@pytest.mark.parametrize("text", ["a.b", "=3", "a..b=3", ".a=1"])
def test_what_is_not_an_override(text):
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        parse_override(text)


def test_overrides_win_later_ones_most(tmp_path):
    text = 'name = "x"\nsolver = "anderson"\n[train]\nsteps = 3'
    config = load(
        tmp_path,
        text,
        "train.steps=4",
        "train.steps=5",
        "solver.memory=9",
        "adjoint.solver.memory=2",
        "train.clip=none",
    )
    assert config.train == Train(steps=5)
    assert config.solver == Anderson(memory=9)
    assert config.adjoint == Implicit(solver=Anderson(memory=2))
    assert load(tmp_path, text, "solver.memory=9", "solver=picard").solver == Picard()
    assert load(tmp_path, text, "train.clip=0.5", "train.clip=none").train.clip is None


def test_overrides_leave_the_given_table_alone():
    table = Table({"train": {"steps": 3}})
    changed = with_overrides(table, ["train.steps=4"])
    assert (table.values["train"]["steps"], changed.values["train"]["steps"]) == (3, 4)


def test_unknown_keys_name_the_key_the_file_and_the_nearest(tmp_path):
    text = message(tmp_path, 'name = "x"\n[train]\nstep = 3')
    assert "recipe.toml" in text
    assert "unknown key in [train] 'step'; did you mean 'steps'?" in text
    text = message(tmp_path, 'name = "x"\n[solvr]\nmemory = 3')
    assert "unknown key or section 'solvr'; did you mean 'solver'?" in text
    text = message(tmp_path, 'name = "x"\nsolver = {name = "anderson", memry = 3}')
    assert "unknown key in [solver] 'memry'; did you mean 'memory'?" in text
    text = message(tmp_path, 'name = "x"', "adjoint.stop.max_step=3")
    assert text.startswith("--set adjoint.stop.max_step=3: unknown key in [adjoint.stop] 'max_step'; did you mean")


def test_a_key_in_the_wrong_place_is_found(tmp_path):
    assert "'betas'; did you mean 'train.betas'?" in message(tmp_path, 'name = "x"\nbetas = [0.1, 0.2]')


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("steps = 1.5", "train.steps: expected an integer, got 1.5 (float)"),
        ("steps = true", "train.steps: expected an integer, got True (bool)"),
        ('lr = "big"', "train.lr: expected a number, got 'big' (str)"),
        ("lr = false", "train.lr: expected a number, got False (bool)"),
        ("compile = 1", "train.compile: expected true or false, got 1 (int)"),
        ("label = 3", "train.label: expected a string, got 3 (int)"),
        ('mode = "fastt"', "train.mode: unknown choice 'fastt'; did you mean 'fast'?"),
        ("betas = [0.1]", "train.betas: expected a list of 2: a number, a number, got [0.1] (list)"),
        ('sizes = [1, "a"]', "train.sizes.1: expected an integer, got 'a' (str)"),
        ("sizes = 3", "train.sizes: expected a list, each item an integer, got 3 (int)"),
        ("steps = -1", "[train] steps must not be negative, got -1."),
    ],
)
def test_wrong_values_say_what_was_expected(tmp_path, line, expected):
    text = message(tmp_path, f'name = "x"\n[train]\n{line}')
    assert expected in text
    assert str(tmp_path / "recipe.toml") in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "x"\nsolver = "andersen"', "unknown solver 'andersen'; did you mean 'anderson'?"),
        (
            'name = "x"\nsolver = "hyper:runs/x"',
            "`evaluate --solver` takes one, and [alternate] fits one during training",
        ),
        ('name = "x"\nadjoint = {name = "implict"}', "unknown adjoint 'implict'; did you mean 'implicit'?"),
        ('name = "x"\nsolver = {name = ["anderson"]}', "unknown solver ['anderson']"),
        ('name = "x"\nsolver = 3', "solver: expected a name or a table"),
        ('name = "x"\nsolver = {memory = 0}', "[solver] Anderson: memory must be an integer of at least 1, got 0."),
        ('name = "x"\nstop = {check_every = 99, max_steps = 5}', "[stop] Stop: check_every=99 exceeds max_steps=5"),
        ('name = "x"\ntrain = 3', "train: expected a table (Train), got 3 (int)"),
        ("[train]\nsteps = 3", "name is missing; expected a string."),
        ("name = [", "cannot be read as TOML"),
    ],
)
def test_wrong_sections(tmp_path, text, expected):
    assert expected in message(tmp_path, text)


def test_an_override_of_something_that_is_no_section(tmp_path):
    assert "--set train.steps.x=1: 'steps' is 3, not a section." in message(
        tmp_path, 'name = "x"\n[train]\nsteps = 3', "train.steps.x=1"
    )
    text = message(tmp_path, 'name = "x"', "train.steps=-2")
    assert text.endswith("recipe.toml --set train.steps=-2: [train] steps must not be negative, got -2.")


def test_missing_files_suggest_a_neighbour(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"there is no file .*recipes\.toml; did you mean .*recipe\.toml\?"):
        read_toml(tmp_path / "recipes.toml")
    with pytest.raises(ConfigError, match=r"there is no file .*x\.toml\."):
        read_toml(tmp_path / "nowhere" / "x.toml")


def test_json_round_trip_of_everything(tmp_path):
    config = Recipe(
        name="demo",
        train=Train(3, math.inf, "slow", sizes=(1, 2), clip=0.5, label="ü"),
        solver=Ladder((Picard(damping=0.5), NewtonKrylov(GMRES(max_steps=3)))),
        adjoint=Implicit(solver=Broyden(memory=5), stop=Stop(rtol=1e-3)),
        stop=Stop(plateau=None, diverge=math.inf),
        eval_plan=Plan(solver=Broyden(), adjoint=Unroll(checkpoint=True), stop=Stop(max_steps=3, norm="rms")),
        extra={"a": [1, {"b": None}]},
        schedule=StepDecay(at=(1, 2)),
    )
    text = to_json(config)
    plain = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert plain["solver"]["name"] == "ladder"
    assert plain["stop"]["diverge"] == "inf"
    assert plain["eval_plan"]["adjoint"] == {"name": "unroll", "checkpoint": True}
    assert from_json(Recipe, text) == config
    assert to_json(from_json(Recipe, text)) == text
    assert from_data(Recipe, to_data(config)) == config


def test_the_whole_plan_schedule_round_trips():
    schedule = PlanSchedule(plan=Plan(Broyden(), Neumann(terms=3), Stop(max_steps=12)), seed=4)
    assert from_json(PlanSchedule, to_json(schedule)) == schedule


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_every_registered_solver_can_be_configured(name):
    if dataclasses.is_dataclass(SOLVERS[name]):
        solver = SOLVERS[name]()
        assert from_data(Recipe, {"name": "x", "solver": to_data(solver)}).solver == solver
        assert to_data(solver)["name"] == name


@pytest.mark.parametrize("name", sorted(ADJOINTS))
def test_every_registered_adjoint_can_be_configured(name):
    adjoint = ADJOINTS[name]()
    assert from_data(Recipe, {"name": "x", "adjoint": to_data(adjoint)}).adjoint == adjoint


def test_json_that_is_none():
    with pytest.raises(ConfigError, match=r"run/config\.json is not valid JSON"):
        from_json(Recipe, "{", source="run/config.json")
    with pytest.raises(ConfigError, match="must hold a table, got list"):
        from_json(Recipe, "[]")
    with pytest.raises(ConfigError, match=r"train\.steps: expected an integer, got none"):
        from_json(Recipe, '{"name": "x", "train": {"steps": null}}')


def test_what_cannot_be_plain_data():
    with pytest.raises(TypeError, match="object cannot be written as plain data"):
        to_data({"a": object()})

    @dataclass(frozen=True)
    class Nameless(Picard):
        pass

    with pytest.raises(TypeError, match="Nameless has no registered name"):
        to_data(Nameless())


def test_sections_for_settings_known_later(tmp_path):
    """A task's own settings are built once the task is known, with messages that still name file and section."""
    table = read_toml(write(tmp_path, 'task = "t"\n[data]\nsteps = 3'), ["data.lrr=1"])
    with pytest.raises(ConfigError, match=r"--set data.lrr=1: unknown key in \[data\] 'lrr'; did you mean 'lr'\?"):
        table.section("data").build(Train)
    assert table.section("absent").build(Train) == Train()
    with pytest.raises(ConfigError, match="task must be a section, got 't'"):
        table.section("task")


def test_unions_take_the_first_member_that_fits():
    @dataclass(frozen=True)
    class Mixed:
        size: int | tuple[int, ...] | None = None
        level: int | float | str = 0

    assert from_data(Mixed, {"size": [1, 2], "level": 2}) == Mixed((1, 2), 2)
    assert from_data(Mixed, {"size": "none", "level": "high"}) == Mixed(None, "high")
    assert isinstance(from_data(Mixed, {"level": 2}).level, int)
    with pytest.raises(ConfigError, match=r"size: expected an integer or a list, each item an integer or \"none\""):
        from_data(Mixed, {"size": "big"})


def test_annotations_that_are_not_supported_are_a_programming_error():
    @dataclass(frozen=True)
    class Odd:
        value: complex = 0j

    with pytest.raises(TypeError, match="settings of type <class 'complex'> are not supported"):
        from_data(Odd, {"value": 1})
