"""The options of ``kvtier-serve``: name, meaning, how a text becomes a value, default.

One table serves the command line, the environment, the file, ``--help`` and the documentation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from kvtier.cache.below.encoder import named_encoder
from kvtier.config import Durability, WriteMode, format_size, parse_size
from kvtier.constants import CHUNK_TOKENS_MAX, GIB, MIB
from kvtier.errors import ConfigError, MissingExtraError, RegistryError, nearest
from kvtier.registry import (
    Registry,
    admissions,
    byte_codecs,
    codecs,
    connectors,
    policies,
    split_codec,
    split_scheme,
)
from kvtier_engine.api.limits import DRAIN_DEADLINE_S

#: The name under which the bundled model is asked for.
BUNDLED_MODEL: Final = "smollm2-135m"
#: What Python takes for a number is more: blanks, other digits, ``1_000``.
_FLOAT: Final = r"[+-]?([0-9]{1,64}\.?[0-9]{0,64}|\.[0-9]{1,64})([eE][+-]?[0-9]{1,4})?"

EnumT = TypeVar("EnumT", bound=StrEnum)


class DeviceChoice(StrEnum):
    """Where the model runs; ``auto`` takes a GPU if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DtypeChoice(StrEnum):
    """What the model and its KV are held in; ``auto``: float32 on a CPU, bfloat16 on a GPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``parse`` takes a text, or a TOML value, and raises ``ConfigError``.

    One that ``repeats`` may stand several times on the command line; blanks join its texts.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any
    metavar: str
    help: str
    secret: bool = False
    repeats: bool = False

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return "KVTIER_API_KEY" if self.name == "api_key" else f"KVTIER_SERVE_{self.name.upper()}"

    @property
    def is_switch(self) -> bool:
        """True for an option that takes no value on the command line."""
        return self.metavar == ""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError("allowed: a text that is not empty, without NUL")
    return value


def _maybe_path(value: Any) -> str:
    try:
        return str(Path(_text(value)).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"there is no such home: {error}") from error


def _directories(value: Any) -> tuple[str, ...]:
    """Return the paths of a text with commas, or of a list, where a path may hold a comma."""
    given = value if isinstance(value, list) else _text(value).split(",")
    paths = tuple(_maybe_path(path.strip() if isinstance(path, str) else path) for path in given)
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError("allowed: directories by comma, each named once")
    return paths


def _urls(value: Any) -> tuple[str, ...]:
    """Return the URLs of a text with blanks, or of a list."""
    given = value if isinstance(value, list) else _text(value).split()
    urls = tuple(_text(url) for url in given)
    known = connectors.names()
    for url in urls:
        scheme, separator, _ = url.partition("://")
        if not separator or split_scheme(scheme)[1] not in known:
            hint = nearest(split_scheme(scheme)[1], known) if separator else ""
            allowed = f"URLs that start with one of {', '.join(known)}, and ://"
            raise ConfigError(f"allowed: {allowed}{hint}")
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError("allowed: URLs, each named once")
    return urls


def _model(value: Any) -> str:
    name = _text(value)
    return name if name == BUNDLED_MODEL else _maybe_path(name)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "false": False, "0": False}
    if not isinstance(value, str) or value.lower() not in known:
        raise ConfigError("allowed: true, false")
    return known[value.lower()]


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = value if type(value) is int else None
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
            number = int(value)
        if number is None or not low <= number <= high:
            raise ConfigError(f"allowed: a whole number from {low} to {high}")
        return number

    return parse


def _number(low: float, high: float, what: str) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        text = value if isinstance(value, str) else repr(value)
        number = float(text) if re.fullmatch(_FLOAT, text) else math.nan
        if not low <= number <= high:
            raise ConfigError(f"allowed: {what} from {low:g} to {high:g}")
        return number

    return parse


def _size(low: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        nbytes = parse_size(value)
        if nbytes < low:
            raise ConfigError(f"allowed: at least {format_size(low)}")
        return nbytes

    return parse


def _one_of(enum: type[EnumT]) -> Callable[[Any], EnumT]:
    def parse(value: Any) -> EnumT:
        known = [member.value for member in enum]
        if not isinstance(value, str) or value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise ConfigError(f"allowed: {', '.join(known)}{hint}")
        return enum(value)

    return parse


def _installed(registry: Registry) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        known = registry.names()
        name = _text(value)
        if name not in known:
            raise ConfigError(f"allowed: {', '.join(known)}{nearest(name, known)}")
        return name

    return parse


def _disk_codec(value: Any) -> str:
    """A codec, a byte codec, or both; what a byte codec needs must be installed."""
    text = _text(value)
    try:
        _, byte_codec = split_codec(text)
        named_encoder(byte_codec)
    except (RegistryError, MissingExtraError) as error:
        raise ConfigError(str(error)) from error
    return text


def _remote_codec(value: Any) -> str:
    """A byte codec, whose needs are installed. What it encodes was packed for DRAM."""
    text = _text(value)
    if text in codecs.names():
        allowed = ", ".join(byte_codecs.names())
        raise ConfigError(f"remotes take what --codec has packed for DRAM; allowed: {allowed}")
    try:
        named_encoder(text)
    except (RegistryError, MissingExtraError) as error:
        raise ConfigError(str(error)) from error
    return text


def _weights_id(value: Any) -> str:
    text = _text(value)
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", text):
        raise ConfigError("allowed: 1 to 128 letters, digits and . _ : -")
    return text


_COUNT_MAX: Final = 1 << 20

OPTIONS: Final[tuple[Option, ...]] = (
    Option("model", _model, BUNDLED_MODEL, "PATH", f"folder or GGUF file, or {BUNDLED_MODEL}"),
    Option("device", _one_of(DeviceChoice), DeviceChoice.AUTO, "NAME", "auto, cpu or cuda"),
    Option(
        "dtype",
        _one_of(DtypeChoice),
        DtypeChoice.AUTO,
        "NAME",
        "of model and KV: auto, float32, bfloat16 or float16",
    ),
    Option("host", _text, "127.0.0.1", "ADDRESS", "address to listen on"),
    Option("port", _whole(0, 65535), 8000, "N", "port to listen on; 0 takes a free one"),
    Option("served_model_name", _text, "", "NAME", "name that clients ask for (the model's own)"),
    Option("api_key", _text, "", "KEY", "key that clients must send (none)", secret=True),
    Option("max_model_len", _whole(1, 1 << 31), 0, "TOKENS", "context limit (what fits)"),
    Option("kv_bytes", _size(1), 512 * MIB, "SIZE", "size of the block pool (HBM)"),
    Option("block_tokens", _whole(1, 1024), 16, "N", "tokens per block"),
    Option(
        "chunk_tokens",
        _whole(1, CHUNK_TOKENS_MAX),
        256,
        "N",
        "tokens per chunk of the cache, a multiple of a block",
    ),
    Option(
        "head_groups",
        _whole(1, 0xFFFF),
        1,
        "N",
        "parts that KV heads are stored in, as of engines on N GPUs",
    ),
    Option("max_num_seqs", _whole(1, 4096), 16, "N", "sequences that run at once"),
    Option(
        "max_num_batched_tokens", _whole(1, _COUNT_MAX), 512, "N", "tokens computed in one step"
    ),
    Option("dram", _size(0), GIB, "SIZE", "size of the DRAM tier; 0, with a tier below it: none"),
    Option(
        "policy",
        _installed(policies),
        "lru",
        "NAME",
        "what leaves DRAM first: lru, arc, gittins, gittins-cost",
    ),
    Option("disk", _directories, (), "PATH[,PATH]", "directories of the disk tier (no disk tier)"),
    Option("disk_bytes", _size(1), 10 * GIB, "SIZE", "size of the disk tier, all directories"),
    Option(
        "disk_policy",
        _installed(policies),
        "lru",
        "NAME",
        "what leaves the disk first, as --policy",
    ),
    Option(
        "disk_admission",
        _installed(admissions),
        "everything",
        "NAME",
        "what is written: everything, second-touch, learned",
    ),
    Option("disk_write_bytes_per_day", _size(0), 0, "SIZE", "bound of disk writes (no bound)"),
    Option(
        "disk_mode",
        _one_of(WriteMode),
        WriteMode.THROUGH,
        "MODE",
        "through: write when stored; back: when DRAM runs short",
    ),
    Option(
        "durability",
        _one_of(Durability),
        Durability.NONE,
        "LEVEL",
        "of the disk tier: none, batch or each",
    ),
    Option("codec", _installed(codecs), "raw", "NAME", "how KV is encoded in the tiers"),
    Option(
        "disk_codec",
        _disk_codec,
        "",
        "NAME",
        "the same for the disk; zstd or NAME+zstd: compressed (as --codec)",
    ),
    Option(
        "remote",
        _urls,
        (),
        "URL",
        "remote tier, as redis://host; may be repeated (none)",
        secret=True,
        repeats=True,
    ),
    Option(
        "remote_bytes",
        _size(0),
        0,
        "SIZE",
        "size of remotes that nobody else writes to (theirs)",
    ),
    Option(
        "remote_mode", _one_of(WriteMode), WriteMode.THROUGH, "MODE", "as --disk-mode, of remotes"
    ),
    Option(
        "remote_codec", _remote_codec, "", "NAME", "zstd: what goes there is compressed (as is)"
    ),
    Option("weights_id", _weights_id, "", "ID", "declares what the weights are (their digest)"),
    Option(
        "tenant_quota", _size(0), 0, "SIZE", "what one cache_salt may hold in the tiers (no bound)"
    ),
    Option("no_cache", _switch, False, "", "no tiers below HBM"),
    Option("access_log", _maybe_path, "", "PATH", "file with a line per request (no log)"),
    Option("kv_events", _text, "", "ENDPOINT", "where KV events are published (nowhere)"),
    Option("tenant_metrics", _switch, False, "", "metrics by tenant too, named by a digest"),
    Option("traces", _switch, False, "", "OpenTelemetry spans of matches, loads and stores"),
    Option(
        "gpu_time_worth",
        # So far that one way is always taken; how long a load may take has a bound of its own.
        _number(1e-6, 1e6, "a factor"),
        1.0,
        "FACTOR",
        "seconds of waiting that a second of computing is worth",
    ),
    Option(
        "drain_seconds",
        _number(0, 3600, "seconds"),
        DRAIN_DEADLINE_S,
        "SECONDS",
        "how long running requests may go on after a signal to stop",
    ),
)

#: Sub-name of the variable that names the file; ``--config`` is the one option outside the table.
CONFIG_VARIABLE: Final = "KVTIER_SERVE_CONFIG"
BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}


def usage() -> str:
    """Return the text of ``--help``."""
    lines = ["usage: kvtier-serve [OPTIONS]", ""]
    shown = [(f"{option.flag} {option.metavar}".rstrip(), _explained(option)) for option in OPTIONS]
    shown += [("--config FILE.toml", "file with any of the above, named with underscores")]
    shown += [("--help", "this text"), ("--version", "the version")]
    width = max(len(left) for left, _ in shown) + 2
    lines += [f"  {left:<{width}}{right}" for left, right in shown]
    lines += [
        "",
        "Sizes are bytes, or take KiB, MiB, GiB, TiB. The command line wins over the environment",
        "(KVTIER_SERVE_PORT and so on, KVTIER_API_KEY), which wins over the file.",
    ]
    return "\n".join(lines)


def shown_default(option: Option) -> str:
    """Return an option's default as people write it; empty where the help says what happens."""
    if not option.default:
        return ""
    if type(option.default) is int and option.metavar == "SIZE":
        return format_size(option.default).replace(" ", "")
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _explained(option: Option) -> str:
    default = shown_default(option)
    return f"{option.help} [{default}]" if default else option.help
