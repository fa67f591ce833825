"""
Prefix states leave the pool for host memory and for files, and come back.

vLLM's `OffloadingConnector` decides which states are stored, loaded and dropped. Two things that it lacks are here:
copies on a CPU, because its own need a GPU, and files with checksums that belong to the weights of a model and have a
limit of bytes.
"""

import hashlib
import os
import secrets
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import subquad
from subquad.states.identity import identify


# Bytes of the files in a directory, without `directory_bytes`.
DEFAULT_DIRECTORY_BYTES = 10 * 2**30
# A file has a CRC-32 after the state.
CHECKSUM_BYTES = 4
OPTIONS = ("cpu_bytes_to_use", "directory", "directory_bytes", "eviction_policy", "offload_prompt_only")


def complete_offloading(vllm_config: VllmConfig) -> None:
    """
    Checks vLLM's settings for offloading, if there are any, and makes them use [`StateOffloadingSpec`].

    Raises:
        ValueError: if an option is unknown or has an impossible value, with the name of the option.
    """
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    options = dict(transfer.kv_connector_extra_config) if transfer else {}  # the caller's may serve other engines
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend == "native":
        _check_size("kv_offloading_size", cache.kv_offloading_size)
        options["cpu_bytes_to_use"] = cache.kv_offloading_size * 2**30
    elif transfer is None or transfer.kv_connector != "OffloadingConnector":
        return
    if "spec_name" in options:  # another class that the user chose
        return
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ValueError(f"`kv_connector_extra_config` must have no options but {', '.join(OPTIONS)}, got {unknown}.")
    _check_size("cpu_bytes_to_use", options.get("cpu_bytes_to_use"))
    if not cache.enable_prefix_caching:
        raise ValueError("`enable_prefix_caching` must be True if states are offloaded, got False.")
    size = options.pop("directory_bytes", DEFAULT_DIRECTORY_BYTES)
    _check_size("directory_bytes", size)
    if "directory" in options:
        path = _directory_of_model(vllm_config, options.pop("directory"))
        tier = {"type": StateFiles.__name__, "module_path": __name__, "root_dir": path, "max_bytes": int(size)}
        options["secondary_tiers"] = [tier]
    elif size != DEFAULT_DIRECTORY_BYTES:
        raise ValueError(f"`directory_bytes` must be absent without a `directory`, got {size!r}.")
    options |= {"spec_name": StateOffloadingSpec.__name__, "spec_module_path": __name__}
    vllm_config.kv_transfer_config = replace(transfer or KVTransferConfig(), kv_connector_extra_config=options)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"`{name}` must be a positive number, got {value!r}.")


def _directory_of_model(vllm_config: VllmConfig, directory: Any) -> str:
    """The part of a directory for everything that states depend on, other than the tokens before them."""
    if not isinstance(directory, str) or not directory:
        raise ValueError(f"`directory` must be a path, got {directory!r}.")
    if vllm_config.lora_config is not None:
        raise ValueError(f"`directory` must be absent with adapters, whose weights may change, got {directory!r}.")
    try:
        os.makedirs(directory, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ValueError(f"`directory` must be a place where files can be written, got {directory!r}.") from error
    model = vllm_config.model_config
    facts = (identify(model.model).digest, model.revision, model.quantization, model.hf_overrides)
    facts += (subquad.__version__, vllm.__version__)
    return os.path.join(os.path.abspath(directory), hashlib.sha256(repr(facts).encode()).hexdigest()[:32])


class StateOffloadingSpec(TieringOffloadingSpec):
    """vLLM's host memory and tiers below it, also on a CPU."""

    def __init__(self, config: OffloadingConfig):
        super().__init__(config)
        size = self.kv_bytes_per_chunk
        given = [("cpu_bytes_to_use", int(self.extra_config["cpu_bytes_to_use"]))]
        given += [("directory_bytes", tier["max_bytes"]) for tier in self.secondary_tier_configs]
        for name, value in given:
            if value < size:
                raise ValueError(f"`{name}` must be at least {size:,}, the size of one state, got {value:,}.")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopies(kv_caches, region)
        return self._worker


class HostCopies(OffloadingWorker):
    """
    Copies states between the pool and other memory of the host.

    Args:
        kv_caches: the pools: for each layer, (slots, bytes) int8.
        region: the other memory, which this object releases.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion):
        self.region = region
        hosts = [region.create_next_worker_view(pool.page_size_bytes) for pool in kv_caches.tensors]
        pairs = [(pool.tensor, host) for pool, host in zip(kv_caches.tensors, hosts, strict=True)]
        # Groups of layers with different states, or with keys and values, have slots of their own.
        self.groups = [[pairs[ref.tensor_idx] for ref in refs] for refs in kv_caches.group_data_refs]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, slots: GPULoadStoreSpec, places: CPULoadStoreSpec, store: bool) -> bool:
        begin, size, sizes = time.perf_counter(), 0, list(slots.group_sizes)
        of_pools, of_hosts = (torch.from_numpy(x.block_ids).long().split(sizes) for x in (slots, places))
        for pairs, in_pool, in_host in zip(self.groups, of_pools, of_hosts, strict=True):
            for pool, host in pairs:
                if store:
                    host[in_host] = pool[in_pool]
                else:
                    pool[in_pool] = host[in_host]
                size += len(in_pool) * host.shape[1]
        self.finished.append(TransferResult(job_id, True, size, time.perf_counter() - begin))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """A copy is complete when it has been submitted."""

    def shutdown(self) -> None:
        self.groups = []  # a view keeps the memory mapped
        self.region.cleanup()


class StateFiles(FileSystemTierManager):
    """
    States as files. Those that were written or read longest ago are deleted, whichever model they belong to.

    Args:
        root_dir: directory of the model's files, in the directory of all files.
        max_bytes: size of all files together.
        options: arguments of vLLM's class.
    """

    def __init__(self, *, root_dir: str, max_bytes: int, **options: Any):
        super().__init__(root_dir=root_dir, n_read_threads=2, n_write_threads=2, **options)
        self.max_bytes, self.bytes = max_bytes, 0
        self.sizes: dict[str, int] = {}  # of every file; the file that was used last is at the end
        self.keys: dict[int, list] = {}
        found = []
        # Of every model, and nothing else that may be in the directory.
        for path in Path(root_dir).parent.glob("[0-9a-f]" * 32 + "/*/???/??_g*/*.bin"):
            with suppress(OSError):  # another server may have deleted it
                about = path.stat()
                found.append((about.st_mtime_ns, str(path), about.st_size))
        for _, path, size in sorted(found):
            self._use(path, size)
        self._make_room()

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._pool.enqueue_store(job_metadata.job_id, 1, [partial(_write, self._begin(job_metadata))])

    def submit_load(self, job_metadata: TransferJob) -> None:
        job_id, states = job_metadata.job_id, self._begin(job_metadata)
        self._load_job_keys[job_id] = self.keys[job_id]
        self._pool.enqueue_load(job_id, 1, [partial(self._read, job_id, states)])

    def _begin(self, job: TransferJob) -> list[tuple[Path, memoryview]]:
        """The files of a job, and their places in the host memory."""
        self.keys[job.job_id] = keys = list(job.keys)
        self._job_block_counts[job.job_id] = len(keys)
        memory, size = self._primary_kv_view.cast("B"), self.block_size_bytes
        places = [memory[int(chunk) * size : (int(chunk) + 1) * size] for chunk in job.chunk_ids]
        return list(zip(map(Path, map(self.file_mapper.get_file_name, keys)), places, strict=True))

    def _read(self, job_id: int, states: list[tuple[Path, memoryview]]) -> None:
        for number, (path, state) in enumerate(states):
            try:
                with open(path, "rb") as file:
                    size, checksum = file.readinto(state), file.read()
                if size != len(state) or checksum != _checksum(state):
                    path.unlink(missing_ok=True)
                    raise OSError(f"{path} is damaged, and was deleted.")
            except OSError:
                self._load_progress[job_id] = number  # vLLM reads the tokens of the others
                raise

    def get_finished_jobs(self) -> list[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            for key in self.keys.pop(result.job_id):
                if result.success:
                    path = self.file_mapper.get_file_name(key)
                    with suppress(OSError):  # another server may have deleted it
                        os.utime(path)
                    self._use(path, self.block_size_bytes + CHECKSUM_BYTES)
        self._make_room()
        return results

    def _use(self, path: str, size: int) -> None:
        self.bytes += size - self.sizes.pop(path, 0)
        self.sizes[path] = size

    def _make_room(self) -> None:
        while self.bytes > self.max_bytes:
            path = next(iter(self.sizes))
            self.bytes -= self.sizes.pop(path)
            with suppress(OSError):
                os.unlink(path)


def _write(states: list[tuple[Path, memoryview]]) -> None:
    for path, state in states:
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(state)
                file.write(_checksum(state))
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


def _checksum(state: memoryview) -> bytes:
    return zlib.crc32(state).to_bytes(CHECKSUM_BYTES, "big")
