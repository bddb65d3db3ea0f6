"""Responses that are kept for later requests: in memory, and the last used ones only."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence as Seq
from threading import RLock
from typing import Any, NamedTuple

from forerun.errors import RequestBodyError


class KeptResponse(NamedTuple):
    """A response with its conversation.

    Attributes:
        body: of the answer, as JSON.
        input: items of all turns until then.
        output: items of the answer.
        item_bytes: of the items as JSON, though the responses of a conversation share them.
    """

    body: bytes = b""
    input: Seq[dict[str, Any]] = ()
    output: Seq[dict[str, Any]] = ()
    item_bytes: int = 0

    @property
    def size(self) -> int:
        """Return how many bytes it counts for."""
        return len(self.body) + self.item_bytes

    def listed(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the input. Raises RequestBodyError.

        query: `order`, `limit` and `after`, as OpenAI has them.
        """
        order = query.get("order", "desc")
        limit = query.get("limit", "20")
        after = query.get("after")
        items = list(map(_shown, range(len(self.input)), self.input))[:: 1 if order == "asc" else -1]
        ids = [None, *(item["id"] for item in items)]
        valid = {"order": order in ("asc", "desc"), "limit": limit in map(str, range(1, 101)), "after": after in ids}
        if wrong := next((name for name, is_valid in valid.items() if not is_valid), None):
            message = f"{wrong} is wrong: order is asc or desc, limit in 1..100, after the id of an item. Correct it."
            raise RequestBodyError(message, wrong)
        start = ids.index(after)
        page = items[start : start + int(limit)]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": start + len(page) < len(items)}


def _shown(place: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item with an id, and its text as a part, as OpenAI shows items."""
    text = item.get("content")
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    parts = {"content": [{"type": kind, "text": text}]} if isinstance(text, str) else {}
    return {"id": f"item_{place}", "type": "message", "status": "completed", **item, **parts}


class KeptResponses:
    """The responses of one tenant. What was used least recently is dropped first.

    Args:
        size: bytes that are kept at most.
        most: responses that are kept at most.
    """

    def __init__(self, size: int, most: int) -> None:
        self._left = size
        self._most = most
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._lock = RLock()  # answers end in several threads

    def keep(self, items: Seq[dict[str, Any]], item_bytes: int, answer: dict[str, Any]) -> None:
        """Keep an answer.

        Args:
            items: of the conversation until then.
            item_bytes: of these as JSON.
        """
        body = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        made = KeptResponse(body, items, answer["output"], item_bytes + len(json.dumps(answer["output"])))
        with self._lock:
            self._kept[answer["id"]] = made
            self._left -= made.size
            while self._left < 0 or len(self._kept) > self._most:
                self._left += self._kept.popitem(last=False)[1].size

    def find(self, name: str, param: str | None = None) -> KeptResponse:
        """Return a response. Raises RequestBodyError if it is not kept. param: the field that names it."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        raise RequestBodyError(
            f"Response {name[:80]!a} is not found: it was not stored, or is not kept any more. Send the whole "
            "conversation as input.",
            param,
            code="previous_response_not_found" if param else None,
            status=404,
        )

    def remove(self, name: str) -> None:
        """Forget a response. Raises RequestBodyError if it is not kept."""
        with self._lock:
            self._left += self.find(name).size
            del self._kept[name]
