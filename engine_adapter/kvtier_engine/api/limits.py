"""What one request, and all of them together, may ask of the server.

Each limit is checked before the work that it bounds, and a test reaches it. Going over one is an
answer in OpenAI's error form, never a crash.
"""

from __future__ import annotations

from typing import Final

from kvtier.constants import MIB

#: Checked against Content-Length, and again while the body arrives, before a byte is parsed.
BODY_BYTES_MAX: Final = 16 * MIB

#: Prompts of one completions call, and what it may multiply them to with ``n``.
PROMPTS_MAX: Final = 256
CHOICES_MAX: Final = 64
SEQUENCES_PER_CALL_MAX: Final = 256
MESSAGES_MAX: Final = 4096

STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARS_MAX: Final = 1024
STOP_TOKEN_IDS_MAX: Final = 128
LOGIT_BIAS_ENTRIES_MAX: Final = 1024
TOP_LOGPROBS_MAX: Final = 20
CACHE_SALT_CHARS_MAX: Final = 256

#: Sequences accepted and unfinished beyond those that may run at once.
QUEUED_SEQUENCES_MAX: Final = 1024
RETRY_AFTER_S: Final = 1

#: How long an answer waits for the tiers to hold what was warmed.
WARM_WAIT_S: Final = 10.0

#: Text longer than this is tokenized in a thread, so that other streams go on meanwhile.
INLINE_ENCODE_CHARS_MAX: Final = 4096

#: How long running requests may go on after a signal to stop.
DRAIN_DEADLINE_S: Final = 10.0
