# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a framework refuses says the name of the format that the user gave."""

from __future__ import annotations

import pytest

from mbridge_fsdp_ckpt.integrations.common.own_name import naming_format_in_errors


def test_stocks_name_is_replaced_and_nothing_like_it() -> None:
    with pytest.raises(ValueError, match="ckpt_format") as caught, naming_format_in_errors("fsdp_dtensor_safe"):
        raise ValueError("ckpt_format='fsdp_dtensor' is not my_fsdp_dtensor_too", 3)
    assert caught.value.args == ("ckpt_format='fsdp_dtensor_safe' is not my_fsdp_dtensor_too", 3)
