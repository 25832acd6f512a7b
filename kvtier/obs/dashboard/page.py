"""The page itself: markup, style and script in one file, and the headers that keep it harmless.

It loads nothing but the figures, which it asks for at their own address with whatever token a
person gives it. Its policy names the one script and the one style by their digests, so a name that
somebody else chose could run nothing even if the page set it as markup, which it does not.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Page:
    """What is sent. It is the same for everybody and holds no figure."""

    html: str
    headers: dict[str, str]


def dashboard(stats: str, history: str = "", namespaces: str = "") -> Page:
    """Return the page of a server.

    ``stats`` is where its figures are, ``history`` where those of the last while are and
    ``namespaces`` where it says what each holds, as paths relative to the page. Without a history
    the page knows only what it has seen itself.
    """
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    for name, path in {"stats": stats, "history": history, "namespaces": namespaces}.items():
        html = html.replace(f"{{{name}}}", escape(path), 1)
    policy = (
        "default-src 'none'",
        f"script-src {_source(html, 'script')}",
        f"style-src {_source(html, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return Page(
        html,
        {
            "Content-Security-Policy": "; ".join(policy),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def _source(html: str, tag: str) -> str:
    """The digest of what stands in the one element of a kind (Content Security Policy 3, 2.3.1)."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"
