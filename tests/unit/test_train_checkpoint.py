"""Checkpoints: whole or absent, bit-equal after a resume; signals; what is said about a bad place to write."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import nn

from equipoise.train import (
    Adam,
    CheckpointError,
    GracefulStop,
    check_writable,
    checkpoint,
    checkpoint_bytes,
    checkpoint_folder,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_best,
    recover_checkpoints,
    rng_state,
    save_checkpoint,
    set_rng_state,
    write_best,
)

CONFIG = {"model": {"name": "tiny", "width": 3}, "seed": 1}


class Tied(nn.Module):
    """An output layer tied to the embedding, a buffer, and a parameter that is not contiguous."""

    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.output = nn.Linear(4, 6)
        self.skew = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("count", torch.tensor(7))
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hidden(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_round_trip(tmp_path):
    model = nn.Linear(3, 2)
    state = {"step": 5, "nested": {"a": [1.5, (True, None)], 3: torch.arange(3)}, "name": "x"}
    folder = save_checkpoint(checkpoint_folder(tmp_path / "runs" / "a", 5), model, CONFIG, state)
    assert folder == tmp_path / "runs" / "a" / "step-000005"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "trainer.pt"]
    fresh = nn.Linear(3, 2)
    found = load_checkpoint(folder, fresh)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    assert found.config == CONFIG
    assert found.save_dtype is None
    assert found.trainer["nested"]["a"] == [1.5, (True, None)]
    assert torch.equal(found.trainer["nested"][3], torch.arange(3))
    assert hidden(folder.parent) == []
    assert torch.load(folder / "trainer.pt", weights_only=True)["step"] == 5
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1  # who may read the one may read the others


def test_weights_alone(tmp_path):
    folder = save_checkpoint(tmp_path / "export", nn.Linear(3, 2), CONFIG)
    assert load_checkpoint(folder).trainer is None


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model = Tied()
    folder = save_checkpoint(tmp_path / "step-000001", model, CONFIG)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["count", "embedding.weight", "output.bias", "skew"]
    fresh = Tied(tied=False)
    found = load_checkpoint(folder, fresh)
    assert found.ties == {"output.weight": "embedding.weight"}
    assert fresh.output.weight is fresh.embedding.weight
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
        assert torch.equal(found.model[name], value)
    tokens = torch.tensor([0, 3])
    assert torch.equal(fresh(tokens), model(tokens))


def test_loading_into_a_tied_model_keeps_its_parameters(tmp_path):
    folder = save_checkpoint(tmp_path / "step-000001", Tied(), CONFIG)
    model = Tied()
    parameters = [id(p) for p in model.parameters()]
    load_checkpoint(folder, model)
    assert [id(p) for p in model.parameters()] == parameters  # an optimiser made before still holds them


def test_views_of_one_storage_are_saved_apart(tmp_path):
    model = nn.Module()
    base = torch.arange(12.0)
    model.register_buffer("whole", base)
    model.register_buffer("matrix", base.view(3, 4))
    model.register_buffer("part", base[2:5])
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("nothing", torch.zeros(0))
    found = load_checkpoint(save_checkpoint(tmp_path / "step-000001", model, CONFIG)).model
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_rounded_weights_say_so(tmp_path):
    model = Tied().double()
    folder = save_checkpoint(tmp_path / "small", model, CONFIG, save_dtype="bf16")
    found = load_checkpoint(folder, fresh := Tied().double())
    assert found.save_dtype == "bf16"
    assert found.model["skew"].dtype is torch.bfloat16
    assert found.model["count"].dtype is torch.int64
    assert torch.equal(fresh.skew, model.skew.bfloat16().double())
    with pytest.raises(ValueError, match="unknown save_dtype 'bf61'; did you mean 'bf16'"):
        save_checkpoint(tmp_path / "x", model, CONFIG, save_dtype="bf61")


def test_state_that_needs_code_to_be_read_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"trainer_state\['a'\]\[1\] is a ndarray"):
        save_checkpoint(tmp_path / "step-000001", nn.Linear(2, 2), CONFIG, {"a": [1, numpy.zeros(2)]})
    with pytest.raises(CheckpointError, match=r"trainer_state\['score'\] is a float64"):
        save_checkpoint(tmp_path / "step-000001", nn.Linear(2, 2), CONFIG, {"score": numpy.float64(1)})
    with pytest.raises(CheckpointError, match="has a key of type NoneType"):
        save_checkpoint(tmp_path / "step-000001", nn.Linear(2, 2), CONFIG, {"a": {None: 1}})
    with pytest.raises(CheckpointError, match="not JSON compliant"):
        save_checkpoint(tmp_path / "step-000001", nn.Linear(2, 2), {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def fail_at(monkeypatch, name, call, error=None):
    """Make the n-th call of a function of `os` fail, as a crash or a full disk would."""
    real, calls = getattr(os, name), []

    def wrapped(*arguments, **options):
        calls.append(arguments)
        if len(calls) == call:
            raise error or OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(checkpoint.os, name, wrapped)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_last_good_one(tmp_path, monkeypatch, call):
    good = save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG, {"step": 1})
    before = contents(good)
    fail_at(monkeypatch, "fsync", call)
    with pytest.raises(CheckpointError, match=r"step-000002 was not written: No space left.*The disk is full"):
        save_checkpoint(tmp_path / "step-000002", nn.Linear(3, 2), CONFIG, {"step": 2})
    assert latest_checkpoint(tmp_path) == good
    assert contents(good) == before
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failed_rename_leaves_the_last_good_one(tmp_path, monkeypatch, same_step, error):
    good = save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG, {"step": 1})
    before = contents(good)
    fail_at(monkeypatch, "replace", 2 if same_step else 1, error)
    target = good if same_step else tmp_path / "step-000002"
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        save_checkpoint(target, nn.Linear(3, 2), CONFIG, {"step": 2})
    assert latest_checkpoint(tmp_path) == good
    assert contents(good) == before
    assert hidden(tmp_path) == []


def test_files_beyond_a_real_limit(tmp_path):
    """The system itself refuses to write more."""
    good = save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG, {"step": 1})
    before = contents(good)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        for model, state in ((nn.Linear(100, 100), {}), (nn.Linear(3, 2), {"x": torch.zeros(10_000)})):
            with pytest.raises(CheckpointError, match="step-000002 was not written"):
                save_checkpoint(tmp_path / "step-000002", model, CONFIG, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_checkpoints(tmp_path) == [good]
    assert contents(good) == before
    assert hidden(tmp_path) == []


def test_a_process_killed_while_writing(tmp_path):
    """No handler runs: what was there stays, what was begun is never taken for a checkpoint, and is tidied up."""
    good = save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG, {"step": 1})
    script = (
        "import os, sys, torch\n"
        "from equipoise.train import checkpoint\n"
        "checkpoint.os.replace = lambda *names: os.kill(os.getpid(), 9)\n"
        "checkpoint.save_checkpoint(sys.argv[1] + '/step-000002', torch.nn.Linear(3, 2), {}, {})\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 1
    assert list_checkpoints(tmp_path) == [good]
    recover_checkpoints(tmp_path)
    assert hidden(tmp_path) == []
    assert load_checkpoint(good).trainer == {"step": 1}


def test_a_crash_between_two_renames_is_mended(tmp_path):
    good = save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG, {"step": 1})
    before = contents(good)
    good.rename(tmp_path / ".replaced-step-000001")
    assert list_checkpoints(tmp_path) == []
    recover_checkpoints(tmp_path)
    assert list_checkpoints(tmp_path) == [good]
    assert contents(good) == before
    good.rename(tmp_path / ".replaced-step-000001")
    save_checkpoint(good, nn.Linear(3, 2), CONFIG, {"step": 3})
    assert load_checkpoint(good).trainer == {"step": 3}
    assert hidden(tmp_path) == []
    recover_checkpoints(tmp_path / "nowhere")


def test_saving_the_same_step_again_replaces_it(tmp_path):
    for value in (1, 2):
        save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG, {"value": value})
    assert load_checkpoint(tmp_path / "step-000001").trainer == {"value": 2}
    assert hidden(tmp_path) == []


def test_order_is_by_number_and_only_whole_ones_count(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for step in (999_999, 1_000_000, 20):
        save_checkpoint(checkpoint_folder(tmp_path, step), nn.Linear(2, 2), CONFIG)
    (tmp_path / "step-9999999").mkdir()
    (tmp_path / "notes").mkdir()
    names = [folder.name for folder in list_checkpoints(tmp_path)]
    assert names == ["step-000020", "step-999999", "step-1000000"]
    assert latest_checkpoint(tmp_path).name == "step-1000000"


def test_retention_spares_the_best(tmp_path):
    for step in range(1, 6):
        save_checkpoint(checkpoint_folder(tmp_path, step), nn.Linear(2, 2), CONFIG)
    write_best(tmp_path, checkpoint_folder(tmp_path, 2), step=2, metric="loss", score=0.5)
    deleted = prune_checkpoints(tmp_path, keep=2)
    assert [folder.name for folder in deleted] == ["step-000001", "step-000003"]
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-000002", "step-000004", "step-000005"]
    assert prune_checkpoints(tmp_path, keep=10) == []
    with pytest.raises(ValueError, match="keep must be at least 1"):
        prune_checkpoints(tmp_path, keep=0)


def test_best_is_written_atomically(tmp_path, monkeypatch):
    assert read_best(tmp_path) is None
    write_best(tmp_path, tmp_path / "step-000002", step=2, metric="loss", score=0.5)
    expected = {"checkpoint": "step-000002", "step": 2, "metric": "loss", "score": 0.5}
    assert read_best(tmp_path) == expected
    with pytest.raises(CheckpointError, match="not JSON compliant"):
        write_best(tmp_path, tmp_path / "step-000003", step=3, metric="loss", score=float("nan"))
    fail_at(monkeypatch, "fsync", 1)
    with pytest.raises(CheckpointError, match="The disk is full"):
        write_best(tmp_path, tmp_path / "step-000003", step=3, metric="loss", score=0.4)
    assert read_best(tmp_path) == expected


def test_what_is_no_checkpoint(tmp_path):
    good = save_checkpoint(tmp_path / "checkpoints" / "step-000001", nn.Linear(3, 2), CONFIG)
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors\. The newest one nearby is .*step-000001\."):
        load_checkpoint(tmp_path)
    (good / "model.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(good)


def test_another_architecture_is_refused_by_key(tmp_path):
    folder = save_checkpoint(tmp_path / "step-000001", nn.Linear(3, 2), CONFIG)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        load_checkpoint(folder, nn.Linear(4, 2))


def test_entries_that_are_no_tensors_are_named(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match="'_extra_state' is a dict; only tensors are saved"):
        save_checkpoint(tmp_path / "step-000001", Extra(2, 2), CONFIG)


def test_check_writable_makes_the_folder_and_leaves_nothing(tmp_path):
    check_writable(tmp_path / "a" / "b", needed_bytes=1)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_check_writable_says_what_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*file/run: .*file is a file, not a folder"):
        check_writable(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match=r"too little space in .*: 1048576\.00 GiB needed, .* free"):
        check_writable(tmp_path, needed_bytes=2**50)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write to .*: Permission denied\."):
        check_writable(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_check_writable_on_a_read_only_folder(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        check_writable(folder)


def test_checkpoint_bytes_is_about_right(tmp_path):
    model = nn.Linear(300, 300)
    optimizer = Adam().build(model)
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    folder = save_checkpoint(tmp_path / "step-000001", model, CONFIG, {"optimizer": optimizer.state_dict()})
    real = sum(path.stat().st_size for path in folder.iterdir())
    assert real <= checkpoint_bytes(model, copies=2) <= real + 2**21


def draw():
    return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()


def test_random_state_survives_the_file(tmp_path):
    random.seed(1)
    numpy.random.seed(2)
    draw()  # an odd number of normal draws leaves a half-used pair behind
    folder = save_checkpoint(tmp_path / "step-000001", nn.Linear(2, 2), CONFIG, {"rng": rng_state()})
    expected = [draw(), draw()]
    random.seed(99)
    numpy.random.seed(99)
    torch.manual_seed(99)
    set_rng_state(load_checkpoint(folder).trainer["rng"])
    assert [draw(), draw()] == expected


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randint(6, (5,))
        out = nn.functional.dropout(model(x), 0.3)
        loss = out.square().mean() + model.skew.square().sum() * random.random()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    settings = Adam(lr=0.01, weight_decay=0.1, no_decay=("bias",))
    model = Tied()
    optimizer = settings.build(model)
    train(model, optimizer, 3)
    state = {"optimizer": optimizer.state_dict(), "rng": rng_state()}
    folder = save_checkpoint(tmp_path / "step-000003", model, CONFIG, state)
    expected = train(model, optimizer, 4)

    torch.manual_seed(123)
    resumed = Tied()
    found = load_checkpoint(folder, resumed)
    again = settings.build(resumed)
    again.load_state_dict(found.trainer["optimizer"])
    set_rng_state(found.trainer["rng"])
    assert train(resumed, again, 4) == expected
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_flag_and_the_second_ends(number):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.reason == number.name
        with pytest.raises(KeyboardInterrupt, match=number.name):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert stop.requested


def test_a_signal_that_a_launcher_repeats_is_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a test")
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher tells its processes what the terminal has told them
        assert stop.reason == "SIGINT"
        monkeypatch.setattr(checkpoint, "REPEATED", 0.0)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM after SIGINT"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)

    def fail():
        with GracefulStop():
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_get_the_flag_without_handlers():
    before, result = signal.getsignal(signal.SIGTERM), []

    def work():
        with GracefulStop() as stop:
            result.append(signal.getsignal(signal.SIGTERM) is before)
            stop.request("time is up")
            stop.request("later")
            result.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [True, "time is up"]


def test_a_stopped_run_saves_and_exits_cleanly_and_its_workers_die_of_the_signal(tmp_path):
    script = (
        "import os, signal, sys, time, torch\n"
        "from equipoise.train import GracefulStop, save_checkpoint, checkpoint_folder\n"
        "with GracefulStop() as stop:\n"
        "    ready, tell = os.pipe()\n"
        "    worker = os.fork()\n"
        "    if worker == 0:\n"
        "        os.write(tell, b'.')\n"
        "        time.sleep(60)\n"
        "        os._exit(1)\n"
        "    os.read(ready, 1)\n"  # a signal that comes while a fork is under way is lost
        "    os.kill(worker, signal.SIGTERM)\n"
        "    print(os.WTERMSIG(os.waitpid(worker, 0)[1]), stop.requested)\n"
        "    for step in range(1000):\n"
        "        if step == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "        if stop.requested: break\n"
        "    save_checkpoint(checkpoint_folder(sys.argv[1], step), torch.nn.Linear(2, 2), {}, {'step': step})\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "\nSIGTERM: will save and end; once more ends at once.\n")
    assert done.stdout.split() == [str(int(signal.SIGTERM)), "False"]
    assert load_checkpoint(latest_checkpoint(tmp_path)).trainer == {"step": 3}


def test_config_is_readable_text(tmp_path):
    folder = save_checkpoint(tmp_path / "step-000001", nn.Linear(2, 2), {"name": "ü"})
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == {"name": "ü"}
    assert "ü" in (folder / "config.json").read_text(encoding="utf-8")
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
