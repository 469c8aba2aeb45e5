"""A process may fork at any time: locks of the planner that another thread holds are free in the child."""

from helpers.support import said_by_a_fork

SLOW = """
class Slow(tuple):
    def __hash__(self):
        hold()
        return tuple.__hash__(self)

    def __iter__(self):
        hold()
        return tuple.__iter__(self)
"""


def test_a_cache_that_is_locked_at_a_fork_is_empty_in_the_child():
    code = f"""{SLOW}
from kda_cp.cache import Cache
cache = Cache(4)
cache.get("old", lambda: 1)

def busy():
    cache.get(Slow("new"), lambda: 2)

def child():
    return cache.get("old", lambda: 3), cache.get("new", lambda: 4), len(cache)
"""
    assert said_by_a_fork(code) == "(3, 4, 2)"  # cleared, because a thread held its lock


def test_an_unlocked_cache_keeps_its_values_in_a_child():
    code = """
from kda_cp.cache import Cache
cache = Cache(4)
cache.get("old", lambda: 1)

def busy():
    hold()

def child():
    return cache.get("old", lambda: 3)
"""
    assert said_by_a_fork(code) == "1"


def test_a_child_reads_constants_while_the_parent_stores_some(tmp_path):
    code = f"""{SLOW}
os.environ["KDA_CACHE_DIR"] = {str(tmp_path)!r}
from kda_cp import constants
found = constants.SHIPPED["NVIDIA H200", "sm90", "bfloat16"]

def busy():
    constants.store(Slow(("a GPU", "slow", "bfloat16")), found)

def child():
    return constants.lookup(("a GPU", "slow", "bfloat16"))[1]

def afterwards():
    assert constants.lookup(("a GPU", "slow", "bfloat16")) == (found, "calibrated")
"""
    assert said_by_a_fork(code) == "none"
