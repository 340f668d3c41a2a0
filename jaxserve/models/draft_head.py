"""Heads that draft tokens from the hidden states of the model that is served: what all kinds share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models.eagle import EagleConfig, EagleParams
from jaxserve.models.medusa import MedusaConfig, MedusaParams


@dataclass(frozen=True)
class DraftHead:
    """A head and its arrays: on the host as a checkpoint has them, or as devices run them."""

    config: EagleConfig | MedusaConfig
    params: EagleParams | MedusaParams
