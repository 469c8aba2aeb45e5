"""The records of what the adapters rely on agree with the adapters, with the stand-ins of the tests, and with the installed packages."""

from __future__ import annotations

import inspect
import re

import pytest
from helpers import fake_sglang, fake_vllm, signatures

from kda_core.integrations import sglang, vllm

ADAPTERS = {"vllm": vllm, "sglang": sglang}
LINEAR = "sglang.srt.layers.attention.linear"
MAMBA = "vllm.model_executor.layers.mamba"
NAME = lambda value: (
    value if isinstance(value, str) else value.__name__
)  # not the address, which differs from process to process


def names(recorded):
    """Returns the names in recorded parameters or calls, without defaults and separators."""
    return [text.partition("=")[0].lstrip("*") for text in recorded if text.strip("*/")]


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_installed_package_has_what_the_adapter_relies_on(name):
    if signatures.installed(name) is None:
        pytest.skip(f"{name} is not installed; python -m nox -s test-{name} installs it")
    assert not signatures.differences(name)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_record_names_the_version_that_the_adapter_was_written_for(name):
    record = signatures.read(name)
    assert (record["package"], record["version"]) == (name, ADAPTERS[name].WRITTEN_FOR)
    assert len(record["entries"]) > 20 and None not in record["entries"].values()


def test_differences_are_found(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text(
        "def f(a, /, b, *c, d=1, **e): g(a, k=1)\nclass C:\n    x: int = 3\nY = 2\n"
    )
    monkeypatch.setattr(signatures, "installed", lambda name: tmp_path)
    right = {"p:f": ["a", "/", "b", "*c", "d=1", "**e"], "p:C": ["x=3"], "p:Y": "2", "p:f -> g": [["a", "k"]]}
    wrong = {
        "p:f": ["a"],
        "p:C": ["x=4"],
        "p:Y": "3",
        "p:f -> g": [["a"]],
        "p:h": [],
        "p.q:f": [],
        "p:f -> h": [],
    }
    for entries, expected in ((right, 0), (wrong, len(wrong))):
        monkeypatch.setattr(signatures, "read", lambda name, entries=entries: {"entries": entries})
        assert len(signatures.differences("p")) == expected


# ---- vLLM


def test_the_layers_override_the_recorded_method_of_vllm():
    entries = signatures.read("vllm")["entries"]
    for name, replaced in vllm.LAYERS.items():
        layer = f"{replaced.module}:{name}"
        assert tuple(names(entries[f"{layer}._forward"])) == vllm.ARGUMENTS
        assert tuple(entries[f"{layer}.forward -> self._forward"][0]) == vllm.ARGUMENTS[1:]
        assert names(entries[f"{layer}.__init__"])[:3] == ["self", "config", "vllm_config"]
    assert tuple(parameters(vllm.KdaCoreAttention._forward)) == vllm.ARGUMENTS
    assert entries["vllm.v1.attention.backends.utils:NULL_BLOCK_ID"] == str(vllm.FIRST_SLOT - 1)


def test_vllm_knows_the_fields_that_the_adapter_reads_and_replaces():
    entries = signatures.read("vllm")["entries"]
    shared = names(entries["vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata"])
    own = names(entries["vllm.models.kimi_k3.nvidia.kda_metadata:KimiK3KDAMetadata"])
    checkpoint = names(entries[f"{MAMBA}.checkpoint:MambaPrefillCheckpointMetadata"])
    source = inspect.getsource(vllm)
    read = set(re.findall(r"\bm\.(\w+)", source))
    assert len(read) > 14 and read - {"spec_token_start", "non_spec_token_start"} <= set(shared)
    assert 'getattr(m, "spec_token_start", None)' in source and {
        "spec_token_start",
        "non_spec_token_start",
    } <= set(own)
    assert set(re.findall(r"\bcheckpoint\.(\w+)", source)) - {"MambaPrefillCheckpointExporter"} <= {
        *checkpoint
    }
    spec = names(entries["vllm.v1.kv_cache_interface:MambaSpec"])
    assert {"num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"} <= set(spec)


@pytest.mark.parametrize(
    "entry, function",
    [
        (f"{MAMBA}.ops.causal_conv1d:causal_conv1d_fn", fake_vllm.causal_conv1d_fn),
        (f"{MAMBA}.ops.causal_conv1d:causal_conv1d_update", fake_vllm.causal_conv1d_update),
        (f"{MAMBA}.checkpoint:MambaPrefillCheckpointExporter.export", fake_vllm.MambaPrefillCheckpointExporter.export),
        ("vllm.model_executor.custom_op:PluggableLayer.register_oot", fake_vllm.PluggableLayer.register_oot.__func__),
        ("vllm.compilation.breakable_cudagraph:eager_break_during_capture", fake_vllm.eager_break_during_capture),
    ],
    ids=NAME,
)  # fmt: skip
def test_the_stand_ins_for_vllm_have_its_parameters(entry, function):
    assert parameters(function) == names(signatures.read("vllm")["entries"][entry])


# ---- SGLang


@pytest.mark.parametrize("method", ("packed_decode", "decode", "extend", "target_verify"))
def test_the_kernel_takes_what_sglang_passes(method):
    entries = signatures.read("sglang")["entries"]
    ours = inspect.signature(getattr(sglang.KdaCoreKernel, method))
    caller = {"extend": "forward_extend", "target_verify": "_forward_target_verify"}.get(
        method, "forward_decode"
    )
    calls = entries[f"{LINEAR}.kda_backend:KDAAttnBackend.{caller} -> kernel_dispatcher.{method}"]
    dispatched = entries[f"{LINEAR}.kda_backend:KDAKernelDispatcher.{method} -> {method}"]
    assert calls and dispatched
    for given in calls:
        ours.bind(None, **dict.fromkeys(name for name in given if name != "**"))
    positional = [
        name for name in dispatched[0] if name in ("mixed_qkv", "q", "k", "v", "g", "a", "b", "beta")
    ]
    if method != "target_verify":  # which the dispatcher calls with keywords
        assert list(ours.parameters)[1 : 1 + len(positional)] == positional
    recorded = entries.get(f"{LINEAR}.kernels.kernel_backend:LinearAttnKernelBase.{method}", [])
    inherited = [name for name in names(recorded) if name != "kwargs"]
    assert [name for name in ours.parameters if name in inherited] == inherited


@pytest.mark.parametrize("method", ("packed_decode", "extend", "target_verify"))
def test_the_fallback_takes_what_the_kernel_passes_on(method):
    recorded = signatures.read("sglang")["entries"][f"{LINEAR}.kernels.kda_triton:TritonKDAKernel.{method}"]
    ours = names([str(p) for p in parameters(getattr(sglang.KdaCoreKernel, method))])
    keywords = {"is_spec_decode", "track_state", "track_chunk_idx", "kwargs"}  # in its **kwargs
    assert set(ours) - keywords <= set(names(recorded)) and "**kwargs" in recorded


def test_the_hook_takes_the_arguments_of_the_method_that_it_wraps():
    module, _, path = sglang.DISPATCHER.partition(".KDAKernelDispatcher")
    recorded = signatures.read("sglang")["entries"][f"{module}:KDAKernelDispatcher{path}"]
    assert names(recorded) == ["self", "decode_backend", "prefill_backend", "verify_backend"]
    assert sglang.Wanted._fields == ("decode", "prefill", "verify")
    (call,) = signatures.read("sglang")["entries"][
        f"{LINEAR}.kda_backend:KDAAttnBackend.__init__ -> KDAKernelDispatcher"
    ]
    assert call == names(recorded)[1:]


def test_the_flags_of_the_kernel_are_those_of_sglang():
    base = signatures.read("sglang")["entries"][f"{LINEAR}.kernels.kernel_backend:LinearAttnKernelBase"]
    assert all(hasattr(sglang.KdaCoreKernel, flag) for flag in names(base)[:2])
    assert set(names(base)) <= {
        name for name in dir(sglang.KdaCoreKernel) if name.startswith(("supports", "uses"))
    }


@pytest.mark.parametrize(
    "entry, function",
    [
        *((f"{LINEAR}.kernels.kernel_backend:LinearAttnKernelBase.{m}", getattr(fake_sglang.LinearAttnKernelBase, m))
          for m in ("decode", "extend", "target_verify")),
        ("sglang.srt.plugins.hook_registry:HookRegistry.register", fake_sglang.HookRegistry.register.__func__),
        (f"{LINEAR}.kda_backend:KDAKernelDispatcher.__init__", fake_sglang.KDAKernelDispatcher.__init__),
    ],
    ids=NAME,
)  # fmt: skip
def test_the_stand_ins_for_sglang_have_its_parameters(entry, function):
    assert parameters(function) == names(signatures.read("sglang")["entries"][entry])
