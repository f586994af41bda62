# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a save or load took, as scalars in the loggers of a Bridge run: TensorBoard, W&B, MLflow, Comet.

Bridge gives the last rank its loggers, and the others none.  A logger is no reason to end a run: where one fails, that
is a warning, as Bridge gives them: it drops what is logged at that level.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from mbridge_fsdp_ckpt.errors import brief
from mbridge_fsdp_ckpt.phases import Spent, rate

Numbers = Mapping[str, float]


class Moment(NamedTuple):
    """Iterations: of the checkpoint, and the present one, which is later after an asynchronous save."""

    saved: int
    now: int


def numbers_of(what: Literal["save", "load"], spent: Spent) -> dict[str, float]:
    """Names and values: checkpoint/save_seconds, checkpoint/save_write_seconds and so on."""
    return {
        f"checkpoint/{what}_seconds": spent.duration,
        f"checkpoint/{what}_bytes": float(spent.bytes_of_all),
        f"checkpoint/{what}_gb_per_s": rate(spent),
        **{f"checkpoint/{what}_{phase}_seconds": seconds for phase, seconds in spent.seconds.items()},
    }


def log_scalars(what: Literal["save", "load"], spent: Spent, state: Any, step: int) -> None:
    """Write them, on the rank that has the loggers.

    Args:
        what: What was done.
        spent: What it cost this rank.
        state: Bridge's `GlobalState`.
        step: The iteration of the checkpoint.
    """
    if getattr(state.cfg, "logger", None) is None:
        return
    numbers, moment = numbers_of(what, spent), Moment(step, state.train_state.step)
    for name, write in _WRITERS.items():
        try:
            logger = getattr(state, name, None)  # made when it is first asked for; older Bridge has not all
            if logger is not None:
                write(logger, numbers, moment)
        except Exception as error:
            text = f"{name} does not take what the {what} took, and the run goes on: {brief(error)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _to_tensorboard(logger: Any, numbers: Numbers, moment: Moment) -> None:
    for name, value in numbers.items():
        logger.add_scalar(name, value, moment.saved)
    logger.flush()  # Bridge does for the last time before the last asynchronous save has ended


def _to_wandb(logger: Any, numbers: Numbers, moment: Moment) -> None:
    logger.log(dict(numbers), moment.now)  # it drops what comes for a step that has passed


def _to_metrics(logger: Any, numbers: Numbers, moment: Moment) -> None:
    logger.log_metrics(dict(numbers), step=moment.saved)


_WRITERS: dict[str, Callable[[Any, Numbers, Moment], None]] = {
    "tensorboard_logger": _to_tensorboard,
    "wandb_logger": _to_wandb,
    "mlflow_logger": _to_metrics,
    "comet_logger": _to_metrics,
}
"""By the name that Bridge's state has for a logger."""
