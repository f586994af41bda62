"""Expert numbers in names: a rank numbers its experts from zero, a checkpoint numbers all of them.

EP rank 1 of 2, four experts:   experts.local_experts.0.linear_fc1.weight  ->  experts.local_experts.2.linear_fc1.weight
                                experts.linear_fc1.weight1                 ->  experts.linear_fc1.weight3
"""

from __future__ import annotations

import re

_SEQUENTIAL = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)")
_GROUPED = re.compile(r"(?<=\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)$")


def global_expert_name(name: str, first_expert: int) -> str:
    """A parameter name with its expert number counted over all expert-parallel ranks.

    Args:
        name: Dotted name on this rank.
        first_expert: Number of the first expert that lives on this rank.
    """
    name = _SEQUENTIAL.sub(lambda match: str(int(match[0]) + first_expert), name)
    return _GROUPED.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}", name)


def is_expert_name(name: str) -> bool:
    """Whether Megatron-FSDP shards this parameter over the expert mesh.

    The rule is Megatron-FSDP's own (`_get_parameter_groups`: ".experts." in the name); shared experts are dense.
    """
    return ".experts." in f".{name}"
