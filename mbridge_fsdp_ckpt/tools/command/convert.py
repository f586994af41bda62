# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`convert`: its frame, and `import` and `export`, from and to Hugging Face.

These two take the arguments of Megatron-Bridge's `convert_checkpoints_fsdp.py`.  They do without a GPU where there is
none, and run in one process, or under torchrun.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, NotACheckpointError, UnknownFormatError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STAGING, STOCK_FORMAT
from mbridge_fsdp_ckpt.remedies import Frontend, inside
from mbridge_fsdp_ckpt.tools.command.console import EXIT_CODES, be_quiet, fail, say
from mbridge_fsdp_ckpt.tools.command.console import app as frame
from mbridge_fsdp_ckpt.tools.command.convert_on_disk import from_stock, from_torch_dist, reshard, to_stock
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.io.store import AnyPath
    from mbridge_fsdp_ckpt.tools.convert.hugging_face import Sizes, Source

_ELSEWHERE = {
    STOCK_FORMAT: "Stock reads what is written; `convert to-stock` makes a copy without this format's files.",
    "torch_dist": "`convert from-torch-dist` reads it; Megatron-Bridge's own conversion script writes it.",
}
GRACE_S = 5.0
_USAGE = (ConfigurationError, NotACheckpointError, UnknownFormatError)  # arguments that cannot work: exit code 2

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Convert checkpoints, from and to others.", epilog=EXIT_CODES
)
frame.add_typer(app, name="convert")
for _name, _command in (
    ("reshard", reshard),
    ("to-stock", to_stock),
    ("from-stock", from_stock),
    ("from-torch-dist", from_torch_dist),
):
    app.command(_name, epilog=EXIT_CODES)(_command)


class Precision(StrEnum):
    """Names of `--torch-dtype`."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


HfModel = Annotated[str, typer.Option(help="Hugging Face model: a directory, or its name on the Hub.")]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")]
Cp = Annotated[int, typer.Option(min=1, help="Context-parallel size.")]
Ep = Annotated[int, typer.Option(min=1, help="Expert-parallel size.")]
Etp = Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size of experts; by default Bridge's choice.")]
TorchDtype = Annotated[Precision, typer.Option(help="Precision of the model.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")]
CkptFormat = Annotated[str, typer.Option(help="Format of the checkpoint.")]


@app.command("import", epilog=EXIT_CODES)
def import_(
    hf_model: HfModel,
    megatron_path: Annotated[str, typer.Option(help="Where the checkpoint goes: a new directory or URL.")],
    tp: Tp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    torch_dtype: TorchDtype = Precision.bfloat16,
    trust_remote_code: Trust = False,
    ckpt_format: CkptFormat = FORMAT_NAME,
    not_strict: Annotated[
        bool, typer.Option("--not-strict", help="Leave out tensors of the files that the model has no place for.")
    ] = False,
    no_low_memory_save: Annotated[
        bool, typer.Option("--no-low-memory-save", help="Has no effect: this format never copies the model.")
    ] = False,
) -> None:
    """Make a checkpoint from a Hugging Face model.

    It loads in every layout; the sizes are those of this job. With more than one rank, start it with torchrun.
    """
    from mbridge_fsdp_ckpt.io.store import as_path

    with _one_voice():
        _check_format(ckpt_format, (FORMAT_NAME,))
        _check_sizes(tp, cp, ep, etp)
        model, target = _hugging_face(hf_model), as_path(megatron_path)
        _check_is_new(target)
        be_quiet()
        from mbridge_fsdp_ckpt.tools.convert.hugging_face import import_model

        source = _source(model, torch_dtype, trust_remote_code)
        unread = import_model(source, _sizes(tp, cp, ep, etp), target, strict=not not_strict)
    if _is_first():
        say(f"Imported {hf_model} to {megatron_path}.")
        _say_left_out(unread, "without a place in the model")


@app.command(epilog=EXIT_CODES)
def export(
    hf_model: HfModel,
    megatron_path: Annotated[str, typer.Option(help="An iteration directory, or the root of a run's checkpoints.")],
    hf_path: Annotated[str, typer.Option(help="Where the Hugging Face model goes: a new directory.")],
    tp: Tp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    torch_dtype: TorchDtype = Precision.bfloat16,
    trust_remote_code: Trust = False,
    ckpt_format: CkptFormat = FORMAT_NAME,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Draw no progress bar.")] = False,
    not_strict: Annotated[
        bool,
        typer.Option("--not-strict", help="Accept tensors that are missing, or that the Hugging Face model has not."),
    ] = False,
    distributed_save: Annotated[
        bool, typer.Option("--distributed-save", help="Let every rank write its own files.")
    ] = False,
    save_every_n_ranks: Annotated[
        int, typer.Option(min=1, help="Only every n-th rank writes files, with --distributed-save.")
    ] = 1,
) -> None:
    """Make a Hugging Face model from a checkpoint.

    --hf-model is the one it was made from: configuration, tokenizer and the names of tensors come from there.
    A checkpoint that stock fsdp_dtensor wrote is read, too.
    """
    with _one_voice(), inside(Frontend.EXPORT):
        _check_format(ckpt_format, (FORMAT_NAME, STOCK_FORMAT))
        _check_sizes(tp, cp, ep, etp)
        model, target = _hugging_face(hf_model), _on_a_file_system(hf_path)
        _check_is_new(target)
        directory = _checkpoint(megatron_path)
        be_quiet()
        from mbridge_fsdp_ckpt.tools.convert.hugging_face import Files, export_model

        files = Files(not not_strict, not no_progress, distributed_save, save_every_n_ranks)
        source = _source(model, torch_dtype, trust_remote_code)
        absent = export_model(source, _sizes(tp, cp, ep, etp), directory, str(target), files)
    if _is_first():
        say(f"Exported {directory} to {hf_path}.")
        _say_left_out(absent, "absent in the checkpoint")


def _say_left_out(names: list[str], why: str) -> None:
    if names:
        say(f"Note: {len(names)} left out, {why}: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}.")


@contextmanager
def _one_voice() -> Iterator[None]:
    """All ranks fail alike: the first of each host says why, and torchrun ends the others.

    One that is not ended has failed alone, and speaks for itself.
    """
    try:
        yield
    except CheckpointError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(GRACE_S)
        fail(error, 2 if isinstance(error, _USAGE) else 1)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _check_format(name: str, known: tuple[str, ...]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1, 0.5)
    remedy = _ELSEWHERE.get(name) or (f"Did you mean {near[0]!r}?" if near else f"Leave it out: {known[0]} is meant.")
    raise UnknownFormatError(expected=f"--ckpt-format {' or '.join(known)}", found=repr(name), remedy=remedy)


def _check_sizes(tp: int, cp: int, ep: int, etp: int | None) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for given, product in ((f"--tp {tp} --cp {cp}", tp * cp), (f"--ep {ep} --etp {etp or 1}", ep * (etp or 1))):
        if world % product:
            raise ConfigurationError(
                expected=f"a number of ranks that {given} divides",
                found=str(world),
                remedy=f"Start it with: torchrun --nproc-per-node {tp * cp * ep * (etp or 1)} -m mbridge_fsdp_ckpt ...",
            )


def _hugging_face(place: str) -> str:
    from mbridge_fsdp_ckpt.io.store import called

    called(place)  # an empty one would be the working directory
    directory = Path(place).expanduser()
    if (directory / "config.json").is_file():
        return str(directory)
    is_path = directory.exists() or directory.is_absolute() or place.startswith((".", "~")) or place.count("/") > 1
    if not is_path:
        return place
    raise ConfigurationError(
        expected="a directory with a Hugging Face model's config.json",
        found="a directory without it"
        if directory.is_dir()
        else "a file"
        if directory.exists()
        else "no such directory",
        remedy="Give the model's directory, or its name on the Hub, as --hf-model.",
        key=place,
    )


def _on_a_file_system(place: str) -> Path:
    from mbridge_fsdp_ckpt.io.store import as_path, store_of

    target = store_of(as_path(str(Path(place).expanduser()) if place.startswith("~") else place)).local
    if target is None:
        raise ConfigurationError(
            expected="a directory on a file system as --hf-path",
            found=place,
            remedy="Megatron-Bridge writes Hugging Face files there alone: export to a directory, and copy that.",
        )
    return target


def _check_is_new(target: AnyPath) -> None:
    """Nothing is there, or what a conversion that was killed left."""
    left = [path for path in target.iterdir() if not path.name.startswith(STAGING)] if target.is_dir() else []
    if left or (target.exists() and not target.is_dir()):
        raise ConfigurationError(
            expected="a directory that is new, or empty",
            found="files in it" if target.is_dir() else "a file",
            remedy="Nothing was changed. Choose another place, or remove what is there.",
            key=str(target),
        )


def _checkpoint(place: str) -> AnyPath:
    """The iteration directory, with metadata that can be read."""
    from mbridge_fsdp_ckpt.opening import open_checkpoint

    directory = checkpoint_at(place)
    open_checkpoint(directory)
    return directory


def _source(model: str, precision: Precision, trust: bool) -> Source:
    import torch

    from mbridge_fsdp_ckpt.tools.convert.hugging_face import Source

    dtype: torch.dtype = getattr(torch, precision.value)
    return Source(model, dtype, trust)


def _sizes(tp: int, cp: int, ep: int, etp: int | None) -> Sizes:
    from mbridge_fsdp_ckpt.tools.convert.hugging_face import Sizes

    return Sizes(tp, cp, ep, etp)
