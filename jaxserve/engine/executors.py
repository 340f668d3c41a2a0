"""Two ways to run a forward pass: as one program, or layer by layer with one program that all alike layers share.

One program is fastest where launches are dear (a GPU). On a CPU a launch costs little beside a layer, and compiling every
layer anew for every bucket would keep the first user waiting for minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.engine.decode_state import DecodeState
from jaxserve.engine.device_batch import Bucket, packed_size
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.programs import ForwardResult, ProgramFactory, without_layers
from jaxserve.kernels.peer_memory import PeerMemory
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.params import LlamaParams
from jaxserve.models.speculative_sampling import Drafts
from jaxserve.sharding.placement import put_replicated, replicated

Results = dict[str, jax.ShapeDtypeStruct]  # of a program, that stay where they are: by the names of what it gives


class ForwardExecutor(Protocol):
    """Runs the forward pass of one bucket. Cache and state are donated: the caller goes on with those of the result."""

    def __call__(
        self, params: LlamaParams, cache: KVCache, state: DecodeState, packed: jax.Array, *drafts: Drafts
    ) -> ForwardResult: ...
    @property
    def programs(self) -> tuple[Any, ...]:
        """The compiled programs that it runs."""
        ...


class ResultPlaces:
    """Where steps leave what they give, which the next step writes over.

    XLA changes the launch graph of a program before each launch for every array that has moved since the last one.

    Args:
        sharding: of all these arrays.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._arrays: dict[Any, jax.Array] = {}

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """All that there are."""
        return tuple(self._arrays.values())

    def take(self, results: Results) -> tuple[jax.Array, ...]:
        """The arrays of these names and shapes, which are to be written over. Nobody may read them any more."""
        return tuple(self._take(name, like) for name, like in results.items())

    def keep(self, results: Results, given: Any) -> None:
        """Has a later step write over these attributes of what a step gave; their readers are launched before that is."""
        for name in results:
            array = getattr(given, name)
            self._arrays[name, array.shape, array.dtype] = array

    def _take(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        array = self._arrays.pop((name, like.shape, like.dtype), None)
        return put_replicated(np.zeros(like.shape, like.dtype), self._sharding) if array is None else array


class WholeForward:
    """The whole pass as one compiled program.

    Args:
        compiled: takes the arrays that its results are written over behind its other arguments.
        results: names and shapes of these results.
        peers: what it takes for sums over devices, if anything.
    """

    def __init__(
        self,
        compiled: Any,
        results: Results,
        places: ResultPlaces,
        peers: tuple[PeerMemory, ...] = (),
    ) -> None:
        self._compiled = compiled
        self._peers = peers
        self._results = results
        self._places = places

    def __call__(
        self, params: LlamaParams, cache: KVCache, state: DecodeState, packed: jax.Array, *drafts: Drafts
    ) -> ForwardResult:
        places = self._places.take(self._results)
        result = self._compiled(params, cache, state, packed, (*drafts, *self._peers), places)
        self._places.keep(self._results, result)
        return result

    @property
    def programs(self) -> tuple[Any, ...]:
        return (self._compiled,)


@dataclass(frozen=True)
class Taps:
    """Layers whose inputs are wanted, and the program that copies one out; None: no layer's are."""

    layers: tuple[int, ...]
    program: Any


class LayerwiseForward:
    """Begin, then each layer through the compiled program of its kind, then end.

    Args:
        layers: a program for each layer; layers with the same arrays have the same one.
    """

    def __init__(
        self, begin: Any, layers: tuple[Any, ...], end: Any, layer_indices: tuple[jax.Array, ...], taps: Taps
    ) -> None:
        self._begin = begin
        self._layers = layers
        self._end = end
        self._layer_indices = layer_indices
        self._taps = taps

    def __call__(
        self, params: LlamaParams, cache: KVCache, state: DecodeState, packed: jax.Array, *drafts: Drafts
    ) -> ForwardResult:
        outer = without_layers(params)
        state, x, inputs = self._begin(outer, state, packed, *drafts)
        tapped: dict[int, jax.Array] = {}
        for number, (run, index, layer) in enumerate(
            zip(self._layers, self._layer_indices, params.layers, strict=True)
        ):
            if number in self._taps.layers:
                tapped[number] = self._taps.program(x)  # before `x` is given away
            x, cache = run(layer, index, x, cache, inputs)
        if len(params.layers) in self._taps.layers:
            tapped[len(params.layers)] = self._taps.program(x)
        logits, hidden, features = self._end(outer, x, inputs, *(tapped[layer] for layer in self._taps.layers))
        return ForwardResult(
            cache=cache, state=state, logits=logits, slots=inputs.slots, hidden=hidden, features=features
        )

    @property
    def programs(self) -> tuple[Any, ...]:
        taps = (self._taps.program,) if self._taps.layers else ()
        return self._begin, *{id(run): run for run in self._layers}.values(), *taps, self._end


@dataclass(frozen=True)
class ForwardCompiler:
    """Compiles forward passes; the arrays give shapes and placement only.

    Attributes:
        places: that all programs share.
        peers: for the sums over devices of a whole pass; None: XLA makes them.
    """

    factory: ProgramFactory
    programs: ExecutableCache
    params: LlamaParams
    cache: KVCache
    state: DecodeState
    places: ResultPlaces
    peers: PeerMemory | None = None

    def whole(self, bucket: Bucket, num_logits: int) -> WholeForward:
        """One bucket's pass as one program."""
        forward = self.factory.forward(bucket, num_logits)

        def in_place(params: Any, cache: Any, state: Any, packed: Any, more: Any, places: Any) -> ForwardResult:
            del places  # given away for the results
            return forward(params, cache, state, packed, *more)

        function = jax.jit(in_place, donate_argnums=(1, 2, 5), keep_unused=True)
        packed, *drafts = self._step(bucket)
        peers = () if self.peers is None else (self.peers,)
        results = self._results(bucket, num_logits)
        places = tuple(results.values())
        compiled = self.programs.load_or_compile(
            f"forward {bucket} {num_logits}",
            lambda: function.lower(self.params, self.cache, self.state, packed, (*drafts, *peers), places),
            bucket=bucket,
        )
        return WholeForward(compiled, results, self.places, peers)

    def layerwise(self, bucket: Bucket, num_logits: int) -> LayerwiseForward:
        """One bucket's begin, layer and end."""
        outer, step, name = without_layers(self.params), self._step(bucket), f"{bucket} {num_logits}"
        placed = replicated(self.factory.mesh)
        indices = tuple(put_replicated(np.int32(index), placed) for index in range(len(self.params.layers)))
        begin = jax.jit(self.factory.begin(bucket, num_logits), donate_argnums=(1,))
        end = jax.jit(self.factory.end(bucket))

        taps = self.factory.tap_layers or ()
        tap = jax.jit(self.factory.tap())

        def tapped() -> tuple[Any, ...]:
            shape = jax.eval_shape(tap, between()[0])
            return (jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=placed),) * len(taps)

        def between() -> tuple[Any, Any]:
            """Hidden states and inputs as `begin` gives them."""
            _, x, inputs = jax.eval_shape(begin, outer, self.state, *step)
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), (x, inputs))

        def lower_layer(number: int) -> jax.stages.Lowered:
            x, inputs = between()
            layer = jax.jit(self.factory.layer(number), donate_argnums=(2, 3))
            return layer.lower(self.params.layers[number], indices[number], x, self.cache, inputs)

        load = self.programs.load_or_compile
        kinds = [jax.tree.structure(layer) for layer in self.params.layers]  # a quantization may leave some as they are
        firsts = [kinds.index(kind) for kind in kinds]
        layers = {
            number: load(f"layer {number} {name}", partial(lower_layer, number)) for number in dict.fromkeys(firsts)
        }
        return LayerwiseForward(
            begin=load(f"begin {name}", lambda: begin.lower(outer, self.state, *step)),
            layers=tuple(layers[first] for first in firsts),
            end=load(f"end {name}", lambda: end.lower(outer, *between(), *tapped())),
            layer_indices=indices,
            taps=Taps(taps, load(f"tap {name}", lambda: tap.lower(between()[0])) if taps else None),
        )

    def _results(self, bucket: Bucket, num_logits: int) -> Results:
        """Fields of `ForwardResult` that stay in place, but for those that are there before the step."""
        # Not by tracing the pass, which takes longer than loading what was compiled from it.
        config, placed = self.factory.config, replicated(self.factory.mesh)
        num_slots = bucket.decode_rows if bucket.num_drafts else num_logits  # drafts are verified row by row
        shapes = {"logits": ((num_logits, config.vocab_size), jnp.float32), "slots": ((num_slots,), jnp.int32)}
        if bucket.prefill_rows:
            hidden = self.factory.max_prefill_tokens, config.hidden_size
            shapes["hidden"] = hidden, self.params.embedding.dtype
        if self.factory.tap_layers is not None:
            features = bucket.decode_tokens + bucket.prefill_tokens, self.factory.features_size
            shapes["features"] = features, self.params.embedding.dtype
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for name, (shape, dtype) in shapes.items()}

    def _step(self, bucket: Bucket) -> tuple[Any, ...]:
        """What a step brings: itself, packed, and its drafts, if it has any."""

        def like(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self.factory.mesh))

        packed, rows = like(packed_size(bucket, self.factory.sizes)), bucket.decode_rows
        if not bucket.num_drafts:
            return (packed,)
        return packed, Drafts(token_ids=like(rows, bucket.num_drafts), counts=like(rows))
