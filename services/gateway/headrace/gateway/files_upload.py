"""An upload as it arrives: `multipart/form-data`, its file handed on piece by piece, its fields kept."""

from __future__ import annotations

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.gateway.errors import InvalidBodyError
from headrace.shared.errors import BadRequestError, PayloadTooLargeError
from headrace.shared.files import FileWriter

FILE_FIELD = "file"
MAX_FIELDS = 32
MAX_FIELD_BYTES = 4096
FORM_BYTES = 64 * 2**10
"""What the form may have beside the file: borders, headers, fields."""


class UploadForm:
    """What has come of one form."""

    def __init__(self, content_type: str) -> None:
        """Raises: InvalidBodyError when it is no form with a file."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidBodyError(
                "send the file as multipart/form-data with its boundary in Content-Type, "
                f"got {content_type[:200]!r}"
            )
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise InvalidBodyError(f"the multipart form can't be read: {error}") from None
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  #: None: no file has come yet
        self._is_whole = False
        self._name: bytes = b""  # of the header that is being read
        self._value: bytes = b""
        self._disposition: bytes = b""
        self._field: str | None = None  # None: this part is the file
        self._held = bytearray()  # of the field
        self._pieces: list[bytes] = []  # of the file

    def feed(self, data: bytes) -> list[bytes]:
        """Return what `data` has of the file. Raises: InvalidBodyError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidBodyError(f"the multipart form can't be read: {error}") from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def check_whole(self) -> None:
        """Raises: InvalidBodyError when the form ended too early, or had no file."""
        if not self._is_whole:
            raise InvalidBodyError("the multipart form ends before its last boundary")
        if self.filename is None:
            raise BadRequestError("'file' is a required property", param=FILE_FIELD)

    def _begin(self) -> None:
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise InvalidBodyError("a part of the multipart form has no name")
        if b"filename" not in options:
            if len(self.fields) >= MAX_FIELDS:
                raise InvalidBodyError(f"the form has more than {MAX_FIELDS} fields")
            self._field = name
            return
        if name != FILE_FIELD or self.filename is not None:
            raise BadRequestError(
                f"the form must have one file, in {FILE_FIELD!r}; got another one in {name[:64]!r}",
                param=name[:64],
            )
        self._field = None
        self.filename = options[b"filename"].decode(errors="replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._pieces.append(data[start:end])
            return
        self._held += data[start:end]
        if len(self._held) > MAX_FIELD_BYTES:
            raise InvalidBodyError(
                f"field {self._field[:64]!r} has more than {MAX_FIELD_BYTES:,} bytes; "
                "a file needs a filename in its Content-Disposition"
            )

    def _end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._held.decode(errors="replace")
            self._held.clear()
        self._field = ""

    def _finish(self) -> None:
        self._is_whole = True


def check_length(content_length: str | None, max_bytes: int) -> None:
    """Raises: PayloadTooLargeError when the client says itself that it is too much."""
    if content_length is not None and content_length.isdecimal():
        if int(content_length) > max_bytes + FORM_BYTES:
            raise _too_large(int(content_length), max_bytes)


async def receive(
    form: UploadForm, chunks: AsyncIterator[bytes], writer: FileWriter, *, max_bytes: int
) -> None:
    """Read a form to its end, and write its file.

    Raises: InvalidBodyError, PayloadTooLargeError as soon as it is seen; what `chunks` and `writer` raise.
    """
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        for piece in form.feed(chunk):
            if writer.num_bytes + len(piece) > max_bytes:
                raise _too_large(writer.num_bytes + len(piece), max_bytes)
            await writer.write(piece)
        if num_bytes - writer.num_bytes > FORM_BYTES:
            raise InvalidBodyError(f"the form has more than {FORM_BYTES:,} bytes beside its file")
    form.check_whole()


def _too_large(num_bytes: int, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the file has {num_bytes:,} bytes or more; at most {max_bytes:,} are allowed "
        "(setting gateway.max_file_bytes)",
        param=FILE_FIELD,
    )
