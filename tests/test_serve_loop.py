"""examples/serve_loop.py: all operations of the engine occur, every state is exact, and wrong states are noticed."""

import json

import pytest
import torch
from helpers.examples import imported
from helpers.replay import Tape

from kda_cute.testing.emulation import emulated
from kda_sm90.config import ARCH

SMALL = {"requests": 16, "batch": 4, "slots": 18, "budget": 128, "head-dim": 16}


@pytest.fixture(scope="module")
def example():
    with imported("serve_loop") as module:
        yield module


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The calls are too small for several threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def checked_slots(monkeypatch):
    """No call of these tests may write a slot twice, or write one that another sequence reads."""
    monkeypatch.setenv("KDA_CHECK_SLOTS", "1")


def words(out, device="cpu", **options):
    options = SMALL | {name.replace("_", "-"): value for name, value in options.items()}
    return ["--out", str(out), "--device", device, *(f"--{n}={value}" for n, value in options.items())]


def assert_everything_happened(out, options=SMALL):
    """Asserts that a run served all requests, used every operation, and found exact states; returns run.json."""
    run = json.loads((out / "run.json").read_text())
    n = run["counts"]
    assert n["finished"] == options["requests"]
    for name in ("prefix_hits", "evictions", "chunked_prompts", "accepted_drafts", "rejected_drafts"):
        assert n[name] > 0, name
    assert {kind for kind, _, _ in run["latencies"]} == {"prefill", "decode", "verify"}
    assert n["compared"] > n["answer_tokens"] and 0 < run["error"] <= run["limit"]
    return run


def test_a_run_uses_every_operation_and_writes_its_reports(example, tmp_path, capsys):
    assert example.main(words(tmp_path)) == 0
    run = assert_everything_happened(tmp_path)
    assert run["prefill"] == run["decoding"] == ["reference"] and run["device"] == "CPU"
    requests = example.draw_requests(example.Options(requests=16))
    assert run["counts"]["answer_tokens"] == sum(len(r.tokens) - r.prompt for r in requests)
    assert run["checkpoints"] == "in a call" and run["error"] < 1e-5  # the reference computes in fp32
    picture = (tmp_path / "latency.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n") and len(picture) > 5000
    printed = capsys.readouterr().out
    assert "16/16 requests, 0 running" in printed and "decoding  served by reference\n" in printed


def without_checkpoints(example, monkeypatch):
    """The backend refuses calls with checkpoints."""
    refused = type("Refused", (), {"error": "no checkpoints"})
    monkeypatch.setattr(example, "explain", lambda **arguments: refused)


def test_a_backend_without_checkpoints_stores_prefixes_at_the_ends_of_pieces(example, tmp_path, monkeypatch):
    without_checkpoints(example, monkeypatch)
    assert example.main([*words(tmp_path), "--no-picture"]) == 0
    assert assert_everything_happened(tmp_path)["checkpoints"] == "at ends of pieces"
    assert not (tmp_path / "latency.png").exists()


def captured_on_tape(call, device):
    """A tape repeats a call in the same memory with the same arguments, as a CUDA graph does."""
    call()
    tape = Tape()
    with tape:
        call()
    return tape.replay


def test_the_calls_of_a_captured_graph_serve_other_slots(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "captured", captured_on_tape)
    assert example.main([*words(tmp_path), "--no-picture"]) == 0
    assert_everything_happened(tmp_path)


def test_emulated_sm90_kernels_serve_requests(example, tmp_path, monkeypatch):
    """The first request is prefilled in two pieces. The second one starts from the prefix that the first one stored, and both have
    drafts."""
    tokens = tuple(range(100))
    requests = [(tokens, 84, 0), (tokens[:64] + tokens[80:], 74, 3)]
    monkeypatch.setattr(example, "draw_requests", lambda options: [example.Request(*r) for r in requests])
    monkeypatch.setattr(example, "captured", captured_on_tape)
    small = {"requests": 2, "batch": 2, "slots": 9, "budget": 64, "heads": 1, "head_dim": 128}
    with emulated("sm90", ARCH, races=("shared",)):  # as in tests/sm90/test_emulated.py
        assert example.main([*words(tmp_path, **small), "--backend", "sm90", "--no-picture"]) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["prefill"] == run["decoding"] == ["sm90"] and run["counts"]["finished"] == 2
    assert run["checkpoints"] == "in a call"
    for name in ("prefix_hits", "chunked_prompts", "accepted_drafts", "rejected_drafts"):
        assert run["counts"][name] > 0, name
    assert 1e-4 < run["error"] <= run["limit"]  # of products of bf16 operands


@pytest.mark.arch((9, 0))
def test_a_hopper_gpu_serves_the_requests_from_captured_graphs(example, tmp_path):
    options = {"head_dim": 128, "requests": 24}
    assert example.main([*words(tmp_path, "cuda", **options), "--backend", "sm90", "--no-picture"]) == 0
    run = assert_everything_happened(tmp_path, SMALL | options)
    assert run["prefill"] == run["decoding"] == ["sm90"] and run["device"] != "CPU"


# ---- wrong states are noticed


def engine_in_use(example):
    """Returns an engine whose cache and whose running requests hold states."""
    options = {name.replace("-", "_"): value for name, value in SMALL.items()}
    engine = example.Engine(example.Options(**options), torch.device("cpu"), None)
    while not (engine.cache.entries and any(r.done > r.prompt for r in engine.running)):
        engine.step()
    engine.check()
    return engine


def slots_of(engine):
    running = next(r for r in engine.running if r.done > r.prompt)
    return {
        "cached": next(iter(engine.cache.entries.values())).slot,
        "running": running.row[running.column],
        "free": engine.pool.free[0],
    }


CORRUPTIONS = {
    "scaled": ("cached", lambda state, head: head.mul_(1.03), "has the error"),
    "one value": ("running", lambda state, head: head[0, 0].add_(head.norm() / 20), "has the error"),
    "not finite": ("running", lambda state, head: head[3, 2].fill_(torch.nan), "has the error inf"),
    "transposed": ("cached", lambda state, head: state.copy_(state.mT.clone()), "has the error"),
    "written after its end": ("free", lambda state, head: head.zero_(), "is free, but a call wrote to it"),
}


@pytest.mark.parametrize(("kind", "corrupt", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupted_slot_is_noticed(example, kind, corrupt, message):
    engine = engine_in_use(example)
    slot = slots_of(engine)[kind]
    state = engine.pool.states[slot]
    corrupt(state, state[1])
    with pytest.raises(example.WrongStateError, match=f"slot {slot}\\b.*{message}"):
        engine.check()


def no_rollback(example, monkeypatch):
    """Every verify step starts from the state after the last draft."""
    run = example.TokenStep.__call__
    late = lambda step, rows: run(step, [(ids, slots, len(ids)) for ids, slots, _ in rows])
    monkeypatch.setattr(example.TokenStep, "__call__", late)


def stale_prefix(example, monkeypatch):
    """The cache takes any prefix of the right length for a hit."""
    find = lambda cache, tokens: next(
        (e for e in cache.entries.values() if len(e.tokens) < len(tokens)), None
    )
    monkeypatch.setattr(example.PrefixCache, "find", find)


def no_references(example, monkeypatch):
    """The cache evicts the most recently used prefix, although a request is going to read it."""
    take = example.PrefixCache.take

    def careless(cache, count):
        for tokens, entry in reversed(list(cache.entries.items())):
            entry.references = 0
            cache.entries.move_to_end(tokens)
        return take(cache, count)

    monkeypatch.setattr(example.PrefixCache, "take", careless)


def forgotten_pieces(example, monkeypatch):
    """Every piece of a prompt starts from zeros."""
    call = example.chunk_kda
    fresh = lambda has_initial_state, **x: call(**x, has_initial_state=torch.zeros_like(has_initial_state))
    monkeypatch.setattr(example, "chunk_kda", fresh)


@pytest.mark.parametrize("defect", (no_rollback, stale_prefix, no_references, forgotten_pieces))
def test_a_defect_of_the_engine_ends_the_program(example, tmp_path, monkeypatch, capsys, defect):
    monkeypatch.delenv("KDA_CHECK_SLOTS")  # the oracle has to notice it
    defect(example, monkeypatch)
    assert example.main([*words(tmp_path), "--no-picture"]) == 1
    assert "has the error" in capsys.readouterr().err and not (tmp_path / "run.json").exists()


# ---- the cache


def test_the_least_recently_used_prefix_without_references_is_evicted(example):
    pool = example.Pool(example.Options(slots=4, head_dim=16), torch.device("cpu"))
    cache = example.PrefixCache(pool)
    prefixes = [(n,) * 64 for n in range(3)]
    slots = cache.take(3)
    assert sorted(slots) == [1, 2, 3]  # slot 0 is for padding
    entries = [cache.insert(tokens, slot) for tokens, slot in zip(prefixes, slots)]
    entries[0].references = 1
    assert cache.find(prefixes[1] + (7,)) is entries[1]  # entry 2 is now the oldest that can go
    assert cache.take(3) is None and cache.evictions == 0
    pool.states.zero_()
    assert cache.take(1) == [entries[2].slot] and cache.evictions == 1
    assert pool.states[entries[2].slot].isnan().all() and not pool.states[entries[0].slot].any()
    assert cache.find(prefixes[2]) is None and cache.find(prefixes[0]) is entries[0]


def test_the_longest_cached_prefix_is_found_and_a_second_slot_for_it_is_given_back(example):
    pool = example.Pool(example.Options(slots=5, head_dim=16), torch.device("cpu"))
    cache, tokens = example.PrefixCache(pool), tuple(range(200))
    short, long, second = cache.take(3)
    entry = cache.insert(tokens[:64], short)
    longer = cache.insert(tokens[:128], long)
    assert (
        cache.find(tokens) is longer and cache.find(tokens[:127]) is entry and cache.find(tokens[:63]) is None
    )
    assert cache.insert(tokens[:128], second) is longer and second in pool.free


# ---- the command line

REFUSED = {
    "slots": ("--slots=12", "--slots: expected at least 13, got 12"),
    "budget": ("--budget=63", "--budget: expected at least 64, got 63"),
    "requests": ("--requests=0", "--requests: expected at least 1, got 0"),
    "device": ("--device=tpu", "invalid choice: 'tpu'"),
}


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_command_is_refused(example, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit, match="2"):
        example.main([*words(tmp_path), more])
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        example.main(words(tmp_path, "cuda"))
    assert "--device: expected cpu, because torch finds no GPU, got cuda" in capsys.readouterr().err


def test_a_call_that_no_backend_serves_ends_with_the_reasons(example, tmp_path, capsys):
    assert example.main([*words(tmp_path), "--no-picture", "--backend", "nothing"]) == 1
    assert "backend 'nothing' (chosen by backend=) is not installed" in capsys.readouterr().err
