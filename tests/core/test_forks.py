"""A process may fork at any time. Unfinished work of another thread of the parent never blocks the child."""

from helpers.fake_plugins import install_into
from helpers.support import said_by_a_fork

CALL = """
import torch
from kda_core import buffers, chunk_kda, contract, registry, validate

x = {n: torch.randn(1, 20, 1, 8) for n in "qkv"} | {"g": -torch.rand(1, 20, 1, 8), "beta": torch.rand(1, 20, 1)}

def busy():
    chunk_kda(**x, context_parallel="off")

def child():
    with registry.record_calls() as calls:
        chunk_kda(**x, context_parallel="off")
    return [c.backend for c in calls]
"""

SLOW_CLASS = """
import __main__
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def __init__(self):
        __main__.hold()
"""

SLOW_IMPORT = """
import os
import __main__
__main__.hold()
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def chunk_fwd(self, inputs, outputs):
        if os.getpid() == __main__.parent:
            __main__.forked.wait()
        return super().chunk_fwd(inputs, outputs)
"""


def test_a_child_does_not_wait_for_a_thread_that_loads_a_plugin(tmp_path):
    """The fork waits for that thread up to a limit. This thread finishes only after the fork, like one that waits for the fork."""
    install_into(tmp_path, "slow", backend=SLOW_CLASS, priority=5)
    assert said_by_a_fork(f"{CALL}\nregistry.FORK_WAIT_S = 0", tmp_path) == "['slow']"


def test_a_fork_lets_another_thread_finish_an_import(tmp_path):
    """The child does not have that thread, and Python would wait forever for a module that is being imported."""
    install_into(tmp_path, "slow", backend=SLOW_IMPORT, priority=5)
    # Functions that are registered last run first. FORK_WAIT_S: a busy machine imports slowly. The thread's call waits for the fork
    # as well, because torch may import modules of its own in a first call.
    code = """
registry.FORK_WAIT_S = -1  # no limit
forked = threading.Event()
os.register_at_fork(before=release.set, after_in_parent=forked.set)
"""
    assert said_by_a_fork(f"{CALL}\n{code}", tmp_path) == "['slow']"


def test_the_registry_still_works_in_the_parent(tmp_path):
    install_into(tmp_path, "slow", backend=SLOW_CLASS, priority=5)
    code = """
def child():
    return "done"

def calls():
    busy()
    registry.REGISTRY.refresh()
    busy()
    return "done"

def afterwards():
    said = []
    threads = [threading.Thread(target=lambda: said.append(calls())) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert said == ["done"] * 4
"""
    assert said_by_a_fork(f"{CALL}\nregistry.FORK_WAIT_S = 0\n{code}", tmp_path) == "done"


def test_a_child_does_not_wait_for_a_thread_that_reads_lengths():
    """Before Python 3.12 `functools.cached_property` has a lock."""
    code = """
import torch
from dataclasses import replace
from kda_core import buffers, contract, validate

class Slow:
    device = torch.device("cpu")
    def tolist(self):
        hold()
        return [0, 20]

tensors = [torch.randn(1, 20, 1, 8) for _ in range(4)] + [torch.rand(1, 20, 1)] + [None] * 5
shape = validate.problem_shape(*tensors, options=contract.KdaOptions())
inputs = buffers.make_inputs(tensors, shape)

def busy():
    replace(inputs, cu_seqlens=Slow()).sequence_lengths()

def child():
    return replace(inputs, cu_seqlens=torch.tensor([0, 5, 20])).sequence_lengths()
"""
    assert said_by_a_fork(code) == "(5, 15)"
