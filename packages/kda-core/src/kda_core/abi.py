"""The version of the interface between core and plugins, and the rule of compatibility.

A plugin is compatible if its major equals core's and its minor is not above core's. A new feature, optional method or field with a
default raises the minor. A changed meaning, layout or required method raises the major. ``docs/abi.md`` has the history.
"""

from __future__ import annotations

BACKEND_ABI: tuple[int, int] = (2, 10)


def compatible(plugin: tuple[int, int], core: tuple[int, int] = BACKEND_ABI) -> bool:
    """Returns whether a plugin for ABI `plugin` = (major, minor) runs under a core of ABI `core`."""
    return plugin[0] == core[0] and plugin[1] <= core[1]
