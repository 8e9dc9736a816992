"""JSON files read piece by piece, with errors that name the line or the byte."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from ..trace import TraceError


def json_lines(path: Path) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) of each line that is not blank. Raises TraceError naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                torn = "" if line.endswith(b"\n") else "; the file ends here, perhaps torn"
                raise TraceError(f"{path}: line {number}: not JSON: {error}{torn}") from error
            if not isinstance(record, dict):
                raise TraceError(f"{path}: line {number}: expected an object, got {type(record).__name__}")
            yield number, record


def json_objects(path: Path, block: int = 1 << 20) -> Iterator[tuple[int, dict]]:
    """(byte offset, object) of each object of a file that holds one, an array of them, or one after the other.

    Only the object at hand and `block` bytes are in memory. Raises TraceError naming the byte.
    """
    with path.open("rb") as file:
        text = _Text(path, file, block)
        if text.peek() != "[":
            while text.peek():
                yield text.take_object()
            return
        text.advance(1)
        if text.peek() == "]":
            text.advance(1)
        else:
            mark = ","
            while mark == ",":
                yield text.take_object()
                mark = text.peek()
                if mark not in (",", "]") or not mark:
                    text.fail(
                        f"expected ',' or ']' after an object, got {mark!r}" if mark else "the array does not end"
                    )
                text.advance(1)
        if text.peek():
            text.fail(f"text after the end of the array: {text.peek()!r}")


class _Text:
    """A text file of which a window is in memory; `at` is the place in the window, `offset` the same in bytes."""

    def __init__(self, path, file, block):
        self.path, self.file, self.block = path, file, block
        self.window, self.at, self.offset = "", 0, 0
        self.read, self.ended = 0, False
        self.utf8 = codecs.getincrementaldecoder("utf-8")()

    def fail(self, problem, chars=0):
        at = self.offset + len(self.window[self.at : self.at + chars].encode())
        torn = f"; the file has {self.read} bytes, perhaps torn" if self.ended else ""
        raise TraceError(f"{self.path}: byte {at}: {problem}{torn}")

    def more(self, size) -> bool:
        """Reads up to `size` more bytes; False at the end of the file."""
        if self.ended:
            return False
        data = self.file.read(size)
        self.ended = not data
        pending = len(self.utf8.getstate()[0])
        try:
            text = self.utf8.decode(data, self.ended)
        except UnicodeDecodeError as error:
            raise TraceError(f"{self.path}: byte {self.read - pending + error.start}: not UTF-8") from error
        self.read += len(data)
        self.window, self.at = self.window[self.at :] + text, 0
        return not self.ended

    def advance(self, chars):
        self.offset += len(self.window[self.at : self.at + chars].encode())
        self.at += chars

    def peek(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            while self.at < len(self.window):
                if self.window[self.at] not in " \t\r\n\ufeff":
                    return self.window[self.at]
                self.advance(1)
            if not self.more(self.block):
                return ""

    def take_object(self):
        """(offset, object); raises TraceError."""
        self.peek()
        size = self.block
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.window, self.at)
                break
            except json.JSONDecodeError as error:
                reached = error.pos - self.at  # more() moves the window
                if not self.more(size):
                    self.fail(f"not JSON: {error.msg}", reached)
                size *= 2  # so that an object larger than the block is parsed a few times only
        if not isinstance(value, dict):
            self.fail(f"expected an object, got {self.window[self.at : self.at + 20]!r}")
        offset = self.offset
        self.advance(end - self.at)
        return offset, value
