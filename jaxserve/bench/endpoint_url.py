"""The address of an endpoint."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def split_url(url: str) -> SplitResult:
    """Raises:
    ValueError: it is no address that can be asked over HTTP.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half of an IPv6 address
        is_one = False
    if not is_one:
        raise ValueError(f"endpoint {url!r} must look like http://HOST:PORT or https://HOST/PATH")
    return parts
