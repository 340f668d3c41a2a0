"""Arguments that several commands share. Names follow `vllm serve` where it has one."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from jaxserve.speculative_config import SpeculativeConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A known name, a local folder or file (Hugging Face, GGUF, or what `jaxserve convert` wrote), "
        "or hf:ORG/NAME.",
        show_default=True,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS", help="Longest prompt and answer together; unset: what the model and the memory allow."
    ),
]
MemoryUtilization = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of the GPU's memory that weights and KV pages may take.")
]
DTypeName = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Of weights and KV cache; auto: float32 on the CPU, bfloat16 elsewhere."),
]
QuantizationName = Annotated[
    Literal["fp8", "fp8-weight-only", "int8", "int4", "int4-32"] | None,
    typer.Option(help="What the layers' weights are made into as they are loaded; unset: they stay as they are."),
]
KVCacheDTypeName = Annotated[
    Literal["auto", "fp8", "fp8_e4m3"], typer.Option(help="Of the KV cache; auto: as --dtype.")
]
PageSize = Annotated[int, typer.Option(metavar="TOKENS", help="Tokens that a KV page holds.")]
NumPages = Annotated[
    int | None, typer.Option(metavar="COUNT", help="KV pages, in place of the number planned from free memory.")
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share what is computed of prompts that begin alike.",
    ),
]
KvOffloadGib = Annotated[
    float,
    typer.Option(metavar="GIB", help="Host memory for what the prefix cache has no room for; 0: none."),
]
DisableCustomAllReduce = Annotated[
    bool,
    typer.Option(
        "--disable-custom-all-reduce/--no-disable-custom-all-reduce",
        help="Have NCCL make all sums over devices, and no kernel of our own those of small steps.",
    ),
]
MaxTpotMs = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        help="Longest step while answers are generated, which bounds how much of a prompt rides along; "
        "unset: twice a step without any; inf: no bound.",
    ),
]
SchedulingPolicyName = Annotated[
    Literal["fcfs", "priority", "sjf"],
    typer.Option(help="Whose turn comes first: who came first, whose priority is smaller, or whose prompt is shorter."),
]
SpeculativeConfigJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config", metavar="JSON",
        help='How tokens are drafted for the model to verify several at a time, such as \'{"method": "ngram", '
        '"num_speculative_tokens": 4}\'; unset: they are not.',
    ),
]  # fmt: skip
SyntheticAcceptance = Annotated[
    float | None,
    typer.Option(
        "--speculative-synthetic-acceptance", metavar="SHARE",
        help="Keep each draft with this probability, whatever it is: for benchmarks with random weights.",
    ),
]  # fmt: skip
DeviceName = Annotated[Literal["auto", "cpu", "gpu"], typer.Option(help="Where the model runs.")]


def read_speculative_config(text: str | None, synthetic_acceptance: float | None = None) -> SpeculativeConfig | None:
    """What the two options say together.

    Raises:
        ValueError: the JSON is wrong, or there is none that the acceptance belongs to.
    """
    if text is not None:
        return SpeculativeConfig.from_json(text, synthetic_acceptance=synthetic_acceptance)
    if synthetic_acceptance is not None:
        raise ValueError(
            f"--speculative-synthetic-acceptance {synthetic_acceptance} has no effect without --speculative-config"
        )
    return None


Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, help="Log what happens and show tracebacks; twice: log everything.",
        show_default=False,
    ),
]  # fmt: skip
