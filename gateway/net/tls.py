"""The server's TLS certificate: read at the start, and again when it is renewed."""

from __future__ import annotations

import ssl

from ..errors import CertificateUnusable
from ..settings import Network


def server_context(network: Network) -> ssl.SSLContext | None:
    """The TLS context of the listening server, with the certificate loaded; None if the settings name no
    certificate. Raises ``CertificateUnusable`` if the certificate or its key cannot be read or used."""
    if network.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load(context, network)
    return context


def renew(context: ssl.SSLContext, network: Network) -> None:
    """Load the certificate files again into ``context``. New connections use them; open ones go on.

    Raises ``CertificateUnusable``; then nothing has changed.
    """
    server_context(network)
    _load(context, network)


def _load(context: ssl.SSLContext, network: Network) -> None:
    certificate, key = network.certificate, network.private_key
    assert certificate is not None, "there is TLS"
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise CertificateUnusable(f"{option} {path}: {error.strerror}") from None
    try:  # an empty password, or OpenSSL would ask the terminal for it
        context.load_cert_chain(certificate, key, lambda: network.private_key_password or "")
    except (OSError, ValueError) as error:
        told = getattr(error, "reason", None) or error
        raise CertificateUnusable(
            f"--ssl-certfile {certificate} and its key {key or certificate} are no usable pair: {told}"
        ) from None
