"""The contents of files in a store that speaks S3, one object a part. Needs the package `obstore` (`headrace[s3]`).

An object is four bytes with the length of its headers, the headers as JSON, the data: metadata of S3 may have 2 KB
alone. Credentials are those of the environment, as every AWS tool reads them.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from headrace.shared.errors import BrokerError, ConflictError, FileGoneError, SettingsError
from headrace.shared.files import Part
from headrace.shared.settings import FilesSettings
from headrace.shared.subjects import check_token

if TYPE_CHECKING:
    from obstore.store import S3Config

PART_BYTES = 4 * 2**20  # each part costs a request; a reader holds one in memory
TIMEOUT_S = 30
RETRY_S = 20

_LENGTH_BYTES = 4
_NONCE = "Hr-Nonce"


class S3Files:
    """A `FileStore` in one bucket."""

    part_bytes = PART_BYTES
    max_part_bytes = 64 * PART_BYTES

    def __init__(self, settings: FilesSettings) -> None:
        """Raises: SettingsError when the bucket can't be used as the settings say."""
        self._prefix = settings.s3_prefix.strip("/")
        self._bucket = settings.s3_bucket
        config: S3Config = {}
        if settings.s3_endpoint:
            config["endpoint"] = settings.s3_endpoint
        if settings.s3_region:
            config["region"] = settings.s3_region
        try:
            self._store = S3Store(
                settings.s3_bucket,
                config=config,
                client_options={
                    "allow_http": settings.s3_endpoint.startswith("http://"),
                    "timeout": f"{TIMEOUT_S}s",
                },
                retry_config={"retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except BaseError as error:
            raise SettingsError(f"files.s3_bucket {settings.s3_bucket!r}: {_text(error)}") from None

    async def append_part(
        self,
        tenant: str,
        file_id: str,
        number: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the next part, as `FileStore` says."""
        path = self._path(tenant, file_id, number)
        head = msgspec.json.encode({**(headers or {}), _NONCE: uuid.uuid4().hex})
        body = len(head).to_bytes(_LENGTH_BYTES, "big") + head + data
        try:
            await obstore.put_async(self._store, path, body, mode="create", use_multipart=False)
        except AlreadyExistsError:
            # Or an earlier try of this call was stored, and its answer lost.
            if await self._get(path) != body:
                raise ConflictError(
                    f"file {file_id} has a part {number}: somebody else writes it"
                ) from None
        except (BaseError, FileNotFoundError) as error:  # what is not found is the bucket
            raise self._error(error) from None

    async def parts(
        self, tenant: str, file_id: str, *, start: int = 0, num_parts: int | None = None
    ) -> AsyncGenerator[Part]:
        """Yield the parts, as `FileStore` says."""
        number = start
        while num_parts is None or number < num_parts:
            body = await self._get(self._path(tenant, file_id, number))
            if body is None:
                if num_parts is None:
                    return
                raise FileGoneError(f"file {file_id}: part {number} is not there, it was deleted")
            length = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
            headers = msgspec.json.decode(body[_LENGTH_BYTES:length], type=dict[str, str])
            yield Part(number, body[length:], headers)
            number += 1

    async def delete(self, tenant: str, file_id: str) -> None:
        """Remove every part; what is not there is no error."""
        folder = self._path(tenant, file_id)
        try:
            async for page in obstore.list(self._store, prefix=folder):
                await obstore.delete_async(self._store, [found["path"] for found in page])
        except (BaseError, FileNotFoundError) as error:  # what is not found is the bucket
            raise self._error(error) from None

    async def _get(self, path: str) -> bytes | None:
        try:
            found = await obstore.get_async(self._store, path)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise self._error(error) from None

    def _path(self, tenant: str, file_id: str, number: int | None = None) -> str:
        parts = [check_token(tenant, "tenant"), check_token(file_id, "file_id")]
        if self._prefix:
            parts.insert(0, self._prefix)
        if number is not None:
            parts.append(f"{number:08}")
        return "/".join(parts)

    def _error(self, error: Exception) -> BrokerError:
        return BrokerError(f"bucket {self._bucket}: {_text(error)}")


def _text(error: Exception) -> str:
    return str(error).partition("\n")[0]
