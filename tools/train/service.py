"""What ``sdp train --service`` and ``sdp serve`` share: secret, address, TLS and settings."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from ...engine.config.schema import Config
from ...engine.environment.process import service_token
from ...engine.errors import ConfigError, shorten


def read_token(path: Path | None) -> bytes:
    """Return the secret that the groups of a run share with its service.

    If ``path`` is None, the secret is read from the variable SDP_SERVICE_TOKEN. Raises ConfigError
    if there is no secret, or if it is too short.
    """
    source = "SDP_SERVICE_TOKEN" if path is None else str(path)
    try:
        text = service_token() if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {path}: cannot be read ({shorten(error)})") from None
    token = (text or "").strip().encode()
    if len(token) < 16:
        short = f"the token of the service has {len(token)} characters, but needs 16"
        raise ConfigError(f"{source}: {short}; write one to a file (openssl rand -hex 16) for --token-file")
    return token


def split_address(address: str, option: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ConfigError if ``address`` has another form."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or len(port) > 5 or int(port) >= 2**16:
        raise ConfigError(f"{option} {shorten(address)}: is not HOST:PORT, such as 10.0.0.1:7777")
    return host.strip("[]"), int(port)


def encryption(certificates: Path | None, key: Path | None = None, *, serves: bool) -> ssl.SSLContext | None:
    """Return a TLS context with the certificates that a service shows and groups trust.

    Without ``certificates``, the result is None. Raises ConfigError if they cannot be used.
    """
    try:
        if certificates is None or not serves:
            return None if certificates is None else ssl.create_default_context(cafile=certificates)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates, key)
        return context
    except (OSError, ssl.SSLError) as error:
        option, remedy = ("--tls-certificate", "; also give --tls-key") if serves else ("--tls-ca", "")
        raise ConfigError(f"{option} {certificates}: cannot be used ({shorten(error)}){remedy}") from None


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal in the service and in all groups, as JSON values."""
    whole = config.resolved()
    data, weights = whole["data"], [source["weight"] for source in whole["data"]["sources"] or ()]
    kept = ("sdp", "optimizer", "scheduler", "gradient_clipping", "train_batch_size")
    return {key: whole[key] for key in kept} | {
        "model": {key: value for key, value in whole["model"].items() if key != "path"},
        "training": {key: whole["training"][key] for key in ("steps", "seed", "loss_weighting")},
        "data": {"sequence_length": data["sequence_length"], "weights": weights},
    }
