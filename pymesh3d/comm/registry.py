"""All that a process knows by name: axes and buffers of compiled layers, whose operators take neither.

Nothing is kept alive by its name: it goes with the layers, and with the mesh, that it belongs to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from pymesh3d.errors import ConfigError

_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(name: str, thing: object) -> None:
    """Let `find(name)` return this for as long as somebody else holds it."""
    _named[name] = thing


def found_or_made(name: str, make: Callable[[], object]) -> Any:
    """What is registered under this name, or what `make` returns, which then is."""
    thing = _named.get(name)
    if thing is None:
        thing = _named[name] = make()
    return thing


def take(name: str) -> Any:
    """What is registered under this name, which then stands for nothing any more; None if it does already."""
    return _named.pop(name, None)


def known(name: str) -> Any:
    """What is registered under this name, None if nothing is."""
    return _named.get(name)


def find(name: str) -> Any:
    """What is registered under this name. Raises ConfigError where that is gone."""
    try:
        return _named[name]
    except KeyError:
        rule = "it is gone with its mesh or its optimizer, or was of another process"
        raise ConfigError(f"{name} in a compiled layer", rule, "Make the layer again, on a mesh that is open, and compile that") from None
