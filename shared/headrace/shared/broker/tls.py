"""TLS to the broker, always with its certificate and its name checked."""

from __future__ import annotations

import ssl

from nats import errors
from nats.aio.client import Client

from headrace.shared.errors import SettingsError
from headrace.shared.settings import BrokerSettings

SCHEME = "tls://"


class UntrustedError(errors.Error):
    """The broker does not prove who it is: no TLS, or a certificate that is not good for it."""


def context_of(settings: BrokerSettings) -> ssl.SSLContext | None:
    """Return how the broker is checked, and how this process shows who it is. None: no TLS is asked for.

    Raises: SettingsError naming the file that is wrong.
    """
    ca, cert, key = settings.tls_ca, settings.tls_cert, settings.tls_key
    if bool(cert) != bool(key):
        raise SettingsError("broker.tls_cert and broker.tls_key go together: set both, or neither")
    if not (ca or cert or any(url.strip().startswith(SCHEME) for url in settings.url.split(","))):
        return None
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise SettingsError(f"broker.tls_ca {ca}: {_text(error)}") from None
    if cert:
        try:
            context.load_cert_chain(cert, key)
        except OSError as error:
            raise SettingsError(
                f"broker.tls_cert {cert}, broker.tls_key {key}: {_text(error)}"
            ) from None
    return context


class TlsClient(Client):
    """nats-py's client, which sends no password over a connection that was to be TLS and is not.

    nats-py uses TLS only where the broker's greeting asks for it: whoever changes the greeting on its way would
    read everything.
    """

    def _connect_command(self) -> bytes:
        if self.options.get("tls") and not self._server_info.get("tls_required"):
            raise UntrustedError("the broker offers no TLS, and broker.tls_* or tls:// asks for it")
        return super()._connect_command()


def trouble_of(error: Exception) -> str | None:
    """Return why the broker is not to be trusted, where `error` says so: another attempt won't mend it."""
    if isinstance(error, UntrustedError):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    return None


def _text(error: OSError) -> str:
    return error.strerror or str(error)
