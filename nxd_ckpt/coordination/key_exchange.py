"""A secret that only the ranks of a job know, agreed in a store that anybody on the network may read.

torch's TCPStore does not authenticate clients. So no secret is ever left there: ranks exchange Diffie-Hellman keys (the
group ffdhe2048 of RFC 7919), and each rank passes the secret, encrypted, to at most 32 others. Reading the store does
not help a stranger. Somebody who can also write to it can take a rank's place, but could stop the job anyway.
"""

from __future__ import annotations

import hashlib
import secrets

from nxd_ckpt.coordination.agreement import Words
from nxd_ckpt.errors import MalformedFile

SECRET = 32
"""Bytes of the job's secret."""

_FAN_OUT = 32
"""Number of ranks to which one rank passes the secret, at 3 ms each."""

_PRIME = int(
    "ffffffffffffffffadf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2fe363"
    "630c75d8f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935984f0c70e0e68b77"
    "e2a689daf3efe8721df158a136ade73530acca4f483a797abc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f4681d4f42a3"
    "de394df4ae56ede76372bb190b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff8e4f1232eef28183"
    "c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b423861285c97ffffffffffffffff",
    16,
)
_GENERATOR = 2


class KeyPair:
    """A random private key and its public one, which anybody may read."""

    def __init__(self) -> None:
        self._private = secrets.randbits(256) | 1 << 255
        self.public = f"{pow(_GENERATOR, self._private, _PRIME):x}"

    def key_with(self, public: str) -> bytes:
        """Return the 32 bytes that only the owners of the two key pairs can compute.

        Raises MalformedFile for a value that is no public key.
        """
        try:
            value = int(public, 16)
        except (TypeError, ValueError):
            value = 0
        if not 1 < value < _PRIME - 1:
            raise MalformedFile(f"expected a public key of another rank, found {public!r:.40}")
        return hashlib.sha256(pow(value, self._private, _PRIME).to_bytes(256, "big")).digest()


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET)


def job_secret(words: Words, rank: int, world_size: int, secret: bytes) -> bytes:
    """Give every rank the ``secret`` of rank 0; all ranks call this, the others with any value.

    Raises PeerTimeout if a rank does not come.
    """
    pair = KeyPair()
    words.leave(f"public/{rank}", pair.public)
    if rank != 0:
        parent = (rank - 1) // _FAN_OUT
        key = pair.key_with(words.read(f"public/{parent}", parent))
        secret = _xor(bytes.fromhex(words.take(f"encrypted/{rank}", parent)), key)
    first = rank * _FAN_OUT + 1
    for child in range(first, min(first + _FAN_OUT, world_size)):
        key = pair.key_with(words.read(f"public/{child}", child))
        words.leave(f"encrypted/{child}", _xor(secret, key).hex())
    return secret


def _xor(secret: bytes, key: bytes) -> bytes:
    """Encrypt or decrypt with a key that is used once."""
    return bytes(byte ^ key_byte for byte, key_byte in zip(secret, key, strict=True))
