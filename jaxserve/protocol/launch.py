"""From a model's name to a service that answers: fetch, convert, load, compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER, check_files, is_converted, read_manifest
from jaxserve.checkpoint.source import draft_head_folder, resolve_model
from jaxserve.checkpoint.store import converted_folder, load_checkpoint
from jaxserve.config import EngineConfig, ToolCallFormat
from jaxserve.engine.build import build_runner, check_model_fits, make_engine_mesh, wanted_quantization
from jaxserve.engine.capacity import longest_context
from jaxserve.engine.cluster import Follower, join_cluster
from jaxserve.engine.cluster_runner import follow
from jaxserve.engine.engine_process import ProcessSetup
from jaxserve.engine.remote_engine import RemoteEngine
from jaxserve.engine.request import RequestError
from jaxserve.progress import Progress
from jaxserve.protocol.checkpoint_engine import start_checkpoint_engine
from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.prompts import PromptBuilder
from jaxserve.protocol.service import OpenAIService
from jaxserve.speculative_config import HEAD_METHODS
from jaxserve.structured.compiler import ForwardingCompiler, GrammarCompiler
from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.wording import plural

logger = logging.getLogger(__name__)


def launch(
    model: str,
    config: EngineConfig,
    progress: Progress,
    served_model_name: str | None = None,
    *,
    allow_special_tokens_in_content: bool = False,
    tool_call_parser: ToolCallFormat | None = None,
    pinned_prompt: str | None = None,
    pinned_prompt_name: str = "pinned_prompt",
    engine_process: ProcessSetup | None = None,
) -> OpenAIService:
    """A service whose engine runs and has compiled all it will ever need.

    Args:
        model: a known name, a local folder or file, or "hf:ORG/NAME".
        served_model_name: what clients call the model; None: `model` itself.
        tool_call_parser: how the model writes calls of tools; None: told by its chat template.
        pinned_prompt: a system prompt that is computed at once and kept; None: nothing is.
        pinned_prompt_name: what errors call it.
        engine_process: the engine runs in a process of its own, which speaks to people in this way; None: in this one.

    Raises:
        CheckpointError: the model cannot be found, read or used; one line says what to do about it.
        ValueError: the pinned prompt cannot be served, or there is no prefix cache to keep it in.
        ClusterError: another host with which this one was to share the model is gone.
        EngineProcessError: the engine's process ended while it loaded.
    """
    _check_shared(model, config)
    if pinned_prompt is not None:
        _check_pinning(pinned_prompt, pinned_prompt_name, config)
    folder = converted_folder(resolve_model(model, progress), progress)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    template = load_chat_template(tokenizer, model)
    if pinned_prompt is not None:
        prompts = PromptBuilder(
            tokenizer,
            template,
            max_model_len=longest_context(manifest.model_config, config),
            vocab_size=manifest.model_config.vocab_size,
            allow_special_tokens_in_content=allow_special_tokens_in_content,
        )
        _check_pinned_length(prompts, pinned_prompt, pinned_prompt_name, config.page_size)
    draft_folder = resolve_draft_model(config, lambda: tokenizer, progress)
    start = partial(start_checkpoint_engine, folder, draft_folder, config)
    if engine_process is not None:
        logger.info("starting the engine in a process of its own")  # it says nothing before it has imported all
    engine = start(progress).engine if engine_process is None else RemoteEngine(start, engine_process)
    compiler = (
        ForwardingCompiler(engine.compile_constraint)
        if isinstance(engine, RemoteEngine)
        else GrammarCompiler(tokenizer)
    )
    service = OpenAIService(
        engine,
        tokenizer,
        template,
        served_model_name or model,
        allow_special_tokens_in_content=allow_special_tokens_in_content,
        tool_call_parser=tool_call_parser,
        compiler=compiler,
    )
    if pinned_prompt is not None:
        try:
            num_tokens = service.pin_prompt(pinned_prompt)
        except (BadRequestError, RequestError) as error:
            service.close()
            raise _unservable(pinned_prompt_name, error) from error
        num_pages = num_tokens // config.page_size  # full ones: no other is kept
        logger.info(
            "%s: pinned a prompt of %d tokens, which keeps %d KV %s",
            pinned_prompt_name,
            num_tokens,
            num_pages,
            plural("page", num_pages),
        )
    return service


def _check_pinning(text: str, name: str, config: EngineConfig) -> None:
    """Raises:
    ValueError: there is nothing to pin, or no prefix cache to keep it in.
    """
    if not config.enable_prefix_caching:
        raise ValueError(
            "a pinned prompt is kept in the prefix cache, and enable_prefix_caching is False: leave --pinned-prompt or "
            "--no-enable-prefix-caching out"
        )
    if not text.strip():
        raise ValueError(f"{name} is empty: write a system prompt into it, or leave --pinned-prompt out")


def _check_pinned_length(prompts: PromptBuilder, text: str, name: str, page_size: int) -> None:
    """Before minutes go into loading the model.

    Raises:
        ValueError: no plan of memory could make the pinned prompt fit, or the template refuses it.
    """
    try:
        num_tokens = len(prompts.system_prefix(text))
    except BadRequestError as error:
        raise _unservable(name, error) from error
    if num_tokens >= prompts.max_model_len:
        raise ValueError(
            f"{name}: the pinned prompt has {num_tokens} tokens, and the context has {prompts.max_model_len} with the "
            "answer: shorten it, or raise --max-model-len or --num-pages where they are set"
        )
    if num_tokens < page_size:
        logger.warning(
            "%s: the pinned prompt has %d tokens, less than a KV page of --page-size %d: nothing of it is kept",
            name,
            num_tokens,
            page_size,
        )


def _unservable(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name}: the pinned prompt cannot be served: {error}")


def resolve_draft_model(config: EngineConfig, tokenizer: Callable[[], Tokenizer], progress: Progress) -> Path | None:
    """The folder of the model that drafts, converted, or of the head as it is published; None: no model of its own does.

    Args:
        tokenizer: gives that of the model that is served, where a draft model must have the same tokens.

    Raises:
        CheckpointError: it cannot be found, or its tokens are others than those of the model that is served.
    """
    model = None if config.speculative_config is None else config.speculative_config.model
    if config.speculative_config is None or model is None:
        return None
    if config.speculative_config.method in HEAD_METHODS:
        return draft_head_folder(model, progress)
    folder = converted_folder(resolve_model(model, progress), progress)
    check_files(folder, read_manifest(folder))
    own, served = load_tokenizer(folder / TOKENIZER_FOLDER), tokenizer()
    shared = min(own.vocab_size, served.vocab_size)
    different = next((token for token in range(shared) if own.token_bytes(token) != served.token_bytes(token)), None)
    if different is not None:
        raise CheckpointError(
            f"the draft model {model} has other tokens than the model: token {different} is "
            f"{own.token_bytes(different)!r} in the one and {served.token_bytes(different)!r} in the other; use a draft "
            "model of the same family"
        )
    return folder


def launch_follower(model: str, config: EngineConfig, progress: Progress) -> None:
    """Runs this host's part of a model that several share (`nnodes`), until the first host ends.

    Raises:
        CheckpointError: as `launch`.
        OutOfMemoryError: this host's devices have no room for their part.
        ClusterError: the first host is gone.
    """
    _check_shared(model, config)
    link = join_cluster(config)
    if not isinstance(link, Follower):
        raise ValueError(f"node_rank={config.node_rank} of nnodes={config.nnodes} follows nobody")
    folder = Path(model)
    check_files(folder, read_manifest(folder))
    mesh = make_engine_mesh(config)
    check = partial(check_model_fits, config=config, mesh=mesh)
    quantization = partial(wanted_quantization, config=config)
    checkpoint = load_checkpoint(folder, config.dtype, progress, mesh=mesh, check=check, quantization=quantization)
    built = build_runner(checkpoint.model_config, checkpoint.params, config, progress, cluster=link)
    logger.info("ready: follows host 0")
    follow(built.runner, link)


def _check_shared(model: str, config: EngineConfig) -> None:
    """Raises:
    CheckpointError: several hosts are to share a model, which all of them at once would have to convert.
    """
    if config.nnodes > 1 and not is_converted(Path(model)):
        raise CheckpointError(
            f"{model}: several hosts take a folder that `jaxserve convert` has made, each its own or one that all see"
        )


def load_chat_template(tokenizer: Tokenizer, model: str) -> ChatTemplate | None:
    """The checkpoint's own template, or None where it has none.

    Raises:
        CheckpointError: it is not valid, which is told at start and not at the first request.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        return ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    except ChatTemplateError as error:
        raise CheckpointError(f"{model}: {error}") from error
