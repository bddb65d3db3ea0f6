"""The lines of a batch: requests, and their answers.

A line is an object with "custom_id" (a string, unique in the file), "method" ("POST"), "url" and "body". Blank lines
are skipped.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, RequestBodyError
from forerun.server.protocol.errors import error_response
from forerun.server.protocol.requests import CHAT_URL, COMPLETIONS_URL, CompletionRequest, parse_body
from forerun.utils.files import Closing, atomic_file, digest, file_digest
from forerun.utils.json_file import Fields
from forerun.utils.model_names import names_of, short_name

_FIELDS = ("custom_id", "method", "url", "body")
_LINE = {"place": "The line", "remedy": "Give an object with custom_id, method, url and body."}
_REMEDY = "Give a file with a request on each line, as OpenAI's batch API takes it."


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line.

    Attributes:
        index: among the lines that are not blank.
        custom_id: None if the line has none.
        request: None if it is invalid.
        error: the reason why it is invalid.
    """

    index: int
    custom_id: str | None
    request: CompletionRequest | None
    error: RequestBodyError | None = None


class BatchFile(Closing):
    """A file of requests: checked once, then read line by line while answers are computed.

    Attributes:
        digest: of its content.
        num_lines: lines that are not blank.
        num_broken: of these, lines without a readable custom_id, whose answers could not be assigned.

    Raises:
        ConfigError: it cannot be read, has no line, or two with the same custom_id.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_broken = 0
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(f"{path} is no regular file, but it must be read twice. {_REMEDY}")
            self._file = path.open("rb")
            try:
                self.digest = file_digest(self._file)
                self.num_lines = self._check_ids()
            except BaseException:
                self.close()
                raise
        except OSError as failure:
            raise ConfigError(f"{path} cannot be read: {failure.strerror}. {_REMEDY}") from None

    def close(self) -> None:
        self._file.close()

    def requests(self, selected: Callable[[int], bool], model: str, context_length: int) -> Iterator[BatchLine]:
        """Yield the lines whose index is selected, read lazily.

        Args:
            model: its name in bodies.
            context_length: of the target.
        """
        for index, _, line in self._lines():
            if selected(index):
                yield parse_line(index, line, model, context_length)

    def raw(self) -> Iterator[bytes]:
        """Yield all lines, blank ones too."""
        self._file.seek(0)
        yield from self._file

    def broken(self) -> Iterator[bytes]:
        """Yield the lines that `num_broken` counts."""
        for _, _, line in self._lines():
            if _custom_id(line) is None:
                yield line

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (index, number of the line from 1 on, content)."""
        index = 0
        for number, line in enumerate(self.raw(), 1):
            if line.strip():
                yield index, number, line
                index += 1

    def _check_ids(self) -> int:
        """Count the lines. Raises ConfigError if there is none, or two have the same id."""
        seen: set[int] = set()  # of hashes, since a file may have millions of ids
        count = 0
        for index, number, line in self._lines():
            count = index + 1
            custom_id = _custom_id(line)
            if custom_id is None:
                self.num_broken += 1
                continue
            key = int(digest(custom_id.encode())[:16], 16)
            if key in seen:
                self._refuse_twice(custom_id, number)
            seen.add(key)
        if not count:
            raise ConfigError(f"{self._path} holds no line. {_REMEDY}")
        return count

    def _refuse_twice(self, custom_id: str, last: int) -> None:
        at = self._file.tell()
        for _, number, line in self._lines():
            if number < last and _custom_id(line) == custom_id:
                raise ConfigError(
                    f"{self._path}: lines {number} and {last} have the same custom_id. "
                    "Answers are told apart by it: give each line one of its own."
                )
        self._file.seek(at)  # two ids with one hash


def answer_line(asked: BatchLine, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of the answers' file for a request."""
    name = answer_name(asked)
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": asked.custom_id, "response": response, "error": None}


def answer_name(asked: BatchLine) -> str:
    """Return the base of the answer's ids: the same for the same line, so that the same file has the same answers."""
    return digest(f"{asked.index} {asked.custom_id}".encode())[:24]


def refusal_line(asked: BatchLine, error: BaseException) -> dict[str, Any]:
    """Return the answer to a line that failed or is invalid."""
    return answer_line(asked, *error_response(error))


def _custom_id(line: bytes) -> str | None:
    """Return the line's custom_id; None without a readable one."""
    try:
        return Fields.parse(line, "", RequestBodyError).string("custom_id")
    except RequestBodyError:
        return None


def parse_line(index: int, line: bytes, model: str, context_length: int) -> BatchLine:
    """Parse a line that is not blank; an invalid one has an error."""
    custom_id = _custom_id(line)
    try:
        return BatchLine(index, custom_id, _request(line, model, context_length))
    except RequestBodyError as error:
        return BatchLine(index, custom_id, None, error)


def _request(line: bytes, model: str, context_length: int) -> CompletionRequest:
    """Parse the request of a line. Raises RequestBodyError."""
    values = Fields.parse(line, error=RequestBodyError, private=True, **_LINE).values
    odd = sorted(set(values) - set(_FIELDS))
    if odd:
        raise RequestBodyError(f"The line has fields beside {', '.join(_FIELDS)}. Leave them out.")

    def read(name: str, *choices: str) -> str:
        fields = Fields(values=values, error=partial(RequestBodyError, param=name), private=True, **_LINE)
        return fields.string(name, choices=choices)

    read("custom_id")
    read("method", "POST")
    url = read("url", CHAT_URL, COMPLETIONS_URL)
    request = parse_body(url, values.get("body"), context_length)
    if request.stream:
        raise RequestBodyError("stream is true, but a batch has no streams. Leave it out.", param="stream")
    if request.model and request.model not in names_of(model, model) and short_name(request.model) != model:
        raise RequestBodyError(
            f"The model of the request is not the one that runs, {model!r}. Correct it, leave it out, or run the batch "
            "with --served-model-name and the name that the requests use.",
            param="model",
            code="model_not_found",
            status=404,
        )
    return request


def broken_path(out: Path) -> Path:
    """Return the path of the file beside OUT with the lines that have no readable custom_id."""
    return out.with_name(f"{out.name}.broken")


def write_broken(requests: BatchFile, out: Path) -> Path | None:
    """Write the lines without a readable custom_id to a file and return its path; None if there are none.

    Raises:
        ConfigError: it cannot be written.
    """
    path = broken_path(out)
    if not requests.num_broken:
        path.unlink(missing_ok=True)
        return None
    with atomic_file(path, ConfigError) as file:
        for line in requests.broken():
            file.write(line if line.endswith(b"\n") else line + b"\n")
    return path
