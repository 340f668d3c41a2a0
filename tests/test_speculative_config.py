"""`--speculative-config`: what is wrong is told with its value and what to do."""

from __future__ import annotations

import json

import pytest

from jaxserve.config import EngineConfig
from jaxserve.speculative_config import SpeculativeConfig


def test_vllm_s_fields_are_read() -> None:
    config = SpeculativeConfig.from_json('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}')
    assert (config.method, config.num_speculative_tokens) == ("ngram", 5)
    assert (config.longest_lookup, config.shortest_lookup) == (4, 4)
    config = SpeculativeConfig.from_json('{"method": "draft_model", "model": "small", "num_speculative_tokens": 3}')
    assert config.model == "small"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"method": "ngram"}', "lacks num_speculative_tokens"),
        ('{"method": "magic", "num_speculative_tokens": 3}', "'magic' must be one of ngram, draft_model, early_exit"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens=0 must be a number from 1 to"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens=True must be a number"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "num_speculative_tokens='3' must be a number"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "tokens": 1}', r"unknown fields \['tokens'\]; known ones: "),
        ('{"method": "ngram", "num_speculative_tokens": 3, "model": "x"}', "model='x' means nothing to method 'ngram'"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', 'needs "model"'),
        ('{"method": "eagle", "num_speculative_tokens": 3}', 'method "eagle" needs "model": the folder'),
        (
            '{"method": "medusa", "num_speculative_tokens": 3, "model": "x", "quantization": "fp8"}',
            "quantization='fp8' means nothing to method 'medusa'",
        ),
        ('{"method": "early_exit", "num_speculative_tokens": 3, "num_layers": 0}', "num_layers=0 must be at least 1"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 2}',
            "prompt_lookup_max=1 must not be below prompt_lookup_min=2",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 100000}',
            "prompt_lookup_max=100000 must be a number from 1 to 32",
        ),
        ('{"method": "draft_model", "num_speculative_tokens": 3, "model": 5}', "model=5 must be a text: a name"),
        ('{"method": "eagle", "num_speculative_tokens": 3, "model": {}}', "model={} must be a text: a name"),
        ("[" * 100_000, r"\[\[\.\.\.' is not JSON"),
        ('{"method": "ngram", "num_speculative_tokens": ' + "9" * 10_000 + "}", "is not JSON"),
    ],
)
def test_a_wrong_value_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        SpeculativeConfig.from_json(text)
    assert len(str(raised.value)) < 600


def test_more_drafts_than_fit_a_page_are_refused_with_the_other_sizes() -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens=4 must be below page_size=4: .* --page-size"):
        EngineConfig(page_size=4, speculative_config=SpeculativeConfig("ngram", 4))


@pytest.mark.parametrize("quantization", ["fp9", 8, ["fp8"]])
def test_a_quantization_that_there_is_not_is_told_with_those_that_there_are(quantization: object) -> None:
    fields = {"method": "draft_model", "num_speculative_tokens": 3, "model": "x", "quantization": quantization}
    speculative = SpeculativeConfig.from_json(json.dumps(fields))
    with pytest.raises(ValueError, match=r"of the draft model, quantization=.* must be one of fp8, "):
        EngineConfig(speculative_config=speculative)


def test_synthetic_acceptance_goes_with_random_weights_alone() -> None:
    config = SpeculativeConfig("ngram", 3, synthetic_acceptance=0.8)
    EngineConfig(speculative_config=config, load_format="dummy")
    with pytest.raises(
        ValueError, match=r"speculative_synthetic_acceptance=0.8 .* load_format='dummy' alone, not 'auto'"
    ):
        EngineConfig(speculative_config=config)
    with pytest.raises(ValueError, match=r"speculative_synthetic_acceptance=1\.5 must lie in 0\.\.1"):
        SpeculativeConfig("ngram", 3, synthetic_acceptance=1.5)
