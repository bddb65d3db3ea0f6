"""`forerun drafters`."""

import json

from forerun.drafters import DRAFTERS

from .conftest import Invoke


def test_every_drafter_is_listed_with_its_options(invoke: Invoke) -> None:
    listed = json.loads(invoke("drafters", "--json").stdout)
    assert list(listed) == list(DRAFTERS)
    assert listed["suffix"]["kind"] == "lookup" and "min_match" in listed["suffix"]["options"]
    text = invoke("drafters").stdout
    assert all(name in text for name in DRAFTERS)
