"""Everything in which the supported vLLM releases (0.25 to 0.33) or their CPU and GPU builds differ, behind one face.

Used by the engine wrapper in its own process (arguments, outputs, samples) and by the worker extension inside vLLM's workers
(loading weights into a running model). Nothing else in this project knows what an engine looks like inside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from async_search_rl.config.schema import Config
from async_search_rl.errors import ConfigError, EngineError
from async_search_rl.launch.guard import signal_at_parents_death

CPU_BLOCK_MULTIPLE = 32
_GIB = 1 << 30
_CHECKED_SHARE = 0.02


def prepare_environment(config: Config) -> None:
    """Set what vLLM and OpenMP read from the environment, and silence what is known; keeps what the user has set.

    Must run before anything imports torch or vLLM.
    """
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Deprecations that vLLM's processes meet in torch, and shared memory that its end leaves to the resource tracker.
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning,ignore:resource_tracker:UserWarning",
    }
    if config.model.dtype == "float32":
        # Triton's attention would multiply float32 in TF32.
        defaults["TRITON_F32_DEFAULT"] = "ieee"
    if not _has_flashinfer():
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if config.generator.threads:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.generator.threads)}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="This process .* is multi-threaded")


def device_type() -> str:
    """``"cpu"`` or ``"cuda"``: what this vLLM build runs on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def engine_arguments(config: Config, extension: str, detokenize: bool, seed: int) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs``.

    Raises:
        ConfigError: a block size that the CPU build cannot use.
    """
    generator = config.generator
    on_cpu = device_type() == "cpu"
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.rollout.max_context_tokens,
        "max_num_seqs": generator.max_num_seqs,
        "tensor_parallel_size": generator.tensor_parallel,
        "kv_cache_memory_bytes": int(generator.kv_cache_gib * _GIB),
        "enforce_eager": generator.enforce_eager or on_cpu,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": not detokenize,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": extension,
        "seed": seed,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
    }
    block_size = generator.block_size or (CPU_BLOCK_MULTIPLE if on_cpu else 0)
    if on_cpu and block_size % CPU_BLOCK_MULTIPLE:
        raise ConfigError(f"generator.block_size must be a multiple of {CPU_BLOCK_MULTIPLE} on CPU, got {generator.block_size}")
    if block_size:
        arguments["block_size"] = block_size
    if not on_cpu:
        # The KV cache has its own size; this share is only checked against what is free, and others may use the device too.
        arguments["gpu_memory_utilization"] = _CHECKED_SHARE
    if generator.attention_backend:
        arguments["attention_backend"] = generator.attention_backend
    return arguments


def start_engine(config: Config, extension: str, detokenize: bool, seed: int) -> Any:
    """A running ``AsyncLLM``.

    The CPU build asks for spawned processes, each of which imports everything anew: most of its start. They need it only to
    bind OpenMP's threads, so where the number of threads is configured instead, its processes are forked.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_config = AsyncEngineArgs(**engine_arguments(config, extension, detokenize, seed)).create_engine_config(
        UsageContext.ENGINE_CONTEXT
    )
    if device_type() == "cpu" and config.generator.threads:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    # Until the worker extension watches over its owner, and only where processes are forked.
    os.register_at_fork(after_in_child=lambda: signal_at_parents_death(signal.SIGKILL))
    return AsyncLLM.from_vllm_config(vllm_config, usage_context=UsageContext.ENGINE_CONTEXT, disable_log_stats=True)


def count_outputs(engine: Any, count: Callable[[str, int], None]) -> Callable[[], bool]:
    """Call ``count(request id, new tokens)`` for every step of every request, in the engine's order.

    Returns a function that is true when everything that has arrived was counted. The engine sends outputs and the answer to a
    pause through one ordered channel, so after that answer and once this is true, every token of the old weights is counted.
    Must be called before the event loop gives the engine's output task its first turn.
    """
    client = engine.engine_core
    get_output = client.get_output_async

    async def get_and_count() -> Any:
        outputs = await get_output()
        for output in outputs.outputs:
            count(output.request_id.partition("-")[0], len(output.new_token_ids))
        return outputs

    client.get_output_async = get_and_count
    return lambda: bool(client.outputs_queue.empty())


async def stop_outputs(engine: Any) -> None:
    """End the task that reads outputs, which would report the engine's orderly end as a failure."""
    handler = engine.output_handler
    if handler is not None:
        handler.cancel()
        await asyncio.wait([handler])


def sampled(completion: Any) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of a finished completion that was requested with ``logprobs=0, flat_logprobs=True``.

    Raises:
        EngineError: a token came without its log-probability.
    """
    token_ids = list(completion.token_ids)
    flat = completion.logprobs
    if flat is None or len(flat.start_indices) < len(token_ids):
        raise EngineError(f"the engine must report a log-probability for each of {len(token_ids)} tokens, got fewer")
    logprobs: list[float] = []
    for token, start, end in zip(token_ids, flat.start_indices, flat.end_indices, strict=False):
        place = next((i for i in range(start, end) if flat.token_ids[i] == token), None)
        if place is None:
            raise EngineError(f"the engine must report the log-probability of the sampled token {token}, got another's")
        logprobs.append(flat.logprobs[place])
    return token_ids, logprobs


def load_into_running_model(worker: Any, tensors: Iterable[tuple[str, Any]]) -> None:
    """Inside a worker: load checkpoint-format ``(name, tensor)`` pairs into the model, in place, re-packing what the build packs.

    On CPU the linear layers hold packed copies that the layerwise reload makes anew, except that of an embedding which is
    also the output head: that one is packed again here, or the logits would come from the old head without any sign of it.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    initialize_layerwise_reload(runner.model)
    runner.model.load_weights(tensors)
    finalize_layerwise_reload(runner.model, runner.model_config)
    for module in runner.model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _has_flashinfer() -> bool:
    import importlib.util

    return importlib.util.find_spec("flashinfer") is not None
