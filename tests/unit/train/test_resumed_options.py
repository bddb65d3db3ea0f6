from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.train.checkpoint import pin


def test_a_run_is_only_continued_with_its_own_options(tmp_path: Path) -> None:
    pin(tmp_path, {"seed": 1, "lengths": (1, 2)})
    pin(tmp_path, {"seed": 1, "lengths": (1, 2)})
    with pytest.raises(ConfigError, match="seed was 1 and is 2"):
        pin(tmp_path, {"seed": 2, "lengths": (1, 2)})
