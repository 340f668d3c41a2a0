"""`jaxserve serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from functools import partial

import typer

from jaxserve.cli import serve_options as options
from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_access_log, configure_logging
from jaxserve.cli.options import (
    DEFAULT_MODEL,
    DeviceName,
    DisableCustomAllReduce,
    DTypeName,
    KVCacheDTypeName,
    KvOffloadGib,
    MaxModelLen,
    MaxTpotMs,
    MemoryUtilization,
    Model,
    NumPages,
    PageSize,
    PrefixCaching,
    QuantizationName,
    SchedulingPolicyName,
    SpeculativeConfigJson,
    SyntheticAcceptance,
    Verbose,
    read_speculative_config,
)
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.device_memory import claim_device_memory
from jaxserve.progress_display import progress_on, restore_terminal

_ENGINE = EngineConfig()
_SERVER = ServerConfig()
# What is told without -v: the address, memory, other hosts, how it ends.
_SHOWN = ("jaxserve.server", "jaxserve.engine.build", "jaxserve.engine.cluster", "jaxserve.protocol.launch")


def serve(
    model: Model = DEFAULT_MODEL,
    host: options.Host = _SERVER.host,
    port: options.Port = _SERVER.port,
    uds: options.UnixSocket = None,
    ssl_certfile: options.CertFile = None,
    ssl_keyfile: options.KeyFile = None,
    root_path: options.RootPath = _SERVER.root_path,
    max_model_len: MaxModelLen = None,
    mode: options.ModeName = _ENGINE.mode,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_num_queued_requests: options.MaxNumQueuedRequests = _ENGINE.max_num_queued_requests,
    max_num_queued_tokens: options.MaxNumQueuedTokens = None,
    tensor_parallel_size: options.TensorParallelSize = _ENGINE.tensor_parallel_size,
    disable_custom_all_reduce: DisableCustomAllReduce = _ENGINE.disable_custom_all_reduce,
    data_parallel_size: options.DataParallelSize = _ENGINE.data_parallel_size,
    nnodes: options.NumNodes = _ENGINE.nnodes,
    node_rank: options.NodeRank = _ENGINE.node_rank,
    master_addr: options.MasterAddr = _ENGINE.master_addr,
    master_port: options.MasterPort = _ENGINE.master_port,
    gpu_memory_utilization: MemoryUtilization = _ENGINE.gpu_memory_utilization,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    admin_api_key: options.AdminApiKey = None,
    pinned_prompt: options.PinnedPrompt = None,
    allowed_origins: options.AllowedOrigins = None,
    served_model_name: options.ServedModelName = None,
    allow_special_tokens_in_content: options.AllowSpecialTokens = False,
    tool_call_parser: options.ToolCallParser = None,
    seed: options.Seed = None,
    dtype: DTypeName = "auto",
    quantization: QuantizationName = None,
    kv_cache_dtype: KVCacheDTypeName = "auto",
    page_size: PageSize = _ENGINE.page_size,
    num_pages: NumPages = None,
    enable_prefix_caching: PrefixCaching = _ENGINE.enable_prefix_caching,
    kv_offload_gib: KvOffloadGib = _ENGINE.kv_offload_gib,
    scheduling_policy: SchedulingPolicyName = _ENGINE.scheduling_policy,
    max_tpot_ms: MaxTpotMs = None,
    speculative_config: SpeculativeConfigJson = None,
    speculative_synthetic_acceptance: SyntheticAcceptance = None,
    device: DeviceName = "auto",
    max_body_bytes: options.MaxBodyBytes = _SERVER.max_body_bytes,
    shutdown_timeout: options.ShutdownTimeout = _SERVER.shutdown_timeout,
    stalled_client_timeout: options.StalledClientTimeout = _SERVER.stalled_client_timeout,
    timeout_keep_alive: options.TimeoutKeepAlive = _SERVER.timeout_keep_alive,
    max_connections: options.MaxConnections = None,
    engine_process: options.EngineProcessName = _SERVER.engine_process,
    restart_engine: options.RestartEngine = False,
    otlp_traces_endpoint: options.OtlpTracesEndpoint = None,
    access_log: options.AccessLogForm = _SERVER.access_log,
    log_requests: options.LogRequests = False,
    log_requests_content: options.LogRequestsContent = False,
    verbose: Verbose = 0,
) -> None:
    """Serve MODEL over HTTP, the way OpenAI's API does."""
    configure_logging(verbose, shown=_SHOWN, over_bars=True)
    configure_access_log(enabled=access_log != "none")
    with reported_errors(verbose):
        engine_config = EngineConfig(
            max_model_len=max_model_len,
            mode=mode,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            num_pages=num_pages,
            enable_prefix_caching=enable_prefix_caching,
            kv_offload_gib=kv_offload_gib,
            scheduling_policy=scheduling_policy,
            max_tpot_ms=max_tpot_ms,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            seed=seed,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            disable_custom_all_reduce=disable_custom_all_reduce,
            data_parallel_size=data_parallel_size,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            max_num_queued_requests=max_num_queued_requests,
            max_num_queued_tokens=max_num_queued_tokens,
            speculative_config=read_speculative_config(speculative_config, speculative_synthetic_acceptance),
        )
        claim_device_memory(engine_config.gpu_memory_utilization, engine_config.tensor_parallel_size)
        server_config = ServerConfig(
            host=host,
            port=port,
            uds=uds,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            root_path=root_path,
            api_keys=options.all_api_keys(api_key, options.API_KEYS, api_key_file),
            admin_api_keys=options.all_api_keys(admin_api_key, options.ADMIN_API_KEYS),
            pinned_prompt=None if pinned_prompt is None else options.read_text(pinned_prompt, "--pinned-prompt"),
            pinned_prompt_name="pinned_prompt" if pinned_prompt is None else str(pinned_prompt),
            allowed_origins=tuple(allowed_origins or ()),
            served_model_name=served_model_name,
            allow_special_tokens_in_content=allow_special_tokens_in_content,
            tool_call_parser=tool_call_parser,
            max_body_bytes=max_body_bytes,
            shutdown_timeout=shutdown_timeout,
            stalled_client_timeout=stalled_client_timeout,
            timeout_keep_alive=timeout_keep_alive,
            max_connections=max_connections,
            engine_process=engine_process,
            restart_engine=restart_engine,
            otlp_traces_endpoint=otlp_traces_endpoint,
            access_log=access_log,
            log_requests=log_requests,
            log_requests_content=log_requests_content,
        )
        # Here and not at the top: it brings jax, which --help need not wait for.
        from jaxserve.engine.engine_process import ProcessSetup
        from jaxserve.server.run import serve as run_server

        setup = ProcessSetup(partial(configure_logging, verbose, shown=_SHOWN, over_bars=True), progress_on)
        try:
            code = run_server(model, engine_config, server_config, progress_on(), setup)
        finally:
            restore_terminal()
        raise typer.Exit(code)
