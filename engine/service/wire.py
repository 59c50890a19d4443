"""Messages between groups and the service: signed HTTP requests, with tensors as safetensors.

Nothing is unpickled, and sizes are limited. A request is signed with the shared token (HMAC-SHA256
over its path, time, nonce and the hash of its body), so its body is read only if the signature is
right. A nonce is accepted once, so nobody can repeat a request.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..errors import ServiceError
from ..json_files import parse_json
from ..sync.outer import Compression, quantise, restore
from .anchors import Slice

MESSAGE_BYTES = 16 << 20  # a longer tensor is sent in several messages
MOST_BYTES = 64 << 20  # the largest body of a message
_WINDOW_SECONDS = 300.0  # by how many seconds the clocks of two hosts may differ
_SCALES = "scales of "  # the key of the scales begins with this, and ends with that of the integers
TIME, NONCE, DIGEST, SIGNATURE = "X-SDP-Time", "X-SDP-Nonce", "X-SDP-Digest", "X-SDP-Signature"

slice_of = TypeAdapter(Slice).validate_python  # raises ValueError
Part = tuple[Slice, torch.Tensor, Compression]


class Signer:
    """Signs messages, and checks signatures, with a token that the service and all groups share."""

    def __init__(self, token: bytes):
        self._token = token
        self._nonces: dict[str, float] = {}

    def headers(self, path: str, body: bytes, now: float, nonce: str | None = None) -> dict[str, str]:
        """Return the headers of a message. An answer has the ``nonce`` of its request."""
        headers = {TIME: f"{now:.3f}", NONCE: nonce or secrets.token_hex(16), DIGEST: hashlib.sha256(body).hexdigest()}
        return {**headers, SIGNATURE: self._sign(path, headers)}

    def _sign(self, path: str, headers: Mapping[str, str]) -> str:
        signed = json.dumps([path, *(headers.get(name, "") for name in (TIME, NONCE, DIGEST))])
        return hmac.new(self._token, signed.encode(), hashlib.sha256).hexdigest()

    def is_signed(self, path: str, headers: Mapping[str, str]) -> bool:
        """Return whether ``headers`` have a valid signature for ``path``."""
        return hmac.compare_digest(self._sign(path, headers).encode(), headers.get(SIGNATURE, "").encode())

    def accepts(self, path: str, headers: Mapping[str, str], now: float) -> bool:
        """Return whether a request is signed, recent, and not a copy of an earlier request."""
        is_recent = self.is_signed(path, headers) and abs(now - float(headers[TIME])) <= _WINDOW_SECONDS
        if not is_recent or headers[NONCE] in self._nonces:
            return False
        self._nonces[headers[NONCE]] = float(headers[TIME])
        if len(self._nonces) > 10_000:
            self._nonces = {key: at for key, at in self._nonces.items() if now - at <= _WINDOW_SECONDS}
        return True


def fits(body: bytes, headers: Mapping[str, str]) -> bool:
    """Return whether ``body`` has the hash that the signed ``headers`` state."""
    return hmac.compare_digest(hashlib.sha256(body).hexdigest().encode(), headers.get(DIGEST, "").encode())


def messages_of(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield the contents of messages of limited size. Long tensors are cut along dimension 0."""
    message, total = list[Part](), 0
    for piece, tensor, kind in parts:
        rows = max(1, MESSAGE_BYTES // max(1, 4 * math.prod(piece.shape[1:])))
        for first in range(0, piece.shape[0], rows) if piece.shape else (0,):
            part = tensor[first : first + rows] if piece.shape else tensor
            offset = (piece.offset[0] + first, *piece.offset[1:]) if piece.shape else ()
            if message and total + 4 * part.numel() > MESSAGE_BYTES:
                yield message
                message, total = [], 0
            message.append((Slice(piece.name, offset, tuple(part.shape)), part, kind))
            total += 4 * part.numel()
    if message:
        yield message


def encode(parts: Iterable[Part]) -> dict[str, torch.Tensor]:
    """Return the tensors of a message by key: the JSON of a slice, for scales with a prefix."""
    packed = dict[str, torch.Tensor]()
    for piece, tensor, kind in parts:
        key = json.dumps(piece)
        if kind == "int8":
            packed[key], packed[_SCALES + key] = quantise(tensor)
        else:
            packed[key] = tensor.bfloat16() if kind == "bf16" else tensor
    return packed


def pack(parts: Iterable[Part]) -> bytes:
    """Encode slices and their tensors as bytes, in the safetensors format, for :func:`unpack`."""
    return save({key: value.detach().cpu().contiguous() for key, value in encode(parts).items()})


def unpack(body: bytes) -> dict[Slice, torch.Tensor]:
    """Return the tensors that :func:`pack` encoded, by slice. Quantised tensors are restored.

    Raises:
        ServiceError: ``body`` has another form.
    """
    try:
        tensors, found = load(body), {}
        for key in [key for key in tensors if not key.startswith(_SCALES)]:
            piece, tensor = slice_of(parse_json(key)), tensors[key]
            if tensor.dtype == torch.int8:
                tensor = restore(tensor, tensors[_SCALES + key], torch.Size(piece.shape))
            if tuple(tensor.shape) != piece.shape or not tensor.is_floating_point():
                raise ValueError("a tensor does not have the shape of its slice")
            found[piece] = tensor
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
        raise ServiceError("the message does not consist of slices of tensors") from None
    return found
