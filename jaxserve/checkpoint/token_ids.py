"""Whether a tokenizer and the model beside it are of one vocabulary."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles
from jaxserve.config import ModelConfig

logger = logging.getLogger(__name__)


def check_token_ids(config: ModelConfig, tokenizer: TokenizerFiles | None, where: str) -> None:
    """Compare ids with the number of tokens that the model knows.

    Tokens that were added to a tokenizer, and for which the model was not made larger, are in use (to pad batches), and are
    told in a warning: a prompt with one is refused.

    Raises:
        CheckpointError: the tokenizer is another model's.
    """
    if tokenizer is None:
        return
    data = json.loads(tokenizer.tokenizer_json)
    own, added = _ids(data["model"]), [token["id"] for token in data.get("added_tokens") or ()]
    beyond = [token_id for token_id in added if token_id >= config.vocab_size]
    largest = max([*own, *beyond], default=0)
    # Added ones follow the others: an id far beyond them would make every table of tokens as long.
    if largest >= config.vocab_size and (
        largest not in beyond or largest >= max(config.vocab_size, len(own)) + len(added)
    ):
        raise CheckpointError(
            f"{where}: the tokenizer has the id {largest}, but the model knows {config.vocab_size} tokens: they are not of "
            "one model"
        )
    if beyond:
        logger.warning(
            "%s: %d added tokens of the tokenizer, from id %d on, are unknown to the model, and no prompt may have them",
            where,
            len(beyond),
            min(beyond),
        )


def _ids(model: Mapping[str, Any]) -> Collection[int]:
    """Of a `tokenizer.json`'s own vocabulary: a table of ids by token, or (of some kinds) a list of tokens."""
    vocabulary = model.get("vocab", {})
    return vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
