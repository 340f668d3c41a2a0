"""From a speculative configuration to a drafter with its arrays on the engine's devices."""

from __future__ import annotations

from jaxserve.engine.drafters import PromptLookup
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.speculator import Drafting
from jaxserve.speculative_config import SpeculativeConfig


def make_drafting(config: SpeculativeConfig, limits: SchedulerLimits) -> Drafting:
    """The drafter that the configuration asks for.

    Raises:
        ValueError: it does not go with the engine's sizes.
    """
    if config.num_speculative_tokens >= limits.page_size:
        raise ValueError(
            f"num_speculative_tokens={config.num_speculative_tokens} must be below page_size={limits.page_size}: draft "
            "fewer tokens, or raise --page-size"
        )
    drafter = PromptLookup(config.longest_lookup, config.shortest_lookup)
    return Drafting(drafter, (), (), f"{config}", config.synthetic_acceptance)
