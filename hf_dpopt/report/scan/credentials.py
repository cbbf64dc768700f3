"""Credentials in text: tokens of hubs and clouds, private keys, passwords in addresses and in named fields.

Patterns with a fixed prefix or frame are here, as their issuers publish them: few, and hardly ever true of anything
else. With a detector installed (``pip install hf_dpopt[scan]``: bc-detect-secrets, or detect-secrets) its patterns
are looked for as well; its guesses by entropy or by keywords are not, which a vocabulary of 30,000 words would set
off, and nothing is sent to an issuer to be verified.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from typing import Any

_BEFORE, _AFTER = rb"(?<![A-Za-z0-9_-])", rb"(?![A-Za-z0-9])"
_PATTERNS: dict[str, bytes] = {
    "a Hugging Face token": _BEFORE + rb"(?:hf_|api_org_)[A-Za-z0-9]{30,50}" + _AFTER,
    "an AWS access key": _BEFORE + rb"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}" + _AFTER,
    "an AWS secret key": rb"(?i:aws_?secret_?(?:access_?)?key)\W{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    "a GitHub token": _BEFORE + rb"(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{36,255})",
    "a GitLab token": _BEFORE + rb"gl(?:pat|dt|rt|ptt|cbt)-[A-Za-z0-9_-]{20,}",
    "an OpenAI or Anthropic key": _BEFORE
    + rb"sk-(?:(?:proj|svcacct|admin|None|ant-[a-z]+\d+)-[A-Za-z0-9_-]{40,}|[A-Za-z0-9]{32,64}" + _AFTER + rb")",
    "a Google key": _BEFORE + rb"(?:AIza[A-Za-z0-9_-]{35}|GOCSPX-[A-Za-z0-9_-]{28}|ya29\.[A-Za-z0-9_-]{40,})",
    "an Azure storage key": rb"AccountKey=[A-Za-z0-9+/]{86}==",
    "a Slack token": _BEFORE + rb"xox[abeoprs]-(?:\d+-)*[A-Za-z0-9-]{20,}",
    "a Slack webhook": rb"hooks\.slack\.com/services/T[A-Z0-9]{6,}/B[A-Z0-9]{6,}/[A-Za-z0-9]{20,}",
    "a Weights & Biases key": rb"(?i:wandb_?(?:api_?)?key)\W{1,8}[0-9a-f]{40}" + _AFTER,
    "a Databricks token": _BEFORE + rb"dapi[0-9a-f]{32}" + _AFTER,
    "a PyPI token": _BEFORE + rb"pypi-AgE[A-Za-z0-9_-]{50,}",
    "an npm token": _BEFORE + rb"npm_[A-Za-z0-9]{36}" + _AFTER,
    "a Stripe key": _BEFORE + rb"[rs]k_live_[A-Za-z0-9]{20,}",
    "a Groq or Replicate key": _BEFORE + rb"(?:gsk_[A-Za-z0-9]{48,}|r8_[A-Za-z0-9]{37})",
    "an Nvidia key": _BEFORE + rb"nvapi-[A-Za-z0-9_-]{60,}",
    "a private key": rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----",
    "a JSON web token": _BEFORE + rb"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}",
    "a password in an address": rb"[a-z][a-z0-9+.-]{1,12}://[^\s/:@\"'<>{}$]{1,64}:(?P<value>[^\s/:@\"'<>{}$*]{3,128})@[A-Za-z0-9.-]+",
}  # fmt: skip
# Literals of which one occurs wherever a pattern does: most text has none, and is searched at the speed of memchr.
_HINTS = (
    b"hf_", b"api_org_", b"AKIA", b"ASIA", b"ABIA", b"ACCA", b"A3T", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_",
    b"github_pat_", b"glpat-", b"gldt-", b"glrt-", b"glptt-", b"glcbt-", b"sk-", b"AIza", b"GOCSPX-", b"ya29.",
    b"AccountKey=", b"xox", b"hooks.slack.com", b"dapi", b"pypi-AgE", b"npm_", b"k_live_", b"gsk_", b"r8_", b"nvapi-",
    b"PRIVATE KEY", b"eyJ", b"://",
)  # fmt: skip
_NAMED_HINT = re.compile(rb"(?i)aws_?secret|wandb_?(?:api_?)?key")

# Fields that hold a credential under whatever form, in JSON, Python or a pickle.
TOKEN_FIELDS = frozenset(
    """hub_token push_to_hub_token hf_token use_auth_token auth_token access_token api_key apikey secret_key
    secret_access_key client_secret password passwd wandb_api_key openai_api_key""".split()
)
_FIELD = re.compile(
    rb"(?i)[\"']?(?<![A-Za-z0-9_])("
    + "|".join(sorted(TOKEN_FIELDS, key=len, reverse=True)).encode()
    + rb")[\"']?\s*[:=]\s*(?:[\"']([^\"'\n]{8,})[\"']|([A-Za-z0-9/+_.-]{16,})(?=\s|$))"
)
_PLACEHOLDER = re.compile(r"(?i)[<{$\[*].*|your.*|.*(?:_here|\*\*\*|\.\.\.)")
_EXAMPLES = (b"password", b"passwd", b"pass", b"secret", b"token")

_compiled = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}


def find_credentials(text: bytes) -> set[str]:
    """Kinds of credentials that a text holds, and names of fields that hold one; never the credential itself."""
    found: set[str] = set()
    if any(hint in text for hint in _HINTS) or _NAMED_HINT.search(text):
        found |= {name for name, pattern in _compiled.items() if _is_real(pattern, text)}
    for match in _FIELD.finditer(text):
        value = (match.group(2) or match.group(3)).decode("utf-8", "replace")
        if is_credential(match.group(1).decode().lower(), value):
            found.add(match.group(1).decode())
    for name, pattern in _of_detector().items():
        if name not in found and pattern.search(text.decode("utf-8", "replace")):
            found.add(name)
    return found


def is_credential(field: str, value: object) -> bool:
    """Whether a field of this name, with this value, holds a credential and no placeholder."""
    if field.lower() not in TOKEN_FIELDS or not isinstance(value, str):
        return False
    return len(value) >= 8 and not _PLACEHOLDER.fullmatch(value)


def _is_real(pattern: re.Pattern[bytes], text: bytes) -> bool:
    """Whether a pattern matches something other than what documents write: one character repeated, or "password"."""
    value = "value" if "value" in pattern.groupindex else 0
    found = (match.group(value)[-12:].lower() for match in pattern.finditer(text))
    return any(len(set(one)) > 2 and one not in _EXAMPLES for one in found)


@functools.cache
def _of_detector() -> dict[str, re.Pattern[str]]:
    """Kind -> pattern, of an installed detector; those patterns alone that have a frame of their own."""
    try:
        plugins = importlib.import_module("detect_secrets.plugins")
        base = importlib.import_module("detect_secrets.plugins.base").RegexBasedDetector
    except ImportError:
        return {}
    found: dict[str, re.Pattern[str]] = {}
    for module in pkgutil.iter_modules(plugins.__path__):
        if module.name not in _FRAMED:
            continue
        for kind in vars(importlib.import_module(f"detect_secrets.plugins.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
                detector: Any = kind()
                for number, pattern in enumerate(detector.denylist):
                    found[f"{detector.secret_type}{f' ({number + 1})' if number else ''}"] = pattern
    return found


# Plugins whose patterns have a frame of their own; the rest go by a keyword, by entropy, or find public addresses.
_FRAMED = (
    "artifactory", "aws", "azure_storage_key", "discord", "github_token", "gitlab_token", "jwt", "mailchimp", "npm",
    "openai", "private_key", "pypi_token", "sendgrid", "slack", "square_oauth", "stripe", "telegram_token", "twilio",
)  # fmt: skip
