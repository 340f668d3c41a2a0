"""Reads draft heads in the layouts that they are published in: EAGLE, EAGLE-3 and Medusa."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxserve.checkpoint.assemble import transposed
from jaxserve.checkpoint.config_values import whole_number
from jaxserve.checkpoint.draft_head_names import EAGLE, EAGLE3, MEDUSA, EagleNames
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import LLAMA
from jaxserve.checkpoint.hf_config import model_config_from_hf
from jaxserve.checkpoint.safetensors_source import SafetensorsSource, has_safetensors
from jaxserve.checkpoint.tensor_source import TensorSource, joined
from jaxserve.checkpoint.tokenizer_files import read_json
from jaxserve.checkpoint.torch_source import BinSource, bin_files
from jaxserve.checkpoint.trusted_files import checked_file
from jaxserve.config import ModelConfig
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.eagle import EagleConfig, EagleParams, default_tap_layers
from jaxserve.models.medusa import MedusaConfig, MedusaHeadParams, MedusaParams
from jaxserve.models.params import LayerParams

logger = logging.getLogger(__name__)

HeadMethod = Literal["eagle", "eagle3", "medusa"]

_GROUPED = ("norm_before_fc", "fc_norm", "norm_output")
_SHALLOWEST = 4  # layers of a model that EAGLE-3's defaults make sense for


def load_draft_head(folder: Path, method: HeadMethod, target: ModelConfig) -> DraftHead:
    """A head on the host, in the dtype that its files have.

    Args:
        folder: with `config.json` and the weights as they are published.
        target: the model that it was trained for.

    Raises:
        CheckpointError: it is incomplete, damaged, of another kind, or of another model.
    """
    config = _flat(read_json(checked_file(folder, "config.json")))
    if method == "medusa":
        with _medusa_source(folder) as source:
            return _medusa(_Tensors(source, str(folder)), config, target)
    with _weights(folder) as source:
        return _eagle(_Tensors(source, str(folder)), config, target, 1 if method == "eagle" else 3)


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config whose layer is described apart, and whose other keys may be in a group, as one that has all at the top."""
    layer, group = config.get("transformer_layer_config"), config.get("eagle_config")
    if isinstance(layer, Mapping):
        config = {"norm_before_residual": True, **config, **layer}
    if isinstance(group, Mapping):
        config = {**{key: group[key] for key in _GROUPED if key in group}, **config}
    return config


def _weights(folder: Path) -> SafetensorsSource | BinSource:
    if not has_safetensors(folder) and (pickled := bin_files(folder)):
        return BinSource(pickled, integers=True)
    return SafetensorsSource(folder, integers=True)


def _medusa_source(folder: Path) -> AbstractContextManager[TensorSource]:
    if not has_safetensors(folder) and (folder / MEDUSA.torch_file).exists():
        return BinSource([checked_file(folder, MEDUSA.torch_file)])
    if not has_safetensors(folder):
        raise CheckpointError(
            f"{folder} has neither {MEDUSA.safetensors_file} nor {MEDUSA.torch_file}: it holds no Medusa heads"
        )
    return SafetensorsSource(folder)


@dataclass(frozen=True)
class _Tensors:
    """Reads tensors by name once their shapes are found right."""

    source: TensorSource
    where: str

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.source.names():
            raise CheckpointError(f"{self.where}: tensor {name!r} is missing: fetch the head again")
        if self.source.shape(name) != shape:
            raise CheckpointError(
                f"{self.where}: tensor {name!r} has shape {self.source.shape(name)}, must have {shape}"
            )
        return self.source.read(name)

    def matrix(self, name: str, outputs: int, inputs: int) -> np.ndarray:
        """[inputs, outputs], from a file that has it the other way round."""
        return transposed(self.read(name, (outputs, inputs)))

    def refuse_others(self, known: set[str], ignored: tuple[str, ...] = ()) -> None:
        strangers = sorted(name for name in set(self.source.names()) - known if not name.endswith(ignored))
        if strangers:
            raise CheckpointError(
                f"{self.where}: tensors {strangers[:3]} are not part of such a head, and cannot just be dropped"
            )


def _eagle(tensors: _Tensors, config: Mapping[str, Any], target: ModelConfig, version: Literal[1, 3]) -> DraftHead:
    names = EAGLE if version == 1 else EAGLE3
    present = set(tensors.source.names())
    prefix = names.optional_prefix if names.optional_prefix + names.fc in present else ""
    if prefix + names.fc not in present:  # before its config is: that of another kind lacks what is asked for there
        kind = "EAGLE" if version == 1 else "EAGLE-3"
        raise CheckpointError(
            f"{tensors.where} has no tensor {names.fc!r}: it holds no {kind} head; name the folder of one, or its own method"
        )
    eagle = _eagle_config(config, target, version, tensors.where, present, prefix)
    layer, vocab = eagle.layer, eagle.layer.vocab_size
    reader = _EagleReader(tensors, names, prefix, eagle)
    params = EagleParams(
        fc=reader.matrix(names.fc, layer.hidden_size, eagle.num_inputs),
        fc_bias=reader.vector(names.fc_bias, layer.hidden_size) if eagle.has_bias else None,
        embedding=reader.read(names.embedding, (vocab, layer.hidden_size)) if eagle.has_embedding else None,
        embedding_norm=reader.layer_norm(names.embedding_norm),
        layer=reader.layer(),
        final_norm=reader.vector(names.final_norm, layer.hidden_size),
        lm_head=None,
        token_ids=None,
        input_norm=reader.input_norm(),
    )
    if eagle.draft_vocab_size is not None and names.lm_head is not None:
        lm_head = reader.matrix(names.lm_head, eagle.draft_vocab_size, layer.hidden_size)
        params = params.replace(lm_head=lm_head, token_ids=reader.token_ids())  # pyright: ignore[reportAttributeAccessIssue]
    tensors.refuse_others(reader.known, names.ignored)
    return DraftHead(eagle, params)


class _EagleReader:
    """Reads the tensors of one EAGLE head, and keeps in mind which."""

    def __init__(self, tensors: _Tensors, names: EagleNames, prefix: str, config: EagleConfig) -> None:
        self._tensors, self._names, self._prefix, self._config = tensors, names, prefix, config
        present = tensors.source.names()
        prefixes = [prefix + layer for layer in names.layer]
        self._layer = next((each for each in prefixes if any(name.startswith(each) for name in present)), prefixes[0])
        self.known: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._read(self._prefix + name, shape)

    def matrix(self, name: str, outputs: int, inputs: int) -> np.ndarray:
        return transposed(self.read(name, (outputs, inputs)))

    def vector(self, name: str | None, size: int) -> np.ndarray | None:
        return None if name is None else self.read(name, (size,))

    def layer_norm(self, name: str | None) -> np.ndarray | None:
        return None if name is None else self._read(f"{self._layer}{name}.weight", (self._config.layer.hidden_size,))

    def input_norm(self) -> np.ndarray | None:
        names, config = self._names, self._config
        if config.input_norm == "together" and names.input_norm is not None:
            return self.read(names.input_norm, (config.num_inputs,))
        if config.input_norm == "each" and names.input_norms is not None:
            numbers = range(len(config.tap_layers))
            parts = [self.read(names.input_norms.format(number=each), (config.target_hidden_size,)) for each in numbers]
            return joined(parts, axis=0)
        return None

    def token_ids(self) -> np.ndarray:
        """The model's id of each of the head's tokens; without a table they are the same."""
        size, vocab, name = self._config.draft_vocab_size or 0, self._config.layer.vocab_size, self._names.draft_ids
        ids = np.arange(size, dtype=np.int64)
        if name is not None and self._prefix + name in self._tensors.source.names():
            ids = ids + self.read(name, (size,)).astype(np.int64)
        elif size != vocab:
            raise CheckpointError(
                f"{self._tensors.where}: the head has {size} tokens of the model's {vocab}, and no table {name!r} that "
                "tells which: fetch the head again"
            )
        if len(np.unique(ids)) != size or ids.min() < 0 or ids.max() >= vocab:
            raise CheckpointError(
                f"{self._tensors.where}: {name!r} leads to tokens {ids.min()} to {ids.max()}, {len(np.unique(ids))} "
                f"different ones: there must be {size}, from 0 to {vocab - 1}"
            )
        return ids.astype(np.int32)

    def layer(self) -> LayerParams:
        config = self._config.layer
        hidden, ffn, head_dim, heads = (
            config.hidden_size,
            config.intermediate_size,
            config.head_dim,
            config.num_kv_heads,
        )
        width = hidden if self._config.version == 1 else 2 * hidden
        sizes = {"q": config.num_heads * head_dim, "k": heads * head_dim, "v": heads * head_dim}
        qkv = [self._module(name, (size, width)).reshape(heads, -1, head_dim, width) for name, size in sizes.items()]
        gate_up = joined([self._module(name, (ffn, hidden)) for name in ("gate", "up")], axis=0)
        biases: dict[str, np.ndarray] = {}
        if config.attention_bias:
            parts = [self._module(name, (size,), "bias").reshape(heads, -1, head_dim) for name, size in sizes.items()]
            biases["bqkv"] = joined(parts, axis=1)
        if config.attention_output_bias:
            biases["bo"] = self._module("o", (hidden,), "bias")
        group = config.group_size
        return LayerParams(
            attention_norm=self.layer_norm(self._names.attention_norm),
            wqkv=transposed(joined(qkv, axis=1).reshape(-1, width)).reshape(width, heads, group + 2, head_dim),
            bqkv=biases.get("bqkv"),
            q_norm=None,
            k_norm=None,
            wo=transposed(self._module("o", (hidden, sizes["q"]))).reshape(heads, group, head_dim, hidden),
            bo=biases.get("bo"),
            mlp_norm=self.layer_norm(self._names.mlp_norm),
            w_gate_up=transposed(gate_up).reshape(hidden, 2, ffn),
            b_gate_up=None,
            w_down=transposed(self._module("down", (hidden, ffn))),
            b_down=None,
        )

    def _module(self, name: str, shape: tuple[int, ...], part: str = "weight") -> np.ndarray:
        return self._read(f"{self._layer}{self._names.modules[name]}.{part}", shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.known.add(name)
        return self._tensors.read(name, shape)


def _eagle_config(
    config: Mapping[str, Any],
    target: ModelConfig,
    version: Literal[1, 3],
    where: str,
    present: set[str],
    prefix: str,
) -> EagleConfig:
    layers = whole_number(config, "num_hidden_layers", where, 1)
    if layers != 1:
        raise CheckpointError(f"{where}: num_hidden_layers={layers}: only heads of 1 layer are supported")
    layer = model_config_from_hf(
        {**config, "architectures": [LLAMA.architecture], "num_hidden_layers": 1},
        eos_token_ids=(),
        bos_token_id=None,
        where=where,
    )
    if layer.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{where}: the head has a vocabulary of {layer.vocab_size} tokens, the model one of {target.vocab_size}: it was "
            "trained for another model"
        )
    if layer.mlp_bias:
        raise CheckpointError(f"{where}: mlp_bias=True: heads with biases in their MLP are not supported")
    # The configs of heads seldom say which biases their layer has: its tensors do.
    names = EAGLE if version == 1 else EAGLE3
    layer = dataclasses.replace(
        layer,
        attention_bias=any(name.endswith(f"{names.modules['q']}.bias") for name in present),
        attention_output_bias=any(name.endswith(f"{names.modules['o']}.bias") for name in present),
    )
    target_size = whole_number(config, "target_hidden_size", where, layer.hidden_size)
    if target_size != target.hidden_size:
        raise CheckpointError(
            f"{where}: the head takes in hidden states of {target_size} elements, the model's have {target.hidden_size}: it "
            "was trained for another model"
        )
    try:
        return EagleConfig(
            version=version,
            layer=layer,
            target_hidden_size=target_size,
            tap_layers=() if version == 1 else _tap_layers(config, target, where),
            draft_vocab_size=whole_number(config, "draft_vocab_size", where, layer.vocab_size)
            if version == 3
            else None,
            has_embedding=prefix + names.embedding in present,
            has_bias=names.fc_bias is not None and prefix + names.fc_bias in present,
            norms_residual=bool(config.get("norm_before_residual", False)),
            input_norm=_input_norm(config, where) if version == 3 else None,
            norms_output=version == 3 and bool(config.get("norm_output", False)),
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _input_norm(config: Mapping[str, Any], where: str) -> Literal["together", "each"] | None:
    together, each = bool(config.get("norm_before_fc", False)), bool(config.get("fc_norm", False))
    if together and each:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other")
    return "together" if together else "each" if each else None


def _tap_layers(config: Mapping[str, Any], target: ModelConfig, where: str) -> tuple[int, ...]:
    """Layers of the model whose inputs the head was trained on.

    Ids are of the layers that the hidden states go into (0: they are the embedding). In a group `eagle_config` they may be
    of the layers that they come out of, and nothing in the file says which. Heads are trained on what goes into layers
    `default_tap_layers`, of which the first is 2, so that a list that begins with 1 is taken for one of the other kind;
    that is logged, for a head that was trained on other layers may be misread by it: its drafts are worse then, never the
    output. A list outside the group is taken as it stands.
    """
    told, group = config.get("eagle_aux_hidden_state_layer_ids"), config.get("eagle_config")
    if told is None and isinstance(group, Mapping):
        told = group.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(told, list) and told and told[0] == 1:
            came_out_of, told = told, [each + 1 if isinstance(each, int) else each for each in told]
            logger.info(
                "%s: eagle_aux_hidden_state_layer_ids=%s of eagle_config are taken for layers that hidden states come out "
                "of, and so for the inputs of %s",
                where, came_out_of, told,
            )  # fmt: skip
    default = default_tap_layers(target.num_layers)
    if told is None and target.num_layers < _SHALLOWEST:
        raise CheckpointError(
            f"{where}: the model has {target.num_layers} layers, EAGLE-3 heads take in the inputs of layers {default}: name "
            "others as eagle_aux_hidden_state_layer_ids"
        )
    layers = default if told is None else told
    if (
        not isinstance(layers, (list, tuple))
        or not layers
        or not all(isinstance(each, int) and 0 <= each <= target.num_layers for each in layers)
    ):
        raise CheckpointError(
            f"{where}: eagle_aux_hidden_state_layer_ids={told!r} must be layers from 0 to {target.num_layers}"
        )
    return tuple(layers)


def _medusa(tensors: _Tensors, config: Mapping[str, Any], target: ModelConfig) -> DraftHead:
    where, names = tensors.where, set(tensors.source.names())
    blocks = whole_number(config, "medusa_num_layers", where, 1)
    present = {int(match[1]) for name in names if (match := re.fullmatch(r"(\d+)\.\d+\..*", name))}
    heads = whole_number(config, "medusa_num_heads", where, len(present))
    # Published configs may tell fewer heads than there are: all of them are read.
    heads = max(heads, len(present))
    for key, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        value = whole_number(config, key, where, own)
        if value != own:
            raise CheckpointError(f"{where}: {key}={value} of the heads must be the model's, {own}")
    hidden, vocab = target.hidden_size, target.vocab_size
    known: set[str] = set()

    def name(pattern: str, head: int, block: int) -> str:
        known.add(pattern.format(head=head, block=block))
        return pattern.format(head=head, block=block)

    params = MedusaParams(
        heads=tuple(
            MedusaHeadParams(
                blocks=tuple(tensors.matrix(name(MEDUSA.block, head, i), hidden, hidden) for i in range(blocks)),
                biases=tuple(tensors.read(name(MEDUSA.bias, head, i), (hidden,)) for i in range(blocks)),
                lm_head=tensors.matrix(name(MEDUSA.lm_head, head, blocks), vocab, hidden),
            )
            for head in range(heads)
        )
    )
    tensors.refuse_others(known)
    try:
        return DraftHead(MedusaConfig(heads, blocks, hidden, vocab), params)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
