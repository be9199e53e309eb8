"""Check that no page of a built site loads anything from elsewhere: ``python scripts/check_site.py build/site``.

A link that a reader may click is fine. A script, style sheet, picture, frame or font of another host is not: it would tell
that host who reads the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: An attribute that a browser loads unasked, and ``url()`` and ``@import`` of style sheets.
_OTHER = r"[\"']?((?:https?:)?//[^\"'\s>]+)"
_TAGS = re.compile(r"<(?:script|img|iframe|source|video|audio|object|embed)\b[^>]*?\b(?:src|data)=" + _OTHER, re.I)
_KINDS = "stylesheet|icon|preload|preconnect|dns-prefetch|prefetch|manifest"
_LINKS = re.compile(rf"<link\b(?=[^>]*\brel=[\"']?(?:{_KINDS})\b)[^>]*\bhref=" + _OTHER, re.I)
_STYLES = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.I)


def loads(text: str, *, is_style: bool = False) -> list[str]:
    """Return the addresses of other hosts that a page, or a style sheet, loads."""
    patterns = (_STYLES,) if is_style else (_TAGS, _LINKS, _STYLES)
    return [address for pattern in patterns for address in pattern.findall(text)]


def main(folder: str) -> int:
    """Print each such address of a site with its page; return 1 where there is one, 2 where there is no site."""
    site = Path(folder)
    pages = [path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css")]
    if not pages:
        print(f"error: {site} holds no page; run mkdocs build first", file=sys.stderr)
        return 2
    found = [(path, a) for path in pages for a in loads(path.read_text(encoding="utf-8"), is_style=path.suffix == ".css")]
    for path, address in found:
        print(f"error: {path} loads {address}", file=sys.stderr)
    print(f"{len(pages)} files of {site}, {len(found)} addresses of other hosts are loaded")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
