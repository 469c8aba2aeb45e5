"""The adapter for vLLM, driven with tensors in vLLM's layouts and compared with the fp64 oracle of whole requests.

Without vLLM its functions are stand-ins (`helpers.fake_vllm`). With vLLM, as in ``nox -s test-vllm``, the layers are subclasses of vLLM's
own, and only what needs a GPU is replaced.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from helpers import fake_vllm
from helpers.fake_vllm import DIM, HEADS, Request, Server
from torch._subclasses.fake_tensor import FakeTensorMode

from kda_core.integrations import vllm as adapter
from kda_core.reference import SPEC, ReferenceBackend
from kda_core.registry import REGISTRY, record_calls

NAMES = tuple(adapter.LAYERS)
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


@pytest.fixture
def vllm(monkeypatch):
    adapter._log_once.cache_clear()
    return fake_vllm.install(monkeypatch)


@pytest.fixture(params=NAMES)
def layer_class(request, vllm):
    return adapter.register_layers()[request.param]


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def metadata(**values):
    """Returns the metadata of a batch without tokens, with these fields changed."""
    counts = dict.fromkeys(
        ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens"), 0
    ) | dict.fromkeys(("num_spec_decodes", "num_spec_decode_tokens", "num_actual_tokens"), 0)
    names = (
        "checkpoint", "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc", "num_accepted_tokens",
        "spec_state_indices_tensor", "non_spec_state_indices_tensor", "spec_token_indx", "non_spec_token_indx",
        "spec_token_start", "non_spec_token_start",
    )  # fmt: skip
    return SimpleNamespace(**(counts | dict.fromkeys(names) | values))


def bounds(lengths):
    return ints(list(accumulate(lengths, initial=0)))


def column(slots):
    """Returns slots as vLLM has them: a column of its table of blocks."""
    return torch.stack([ints(slots), ints(slots) + 1, ints(slots) + 2], dim=1)[:, 0]


def prompts(lengths, slots, known, checkpoint=None, **more):
    """Returns the metadata of a batch of prompts, in which single tokens of running requests come first."""
    decodes = sum(1 for n, old in zip(lengths, known) if n == 1 and old)
    return metadata(
        num_prefills=len(lengths) - decodes,
        num_prefill_tokens=sum(lengths) - decodes,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_actual_tokens=sum(lengths),
        has_initial_state=torch.tensor(known),
        non_spec_query_start_loc=bounds(lengths),
        non_spec_state_indices_tensor=column(slots),
        checkpoint=checkpoint,
        **more,
    )


def decodes(slots, real):
    """Returns the metadata of one token each, of which the rows from `real` on only pad the batch."""
    return metadata(
        num_decodes=real,
        num_decode_tokens=real,
        num_actual_tokens=len(slots),
        non_spec_state_indices_tensor=column(slots),
    )


def prefilled(server, *lengths, drafts=0):
    """Returns requests with these numbers of tokens in slots of their own, after their prefill."""
    width = 1 + drafts
    requests = [Request(list(range(1 + n * width, 1 + (n + 1) * width))) for n in range(len(lengths))]
    m = prompts(lengths, [r.slots[0] for r in requests], [False] * len(lengths))
    *x, _ = server.run(m, sum(lengths))
    return [r.extended(*(y[s:e] for y in x)) for r, s, e in spans(requests, lengths)]


def spans(requests, lengths):
    return [(r, end - n, end) for r, end, n in zip(requests, accumulate(lengths), lengths)]


# ---- registration


def test_the_entry_point_names_register():
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == adapter.PLUGIN)
    assert point.load() is adapter.register


def test_without_vllm_the_plugin_logs_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.INFO):
        adapter.register()
    assert "kda_core serves no layer of this vLLM: ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize("named", (None, [""], ["other"]))
def test_the_plugin_is_off_unless_it_is_named(vllm, caplog, named):
    vllm.envs.VLLM_PLUGINS = named
    with caplog.at_level(logging.INFO, "vllm.kda_core"):
        adapter.register()
    assert not vllm.registry and "VLLM_PLUGINS=kda_core" in caplog.text


def test_other_platforms_keep_their_layers(vllm, caplog):
    vllm.platform.is_cuda = lambda: False
    adapter.register()
    assert not vllm.registry and "platform is not CUDA" in caplog.text


def test_the_plugin_replaces_the_layers_and_may_be_loaded_again(vllm, caplog):
    with caplog.at_level(logging.INFO, "vllm.kda_core"):
        adapter.register()
        first = dict(vllm.registry)
        adapter.register()
    assert tuple(first) == NAMES and vllm.registry == first
    for name, layer in first.items():
        base = getattr(sys.modules[adapter.LAYERS[name].module], name)
        assert issubclass(layer, base) and issubclass(layer, adapter.KdaCoreAttention)
        assert layer._forward is not base._forward
        assert type(base.__new__(base)) is layer  # what a model constructs
    assert f"kda_core serves {', '.join(NAMES)}" in caplog.text


def test_a_layer_that_this_vllm_lacks_is_logged(vllm, monkeypatch, caplog):
    missing = {"KimiK9DeltaAttention": adapter.Replaced("vllm.models.kimi_k9.nvidia.kda", True)}
    monkeypatch.setattr(adapter, "LAYERS", missing)
    with caplog.at_level(logging.INFO, "vllm.kda_core"):
        adapter.register()
    assert not vllm.registry
    assert "kda_core does not serve KimiK9DeltaAttention of this vLLM: ModuleNotFoundError" in caplog.text
    assert "kda_core serves no layer" in caplog.text


def test_a_layer_with_another_method_is_logged(vllm, monkeypatch, caplog):
    name = NAMES[0]
    base = getattr(sys.modules[adapter.LAYERS[name].module], name)
    monkeypatch.setattr(base, "_forward", lambda self, mixed_qkv, out: None)
    assert name not in adapter.register_layers()
    assert f"{name}._forward must have the parameters" in caplog.text


def test_a_layer_that_another_plugin_replaced_is_left_alone(vllm, caplog):
    vllm.registry[NAMES[0]] = other = type("Other", (), {})
    assert NAMES[0] not in adapter.register_layers() and vllm.registry[NAMES[0]] is other
    assert "has replaced it" in caplog.text


@pytest.mark.skipif(fake_vllm.INSTALLED, reason="vLLM's own constructor needs a running engine")
def test_the_constructor_gives_our_layer_and_reads_the_options(vllm):
    adapter.register()
    options = SimpleNamespace(
        additional_config={"kda_decode_backend": "native", "kda_prefill_backend": "auto"}
    )
    layer = fake_vllm.KimiK3DeltaAttention("config", vllm_config=options, prefix="layer")
    assert type(layer) is vllm.registry["KimiK3DeltaAttention"]
    assert layer._kda_core_wanted == adapter.Modes(prefill=True, decode=False, speculation=True)


# ---- batches


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_prompts_start_go_on_and_mix_with_single_tokens(vllm, layer_class, dtype):
    server = Server(fake_vllm.new_layer(layer_class, state_dtype=dtype), vllm.context, dtype)
    with record_calls() as calls:
        old = prefilled(server, 70, 1, 33)
        requests = [old[1], old[0], old[2], Request([8])]
        lengths, known = (1, 65, 130, 5), [True, True, True, False]
        *x, o = server.run(prompts(lengths, [r.slots[0] for r in requests], known), sum(lengths))
    assert [(c.backend, c.entry, c.planner) for c in calls] == [("reference", "chunk_fwd", None)] * 2
    for r, start, end in spans(requests, lengths):
        longer = r.extended(*(y[start:end] for y in x))
        server.check(o[start:end], longer, end - start, {r.slots[0]: len(longer)}, LIMIT[dtype])
    server.check_untouched({r.slots[0] for r in requests})


@pytest.mark.parametrize("bound", (-5.0, None), ids=("bounded", "softplus"))
def test_decoding_with_padded_rows(vllm, layer_class, bound):
    server = Server(fake_vllm.new_layer(layer_class, bound=bound), vllm.context)
    first, second = prefilled(server, 7, 64)
    for padding in ([], [0, 0], [-1, 0, -1]):  # a decode graph pads with the null slot
        slots = [second.slots[0], first.slots[0], *padding]
        with record_calls() as calls:
            *x, o = server.run(decodes(slots, 2), len(slots))
        assert [(c.backend, c.entry) for c in calls] == [("reference", "recurrent_fwd")]
        second, first = (r.extended(*(y[i : i + 1] for y in x)) for i, r in enumerate((second, first)))
        for i, r in enumerate((second, first)):
            server.check(o[i : i + 1], r, 1, {r.slots[0]: len(r)}, 2e-5)
        assert not o[2:].any()
        server.check_untouched({first.slots[0], second.slots[0]})


def drafted(requests, lengths):
    """Returns the metadata of these numbers of drafts."""
    return {
        "num_spec_decodes": len(requests),
        "num_spec_decode_tokens": sum(lengths),
        "spec_query_start_loc": bounds(lengths),
        "spec_state_indices_tensor": ints([r.slots for r in requests]),
        "num_accepted_tokens": ints([r.accepted for r in requests]),
    }


@pytest.mark.parametrize("padded", (False, True))
def test_drafts_start_from_every_number_of_accepted_tokens(vllm, layer_class, padded):
    server = Server(fake_vllm.new_layer(layer_class, num_spec=2), vllm.context)
    requests = prefilled(server, 9, 66, drafts=2)
    padding = [Request([0, 0, 0])] if padded else []
    for accepted in ((1, 3), (2, 1), (3, 2), (1, 1)):
        lengths = [3, 2 if accepted[1] < 3 else 3, *[0] * len(padding)]
        values = drafted([*requests, *padding], lengths)
        tokens = sum(lengths) + 2 * padded  # a graph has more tokens than drafts
        with record_calls() as calls:
            *x, o = server.run(metadata(num_actual_tokens=tokens, **values), tokens)
        assert [(c.backend, c.entry) for c in calls] == [("reference", "recurrent_fwd")]
        for n, (r, start, end) in enumerate(spans(requests, lengths)):
            longer = r.extended(*(y[start:end] for y in x))
            states = {slot: len(r) + 1 + t for t, slot in enumerate(r.slots[: end - start])}
            server.check(o[start:end], longer, end - start, states, 2e-5)
            requests[n] = longer.shortened(len(r) + accepted[n])
            requests[n].accepted = accepted[n]
        assert not o[sum(lengths) :].any()
        written = {s for r, n in zip(requests, lengths) for s in r.slots[:n]}
        server.check_untouched(written)


@pytest.mark.parametrize("form", ("slices", "indices"))
def test_drafts_beside_prompts(vllm, layer_class, form):
    server = Server(fake_vllm.new_layer(layer_class, num_spec=1), vllm.context)
    first, second = prefilled(server, 5, 12, drafts=1)
    third = Request([7])
    # the order of the batch: drafts of `first`, the prompt, drafts of `second`; or drafts before prompts
    rows = {"slices": ([0, 1, 2, 3], range(4, 40)), "indices": ([0, 1, 38, 39], range(2, 38))}[form]
    m = prompts((36,), third.slots, [False], **drafted([first, second], [2, 2]))
    m.num_actual_tokens = 40
    if form == "slices":
        m.spec_token_start, m.non_spec_token_start = 0, 4
    m.spec_token_indx, m.non_spec_token_indx = (torch.tensor(list(r)) for r in rows)
    with record_calls() as calls:
        *x, o = server.run(m, 40)
    assert [(c.backend, c.entry) for c in calls] == [
        ("reference", "recurrent_fwd"),
        ("reference", "chunk_fwd"),
    ]
    for r, mine in ((first, rows[0][:2]), (second, rows[0][2:]), (third, list(rows[1]))):
        longer = r.extended(*(y[mine] for y in x))
        states = {r.slots[t]: len(r) + 1 + t for t in range(2)} if r is not third else {7: 36}
        server.check(o[mine], longer, len(mine), states, 2e-5)
    server.check_untouched({*first.slots, *second.slots, 7})


@pytest.mark.parametrize("drafts", (0, 2))
def test_checkpoints_are_stored_and_resumed(vllm, drafts):
    layer = adapter.register_layers()["KimiK3DeltaAttention"]
    server = Server(fake_vllm.new_layer(layer, num_spec=drafts), vllm.context)
    (old,) = prefilled(server, 64)
    checkpoint = SimpleNamespace(checkpoint_offsets=ints([128, 0, 64]), state_indices=ints([9, 0, 10]))
    requests, lengths = [old, Request([2]), Request([3])], (130, 40, 64 + 3)
    m = prompts(lengths, [r.slots[0] for r in requests], [True, False, False], checkpoint)
    *x, o = server.run(m, sum(lengths))
    done = [r.extended(*(y[s:e] for y in x)) for r, s, e in spans(requests, lengths)]
    states = ({1: 194, 9: 192}, {2: 40}, {3: 67, 10: 64})
    for r, (_, start, end), kept in zip(done, spans(requests, lengths), states):
        server.check(o[start:end], r, end - start, kept, 2e-5)
    server.check_untouched({1, 2, 3, 9, 10})
    # a request with the same prefix goes on from the checkpoint, with the states of recurrence and convolution
    again = done[0].shortened(192)
    again.slots = [9]
    *x, o = server.run(prompts((7,), [9], [True]), 7)
    server.check(o, again.extended(*x), 7, {9: 199}, 2e-5)


# ---- what is left to vLLM


def test_profiling_runs_do_nothing(vllm, layer_class):
    layer = fake_vllm.new_layer(layer_class)
    o = torch.full((1, 3, HEADS, DIM), 7.0)
    for found in (None, {"another layer": metadata()}):
        vllm.context.attn_metadata = found
        layer._forward(
            torch.empty(3, 96),
            torch.empty(1, 3, HEADS, DIM),
            torch.empty(3, HEADS, DIM),
            torch.empty(1, 3, HEADS),
            o,
        )
    assert torch.equal(o, torch.full_like(o, 7.0))


MODES = {
    "prefill": (prompts((5,), [1], [False]), 5),
    "decode": (decodes([1, 2], 2), 2),
    "speculation": (metadata(num_spec_decodes=1, num_spec_decode_tokens=2, num_actual_tokens=2), 2),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_backend_that_the_options_name_serves_its_mode(vllm, layer_class, monkeypatch, mode):
    base, seen = layer_class.__mro__[2], []
    monkeypatch.setattr(base, "_forward", lambda self, **x: seen.append(x))
    wanted = adapter.Modes(**{name: name != mode for name in MODES})
    server = Server(fake_vllm.new_layer(layer_class, _kda_core_wanted=wanted), vllm.context)
    with record_calls() as calls:
        server.run(*MODES[mode])
    assert not calls and [set(x) for x in seen] == [set(adapter.ARGUMENTS[1:])]


def without(*features):
    """Returns a context in which `reference` does not declare these features."""
    spec = adapter.dataclasses.replace(SPEC, features=SPEC.features - set(features), abi=(2, 0))
    return REGISTRY.replaced(spec, ReferenceBackend(), "without a feature")


@pytest.mark.parametrize(
    "missing, served",
    [
        ((), adapter.Modes(True, True, True)),
        (("state_pool",), adapter.Modes(False, False, False)),
        (("recurrent",), adapter.Modes(False, False, False)),
        (("token_states",), adapter.Modes(False, True, False)),
        (("varlen",), adapter.Modes(False, True, False)),
    ],
    ids=str,
)
def test_modes_that_no_backend_serves_in_place_are_left_to_vllm(vllm, layer_class, caplog, missing, served):
    with without(*missing), caplog.at_level(logging.INFO, "vllm.kda_core"):
        layers = [fake_vllm.new_layer(layer_class, num_spec=2) for _ in range(3)]
        assert [layer.kda_core_modes() for layer in layers] == [served] * 3
    for mode, mine in zip(adapter.Modes._fields, served):
        assert caplog.text.count(f"kda_core serves {mode} of") == mine
    if not served.decode:
        assert caplog.text.count("vLLM serves decode of KDA layers. kda_core does not") == 1


def test_prompts_need_a_backend_for_drafts_only_if_there_are_drafts(vllm, layer_class):
    with without("token_states"):
        assert fake_vllm.new_layer(layer_class).kda_core_modes() == (True, True, False)
        assert not fake_vllm.new_layer(layer_class, num_spec=1).kda_core_modes().prefill
        recovers = fake_vllm.new_layer(layer_class, num_spec=1, use_recoverssm=True)
        assert recovers.kda_core_modes().prefill


def test_drafts_of_recoverssm_stay_with_vllm(vllm):
    layer_class = adapter.register_layers()["KimiK3DeltaAttention"]
    seen = []
    layer = fake_vllm.new_layer(
        layer_class,
        num_spec=1,
        use_recoverssm=True,
        _recoverssm_verify=lambda m, qkv, g, beta, weights, cu, out: (seen.append(len(qkv)), out.fill_(3.0)),
    )
    server = Server(layer, vllm.context)
    m = prompts((4,), [7], [False], num_spec_decodes=1, num_spec_decode_tokens=2)
    m.spec_state_indices_tensor, m.num_accepted_tokens = ints([[1]]), ints([1])
    m.spec_query_start_loc, m.spec_token_start, m.non_spec_token_start = ints([0, 2]), 0, 2
    *x, o = server.run(m, 6)
    assert seen == [2] and o[:2].allclose(torch.tensor(3.0))
    server.check(o[2:], Request([7]).extended(*(y[2:] for y in x)), 4, {7: 4}, 2e-5)


def test_the_alignment_of_checkpoints_is_that_of_kda_core(vllm, monkeypatch):
    layers = adapter.register_layers()
    spec = fake_vllm.Spec()
    for name, layer in layers.items():
        monkeypatch.setattr(layer.__mro__[2], "get_kv_cache_spec", lambda self, vllm_config: spec)
        found = fake_vllm.new_layer(layer).get_kv_cache_spec(None)
        assert found == (fake_vllm.Spec(1, 64) if adapter.LAYERS[name].checkpoints else spec)
        other = fake_vllm.new_layer(layer, _kda_core_wanted=adapter.Modes(False, True, True))
        assert other.get_kv_cache_spec(None) is spec


# ---- CUDA graphs


def test_no_batch_reads_a_tensor_on_the_host(vllm, layer_class):
    """A fake tensor has no values, so it raises an exception where the host would wait for one."""
    served = adapter.Modes(True, True, True)  # computed when the weights are loaded
    with FakeTensorMode():
        server = Server(fake_vllm.new_layer(layer_class, num_spec=2, _kda_core_modes=served), vllm.context)
        checkpoint = SimpleNamespace(checkpoint_offsets=ints([64, 0]), state_indices=ints([3, 0]))
        mixed = prompts(
            (70, 5), [1, 2], [True, False], checkpoint if layer_class.kda_core_checkpoints else None
        )
        drafts = metadata(
            num_spec_decodes=2,
            num_spec_decode_tokens=6,
            num_actual_tokens=8,
            spec_query_start_loc=ints([0, 3, 6]),
            spec_state_indices_tensor=ints([[1, 2, 3], [4, 5, 6]]),
            num_accepted_tokens=ints([1, 2]),
        )
        for m, tokens in ((mixed, 75), (decodes([1, 2, 0, 0], 2), 4), (drafts, 8)):
            *_, o = server.run(m, tokens)
            assert o.shape == (tokens, HEADS, DIM)


def test_decode_steps_repeat_in_the_same_memory_with_other_slots(vllm, layer_class):
    """What a CUDA graph replays: the same tensors, with other contents."""
    server = Server(fake_vllm.new_layer(layer_class), vllm.context)
    requests = prefilled(server, 4, 5, 6)
    m = decodes([0, 0, 0], 3)
    for order in ([0, 1, 2], [2, 0], [1], [2, 1, 0]):
        slots = [requests[i].slots[0] for i in order] + [0] * (3 - len(order))
        m.non_spec_state_indices_tensor.copy_(ints(slots))
        *x, o = server.run(m, 3)
        for row, i in enumerate(order):
            requests[i] = requests[i].extended(*(y[row : row + 1] for y in x))
            server.check(o[row : row + 1], requests[i], 1, {requests[i].slots[0]: len(requests[i])}, 2e-5)
        server.check_untouched(set(slots[: len(order)]))


@pytest.mark.parametrize("mode", MODES)
def test_kda_core_gets_views_and_writes_into_the_tensors_of_vllm(vllm, layer_class, monkeypatch, mode):
    server = Server(fake_vllm.new_layer(layer_class, num_spec=1), vllm.context)
    seen, owned = {}, lambda *tensors: {x.untyped_storage().data_ptr() for x in tensors}
    assert all(server.layer.kda_core_modes())
    name = "chunk_kda" if mode == "prefill" else "fused_recurrent_kda"
    monkeypatch.setattr(adapter, name, lambda *x, **given: seen.update(given, x=x))
    m, tokens = MODES[mode]
    if mode == "speculation":
        m.spec_query_start_loc, m.num_accepted_tokens = ints([0, 2]), ints([1])
        m.spec_state_indices_tensor = ints([[1, 2]])
    server.run(m, tokens)
    q, k, v, g, beta = seen["x"]
    assert len(owned(q, k, v)) == 1 and not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
    assert seen["initial_state"] is server.pool
    assert [owned(x) for x in (g, beta, seen["out"])] == [owned(x) for x in server.passed]
