"""Checks and makes what a server has in addition to its engine: access, certificate, ports, sources of images.

It needs neither gRPC nor the engine's libraries, so that a start can fail before they are imported.
"""

from __future__ import annotations

from pathlib import Path

from kestrel_grpc.access.access import Access, OpenAccess, TokenAccess
from kestrel_grpc.access.limits import Limits, TokenLimits
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_grpc.images.image_uris import ImageSource, NoRemoteImages, RemoteImagesUnavailable
from kestrel_grpc.process.free_ports import require_free_port, require_free_socket


def access_of(config: ServerConfig, limits: Limits) -> Access:
    """Returns who may call. Raises `TokenFileError`."""
    return OpenAccess() if config.tokens is None else TokenAccess(Path(config.tokens), limits)


def image_source(config: ServerConfig) -> ImageSource:
    """Returns the source of images that the configuration allows. Raises `RemoteImagesUnavailable`."""
    if config.image_hosts is None:
        return NoRemoteImages()
    try:
        # Imported here, since its libraries are optional.
        from kestrel_grpc.images.remote_images import RemoteImages
    except ImportError as error:
        raise RemoteImagesUnavailable("--image-hosts needs `pip install 'kestrel-grpc[remote]'`") from error
    max_bytes = config.engine.max_image_bytes
    return RemoteImages(config.image_hosts, max_bytes=max_bytes, timeout_s=config.image_fetch_timeout)


def certificate_of(config: ServerConfig) -> CertificateFiles | None:
    """Returns the files of the certificate, None without one. Raises `CertificateError`."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
    return CertificateFiles(Path(config.tls_certificate), Path(config.tls_key), client_ca)


def require_usable(config: ServerConfig) -> None:
    """Raises the errors that a `Server` would raise, before a model is loaded. Also raises `ConfigurationError`."""
    require_usable_engine(config)
    access_of(config, TokenLimits())
    certificate_of(config)
    require_free_port(config.host, config.port)
    for port in (config.http_port, config.triton_port):
        if port is not None:
            require_free_port(config.host, port)
    if config.unix_socket is not None:
        require_free_socket(Path(config.unix_socket))
    for host, port in ((config.admin_host, config.admin_port), (config.metrics_host, config.metrics_port)):
        if port is not None:
            require_free_port(host, port)


def require_usable_engine(config: ServerConfig) -> None:
    """Checks the part of `require_usable` that concerns neither ports nor callers. Raises the same errors."""
    adapters = config.engine.adapters
    if adapters is not None and not Path(adapters).is_dir():
        raise ConfigurationError((f"--adapters: there is no folder {adapters}",))
    image_source(config)
