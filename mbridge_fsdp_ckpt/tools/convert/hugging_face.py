# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> checkpoint -> Hugging Face, by Megatron-Bridge's own mappings.

The model is built plain: each rank holds its tensor- and expert-parallel part whole, on the GPU, or in host memory
where there is none.  Megatron-FSDP takes no part, so that Bridge's export meets the tensors it was written for, and
the memory is that of the weights alone.  What is saved has the keys of the wrapped model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, StorageError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STAGING, beside
from mbridge_fsdp_ckpt.integrations.bridge.plain_model import PlainModel, load_plain
from mbridge_fsdp_ckpt.integrations.bridge.plugin import register
from mbridge_fsdp_ckpt.integrations.bridge.process_group import process_group_for_conversion
from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import as_if_there_was_one
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.tools.convert.accounting import check_files, fill, left_out
from mbridge_fsdp_ckpt.tools.convert.destination import remove_empty
from mbridge_fsdp_ckpt.versions import require

_HALF = (torch.bfloat16, torch.float16)
_STORAGE = "that the model's files can be read, and the storage that is written to (space, permissions, quota)"
_VERSIONS = "the model's files, and the versions that are installed"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Source:
    """A Hugging Face model.

    Args:
        place: The directory of the model, or its name on the Hugging Face Hub.
        dtype: Dtype of the Megatron model.
        trust_remote_code: Whether code that comes with it may run.
    """

    place: str
    dtype: torch.dtype = torch.bfloat16
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of the job that converts; what is saved loads in every other layout.

    Args:
        tensor: Tensor-parallel size.
        context: Context-parallel size.
        expert: Expert-parallel size.
        expert_tensor: Tensor-parallel size of experts; None leaves Bridge's choice for the model.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """How Hugging Face files are written.

    Args:
        strict: Whether the exported names must be those of the original model.
        show_progress: Whether to draw a progress bar.
        distributed: Whether ranks write files of their own.
        every: Every how many ranks one writes files, if `distributed` is set.
    """

    strict: bool = True
    show_progress: bool = True
    distributed: bool = False
    every: int = 1


def import_model(source: Source, sizes: Sizes, directory: AnyPath, *, strict: bool = True) -> list[str]:
    """Save a Hugging Face model as a checkpoint with iteration 0.  All ranks call it with the same arguments.

    Args:
        source: The model.
        sizes: The parallel sizes of this job.
        directory: The root below which the checkpoint is written.
        strict: Whether every tensor of the files must have a place in the model.

    Returns:
        The names of tensors in the files that have no place.

    Raises:
        ConfigurationError: Bridge does not know the model, or the model does not fit the sizes or the dtype.
        KeyMismatchError: The files lack tensors, or have tensors without a place.
        CheckpointError: The save failed, the same on every rank.
    """
    from megatron.bridge.training.model_load_save import save_megatron_model

    register()
    with process_group_for_conversion(), _errors_named(f"importing to {directory}", source.place):
        bridge, model = _build(source, sizes)
        unread = fill(bridge, model, strict=strict)
        save_megatron_model(
            [PlainModel(model)],
            str(directory),
            ckpt_format=FORMAT_NAME,
            hf_tokenizer_path=source.place if _has_tokenizer(source.place) else None,
            hf_tokenizer_kwargs=_tokenizer_arguments(bridge, source),
        )
    return unread


def export_model(source: Source, sizes: Sizes, directory: AnyPath, target: str, files: Files) -> list[str]:
    """Write a checkpoint's weights as a Hugging Face model.  All ranks call it with the same arguments.

    Args:
        source: The original model, for its configuration, its tokenizer, and the names and files of its tensors.
        sizes: The parallel sizes of this job.
        directory: An iteration directory, of this format or of stock `fsdp_dtensor`.
        target: The directory for the model, which appears there once it is complete.
        files: How the files are written.

    Returns:
        The names of tensors that the checkpoint lacks; none if `Files.strict` is set.

    Raises:
        ConfigurationError: Bridge does not know the model, or the model does not fit the sizes.
        CheckpointError: The load failed, the same on every rank.
    """
    register()
    with (
        process_group_for_conversion(),
        _errors_named(f"exporting to {target}", source.place),
        staged_for(Path(target).absolute()) as place,
    ):
        bridge, model = _build(source, sizes)
        absent = load_plain(directory, [model], strict=files.strict)
        if source.dtype != torch.float32:
            _narrow(bridge)
        if not _has_tokenizer(source.place):
            bridge.hf_pretrained.ARTIFACTS = []  # Bridge insists on one
        with left_out(bridge, absent) as names:
            bridge.save_hf_pretrained(
                [model],
                str(place),
                show_progress=files.show_progress,
                strict=files.strict,
                distributed_save=files.distributed,
                save_every_n_ranks=files.every,
            )
    return names


@contextmanager
def _errors_named(doing: str, place: str) -> Iterator[None]:
    """Turn an exception of Bridge, or of a library that it uses, into a named error of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        of_storage = isinstance(error, OSError) or "(os error " in str(error)  # as safetensors tells of the latter
        kind, check = (StorageError, _STORAGE) if of_storage else (ConfigurationError, _VERSIONS)
        raise kind(
            expected=f"{doing} with the installed Megatron-Bridge to succeed",
            found=f"{type(error).__name__}: {in_one_line(error)}",
            remedy=f"Nothing was left behind. Check {check}.",
            key=place,
        ) from error


@contextmanager
def staged_for(target: Path) -> Iterator[Path]:
    """A temporary directory, the same on all ranks, whose content becomes the target when all ranks leave the block.

    This creates the directory.  It lies beside a target that does not exist, which then appears in one rename.  It lies
    inside a target that exists, which may be a mount point, and files are then moved one by one.  If this rank raises,
    it removes the directory.

    All ranks must enter and leave the block.  A rank that raises leaves the others waiting in a barrier until the
    launcher ends them.

    Args:
        target: The directory to make or fill; it must be new or empty.

    Yields:
        The temporary directory.

    Raises:
        OSError: It cannot be made; raised on all ranks, before anything is read.
    """
    name = beside(STAGING, target.name)
    place = target / name if target.is_dir() else target.with_name(name)
    missing = [folder for folder in place.parents if not folder.exists()]
    made: list[tuple[Path, OSError | None]] = [(place, _made(place) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(made)
    [(place, error)] = made
    try:
        if error is not None:
            raise error
        yield place
        dist.barrier()
        if dist.get_rank() == 0:
            _move(place, target)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        remove_empty(missing)
        raise
    dist.barrier()


def _made(place: Path) -> OSError | None:
    """Make a directory; what the storage refused."""
    try:
        place.mkdir(parents=True)
    except OSError as error:
        return error
    return None


def _move(place: Path, target: Path) -> None:
    if not target.exists():
        place.rename(target)
        return
    for entry in place.iterdir():
        entry.rename(target / entry.name)
    place.rmdir()


def _build(source: Source, sizes: Sizes) -> tuple[Any, Any]:
    """Bridge's converter, and the model with its initial weights."""
    require("conversion")
    from megatron.bridge import AutoBridge

    try:
        bridge = AutoBridge.from_hf_pretrained(
            source.place, torch_dtype=source.dtype, trust_remote_code=source.trust_remote_code
        )
        provider = bridge.to_megatron_provider(load_weights=False)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigurationError(
            expected="a Hugging Face model that the installed Megatron-Bridge knows",
            found=in_one_line(error),
            remedy="Give a directory with config.json and safetensors files, or a name on the Hugging Face Hub.",
            key=source.place,
        ) from error
    check_files(bridge)
    configure(provider, source.dtype, sizes)
    with as_if_there_was_one():
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available()
        )
    return bridge, chunks[0]


def arrange(provider: Any, dtype: torch.dtype, sizes: Sizes) -> None:
    """Set a model provider's dtype and parallel sizes, and switch off what a conversion of weights does not need."""
    provider.tensor_model_parallel_size, provider.context_parallel_size = sizes.tensor, sizes.context
    provider.expert_model_parallel_size = sizes.expert
    if sizes.expert_tensor is not None:
        provider.expert_tensor_parallel_size = sizes.expert_tensor
    elif sizes.expert > 1 and provider.expert_tensor_parallel_size is None:
        provider.expert_tensor_parallel_size = 1  # as Bridge 0.6 does; 0.5 takes the tensor-parallel size
    provider.pipeline_dtype = provider.params_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    provider.gradient_accumulation_fusion = False
    provider.sequence_parallel = sizes.tensor > 1  # some layers are built with it alone
    if getattr(provider, "moe_token_dispatcher_type", None) == "flex":
        provider.moe_token_dispatcher_type = "alltoall"  # no token is dispatched; flex wants packages that do


def configure(provider: Any, dtype: torch.dtype, sizes: Sizes) -> None:
    """Set up a provider with `arrange`, and Megatron's process groups.

    Raises:
        ConfigurationError: The sizes do not fit the model or the number of ranks.
    """
    arrange(provider, dtype, sizes)
    try:
        provider.finalize()
        provider.initialize_model_parallel(seed=0 if torch.cuda.is_available() else None)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            expected="parallel sizes that fit the model and the number of ranks",
            found=in_one_line(error) or type(error).__name__,
            remedy=f"Given: TP {sizes.tensor}, CP {sizes.context}, EP {sizes.expert}, {dist.get_world_size()} ranks.",
        ) from error


def _narrow(bridge: Any) -> None:
    """Write tensors that the model keeps in float32 in the original's 16-bit dtype, if it has one."""
    files: Any = getattr(bridge.hf_pretrained.state, "source", None)
    if files is None or not hasattr(files, "save_generator"):
        return
    save, dtypes = files.save_generator, _dtypes(files)

    def narrowed(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            wanted = dtypes.get(name)
            narrows = tensor.dtype == torch.float32 and wanted in _HALF
            yield name, tensor.to(wanted) if narrows else tensor

    files.save_generator = lambda tensors, *args, **kwargs: save(narrowed(tensors), *args, **kwargs)


def _dtypes(files: Any) -> dict[str, torch.dtype]:
    """The dtypes of the original's tensors, from the headers of its safetensors files."""
    from safetensors import safe_open

    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    found = {}
    for name in sorted(set(files.key_to_filename_map.values())):
        with safe_open(str(Path(files.path) / name), "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                dtype = known.get(file.get_slice(key).get_dtype())
                if dtype is not None:
                    found[key] = dtype
    return found


def _has_tokenizer(place: str) -> bool:
    """Whether a model has tokenizer files; a model on the Hub is assumed to have them."""
    directory = Path(place)
    return not directory.is_dir() or any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _tokenizer_arguments(bridge: Any, source: Source) -> dict[str, Any]:
    wanted = getattr(bridge._model_bridge, "get_hf_tokenizer_kwargs", lambda: None)() or {}
    return dict(wanted) | ({"trust_remote_code": True} if source.trust_remote_code else {})


def in_one_line(error: BaseException) -> str:
    """The text of an exception in one line, cut to 500 characters."""
    return " ".join(str(error).split())[:500]
