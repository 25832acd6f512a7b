"""The settings of ``kvtier-serve``: read once, from where they stand, checked against each other.

Command line over environment over file over default. Every value keeps its source, so that the
running server can say where it has it from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.config import CacheConfig, DiskConfig, Durability, RemoteConfig, WriteMode, format_size
from kvtier.errors import ConfigError, nearest, shortly
from kvtier.registry import split_codec
from kvtier_engine.options import (
    BY_NAME,
    CONFIG_VARIABLE,
    OPTIONS,
    DeviceChoice,
    DtypeChoice,
    Option,
)

_VARIABLE_PREFIX: Final = "KVTIER_SERVE_"
_MASK: Final = "********"
_DISK_ONLY: Final = (
    "disk_bytes",
    "disk_policy",
    "disk_admission",
    "disk_write_bytes_per_day",
    "disk_mode",
    "disk_codec",
    "durability",
)
_REMOTE_ONLY: Final = ("remote_bytes", "remote_mode", "remote_codec")
_CACHE_ONLY: Final = (
    "dram",
    "policy",
    "disk",
    *_DISK_ONLY,
    "remote",
    *_REMOTE_ONLY,
    "codec",
    "gpu_time_worth",
    "kv_events",
    "traces",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Effective settings, one field per option; empty or 0 where nothing was said."""

    model: str
    device: DeviceChoice
    dtype: DtypeChoice
    host: str
    port: int
    served_model_name: str
    api_key: str
    max_model_len: int
    kv_bytes: int
    block_tokens: int
    chunk_tokens: int
    head_groups: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dram: int
    policy: str
    disk: tuple[str, ...]
    disk_bytes: int
    disk_policy: str
    disk_admission: str
    disk_write_bytes_per_day: int
    disk_mode: WriteMode
    durability: Durability
    codec: str
    disk_codec: str
    remote: tuple[str, ...]
    remote_bytes: int
    remote_mode: WriteMode
    remote_codec: str
    weights_id: str
    tenant_quota: int
    no_cache: bool
    access_log: str
    kv_events: str
    tenant_metrics: bool
    traces: bool
    gpu_time_worth: float
    drain_seconds: float

    def __repr__(self) -> str:
        """Name the model only: the settings hold a secret."""
        return f"EngineConfig(model={self.model!r})"

    def cache_config(self) -> CacheConfig | None:
        """Return the cache that is asked for, or None."""
        if self.no_cache:
            return None
        disk = None
        if self.disk:
            first, *more = self.disk
            codec, byte_codec = split_codec(self.disk_codec) if self.disk_codec else (None, None)
            disk = DiskConfig(
                first,
                self.disk_bytes,
                self.durability,
                self.disk_mode,
                policy=self.disk_policy,
                more_paths=tuple(more),
                admission=self.disk_admission,
                write_bytes_per_day=self.disk_write_bytes_per_day,
                codec=codec,
                byte_codec=byte_codec,
            )
        return CacheConfig(
            dram_bytes=self.dram,
            disk=disk,
            remotes=tuple(
                RemoteConfig(
                    url,
                    self.remote_bytes,
                    mode=self.remote_mode,
                    byte_codec=self.remote_codec or None,
                )
                for url in self.remote
            ),
            codec=self.codec,
            policy=self.policy,
            gpu_time_worth=self.gpu_time_worth,
            tenant_quota_bytes=self.tenant_quota,
            events=bool(self.kv_events),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """A config and, per option, where its value comes from."""

    config: EngineConfig
    sources: Mapping[str, str]

    def report(self) -> dict[str, dict[str, Any]]:
        """Return every option's effective value and source, secrets masked."""
        return {
            option.name: {
                "value": self._shown(option),
                "source": self.sources[option.name],
            }
            for option in OPTIONS
        }

    def _shown(self, option: Option) -> Any:
        value = getattr(self.config, option.name)
        return _MASK if option.secret and value else value


def load_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Return the settings, or raise ``ConfigError`` with one line that names what is wrong.

    ``arguments`` as in ``sys.argv[1:]``, without ``--help`` and ``--version``.
    """
    given = _from_arguments(arguments)
    _check_variables(environment)
    path = given.pop("config", None) or environment.get(CONFIG_VARIABLE)
    table = {} if path is None else _from_file(path)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        raw, source, where = option.default, "default", ""
        if option.name in given:
            raw, source, where = given[option.name], "command line", option.flag
        elif option.variable in environment:
            raw, source = environment[option.variable], f"environment {option.variable}"
            where = option.variable
        elif option.name in table:
            raw, source, where = table[option.name], f"file {path}", f"{path}: {option.name}"
        values[option.name] = raw if source == "default" else _parsed(option, raw, where)
        sources[option.name] = source
    config = EngineConfig(**values)
    _check_together(config, {name for name, source in sources.items() if source != "default"})
    return Settings(config, sources)


def _parsed(option: Option, raw: Any, where: str) -> Any:
    try:
        return option.parse(raw)
    except ConfigError as error:
        shown = _MASK if option.secret else shortly(raw)
        raise ConfigError(f"{where}: bad value {shown}; {error}") from error


def _from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the command line says, as texts, ``config`` among it."""
    flags = {option.flag: option for option in OPTIONS}
    given: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag not in flags and flag != "--config":
            if not flag.startswith("-"):
                shown = _MASK if "://" in argument else repr(argument)  # It may hold a password.
                raise ConfigError(f"unexpected argument {shown}; options start with --")
            hint = nearest(flag, [*flags, "--config", "--help", "--version"])
            raise ConfigError(f"unknown option {flag}{hint}; --help lists them")
        name = "config" if flag == "--config" else flags[flag].name
        option = flags.get(flag)
        told = _value_of(option, flag, value if equals else None, rest)
        if name in given and not (option is not None and option.repeats):
            raise ConfigError(f"{flag} is given twice")
        given[name] = f"{given[name]} {told}" if name in given else told
    return given


def _value_of(
    option: Option | None, flag: str, inline: str | None, rest: Iterable[str]
) -> str | bool:
    if inline is not None:
        return inline
    if option is not None and option.is_switch:
        return True
    value = next(iter(rest), None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"{flag} needs a value")
    return value


def _check_variables(environment: Mapping[str, str]) -> None:
    known = [*(option.variable for option in OPTIONS), CONFIG_VARIABLE]
    for name in sorted(environment):
        if name.startswith(_VARIABLE_PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{nearest(name, known)}")


def _from_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from error
    for name in table:
        if name not in BY_NAME:
            raise ConfigError(f"{path}: unknown key {name!r}{nearest(name, BY_NAME)}")
    return table


def _check_together(config: EngineConfig, given: set[str]) -> None:
    """Raise ``ConfigError`` for settings that are fine alone and cannot be together."""
    flags = {name: BY_NAME[name].flag for name in BY_NAME}
    if config.no_cache:
        for name in _CACHE_ONLY:
            if name in given:
                raise ConfigError(f"--no-cache contradicts {flags[name]}: leave one of them out")
    if config.chunk_tokens % config.block_tokens:
        raise ConfigError(
            f"--chunk-tokens {config.chunk_tokens} is not a multiple of --block-tokens "
            f"{config.block_tokens}"
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than "
            f"--max-num-seqs {config.max_num_seqs}: each running sequence needs a token per step"
        )
    if not config.disk:
        for name in _DISK_ONLY:
            if name in given:
                raise ConfigError(f"{flags[name]} needs --disk PATH")
    if not config.remote:
        for name in _REMOTE_ONLY:
            if name in given:
                raise ConfigError(f"{flags[name]} needs --remote URL")
    if not (config.dram or config.disk or config.remote or config.no_cache):
        raise ConfigError(
            "--dram 0 leaves no tier below HBM: allowed with --remote URL or --disk PATH; for no "
            "cache at all say --no-cache"
        )
    try:
        config.cache_config()
    except ConfigError as error:
        shown = f"--dram {format_size(config.dram)}"
        if config.disk:
            shown += f", --disk-bytes {format_size(config.disk_bytes)}"
        raise ConfigError(f"{shown}: {error}") from error
