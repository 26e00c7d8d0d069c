"""Running the command, and recipes that take a second."""

from typer.testing import CliRunner

from equipoise.cli import main as cli

COPY = """
[task]
name = "copy_memory"
length = 5
train_size = 64
test_size = 16
batch_size = 8

[model]
name = "deq_transformer_copy_memory"
d_model = 16
heads = 2
d_inner = 24

[stop]
rtol = 1e-3
max_steps = 6

[adjoint]
name = "implicit"
stop = { rtol = 0.0, max_steps = 5 }

[train]
steps = 4
log_every = 2
evaluate_every = 4
save_every = 2
threads = 1
"""
TEXT = (
    COPY[COPY.index("[stop]") :]
    + """
[task]
name = "language_model"
corpus = "mine"
tokens = "character"
batch_size = 4
length = 8
eval_batch_size = 4

[model]
name = "deq_transformer_small"
d_model = 16
heads = 2
d_inner = 24
memory_length = 64
"""
)


def invoke(*arguments):
    """Run a command; what it raises is raised."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def train(folder, text, *options):
    """A finished run by a recipe."""
    (folder / "recipe.toml").write_text(text)
    result = invoke("train", str(folder / "recipe.toml"), "--out", str(folder / "run"), *options)
    assert result.exit_code == 0, result.output
    return folder / "run"


def one_line(error):
    """The line that a refusal consists of."""
    assert error.startswith("equipoise: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


IMAGES = """
[task]
name = "{task}"
data = "{data}"
options = {{ size = 8, train_size = 24, test_size = 10 }}
batch_size = 6
eval_batch_size = 5

[model]
name = "{model}"
{settings}

[stop]
rtol = 1e-3
max_steps = 4

[adjoint]
name = "implicit"
stop = {{ rtol = 0.0, max_steps = 3 }}

[train]
steps = 1
log_every = 1
evaluate_every = 1
threads = 1
"""
DIGITS = {"task": "classification", "data": "digits", "model": "mdeq_digits"}
DIGITS["settings"] = "channels = [8, 8]\nhead_channels = [2, 2]\nfinal_channels = 8"
SHAPES = {"task": "segmentation", "data": "shapes", "model": "mdeq_shapes"}
SHAPES["settings"] = "channels = [8, 8, 8]\nfinal_channels = 8"


def trained_images(folder, **words):
    """A run on images, of one step, with the words of `IMAGES` filled in."""
    recipe = folder.with_suffix(".toml")
    recipe.write_text(IMAGES.format(**words))
    result = invoke("train", recipe, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder
