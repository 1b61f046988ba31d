"""Address and key of a reward service, checked before any request. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mega_rl.config.rules.servers import is_loopback
from mega_rl.errors import UserError


@dataclass(frozen=True)
class RewardService:
    """An address that batches of responses are posted to. The key is not shown by repr."""

    url: str  # http://127.0.0.1:8000/score
    key: str = field(default="", repr=False)  # bearer token; empty sends none

    @classmethod
    def find(cls, url: str, key_file: str, section: str = "reward.http") -> RewardService:
        """The service of the settings url and key_file ("" for none) of a section.

        Raises UserError for an address that is none or holds a password, a key that others can read, and one that
        would travel in the clear.
        """
        host = _host(url, section)
        if not key_file:
            return cls(url)
        if url.startswith("http://") and not is_loopback(host):
            raise UserError(
                f"{section}.url={url!r} with {section}.key_file: the key would travel unencrypted to {host}; use "
                "https://, or a tunnel that ends on 127.0.0.1"
            )
        return cls(url, _key(Path(key_file), section))


def _host(url: str, section: str) -> str:
    if not url.isprintable() or " " in url:
        raise UserError(f"{section}.url={url!r}: holds white space or other characters that no address has; quote them")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{section}.url={url!r}: {error}; write it as http://host:port/path") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{section}.url={url!r}: legal: http://host:port/path or https://host/path")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"{section}.url: names a user or password for {host}, and addresses are logged; use {section}.key_file"
        )
    return host


def _key(path: Path, section: str) -> str:
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise UserError(
                f"{section}.key_file: {path}: others than its owner may read it (mode {mode & 0o777:o}); chmod 600 "
                f"{path}"
            )
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{section}.key_file: {path}: cannot be read: {type(error).__name__}; it holds one line"
        ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{section}.key_file: {path}: must hold one key of printable ASCII characters without spaces")
    return key
