"""examples/train_bytes_lm.py: it learns, resumes to the bit, compares runs, and decodes with a cache."""

import json

import pytest
import torch
from helpers.examples import EXAMPLES, imported

from kda_core.nn import Cache
from kda_core.registry import record_calls

SCRIPT = EXAMPLES / "train_bytes_lm.py"
TINY = {
    "steps": 24, "batch": 4, "tokens": 32, "layers": 1, "hidden": 32, "heads": 2, "head-dim": 16, "every": 8, "sample": 5,
    "learning-rate": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def example():
    with imported("train_bytes_lm") as module:
        yield module


def words(out, **options):
    return [
        "--out",
        str(out),
        "--device",
        "cpu",
        *(f"--{n}={value}" for n, value in (TINY | options).items()),
    ]


@pytest.fixture(scope="module")
def finished(example, tmp_path_factory):
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert example.main(words(out)) == 0
    return out


def record(out):
    return json.loads((out / "run.json").read_text())


def test_the_loss_falls_and_the_reports_are_written(finished):
    run = record(finished)
    assert (
        run["served"] == {"chunk_fwd": ["reference"], "chunk_bwd": ["reference"]} and run["device"] == "CPU"
    )
    assert len(run["losses"]) == 24 and [step for step, _ in run["validation"]] == [8, 16, 24]
    assert 5.4 < run["losses"][0] < 5.7  # log(256): the first guess is even
    assert sum(run["losses"][-5:]) / 5 < 4 and run["validation"][-1][1] < 4
    picture = (finished / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n") and len(picture) > 5000


def test_an_interrupted_run_resumes_to_the_bit(example, finished, tmp_path, monkeypatch, capsys):
    draw_batch = example.draw_batch

    def interrupted(text, options, step):
        if step == 11:
            raise KeyboardInterrupt
        return draw_batch(text, options, step)

    with monkeypatch.context() as patch:
        patch.setattr(example, "draw_batch", interrupted)
        assert example.main(words(tmp_path)) == 130
    assert not (tmp_path / "run.json").exists()
    assert "stopped at step 11; --resume continues" in capsys.readouterr().out
    assert len(torch.load(tmp_path / "checkpoint.pt")["losses"]) == 8
    assert example.main([*words(tmp_path), "--resume", "--no-picture"]) == 0
    assert (tmp_path / "run.json").exists() and not (tmp_path / "loss.png").exists()
    resumed, whole = (torch.load(out / "checkpoint.pt") for out in (tmp_path, finished))
    assert resumed["losses"] == whole["losses"] and resumed["validation"] == whole["validation"]
    assert all(torch.equal(resumed["model"][name], x) for name, x in whole["model"].items())
    for index, state in whole["optimizer"]["state"].items():
        assert all(torch.equal(resumed["optimizer"]["state"][index][name], x) for name, x in state.items())


def test_two_runs_are_drawn_beside_each_other(example, finished, tmp_path, capsys):
    other = record(finished)
    other["losses"] = [loss + 0.25 for loss in other["losses"]]
    (tmp_path / "other.json").write_text(json.dumps(other))
    alone = (finished / "loss.png").read_bytes()
    arguments = [*words(finished), "--resume", "--compare", str(tmp_path / "other.json")]
    assert example.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "reference on CPU against reference on CPU" in printed and "differ by at most 0.2500;" in printed
    assert "forward   served by reference\nbackward  served by reference\n" in printed
    assert (finished / "loss.png").read_bytes() != alone
    assert record(finished)["losses"] == torch.load(finished / "checkpoint.pt")["losses"]


def test_the_sample_takes_its_states_from_a_cache(example, finished):
    options = example.Options(
        **{name: record(finished)["identity"][name] for name in example.Options._fields}
    )
    model = example.BytesModel(options)
    model.load_state_dict(torch.load(finished / "checkpoint.pt")["model"])
    with record_calls() as calls:
        written = example.sample(model, b"The ", 5, seed=0, temperature=1e-3)
    assert len(written) == 5 and len(calls) == 5 * options.layers
    ids, cache = torch.tensor([list(b"The " + written)]), Cache()
    with torch.inference_mode():
        whole = model(ids)
        parts = [model(part, cache) for part in ids.split([4, 1, 1, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=3e-2, atol=3e-2)
    for at, byte in enumerate(written, start=3):  # almost greedy: each byte has nearly the highest logit
        assert whole[0, at, byte] > whole[0, at].max() - 0.1


def test_batches_follow_from_the_seed_and_the_step(example):
    text = example.Text.of(bytes(range(256)) * 20)
    options = example.DEFAULTS
    first, again, later = (example.draw_batch(text, options, step) for step in (3, 3, 4))
    other = example.draw_batch(text, options._replace(seed=1), 3)
    assert torch.equal(first, again) and not torch.equal(first, later) and not torch.equal(first, other)
    assert first.shape == (options.batch, options.tokens + 1)
    assert torch.equal(first.diff() % 256, torch.ones_like(first)[:, 1:])  # consecutive bytes of the text


REFUSED = {
    "no matching text": (("--text", str(SCRIPT)), "text_sha256="),
    "no checkpoint": (("--resume",), "--resume: there is no"),
    "steps": (("--steps", "0"), "--steps: expected a number above 0, got 0"),
    "no file": (("--text", "/nothing"), "there is no file /nothing"),
}


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_command_is_refused(example, finished, tmp_path, capsys, more, message):
    out = tmp_path if "resume" in message else finished
    resume = [] if "resume" in message else ["--resume"]
    with pytest.raises(SystemExit, match="2"):
        example.main([*words(out), *resume, *more])
    assert message in capsys.readouterr().err


def test_a_run_with_other_options_is_neither_continued_nor_compared(example, finished, tmp_path, capsys):
    for arguments in (
        [*words(finished, seed=1), "--resume"],
        [*words(tmp_path, seed=1), "--compare", str(finished / "run.json")],
    ):
        with pytest.raises(SystemExit, match="2"):
            example.main(arguments)
        assert "has seed=0, this run has 1; pass --seed 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        example.main(words(finished))
    assert "has a checkpoint: pass --resume" in capsys.readouterr().err


def test_a_call_that_no_backend_serves_ends_with_the_reasons(example, tmp_path, capsys):
    assert example.main([*words(tmp_path), "--backend", "nothing"]) == 1
    assert "backend 'nothing' (chosen by backend=) is not installed" in capsys.readouterr().err
