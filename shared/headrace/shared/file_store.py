"""Where the contents of files lie: in the broker, or in a bucket."""

from __future__ import annotations

from collections.abc import Callable

from headrace.shared.broker import Broker
from headrace.shared.errors import SettingsError
from headrace.shared.files import BrokerFiles, FileStore
from headrace.shared.settings import FilesSettings


def store_of(settings: FilesSettings) -> Callable[[Broker], FileStore]:
    """Return what gives the store, once there is a broker. Raises: SettingsError when there can be none."""
    if not settings.s3_bucket:
        return BrokerFiles
    try:
        from headrace.shared.files_s3 import S3Files  # it is an extra
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise SettingsError(
            f"files.s3_bucket is {settings.s3_bucket!r}, and needs the package obstore: "
            'pip install "headrace[s3]"'
        ) from None
    store = S3Files(settings)
    return lambda broker: store
