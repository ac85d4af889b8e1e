"""Running a function's own text in a world where arrays may be tracers.

NumPy and Dask write much of themselves in Python: ``np.diff`` or a chunk function slices, adds and calls other
functions. Their text can be traced as it stands, but for lines such as ``a = np.asanyarray(a)`` or
``out = np.empty(shape)`` that insist on real arrays. `rebind` gives back the same function with other *globals*: the
same names, looked up through `route`, which answers with stand-ins for the few functions that matter. The original
function is never changed, nor any module, so other threads see nothing of it.

An array that a function *finds* (in its closure, its globals, its defaults) is as much an operand as the ones it is
given: it becomes a known tracer. One that it *makes* by means not known to be deterministic is refused by the tracers.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from goblin_dask.errors import NotTraceable

STAND_INS: dict[int, Any] = {}
"""By the identity of the original; filled by `stand_in`."""
_ORIGINALS: list[Any] = []
_MODULES = frozenset({"numpy", "scipy", "array_api_compat"})
_RANDOM = frozenset({"numpy.random", "random", "secrets", "uuid"})


def stand_in(*originals: Any) -> Callable[[Any], Any]:
    """Register a replacement of functions, used wherever a traced function names them."""

    def register(replacement: Any) -> Any:
        for original in originals:
            _ORIGINALS.append(original)
            STAND_INS[id(original)] = replacement
        return replacement

    return register


class Rebinding:
    """The stand-ins of one recording: each function is rebound once, each found array becomes one known tracer.

    Parameters
    ----------
    wrap_array : callable
        Makes a known tracer of an array that a function found.
    wrap_result : callable
        Makes known tracers of what a NumPy function returned that was called without tracers.
    is_tracer : callable
    """

    def __init__(
        self,
        wrap_array: Callable[[Any], Any],
        wrap_result: Callable[[Any], Any],
        is_tracer: Callable[[Any], bool],
    ) -> None:
        self.wrap_array = wrap_array
        self.wrap_result = wrap_result
        self.is_tracer = is_tracer
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        """`route`: what a traced function sees in the place of `value`."""
        replacement = STAND_INS.get(id(value))
        if replacement is not None:
            return replacement
        found = self._memo.get(id(value))
        if found is not None:
            return found
        routed = self._route(value)
        if routed is not value:
            self._memo[id(value)] = routed
            self._kept.append(value)
        return routed

    def _route(self, value: Any) -> Any:
        kind = type(value)
        if kind is types.FunctionType:
            return self._library(value) if _is_numpy_function(value) else self._function(value)
        if kind is np.ndarray:
            return self.wrap_array(value)
        if kind is types.ModuleType:
            if value.__name__ in _RANDOM:
                return _Random()
            return _Module(value, self) if value.__name__.partition(".")[0] in _MODULES else value
        if kind is functools.partial:
            return functools.partial(
                self(value.func), *map(self, value.args), **{name: self(each) for name, each in value.keywords.items()}
            )
        if kind is types.MethodType and type(value.__self__).__name__ in ("Generator", "RandomState"):
            raise NotTraceable("the function draws random numbers")
        if isinstance(value, np.random.Generator | np.random.RandomState):
            return _Random()
        module = getattr(kind, "__module__", "") or ""
        if module == "dask.utils" and kind.__name__ == "Dispatch":
            return self._dispatch(value)
        if module == "dask.utils" and kind.__name__ == "methodcaller":
            return value
        if module.startswith(("toolz", "tlz")) and kind.__name__ == "Compose":
            return self._compose(value)
        if module.startswith(("toolz", "tlz", "cytoolz")) and kind.__name__ == "curry":
            return self(functools.partial(value.func, *value.args, **value.keywords))
        if isinstance(value, (type(np.ogrid), type(np.mgrid))):
            return _Grid(value, self)
        if kind is np.vectorize:
            raise NotTraceable("np.vectorize calls Python for every element")
        if _is_numpy_function(value):
            return self._numpy(value)
        return value

    def _function(self, function: types.FunctionType) -> Any:
        root = (function.__module__ or "").partition(".")[0]
        if (root in sys.stdlib_module_names and root != "__main__") or root == "goblin_dask":
            return function
        code = function.__code__
        if code.co_flags & 0x2A0:  # generators and coroutines run later, perhaps outside of the recording
            return function
        made = types.FunctionType(
            code.replace(),  # a fresh code object: the interpreter caches global lookups in it
            _Globals(function.__globals__, self),
            function.__name__,
            None,
            None if function.__closure__ is None else tuple(types.CellType() for _ in function.__closure__),
        )
        self._memo[id(function)] = made
        self._kept.append(function)
        if function.__closure__ is not None:
            written = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}
            for name, cell, new in zip(code.co_freevars, function.__closure__, made.__closure__ or (), strict=True):
                if name in written:
                    raise NotTraceable(f"the function writes to the variable {name!r} outside of itself")
                try:
                    new.cell_contents = self(cell.cell_contents)
                except ValueError:  # an empty cell
                    continue
        if function.__defaults__ is not None:
            made.__defaults__ = tuple(map(self, function.__defaults__))
        if function.__kwdefaults__ is not None:
            made.__kwdefaults__ = {name: self(each) for name, each in function.__kwdefaults__.items()}
        made.__dict__.update({name: each for name, each in function.__dict__.items() if name != "__wrapped__"})
        made.__qualname__ = function.__qualname__
        made.__module__ = function.__module__
        return made

    def _library(self, function: types.FunctionType) -> Any:
        """A function that NumPy wrote in Python: its own text only where there are tracers.

        Some make their result by writing into views of it, which a recording cannot follow.
        """
        plain, rebound = self._numpy(function), self._function(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (rebound if self._has_tracer((args, kwargs)) else plain)(*args, **kwargs)

        return functools.update_wrapper(call, function, updated=())

    def _has_tracer(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._has_tracer, value))
        if isinstance(value, dict):
            return any(map(self._has_tracer, value.values()))
        return self.is_tracer(value)

    def _numpy(self, function: Any) -> Any:
        """A NumPy function: with tracers it dispatches to them; without, what it returns is known."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.wrap_result(function(*args, **kwargs))

        return functools.update_wrapper(call, function, updated=())

    def _dispatch(self, dispatch: Any) -> Any:
        """Dask's dispatch on the type of the first argument: tracers are NumPy arrays to it."""

        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = dispatch.dispatch(np.ndarray if self.is_tracer(first) else type(first))
            return self(chosen)(first, *args, **kwargs)

        call.dispatch = lambda kind: self(dispatch.dispatch(kind))  # type: ignore[attr-defined]
        return call

    def _compose(self, compose: Any) -> Any:
        functions = [self(each) for each in (compose.first, *compose.funcs)]

        def call(*args: Any, **kwargs: Any) -> Any:
            result = functions[0](*args, **kwargs)
            for each in functions[1:]:
                result = each(result)
            return result

        return call


class _Globals(dict[str, Any]):
    """The globals of a rebound function. CPython looks names up with ``__getitem__`` where they are no plain dict."""

    def __init__(self, original: dict[str, Any], route: Rebinding) -> None:
        super().__init__({"__builtins__": {**vars(builtins), "__import__": self._import}})
        self._original = original
        self._route = route

    def __getitem__(self, name: str) -> Any:
        return self._route(self._original[name])

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        """``import`` within a function finds modules that are routed."""
        return self._route(builtins.__import__(*args, **kwargs))


class _Module:
    """A module whose attributes are routed."""

    def __init__(self, module: types.ModuleType, route: Rebinding) -> None:
        self._module = module
        self._route = route

    def __getattr__(self, name: str) -> Any:
        return self._route(getattr(self._module, name))


class _Grid:
    """In the place of ``np.ogrid`` and ``np.mgrid``."""

    def __init__(self, grid: Any, route: Rebinding) -> None:
        self._grid = grid
        self._route = route

    def __getitem__(self, index: Any) -> Any:
        return self._route.wrap_result(self._grid[index])


class _Random:
    """In the place of ``np.random`` and of generators: what is drawn inside a task cannot be a program."""

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(f"the function draws random numbers ({name})")


def _is_numpy_function(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    if not callable(value) or isinstance(value, (type, np.ufunc)):
        return False
    return module.partition(".")[0] == "numpy" and not isinstance(value, np.ndarray | np.generic)
