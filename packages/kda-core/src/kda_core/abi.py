"""The version of the contract between core and backends, and the rule that compares two of them.

Same major, and the plugin's minor not above core's: a new feature, optional method or field with a default
raises the minor; a changed meaning, layout or required method raises the major. ``docs/abi.md`` has the history.
"""

from __future__ import annotations

BACKEND_ABI: tuple[int, int] = (2, 0)


def compatible(plugin: tuple[int, int], core: tuple[int, int] = BACKEND_ABI) -> bool:
    """Whether a plugin built for ABI `plugin` = (major, minor) runs under a core of ABI `core`."""
    return plugin[0] == core[0] and plugin[1] <= core[1]
