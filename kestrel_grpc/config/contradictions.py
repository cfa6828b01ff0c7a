"""Finds options that are valid separately, but not together."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kestrel_grpc.config.settings import flag_name

if TYPE_CHECKING:
    from kestrel_grpc.config.options import ServerConfig


def contradictions(config: ServerConfig) -> Iterator[str]:
    """Problems of options that are valid separately, but not together."""
    if (config.tls_certificate is None) != (config.tls_key is None):
        yield "--tls-certificate and --tls-key: each needs the other"
    elif config.tls_client_ca is not None and config.tls_certificate is None:
        yield "--tls-client-ca: needs --tls-certificate"
    if config.max_receiving_bytes < config.max_message_bytes:
        yield "--max-receiving-bytes: must be at least --max-message-bytes"
    if config.reflection == "token" and config.tokens is None:
        yield "--reflection token: needs --tokens"
    if config.deterministic:
        yield from _contradictions_of_determinism(config)
    for name in ("triton_port", "triton_shared_memory"):
        if getattr(config, name) is not None and not config.triton:
            yield f"{flag_name(name)}: needs --triton"
    for name in ("http_hosts", "http_origins"):
        if getattr(config, name) is not None and config.http_port is None:
            yield f"{flag_name(name)}: needs --http-port"
    if config.tokens is not None or config.insecure_public:
        return
    advice = "anybody could call; give --tokens{}, or say --insecure-public"
    if config.tls_certificate is None and not _is_loopback(config.host):
        yield f"--host {config.host}: {advice.format(' or --tls-certificate')}"
    if config.admin_port is not None and not _is_loopback(config.admin_host):
        yield f"--admin-host {config.admin_host}: {advice.format('')}"


def _contradictions_of_determinism(config: ServerConfig) -> Iterator[str]:
    if config.adapters is not None or config.adapter_repositories:
        yield "--deterministic: takes no adapters"
    for name in ("text_path", "vision_path"):
        if getattr(config, name) not in ("auto", "plain"):
            yield f"{flag_name(name)}: --deterministic has a path of its own"
    if config.precision == "float8":
        yield "--precision float8: --deterministic has no products in float8"
    if config.cuda_graphs:
        yield "--cuda-graphs: not with --deterministic"


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name may mean any address, except `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
