"""Finds a handler by its registered name, or by the import path of a class."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from workers.handlers.base import Handler

GROUP = "rollmill.handlers"


def load_handler(name: str) -> Handler:
    """Make the handler registered as `name`, or the class at `package.module:Class`.

    Raises ValueError that lists the known names, or says what is wrong with the import path.
    """
    registered = entry_points(group=GROUP)
    if name in registered.names:
        return _instance(registered[name].value)
    if ":" in name:
        return _instance(name)
    known = ", ".join(sorted(registered.names)) or "none"
    raise ValueError(f"unknown handler {name!r}: known are {known}, or give an import path 'package.module:Class'")


def _instance(path: str) -> Handler:
    module_name, _, class_name = path.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"handler {path!r}: no module {error.name!r}") from None
    handler_class = getattr(module, class_name, None)
    if not isinstance(handler_class, type):
        raise ValueError(f"handler {path!r}: module {module_name!r} has no class {class_name!r}")
    scoring = ("submits", "judge") if hasattr(handler_class, "judge") else ("eval",)
    methods = ("tasks", "init", "call_tool", *scoring)
    if missing := [method for method in methods if not callable(getattr(handler_class, method, None))]:
        raise ValueError(f"handler {path!r} lacks {', '.join(missing)}")
    handler: Handler = handler_class()
    return handler
