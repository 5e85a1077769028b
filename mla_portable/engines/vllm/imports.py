# SPDX-License-Identifier: Apache-2.0
"""Run a function on a module right after it is imported, by whichever module and at whatever time.

The plugin is loaded before the model's modules, in processes that may never need them. Changing a module as soon as its own
code has run costs nothing until then, and is seen by everyone who imports names from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[Any], None]


class _Loader(Loader):
    """Another finder's loader, with an action behind it. That loader may load other modules too, so it stays as it is."""

    def __init__(self, inner: Any, action: Action) -> None:
        self._inner, self._action = inner, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # sources, resources


class _Finder(MetaPathFinder):
    """Finds nothing itself: lets the other finders find a module, and adds its action to the loader."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self.actions.get(fullname)
        if action is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, action)
        return spec


_finder = _Finder()


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` when the module `name` has been imported: now if it is, else in that import, once per import.

    Asking for the same again changes nothing; another action for the same name takes the place of the first from the next
    import on. What `action` raises makes the import fail.
    """
    if _finder.actions.get(name) is action:
        return
    _finder.actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None:
        action(module)
