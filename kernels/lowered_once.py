"""Programs within programs that a process traces and lowers once, and not once in every program that they occur in.

To lower a Mosaic GPU kernel takes a second or two of Python, and a start compiles two dozen programs for different sizes
of a step, in which few different kernels occur.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import export


class LoweredOnce:
    """Wraps a function of arrays: callable like it, eagerly or while another program is traced, from any thread.

    What it becomes for some shapes is kept as long as this object lives, in the form in which jax exports programs. XLA
    inlines it, so that the program around it is the same as with `jax.jit`.

    Args:
        function: pure; its arrays may come in any pytree.
        static_argnames: keyword arguments that are no arrays; hashable.
        platform: what it is lowered for.
    """

    def __init__(self, function: Callable[..., Any], *, static_argnames: Sequence[str] = (), platform: str = "cuda"):
        self._function = function
        self._static_argnames = frozenset(static_argnames)
        self._platform = platform
        # Whoever comes second waits for the first instead of doing the same; lowering holds the interpreter in any case.
        self._lock = threading.Lock()
        self._programs: dict[Hashable, export.Exported] = {}

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        static = {name: value for name, value in keywords.items() if name in self._static_argnames}
        named = {name: value for name, value in keywords.items() if name not in self._static_argnames}
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (arrays, named))
        leaves, structure = jax.tree.flatten(shapes)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves), frozenset(static.items())
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                positional, by_name = shapes
                function = jax.jit(functools.partial(self._function, **static))
                program = export.export(function, platforms=(self._platform,))(*positional, **by_name)
                self._programs[key] = program
        return program.call(*arrays, **named)
